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

INLINE vf dequantised(const Work *work, const Linear *linear, int64_t row, int64_t block, vi sums) {
    return __builtin_convertvector(sums, vf) * (load(linear->scale + block * LANES) * work->input_scales[row]);
}

#if defined(__AVX512F__)
enum { GROUP = 4, ROWS_AT_ONCE = 4 };
#else
enum { GROUP = 2, ROWS_AT_ONCE = 2 };
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

/* one tile of rows by four blocks of outputs */
INLINE void product_by_tiles(const Work *work, const Linear *linear, int64_t row_block, int64_t block, int count, int target, int64_t rows) {
    const int64_t format = work->decoder->format, units = blocks_of(linear->inputs, inner_block(format));
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input = (const char *)work->inputs + row_block * units * 1024;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
#define STEP(tile, place, dot) { _tile_loadd(5, weight + (place) * units * 1024 + unit * 1024, 64); dot(tile, 4, 5); }
    if (format == BFLOAT16) {
        for (int64_t unit = 0; unit < units; unit++) {
            _tile_loadd(4, input + unit * 1024, 64);
            STEP(0, 0, _tile_dpbf16ps)
            if (count > 1) STEP(1, 1, _tile_dpbf16ps)
            if (count > 2) STEP(2, 2, _tile_dpbf16ps)
            if (count > 3) STEP(3, 3, _tile_dpbf16ps)
        }
    } else {
        for (int64_t unit = 0; unit < units; unit++) {
            _tile_loadd(4, input + unit * 1024, 64);
            STEP(0, 0, _tile_dpbssd)
            if (count > 1) STEP(1, 1, _tile_dpbssd)
            if (count > 2) STEP(2, 2, _tile_dpbssd)
            if (count > 3) STEP(3, 3, _tile_dpbssd)
        }
    }
#undef STEP
    union { vf value; vi sum; } found[4][16] __attribute__((aligned(64)));
    _tile_stored(0, found[0], 64);
    if (count > 1) _tile_stored(1, found[1], 64);
    if (count > 2) _tile_stored(2, found[2], 64);
    if (count > 3) _tile_stored(3, found[3], 64);
    for (int64_t r = 0; r < 16 && row_block * 16 + r < rows; r++) {
        int64_t row = row_block * 16 + r;
        vf values[4];
        for (int i = 0; i < count; i++)
            values[i] = format == INT8 ? dequantised(work, linear, row, block + i, found[i][r].sum) : found[i][r].value;
        finish_blocks(work, linear, row, block, count, values, target);
    }
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

INLINE vi dot_of_quads(vi sum, vi a, vi w) { /* four signed products in each lane */
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)(a ^ (vi)((vu){0} + 0x80808080u)), (__m512i)w);
#else
    for (int shift = 24; shift >= 0; shift -= 8) sum += ((a << shift) >> 24) * ((w << shift) >> 24);
    return sum;
#endif
}

INLINE void product_int8(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    const int64_t units = blocks_of(linear->inputs, 64);
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input[ROWS_AT_ONCE];
    for (int r = 0; r < num_rows; r++) input[r] = (const char *)work->inputs + tile_at(row + r, 0, units);
    vi sums[ROWS_AT_ONCE][GROUP] = {0};
    for (int64_t unit = 0; unit < units; unit++) {
        for (int quad = 0; quad < 16; quad++) {
            vi w[GROUP];
            for (int i = 0; i < count; i++) w[i] = *(const vi_loose *)(weight + ((i * units + unit) * 16 + quad) * 64);
            for (int r = 0; r < num_rows; r++) {
                int32_t four;
                memcpy(&four, input[r] + unit * 1024 + quad * 4, 4);
                for (int i = 0; i < count; i++) sums[r][i] = dot_of_quads(sums[r][i], (vi){0} + four, w[i]);
            }
        }
    }
    for (int r = 0; r < num_rows; r++) {
        vf values[GROUP];
        for (int i = 0; i < count; i++) {
#if defined(__AVX512VNNI__) /* activations were read as unsigned, 128 too large */
            sums[r][i] -= *(const vi_loose *)(linear->sums + (block + i) * LANES) * 128;
#endif
            values[i] = dequantised(work, linear, row + r, block + i, sums[r][i]);
        }
        finish_blocks(work, linear, row + r, block, count, values, target);
    }
}

INLINE void product_rows(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    switch (work->decoder->format) {
    case FLOAT32: product_float32(work, linear, row, num_rows, block, count, target); break;
    case BFLOAT16: product_bfloat16(work, linear, row, num_rows, block, count, target); break;
    default: product_int8(work, linear, row, num_rows, block, count, target);
    }
}

INLINE void product_of_group(const Work *work, const Linear *linear, int64_t rows, int64_t block, int count, int target) {
#if AMX
    if (work->decoder->format != FLOAT32) {
        for (int64_t row_block = 0; row_block * 16 < rows; row_block++)
            product_by_tiles(work, linear, row_block, block, count, target, rows);
        return;
    }
#endif
    int64_t row = 0;
    for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE) product_rows(work, linear, row, ROWS_AT_ONCE, block, count, target);
    for (; row < rows; row++) product_rows(work, linear, row, 1, block, count, target);
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
