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

#if defined(__AVX512F__)
enum { GROUP = 4, ROWS_AT_ONCE = 4 };
#else
enum { GROUP = 2, ROWS_AT_ONCE = 2 };
#endif
enum { INT8_AT_ONCE = BYTES_APART ? ROWS_AT_ONCE / 2 : ROWS_AT_ONCE };

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

/* two tiles of rows by two blocks of outputs: each tile that is read is used twice */
INLINE void product_by_tile_pair(const Work *work, const Linear *linear, int64_t row_tile, int64_t block, int target, int64_t rows) {
    const int64_t format = work->decoder->format, units = blocks_of(linear->inputs, inner_block(format));
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input = (const char *)work->inputs + row_tile * units * 1024;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
#define UNITS(dot) for (int64_t unit = 0; unit < units; unit++) { \
        _tile_loadd(4, input + unit * 1024, 64); \
        _tile_loadd(6, weight + unit * 1024, 64); \
        dot(0, 4, 6); \
        _tile_loadd(7, weight + (units + unit) * 1024, 64); \
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

INLINE void product_float32(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    const float *weight = (const float *)linear->weight + block * linear->inputs * LANES;
    const float *input = (const float *)work->inputs + row * linear->inputs;
    vf sums[ROWS_AT_ONCE][GROUP] = {0};
    for (int64_t k = 0; k < linear->inputs; k++) {
        vf w[GROUP];
        for (int i = 0; i < count; i++) w[i] = load(weight + (i * linear->inputs + k) * LANES);
        for (int r = 0; r < num_rows; r++) {
            vf a = splat(input[r * linear->inputs + k]);
            for (int i = 0; i < count; i++) sums[r][i] = fma16(a, w[i], sums[r][i]);
        }
    }
    for (int r = 0; r < num_rows; r++) finish_blocks(work, linear, row + r, block, count, sums[r], target);
}

INLINE void product_bfloat16(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    const int64_t units = blocks_of(linear->inputs, 32);
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input[ROWS_AT_ONCE];
    for (int r = 0; r < num_rows; r++) input[r] = (const char *)work->inputs + tile_at(row + r, 0, units);
    vf sums[ROWS_AT_ONCE][GROUP] = {0};
    for (int64_t unit = 0; unit < units; unit++) {
        for (int pair = 0; pair < 16; pair++) {
            vu w[GROUP];
            for (int i = 0; i < count; i++) w[i] = *(const vu_loose *)(weight + ((i * units + unit) * 16 + pair) * 64);
            for (int r = 0; r < num_rows; r++) {
                uint32_t both;
                memcpy(&both, input[r] + unit * 1024 + pair * 4, 4);
                vu a = (vu){0} + both;
                for (int i = 0; i < count; i++) {
#if defined(__AVX512BF16__)
                    sums[r][i] = (vf)_mm512_dpbf16_ps((__m512)sums[r][i], (__m512bh)a, (__m512bh)w[i]);
#else
                    sums[r][i] = fma16((vf)(a << 16), (vf)(w[i] << 16), sums[r][i]);
                    sums[r][i] = fma16((vf)(a & 0xffff0000u), (vf)(w[i] & 0xffff0000u), sums[r][i]);
#endif
                }
            }
        }
    }
    for (int r = 0; r < num_rows; r++) finish_blocks(work, linear, row + r, block, count, sums[r], target);
}

#if BYTES_APART
INLINE vi dot_of_quads(vi sum, vi a, vi w) { /* four products of an unsigned byte and a signed one in each lane */
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)w);
}

INLINE vi four_times_sixteen(const char *from) {
    int32_t four;
    memcpy(&four, from, 4);
    return (vi){0} + four;
}

INLINE void product_int8(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    const int64_t units = blocks_of(linear->inputs, 64);
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input[ROWS_AT_ONCE];
    for (int r = 0; r < num_rows; r++) input[r] = (const char *)work->inputs + tile_at(2 * (row + r), 0, units);
    vi high[ROWS_AT_ONCE][GROUP] = {0}, low[ROWS_AT_ONCE][GROUP] = {0};
    for (int64_t unit = 0; unit < units; unit++) {
        for (int quad = 0; quad < 16; quad++) {
            vi w[GROUP];
            for (int i = 0; i < count; i++) w[i] = *(const vi_loose *)(weight + ((i * units + unit) * 16 + quad) * 64);
            for (int r = 0; r < num_rows; r++) {
                const char *at = input[r] + unit * 1024 + quad * 4;
                const vi highs = four_times_sixteen(at), lows = four_times_sixteen(at + 64);
                for (int i = 0; i < count; i++) high[r][i] = dot_of_quads(high[r][i], highs, w[i]);
                for (int i = 0; i < count; i++) low[r][i] = dot_of_quads(low[r][i], lows, w[i]);
            }
        }
    }
    for (int r = 0; r < num_rows; r++) {
        vf values[GROUP];
        for (int i = 0; i < count; i++) {
            const vi extra = *(const vi_loose *)(linear->sums + (block + i) * LANES) * INPUT_OFFSET;
            values[i] = dequantised(work, linear, row + r, block + i, of_both_bytes(high[r][i] - extra, low[r][i] - extra));
        }
        finish_blocks(work, linear, row + r, block, count, values, target);
    }
}
#else
enum { UNITS_IN_SUM = 8 }; /* 8 * 64 products of 16 and 8 bits fit into 32 */

INLINE part_i dot_of_pairs(part_i sum, part_i a, part_i w) { /* two products of 16 bits in each lane */
#if defined(__AVX512BW__)
    return sum + (part_i)_mm512_madd_epi16((__m512i)a, (__m512i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (part_i)_mm256_madd_epi16((__m256i)a, (__m256i)w);
#else
    return sum + ((a << 16) >> 16) * ((w << 16) >> 16) + (a >> 16) * (w >> 16);
#endif
}

INLINE void product_int8(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    const int64_t units = blocks_of(linear->inputs, 64);
    const int parts = count * PARTS;
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input[ROWS_AT_ONCE];
    for (int r = 0; r < num_rows; r++) input[r] = (const char *)work->inputs + tile_at(2 * (row + r), 0, units);
    vf values[ROWS_AT_ONCE][GROUP] = {0};
    for (int64_t first = 0; first < units; first += UNITS_IN_SUM) {
        part_i sums[ROWS_AT_ONCE][GROUP * PARTS] = {0};
        for (int64_t unit = first; unit < units && unit < first + UNITS_IN_SUM; unit++) {
            for (int quad = 0; quad < 16; quad++) {
                part_i even[GROUP * PARTS], odd[GROUP * PARTS];
                for (int i = 0; i < parts; i++) {
                    const char *at = weight + ((i / PARTS * units + unit) * 16 + quad) * 64 + i % PARTS * WIDTH;
                    const part_s w = (part_s) *(const part_i_loose *)at;
                    even[i] = (part_i)((w << 8) >> 8);
                    odd[i] = (part_i)(w >> 8);
                }
                for (int r = 0; r < num_rows; r++) {
                    int32_t pairs[2];
                    memcpy(pairs, input[r] + unit * 1024 + quad * 8, 8);
                    for (int i = 0; i < parts; i++) sums[r][i] = dot_of_pairs(sums[r][i], (part_i){0} + pairs[0], even[i]);
                    for (int i = 0; i < parts; i++) sums[r][i] = dot_of_pairs(sums[r][i], (part_i){0} + pairs[1], odd[i]);
                }
            }
        }
        for (int r = 0; r < num_rows; r++)
            for (int i = 0; i < count; i++) values[r][i] += __builtin_convertvector(vi_of_parts(&sums[r][i * PARTS]), vf);
    }
    for (int r = 0; r < num_rows; r++) {
        for (int i = 0; i < count; i++) values[r][i] = dequantised(work, linear, row + r, block + i, values[r][i]);
        finish_blocks(work, linear, row + r, block, count, values[r], target);
    }
}
#endif

INLINE void product_of_group(const Work *work, const Linear *linear, int64_t rows, int64_t block, int count, int target) {
    const int64_t format = work->decoder->format;
    int64_t row = 0;
#if AMX
    if (format != FLOAT32) {
        product_by_tiles(work, linear, rows, block, count, target);
        return;
    }
#endif
#define ROWS_BY(product, at_once) do { \
        for (; row + at_once <= rows; row += at_once) product(work, linear, row, at_once, block, count, target); \
        for (; row < rows; row++) product(work, linear, row, 1, block, count, target); \
    } while (0)
    switch (format) {
    case FLOAT32: ROWS_BY(product_float32, ROWS_AT_ONCE); break;
    case BFLOAT16: ROWS_BY(product_bfloat16, ROWS_AT_ONCE); break;
    default: ROWS_BY(product_int8, INT8_AT_ONCE);
    }
#undef ROWS_BY
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
