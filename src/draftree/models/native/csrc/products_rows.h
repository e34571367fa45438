/* Products without tiles. A kernel multiplies a few rows by a few inputs of a group of blocks; sums
 * are kept between calls, so weights are in the nearest cache for all rows but the first ones. The
 * order in which inputs are added does not depend on the number of rows, so neither do a row's
 * bits.
 */
#pragma once
#include "finishing.h"

enum {
    PREFETCH_BYTES = 2048,
    ROWS_PER_CALL = 48,
    UNITS_IN_SUM = 8 /* sums of 8 * 64 products of 16 and 8 bits fit into 32 bits */
};

typedef union {
    part_f value[GROUP * PARTS];
    part_i bytes[2][GROUP * PARTS];
} Sums;

typedef struct {
    const Work *work;
    const Linear *linear;
    int64_t row, block, from, to; /* inputs from `from` to `to` */
    Sums *partial_sums;           /* of the rows from `row` on */
    const char *next_weights;     /* weights to prefetch, in the same layout; or NULL */
} Piece;

#define EACH_PART(i) for (int i = 0; i < count * PARTS; i++)
#define EACH_ROW(r) for (int r = 0; r < num_rows; r++)
#define PREFETCH(stride, at) \
    if (piece.next_weights != NULL) \
        for (int i = 0; i < count; i++) __builtin_prefetch(piece.next_weights + i * (stride) + (at))

INLINE void add_float32(Piece piece, int num_rows, int count) {
    const int64_t inputs = piece.linear->inputs;
    const float *weight = (const float *)piece.linear->weight + piece.block * inputs * LANES;
    const float *input = (const float *)piece.work->inputs + piece.row * inputs;
    part_f sums[6][GROUP * PARTS];
    EACH_ROW(r)
        EACH_PART(i) sums[r][i] = piece.partial_sums[r].value[i];
    for (int64_t k = piece.from; k < piece.to; k++) {
        part_f w[GROUP * PARTS];
        PREFETCH(inputs * 64, (k - piece.from) * 64);
        EACH_PART(i)
            w[i] = *(const part_f_loose *)(weight + (i / PARTS * inputs + k) * LANES +
                                           i % PARTS * PART_LANES);
        EACH_ROW(r) {
            const part_f a = (part_f){0} + input[r * inputs + k];
            EACH_PART(i) sums[r][i] = fma_part(a, w[i], sums[r][i]);
        }
    }
    EACH_ROW(r)
        EACH_PART(i) piece.partial_sums[r].value[i] = sums[r][i];
}

INLINE void add_bfloat16(Piece piece, int num_rows, int count) {
    const int64_t units = blocks_of(piece.linear->inputs, 32);
    const char *weight = (const char *)piece.linear->weight + piece.block * units * 1024, *input[6];
    part_f sums[6][GROUP * PARTS];
    EACH_ROW(r) input[r] = (const char *)piece.work->inputs + tile_at(piece.row + r, 0, units);
    EACH_ROW(r)
        EACH_PART(i) sums[r][i] = piece.partial_sums[r].value[i];
    for (int64_t unit = piece.from / 32; unit < blocks_of(piece.to, 32); unit++) {
        for (int pair = 0; pair < 16; pair++) {
            part_u w[GROUP * PARTS];
            uint32_t both[6];
            PREFETCH(units * 1024, (unit - piece.from / 32) * 1024 + pair * 64);
            EACH_PART(i)
                w[i] = *(const part_u_loose *)(weight +
                                               ((i / PARTS * units + unit) * 16 + pair) * 64 +
                                               i % PARTS * WIDTH);
            EACH_ROW(r) memcpy(&both[r], input[r] + unit * 1024 + pair * 4, 4);
#if defined(__AVX512BF16__)
            EACH_ROW(r)
                EACH_PART(i)
                    sums[r][i] = (part_f)_mm512_dpbf16_ps(
                        (__m512)sums[r][i], (__m512bh)((part_u){0} + both[r]), (__m512bh)w[i]);
#else
            EACH_ROW(r)
                EACH_PART(i)
                    sums[r][i] = fma_part((part_f)((part_u){0} + (both[r] << 16)),
                                          (part_f)(w[i] << 16), sums[r][i]);
            EACH_ROW(r)
                EACH_PART(i)
                    sums[r][i] = fma_part((part_f)((part_u){0} + (both[r] & 0xffff0000u)),
                                          (part_f)(w[i] & 0xffff0000u), sums[r][i]);
#endif
        }
    }
    EACH_ROW(r)
        EACH_PART(i) piece.partial_sums[r].value[i] = sums[r][i];
}

INLINE part_i load_part(const char *from) { return *(const part_i_loose *)from; }

INLINE part_i broadcast_part(const char *from) {
    int32_t number;
    memcpy(&number, from, 4);
    return (part_i){0} + number;
}

#if SPLIT_BYTES
enum { INT8_AT_ONCE = ROWS_AT_ONCE / 2 };

/* four products of an unsigned byte and a signed one in each lane */
INLINE part_i dot_of_quads(part_i sum, part_i a, part_i w) {
    return (part_i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)w);
}

INLINE void add_int8(Piece piece, int num_rows, int count) {
    const int64_t units = blocks_of(piece.linear->inputs, 64);
    const char *weight = (const char *)piece.linear->weight + piece.block * units * 1024, *input[6];
    part_i sums[6][2][GROUP * PARTS];
    EACH_ROW(r)
        input[r] = (const char *)piece.work->inputs + tile_at(2 * (piece.row + r), 0, units);
    EACH_ROW(r)
        EACH_PART(i)
            sums[r][0][i] = piece.partial_sums[r].bytes[0][i],
            sums[r][1][i] = piece.partial_sums[r].bytes[1][i];
    for (int64_t unit = piece.from / 64; unit < blocks_of(piece.to, 64); unit++) {
        for (int quad = 0; quad < 16; quad++) {
            part_i w[GROUP * PARTS];
            PREFETCH(units * 1024, (unit - piece.from / 64) * 1024 + quad * 64);
            EACH_PART(i)
                w[i] = *(const part_i_loose *)(weight + ((i * units + unit) * 16 + quad) * 64);
            EACH_ROW(r)
                for (int byte = 0; byte < 2; byte++) {
                    part_i a = broadcast_part(input[r] + unit * 1024 + byte * 64 + quad * 4);
                    /* signed bytes become unsigned, 128 larger */
                    if (AMX) a ^= (part_i)((part_u){0} + 0x80808080u);
                    EACH_PART(i) sums[r][byte][i] = dot_of_quads(sums[r][byte][i], a, w[i]);
                }
        }
    }
    EACH_ROW(r)
        EACH_PART(i)
            piece.partial_sums[r].bytes[0][i] = sums[r][0][i],
            piece.partial_sums[r].bytes[1][i] = sums[r][1][i];
}
#else
enum { INT8_AT_ONCE = ROWS_AT_ONCE };

/* two products of 16 bits in each lane */
INLINE part_i dot_of_pairs(part_i sum, part_i a, part_i w) {
#if defined(__AVX512BW__)
    return sum + (part_i)_mm512_madd_epi16((__m512i)a, (__m512i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (part_i)_mm256_madd_epi16((__m256i)a, (__m256i)w);
#else
    return sum + ((a << 16) >> 16) * ((w << 16) >> 16) + (a >> 16) * (w >> 16);
#endif
}

INLINE void add_int8(Piece piece, int num_rows, int count) {
    const int64_t units = blocks_of(piece.linear->inputs, 64);
    const char *weight = (const char *)piece.linear->weight + piece.block * units * 1024, *input[6];
    part_i sums[6][GROUP * PARTS] = {0};
    EACH_ROW(r)
        input[r] = (const char *)piece.work->inputs + tile_at(2 * (piece.row + r), 0, units);
    for (int64_t unit = piece.from / 64; unit < blocks_of(piece.to, 64); unit++) {
        for (int quad = 0; quad < 16; quad++) {
            part_s w[GROUP * PARTS];
            PREFETCH(units * 1024, (unit - piece.from / 64) * 1024 + quad * 64);
            EACH_PART(i)
                w[i] = (part_s)load_part(weight + ((i / PARTS * units + unit) * 16 + quad) * 64 +
                                         i % PARTS * WIDTH);
            const int64_t at = unit * 1024 + quad * 8;
            EACH_ROW(r)
                EACH_PART(i)
                    sums[r][i] = dot_of_pairs(sums[r][i], broadcast_part(input[r] + at),
                                              (part_i)((w[i] << 8) >> 8));
            EACH_ROW(r)
                EACH_PART(i)
                    sums[r][i] = dot_of_pairs(sums[r][i], broadcast_part(input[r] + at + 4),
                                              (part_i)(w[i] >> 8));
        }
    }
    EACH_ROW(r)
        EACH_PART(i) piece.partial_sums[r].value[i] += __builtin_convertvector(sums[r][i], part_f);
}
#endif

/* kernels have constant numbers of rows and blocks */
#define ROWS_CASE(add, rows) \
    case rows: \
        switch (count) { \
        case 4: \
            if (GROUP == 4) add(piece, rows, 4); \
            break; \
        case 2: add(piece, rows, 2); break; \
        default: add(piece, rows, 1); \
        } \
        break;
#define BY_ROWS(add) \
    switch (num_rows) { \
        ROWS_CASE(add, 1) \
        ROWS_CASE(add, 2) ROWS_CASE(add, 3) ROWS_CASE(add, 4) ROWS_CASE(add, 5) ROWS_CASE(add, 6) \
    }

static __attribute__((noinline)) void add_rows(Piece piece, int num_rows, int count) {
    switch (piece.linear->format) {
    case FLOAT32: BY_ROWS(add_float32) break;
    case BFLOAT16: BY_ROWS(add_bfloat16) break;
    default: BY_ROWS(add_int8)
    }
}

/* Inputs per kernel call. If sums of 8-bit products are converted to float32 on the way, it must
 * not depend on the number of rows. */
INLINE int64_t inputs_of_piece(int64_t format, int64_t inputs, int is_only) {
    if (format == INT8 && !SPLIT_BYTES) return UNITS_IN_SUM * 64;
    return is_only ? inputs : format == FLOAT32 ? 64 : format == BFLOAT16 ? 128 : 256;
}

/* While later rows are multiplied, the memory is idle: the second call prefetches the weights that
 * the next piece needs. If there is one call only, it prefetches a little ahead itself. */
INLINE const char *weights_to_prefetch(const Work *work, const Linear *linear, int64_t block,
                                       int64_t from, int64_t to, int is_only) {
    const int64_t format = linear->format, bytes = block_bytes(linear->inputs, format);
    const int64_t of_input = format == FLOAT32 ? 64 : 1024 / inner_block(format);
    const char *weight = (const char *)linear->weight + block * bytes;
    if (is_only) return weight + from * of_input + PREFETCH_BYTES;
    return to < linear->inputs ? weight + to * of_input
                               : weight + work->pass->num_threads * GROUP * bytes;
}

INLINE void product_in_pieces(const Work *work, const Linear *linear, int64_t row, int64_t num_rows,
                              int64_t block, int count, int target) {
    const int64_t format = linear->format,
                  at_once = format == INT8 ? INT8_AT_ONCE : ROWS_AT_ONCE;
    const int is_only = num_rows <= at_once;
    const int64_t step = inputs_of_piece(format, linear->inputs, is_only);
    Sums partial_sums[ROWS_PER_CALL];
    memset(partial_sums, 0, (size_t)num_rows * sizeof(Sums));
    for (int64_t from = 0; from < linear->inputs; from += step) {
        Piece piece = {work, linear, .block = block, .from = from,
                       .to = min_int(from + step, linear->inputs)};
        for (int64_t r = 0; r < num_rows; r += at_once) {
            piece.row = row + r;
            piece.partial_sums = partial_sums + r;
            piece.next_weights = is_only || r == at_once
                                     ? weights_to_prefetch(work, linear, block, from, piece.to,
                                                           is_only)
                                     : NULL;
            add_rows(piece, (int)min_int(at_once, num_rows - r), count);
        }
    }
    for (int64_t r = 0; r < num_rows; r++) {
        vf values[GROUP];
        memcpy(values, &partial_sums[r], sizeof(values));
        for (int i = 0; i < count && format == INT8; i++) {
#if SPLIT_BYTES
            const vi extra = *(const vi_loose *)(linear->sums + (block + i) * LANES) * 128;
            values[i] = combine_bytes((vi)partial_sums[r].bytes[0][i] - extra,
                                      (vi)partial_sums[r].bytes[1][i] - extra);
#endif
            values[i] = dequantized(work, linear, row + r, block + i, values[i]);
        }
        finish_blocks(work, linear, row + r, block, count, values, target);
    }
}
