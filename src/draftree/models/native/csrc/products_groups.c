/* Products of rows and weights with a scale for each group of inputs; groups.h has their layout.
 *
 * For a group, codes and bytes of a row are multiplied and summed exactly; the sum is scaled and
 * added to the row's sum in float32, group after group. This does not depend on the number of rows,
 * so neither do a row's bits.
 *
 * With AVX-512 codes are always read as they are packed, one block at a time by up to 12 rows: there
 * are registers for all integer and float sums, and taking codes apart uses units that the dot
 * products leave idle. More rows take several calls for each piece of the inputs, whose codes stay in
 * the nearest cache. Other builds read codes as they are packed for one row; for more rows a piece of
 * the weights is unpacked once, and all rows are multiplied with it.
 */
#include <string.h>
#include "products_groups.h"
#include "products_groups_kernels.h"

/* A super-group of up to GROUP blocks, one code in a byte. */
typedef struct {
    uint8_t codes[GROUP][GROUPS_OF_SUPER][QUADS_OF_GROUP][64];
    Parted scale[GROUP][GROUPS_OF_SUPER][MOST_HALVES], minimum[GROUP][GROUPS_OF_SUPER];
} __attribute__((aligned(64))) Unpacked;

INLINE void unpack_kind(SuperGroup super, int64_t groups, int i, int kind, Unpacked *out) {
    for (int64_t group = 0; group < groups; group++) {
        const char *codes = super.codes + group * code_bytes(kind);
        for (int half = 0; half < halves_of(kind); half++)
            out->scale[i][group][half].whole = scale_of_half(super, kind, group, half);
        if (has_minimum(kind)) out->minimum[i][group].whole = minimum_of(super, kind, group);
        for (int line = 0; line < bits_of(kind); line++)
            prefetch_once(codes + bytes_of_super(GROUPS_OF_SUPER, kind) + line * 64);
        UNROLLED for (int quad = 0; quad < QUADS_OF_GROUP; quad++)
            for (int part = 0; part < PARTS; part++)
                *(part_i *)(out->codes[i][group][quad] + part * WIDTH) =
                    codes_of(codes, kind, quad, part);
    }
}

static void unpack_groups(SuperGroup super, int64_t groups, int i, int kind, Unpacked *out) {
#define ONE(name) \
    case name: unpack_kind(super, groups, i, name, out); break;
    switch (kind) { EACH_KIND(ONE) }
#undef ONE
}

typedef struct {
    const Unpacked *weights;
    const RowGroup *rows; /* the first group of the first row */
    int64_t stride;       /* from one row to the next, in groups */
    int num_groups, first_block, first_part, zero;
    Sums *sums; /* of the first row */
} UnpackedPiece;

INLINE void add_unpacked(const UnpackedPiece *given, int num_rows, int count, int halves, int minimums,
                         int has_8_bits) {
    const UnpackedPiece piece = *given;
    const uint8_t (*codes_at)[GROUPS_OF_SUPER][QUADS_OF_GROUP][64] = piece.weights->codes +
                                                                  piece.first_block;
    const Parted (*scale)[GROUPS_OF_SUPER][MOST_HALVES] = piece.weights->scale + piece.first_block;
    const Parted (*minimum)[GROUPS_OF_SUPER] = piece.weights->minimum + piece.first_block;
    for (int group = 0; group < piece.num_groups; group++) {
        const RowGroup *rows = piece.rows + group;
        UNROLLED for (int half = 0; half < halves; half++) {
            part_i sum[SUMS_AT_ONCE];
            EACH_ROW(r)
                EACH_PART(i)
                    sum[PART_OF(r, i)] = start_of_sum(rows + r * piece.stride, half, halves,
                                                      piece.zero);
            UNROLLED for (int step = 0; step < QUADS_OF_GROUP / halves; step++) {
                const int quad = half * 4 + step;
                part_i codes[GROUP * PARTS];
                EACH_PART(i)
                    codes[i] = *(const part_i *)(codes_at[i / PARTS][group][quad] +
                                                 i % PARTS * WIDTH);
                EACH_ROW(r) {
                    const part_i bytes = broadcast_part(
                        (const char *)rows[r * piece.stride].bytes + quad * 4);
                    EACH_PART(i)
                        sum[PART_OF(r, i)] = dot_of_codes(sum[PART_OF(r, i)], codes[i], bytes,
                                                          has_8_bits);
                }
            }
            EACH_ROW(r)
                EACH_PART(i) {
                    part_f *total = &piece.sums[r].value[piece.first_part + i];
                    *total = scaled_and_added(
                        *total, sum[PART_OF(r, i)], rows + r * piece.stride,
                        scale[i / PARTS][group][half].part[i % PARTS]);
                    if (minimums)
                        *total = fma_part(splat_part(rows[r * piece.stride].scaled_sum),
                                          minimum[i / PARTS][group].part[i % PARTS],
                                          *total);
                }
        }
    }
}

#define UNPACKED_CASE(rows, blocks, ...) \
    case rows: \
        if ((rows) * (blocks) * PARTS <= SUMS_AT_ONCE) \
            add_unpacked(piece, rows, blocks, __VA_ARGS__); \
        break;
#define UNPACKED_ROWS(blocks, ...) \
    switch (num_rows) { \
        UNPACKED_CASE(1, blocks, __VA_ARGS__) \
        UNPACKED_CASE(2, blocks, __VA_ARGS__) \
        UNPACKED_CASE(3, blocks, __VA_ARGS__) \
        UNPACKED_CASE(4, blocks, __VA_ARGS__) \
        UNPACKED_CASE(5, blocks, __VA_ARGS__) \
        UNPACKED_CASE(6, blocks, __VA_ARGS__) \
    }
/* halves, minimums and whether codes have 8 bits are constant */
#define UNPACKED(name, ...) \
    static __attribute__((noinline)) void name(const UnpackedPiece *piece, int num_rows, int count) { \
        if (count == 2) { \
            UNPACKED_ROWS(2, __VA_ARGS__) \
        } else { \
            UNPACKED_ROWS(1, __VA_ARGS__) \
        } \
    }
UNPACKED(add_plain, 1, 0, 0)
UNPACKED(add_bytes, 1, 0, 1)
UNPACKED(add_halves, 2, 0, 0)
UNPACKED(add_minimums, 1, 1, 0)

static void add_unpacked_of(const UnpackedPiece *piece, int num_rows, int count, int kind) {
    if (halves_of(kind) == 2) add_halves(piece, num_rows, count);
    else if (has_minimum(kind)) add_minimums(piece, num_rows, count);
    else if (piece->zero == 128) add_bytes(piece, num_rows, count);
    else add_plain(piece, num_rows, count);
}

/* rows by up to GROUP blocks of one kind, whose codes are unpacked piece by piece */
static void add_by_pieces(const Work *work, const Linear *linear, int64_t row, int64_t num_rows,
                          int64_t block, int count, int first_part, int kind, Sums *sums) {
    Unpacked unpacked;
    const int64_t groups = input_groups(linear->inputs);
    const int at_once = num_rows > ROWS_OF_ALL_BLOCKS ? 1 : count;
    const int64_t most = min_int(6, SUMS_AT_ONCE / PARTS / at_once),
                  calls = blocks_of(num_rows, most);
    for (int64_t super = 0; super < input_supers(linear->inputs); super++) {
        const int64_t from = super * GROUPS_OF_SUPER, size = groups_of_super(linear->inputs, super);
        for (int i = 0; i < count; i++)
            unpack_groups(super_group(block_at(linear, block + i), linear->inputs, kind, super),
                          size, i, kind, &unpacked);
        for (int64_t call = 0, r = 0, end; call < calls; call++, r = end) {
            end = num_rows * (call + 1) / calls;
            for (int i = 0; i < count; i += at_once) {
                const UnpackedPiece piece = {.weights = &unpacked,
                                             .rows = row_groups(work, row + r, linear->inputs) + from,
                                             .stride = groups,
                                             .num_groups = (int)size,
                                             .first_block = i,
                                             .first_part = first_part + i * PARTS,
                                             .zero = zero_of(kind),
                                             .sums = sums + r};
                add_unpacked_of(&piece, (int)(end - r), at_once, kind);
            }
        }
    }
}

/* The weights from block `next` on, whose kind and place are taken to follow from those of `block`. */
INLINE const char *later_weights(const Linear *linear, int64_t block, int64_t next, int kind) {
    __builtin_prefetch(linear->blocks + next);
    return block_at(linear, block) + (next - block) * group_block_bytes(linear->inputs, kind);
}

/* rows by a block whose codes are read as they are packed */
static void add_as_packed(const Work *work, const Linear *linear, int64_t row, int64_t num_rows,
                          int64_t block, int first_part, Sums *sums, int64_t next) {
    const int kind = kind_of_block(linear, block);
    const int64_t supers = input_supers(linear->inputs), calls = blocks_of(num_rows, DIRECT_ROWS),
                  step = calls == 1 ? supers : DIRECT_SUPERS;
    PackedPiece piece = {.block = block_at(linear, block), .inputs = linear->inputs,
                         .next = later_weights(linear, block, next, kind), .first_part = first_part};
    for (piece.from = 0; piece.from < supers; piece.from = piece.to) {
        piece.to = min_int(piece.from + step, supers);
        for (int64_t call = 0, r = 0, end; call < calls; call++, r = end) {
            end = num_rows * (call + 1) / calls;
            piece.rows = row_groups(work, row + r, linear->inputs);
            piece.sums = sums + r;
            piece.is_first = call == 0;
            add_direct(&piece, (int)(end - r), kind);
        }
    }
}

void product_by_groups(const Work *work, const Linear *linear, int64_t row, int64_t num_rows,
                              int64_t block, int count, int target, int64_t next) {
    Sums sums[ROWS_PER_CALL];
    memset(sums, 0, (size_t)num_rows * sizeof(Sums));
    for (int i = 0, size; i < count; i += size) {
        const int kind = kind_of_block(linear, block + i);
        size = 1;
        if (PARTS == 1 || num_rows <= DIRECT_ROWS) {
            add_as_packed(work, linear, row, num_rows, block + i, i * PARTS, sums,
                          i + 1 < count ? block + i + 1 : next);
        } else {
            if (i + 1 < count && kind_of_block(linear, block + i + 1) == kind) size = 2;
            add_by_pieces(work, linear, row, num_rows, block + i, size, i * PARTS, kind, sums);
        }
    }
    for (int64_t r = 0; r < num_rows; r++) {
        vf values[GROUP];
        memcpy(values, &sums[r], sizeof(values));
        finish_blocks(work, linear, row + r, block, count, values, target);
    }
}
