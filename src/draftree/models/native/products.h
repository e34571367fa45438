/* Products of rows and packed weights. */
#pragma once
#include "structures.h"
#include "threads.h"

INLINE vf activate(vf x, int64_t kind) {
    /* gelu by tanh is x times the logistic of 2 sqrt(2 / pi) (x + 0.044715 x^3) */
    vf z = kind == SILU ? x : 1.5957691216f * fma16(0.044715f * x * x, x, x);
    return x / (1.0f + exp16(-z));
}

INLINE vf with_bias(const Linear *linear, int64_t block, vf value) {
    return linear->bias == NULL ? value : value + load(linear->bias + block * LANES);
}

enum { TO_WIDE, TO_STREAM, TO_MLP, TO_LOGITS };

INLINE void finish(const Work *work, const Linear *linear, int64_t row, int64_t block, vf value, int target) {
    const Decoder *decoder = work->decoder;
    value = with_bias(linear, block, value);
    if (target == TO_WIDE) {
        store(work->wide + row * linear->outputs + block * LANES, value);
    } else if (target == TO_STREAM) {
        float *at = work->x + row * decoder->hidden + block * LANES;
        store(at, fma16(value, splat(decoder->residual_scale), load(at)));
    } else {
        float *at = work->pass->logits + row * decoder->vocab + block * LANES;
        int64_t left = decoder->vocab - block * LANES;
        value = value * decoder->logit_scale;
        if (left >= LANES) store(at, value);
        else for (int64_t i = 0; i < left; i++) at[i] = value[i];
    }
}

/* gate and up lie in turns: block 2i is of the gate, block 2i + 1 of what it lets through */
INLINE void finish_mlp(const Work *work, const Linear *linear, int64_t row, int64_t block, vf gate, vf up) {
    const Decoder *decoder = work->decoder;
    gate = with_bias(linear, block, gate);
    up = with_bias(linear, block + 1, up);
    vf value = activate(gate, decoder->activation) * up;
    int64_t column = block / 2 * LANES;
    if (decoder->format == BFLOAT16) {
        int64_t units = blocks_of(decoder->mlp, 32);
        store_half((uint16_t *)((char *)work->mixed + tile_at(row, column / 32, units)) + column % 32, value);
    } else {
        store(work->mixed + row * decoder->mlp + column, value);
    }
}

INLINE void finish_blocks(const Work *work, const Linear *linear, int64_t row, int64_t block, int count, const vf *values, int target) {
    if (target == TO_MLP)
        for (int i = 0; i < count; i += 2) finish_mlp(work, linear, row, block + i, values[i], values[i + 1]);
    else
        for (int i = 0; i < count; i++) finish(work, linear, row, block + i, values[i], target);
}

INLINE vf dequantised(const Work *work, const Linear *linear, int64_t row, int64_t block, vf sums) {
    return sums * (load(linear->scale + block * LANES) * work->input_scales[row]);
}

INLINE vf of_both_bytes(vi high, vi low) {
    return fma16(__builtin_convertvector(high, vf), splat(256.0f), __builtin_convertvector(low, vf));
}

/* blocks of outputs at once, and rows at once: as many sums as there are registers for, beside what is multiplied */
#if defined(__AVX512F__)
enum { GROUP = 4, ROWS_AT_ONCE = 6 };
#else
enum { GROUP = 2, ROWS_AT_ONCE = PARTS == 2 ? 3 : 1 };
#endif

#if AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t columns[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

static void configure_tiles(void) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.columns[i] = 64;
        config.rows[i] = 16;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc believes that only its first bytes are read */
    _tile_loadconfig(&config);
}

typedef union { vf value[16]; vi sum[16]; } __attribute__((aligned(64))) Found;

INLINE void finish_tile(const Work *work, const Linear *linear, int64_t row_tile, int64_t block, int count, const Found *found, int target, int64_t rows) {
    const int64_t format = work->decoder->format, in_tile = TILE_ROWS / tile_rows(format);
    for (int64_t r = 0; r < in_tile && row_tile * in_tile + r < rows; r++) {
        const int64_t row = row_tile * in_tile + r;
        vf values[GROUP];
        for (int i = 0; i < count; i++)
            values[i] = format != INT8 ? found[i].value[r]
                : dequantised(work, linear, row, block + i, of_both_bytes(found[i].sum[2 * r], found[i].sum[2 * r + 1]));
        finish_blocks(work, linear, row, block, count, values, target);
    }
}

/* one tile of rows by up to four blocks of outputs */
INLINE void product_by_tile(const Work *work, const Linear *linear, int64_t row_tile, int64_t block, int count, int target, int64_t rows) {
    const int64_t format = work->decoder->format, units = blocks_of(linear->inputs, inner_block(format));
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input = (const char *)work->inputs + row_tile * units * 1024;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
#define STEP(tile, place, dot) { _tile_loadd(5, weight + (place) * units * 1024 + unit * 1024, 64); dot(tile, 4, 5); }
#define UNITS(dot) for (int64_t unit = 0; unit < units; unit++) { \
        _tile_loadd(4, input + unit * 1024, 64); \
        STEP(0, 0, dot) \
        if (count > 1) STEP(1, 1, dot) \
        if (count > 2) STEP(2, 2, dot) \
        if (count > 3) STEP(3, 3, dot) \
    }
    if (format == BFLOAT16) UNITS(_tile_dpbf16ps) else UNITS(_tile_dpbssd)
#undef UNITS
#undef STEP
    Found found[4];
    _tile_stored(0, &found[0], 64);
    if (count > 1) _tile_stored(1, &found[1], 64);
    if (count > 2) _tile_stored(2, &found[2], 64);
    if (count > 3) _tile_stored(3, &found[3], 64);
    finish_tile(work, linear, row_tile, block, count, found, target, rows);
}

INLINE void fetch_tile(const char *at) {
    for (int i = 0; i < 16; i++) __builtin_prefetch(at + i * 64, 0, 2);
}

/* two tiles of rows by two blocks of outputs: each tile that is read is used twice. While these are multiplied memory
 * would rest, so the weights of the groups behind those in work are fetched (one tile of rows waits for memory anyway) */
INLINE void product_by_tile_pair(const Work *work, const Linear *linear, int64_t row_tile, int64_t block, int target, int64_t rows) {
    const int64_t ahead = work->pass->num_threads * GROUP * block_bytes(linear->inputs, work->decoder->format);
    const int64_t format = work->decoder->format, units = blocks_of(linear->inputs, inner_block(format));
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input = (const char *)work->inputs + row_tile * units * 1024;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
#define UNITS(dot) for (int64_t unit = 0; unit < units; unit++) { \
        _tile_loadd(4, input + unit * 1024, 64); \
        _tile_loadd(6, weight + unit * 1024, 64); \
        if (row_tile == 0) fetch_tile(weight + unit * 1024 + ahead); \
        dot(0, 4, 6); \
        _tile_loadd(7, weight + (units + unit) * 1024, 64); \
        if (row_tile == 0) fetch_tile(weight + (units + unit) * 1024 + ahead); \
        dot(1, 4, 7); \
        _tile_loadd(5, input + (units + unit) * 1024, 64); \
        dot(2, 5, 6); \
        dot(3, 5, 7); \
    }
    if (format == BFLOAT16) UNITS(_tile_dpbf16ps) else UNITS(_tile_dpbssd)
#undef UNITS
    Found found[4];
    _tile_stored(0, &found[0], 64); _tile_stored(1, &found[1], 64);
    _tile_stored(2, &found[2], 64); _tile_stored(3, &found[3], 64);
    finish_tile(work, linear, row_tile, block, 2, found, target, rows);
    finish_tile(work, linear, row_tile + 1, block, 2, found + 2, target, rows);
}

INLINE void product_by_tiles(const Work *work, const Linear *linear, int64_t rows, int64_t block, int count, int target) {
    const int64_t tiles = blocks_of(rows * tile_rows(work->decoder->format), TILE_ROWS);
    int64_t tile = 0;
    if (count % 2 == 0)
        for (; tile + 2 <= tiles; tile += 2)
            for (int i = 0; i < count; i += 2) product_by_tile_pair(work, linear, tile, block + i, target, rows);
    for (; tile < tiles; tile++) product_by_tile(work, linear, tile, block, count, target, rows);
}
#endif

/* Without tiles a few rows are multiplied at once by a few inputs of a group of blocks, and their sums are kept between
 * these; so the weights of those inputs come from the nearest cache for all rows but the first. Inputs are added one
 * behind the other all the same, and the bits of a row do not depend on the rows beside it. */
enum { FETCHED_AHEAD = 2048, ROWS_IN_TURN = 48, UNITS_IN_SUM = 8 /* 8 * 64 products of 16 and 8 bits fit into 32 */ };

typedef union {
    part_f value[GROUP * PARTS];
    part_i bytes[2][GROUP * PARTS];
} Sums;

typedef struct {
    const Work *work;
    const Linear *linear;
    int64_t row, block, from, to; /* of these inputs */
    Sums *kept;                   /* of these rows */
    const char *coming;           /* weights to fetch meanwhile, laid out as those in work; or NULL */
} Piece;

#define EACH_PART(i) for (int i = 0; i < count * PARTS; i++)
#define EACH_ROW(r) for (int r = 0; r < num_rows; r++)
#define FETCH(stride, at) if (piece.coming != NULL) for (int i = 0; i < count; i++) __builtin_prefetch(piece.coming + i * (stride) + (at))

INLINE void add_float32(Piece piece, int num_rows, int count) {
    const int64_t inputs = piece.linear->inputs;
    const float *weight = (const float *)piece.linear->weight + piece.block * inputs * LANES;
    const float *input = (const float *)piece.work->inputs + piece.row * inputs;
    part_f sums[6][GROUP * PARTS];
    EACH_ROW(r) EACH_PART(i) sums[r][i] = piece.kept[r].value[i];
    for (int64_t k = piece.from; k < piece.to; k++) {
        part_f w[GROUP * PARTS];
        FETCH(inputs * 64, (k - piece.from) * 64);
        EACH_PART(i) w[i] = *(const part_f_loose *)(weight + (i / PARTS * inputs + k) * LANES + i % PARTS * PART_LANES);
        EACH_ROW(r) {
            const part_f a = (part_f){0} + input[r * inputs + k];
            EACH_PART(i) sums[r][i] = fma_part(a, w[i], sums[r][i]);
        }
    }
    EACH_ROW(r) EACH_PART(i) piece.kept[r].value[i] = sums[r][i];
}

INLINE void add_bfloat16(Piece piece, int num_rows, int count) {
    const int64_t units = blocks_of(piece.linear->inputs, 32);
    const char *weight = (const char *)piece.linear->weight + piece.block * units * 1024, *input[6];
    part_f sums[6][GROUP * PARTS];
    EACH_ROW(r) input[r] = (const char *)piece.work->inputs + tile_at(piece.row + r, 0, units);
    EACH_ROW(r) EACH_PART(i) sums[r][i] = piece.kept[r].value[i];
    for (int64_t unit = piece.from / 32; unit < blocks_of(piece.to, 32); unit++) {
        for (int pair = 0; pair < 16; pair++) {
            part_u w[GROUP * PARTS];
            uint32_t both[6];
            FETCH(units * 1024, (unit - piece.from / 32) * 1024 + pair * 64);
            EACH_PART(i) w[i] = *(const part_u_loose *)(weight + ((i / PARTS * units + unit) * 16 + pair) * 64 + i % PARTS * WIDTH);
            EACH_ROW(r) memcpy(&both[r], input[r] + unit * 1024 + pair * 4, 4);
#if defined(__AVX512BF16__)
            EACH_ROW(r) EACH_PART(i)
                sums[r][i] = (part_f)_mm512_dpbf16_ps((__m512)sums[r][i], (__m512bh)((part_u){0} + both[r]), (__m512bh)w[i]);
#else
            EACH_ROW(r) EACH_PART(i) sums[r][i] = fma_part((part_f)((part_u){0} + (both[r] << 16)), (part_f)(w[i] << 16), sums[r][i]);
            EACH_ROW(r) EACH_PART(i)
                sums[r][i] = fma_part((part_f)((part_u){0} + (both[r] & 0xffff0000u)), (part_f)(w[i] & 0xffff0000u), sums[r][i]);
#endif
        }
    }
    EACH_ROW(r) EACH_PART(i) piece.kept[r].value[i] = sums[r][i];
}

INLINE part_i whole_part(const char *from) {
    int32_t number;
    memcpy(&number, from, 4);
    return (part_i){0} + number;
}

#if BYTES_APART
enum { INT8_AT_ONCE = ROWS_AT_ONCE / 2 };

INLINE part_i dot_of_quads(part_i sum, part_i a, part_i w) { /* four products of an unsigned byte and a signed one in each lane */
    return (part_i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)w);
}

INLINE void add_int8(Piece piece, int num_rows, int count) {
    const int64_t units = blocks_of(piece.linear->inputs, 64);
    const char *weight = (const char *)piece.linear->weight + piece.block * units * 1024, *input[6];
    part_i sums[6][2][GROUP * PARTS];
    EACH_ROW(r) input[r] = (const char *)piece.work->inputs + tile_at(2 * (piece.row + r), 0, units);
    EACH_ROW(r) EACH_PART(i) sums[r][0][i] = piece.kept[r].bytes[0][i], sums[r][1][i] = piece.kept[r].bytes[1][i];
    for (int64_t unit = piece.from / 64; unit < blocks_of(piece.to, 64); unit++) {
        for (int quad = 0; quad < 16; quad++) {
            part_i w[GROUP * PARTS];
            FETCH(units * 1024, (unit - piece.from / 64) * 1024 + quad * 64);
            EACH_PART(i) w[i] = *(const part_i_loose *)(weight + ((i * units + unit) * 16 + quad) * 64);
            EACH_ROW(r) for (int byte = 0; byte < 2; byte++) {
                part_i a = whole_part(input[r] + unit * 1024 + byte * 64 + quad * 4);
                if (AMX) a ^= (part_i)((part_u){0} + 0x80808080u); /* signed bytes become unsigned, 128 larger */
                EACH_PART(i) sums[r][byte][i] = dot_of_quads(sums[r][byte][i], a, w[i]);
            }
        }
    }
    EACH_ROW(r) EACH_PART(i) piece.kept[r].bytes[0][i] = sums[r][0][i], piece.kept[r].bytes[1][i] = sums[r][1][i];
}
#else
enum { INT8_AT_ONCE = ROWS_AT_ONCE };

INLINE part_i dot_of_pairs(part_i sum, part_i a, part_i w) { /* two products of 16 bits in each lane */
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
    EACH_ROW(r) input[r] = (const char *)piece.work->inputs + tile_at(2 * (piece.row + r), 0, units);
    for (int64_t unit = piece.from / 64; unit < blocks_of(piece.to, 64); unit++) {
        for (int quad = 0; quad < 16; quad++) {
            part_s w[GROUP * PARTS];
            FETCH(units * 1024, (unit - piece.from / 64) * 1024 + quad * 64);
            EACH_PART(i) w[i] = (part_s) *(const part_i_loose *)(weight + ((i / PARTS * units + unit) * 16 + quad) * 64 + i % PARTS * WIDTH);
            const int64_t at = unit * 1024 + quad * 8;
            EACH_ROW(r) EACH_PART(i) sums[r][i] = dot_of_pairs(sums[r][i], whole_part(input[r] + at), (part_i)((w[i] << 8) >> 8));
            EACH_ROW(r) EACH_PART(i) sums[r][i] = dot_of_pairs(sums[r][i], whole_part(input[r] + at + 4), (part_i)(w[i] >> 8));
        }
    }
    EACH_ROW(r) EACH_PART(i) piece.kept[r].value[i] += __builtin_convertvector(sums[r][i], part_f);
}
#endif

/* kernels know how many rows and blocks they have */
#define ROWS_CASE(add, rows) case rows: switch (count) { \
        case 4: if (GROUP == 4) add(piece, rows, 4); break; \
        case 2: add(piece, rows, 2); break; \
        default: add(piece, rows, 1); \
    } break;
#define BY_ROWS(add) switch (num_rows) { \
        ROWS_CASE(add, 1) ROWS_CASE(add, 2) ROWS_CASE(add, 3) ROWS_CASE(add, 4) ROWS_CASE(add, 5) ROWS_CASE(add, 6) \
    }

static __attribute__((noinline)) void add_rows(Piece piece, int num_rows, int count) {
    switch (piece.work->decoder->format) {
    case FLOAT32: BY_ROWS(add_float32) break;
    case BFLOAT16: BY_ROWS(add_bfloat16) break;
    default: BY_ROWS(add_int8)
    }
}

INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

/* inputs in a piece: where 8-bit weights' sums pass through float32 it is the same for any number of rows */
INLINE int64_t inputs_of_piece(int64_t format, int64_t inputs, int is_alone) {
    if (format == INT8 && !BYTES_APART) return UNITS_IN_SUM * 64;
    return is_alone ? inputs : format == FLOAT32 ? 64 : format == BFLOAT16 ? 128 : 256;
}

/* Memory would rest while the second few rows are multiplied, so these fetch what the first will need next. Where there
 * are no others the few themselves fetch a little ahead. */
INLINE const char *coming_weights(const Work *work, const Linear *linear, int64_t block, int64_t from, int64_t to, int is_alone) {
    const int64_t format = work->decoder->format, bytes = block_bytes(linear->inputs, format);
    const int64_t of_input = format == FLOAT32 ? 64 : 1024 / inner_block(format);
    const char *weight = (const char *)linear->weight + block * bytes;
    if (is_alone) return weight + from * of_input + FETCHED_AHEAD;
    return to < linear->inputs ? weight + to * of_input : weight + work->pass->num_threads * GROUP * bytes;
}

INLINE void product_in_pieces(const Work *work, const Linear *linear, int64_t row, int64_t num_rows, int64_t block, int count, int target) {
    const int64_t format = work->decoder->format, at_once = format == INT8 ? INT8_AT_ONCE : ROWS_AT_ONCE;
    const int is_alone = num_rows <= at_once;
    const int64_t step = inputs_of_piece(format, linear->inputs, is_alone);
    Sums kept[ROWS_IN_TURN];
    memset(kept, 0, (size_t)num_rows * sizeof(Sums));
    for (int64_t from = 0; from < linear->inputs; from += step) {
        Piece piece = {work, linear, .block = block, .from = from, .to = lesser(from + step, linear->inputs)};
        for (int64_t r = 0; r < num_rows; r += at_once) {
            piece.row = row + r;
            piece.kept = kept + r;
            piece.coming = is_alone || r == at_once ? coming_weights(work, linear, block, from, piece.to, is_alone) : NULL;
            add_rows(piece, (int)lesser(at_once, num_rows - r), count);
        }
    }
    for (int64_t r = 0; r < num_rows; r++) {
        vf values[GROUP];
        memcpy(values, &kept[r], sizeof(values));
        for (int i = 0; i < count && format == INT8; i++) {
#if BYTES_APART
            const vi extra = *(const vi_loose *)(linear->sums + (block + i) * LANES) * 128;
            values[i] = of_both_bytes((vi)kept[r].bytes[0][i] - extra, (vi)kept[r].bytes[1][i] - extra);
#endif
            values[i] = dequantised(work, linear, row + r, block + i, values[i]);
        }
        finish_blocks(work, linear, row + r, block, count, values, target);
    }
}

INLINE void product_of_group(const Work *work, const Linear *linear, int64_t rows, int64_t block, int count, int target) {
#if AMX
    const int64_t format = work->decoder->format;
    if (format == BFLOAT16 || (format == INT8 && rows > 1)) { /* int8 sums are the same either way, and tiles make one row wait */
        product_by_tiles(work, linear, rows, block, count, target);
        return;
    }
#endif
    for (int64_t row = 0; row < rows; row += ROWS_IN_TURN)
        product_in_pieces(work, linear, row, lesser(ROWS_IN_TURN, rows - row), block, count, target);
}

/* groups of blocks, by whichever thread comes for them */
INLINE void product(const Work *work, const Linear *linear, int64_t rows, int phase, int target) {
    const int64_t blocks = blocks_of(linear->outputs, LANES), groups = blocks_of(blocks, GROUP);
    EACH(group, groups, phase) {
        int64_t block = group * GROUP;
        if (block + GROUP <= blocks) {
            product_of_group(work, linear, rows, block, GROUP, target);
        } else { /* the mlp's blocks come in pairs */
            int64_t step = target == TO_MLP ? 2 : 1;
            for (; block < blocks; block += step) product_of_group(work, linear, rows, block, (int)step, target);
        }
    }
}
