/* The epilogue of a product: scale, bias, activation, and where the results are stored. */
#pragma once
#include "structures.h"

/* x times the distribution function of the normal distribution, whose error is below 1e-7: half of
 * the complementary error function by Abramowitz and Stegun, 7.1.26 */
INLINE vf exact_gelu(vf x) {
    const vi is_negative = above(splat(0.0f), x);
    const vf size = choose(is_negative, -x, x) * 0.70710678119f, t = 1.0f / (1.0f + 0.3275911f * size);
    vf tail = splat(1.061405429f);
    tail = fma16(tail, t, splat(-1.453152027f));
    tail = fma16(tail, t, splat(1.421413741f));
    tail = fma16(tail, t, splat(-0.284496736f));
    tail = fma16(tail, t, splat(0.254829592f));
    tail = 0.5f * tail * t * exp16(-(size * size));
    return x * choose(is_negative, tail, 1.0f - tail);
}

INLINE vf activate(vf x, int64_t kind) {
    if (kind == RELU || kind == RELU_SQUARED) {
        x = choose(above(splat(0.0f), x), splat(0.0f), x); /* NaN stays */
        return kind == RELU ? x : x * x;
    }
    if (kind == GELU) return exact_gelu(x);
    /* gelu by tanh is x times the logistic of 2 sqrt(2 / pi) (x + 0.044715 x^3) */
    vf z = kind == SILU         ? x
           : kind == QUICK_GELU ? 1.702f * x
                                : 1.5957691216f * fma16(0.044715f * x * x, x, x);
    return x / (1.0f + exp16(-z));
}

INLINE vf gated(const Decoder *decoder, vf gate, vf up) {
    if (decoder->activation != CLAMPED_SILU) return activate(gate, decoder->activation) * up;
    const vf limit = splat(decoder->gate_limit); /* NaN stays */
    gate = choose(above(gate, limit), limit, gate);
    up = choose(above(up, limit), limit, choose(above(-limit, up), -limit, up));
    return (up + 1.0f) * (gate / (1.0f + exp16(-(gate * decoder->gate_slope))));
}

INLINE vf with_bias(const Linear *linear, int64_t block, vf value) {
    return linear->bias == NULL ? value : value + load(linear->bias + block * LANES);
}

enum { STREAMED_LOGITS = 8 }; /* rows of logits from which on they are stored past the caches */

/* TO_START: what enters the first layer, with the precision in which slots keep it */
enum { TO_WIDE, TO_MIXER, TO_JOINT, TO_START, TO_STREAM, TO_MLP, TO_PLAIN_MLP, TO_LOGITS };

INLINE vf as_kept(const Decoder *decoder, vf value) {
    uint16_t halves[LANES];
    if (decoder->kv_format == FLOAT32) return value;
    store_half(halves, value);
    return load_half(halves);
}

/* stores a result of the activation in the format of the next product, or float32 for int8 */
INLINE void store_inner(const Work *work, int64_t row, int64_t column, vf value) {
    const Decoder *decoder = work->decoder;
    if (decoder->format == BFLOAT16) store_half_input(work->mixed, row, column, work->inner, value);
    else store(work->mixed + row * work->inner + column, value);
}

INLINE void finish(const Work *work, const Linear *linear, int64_t row, int64_t block, vf value,
                   int target) {
    const Decoder *decoder = work->decoder;
    value = with_bias(linear, block, value);
    const int64_t column = linear->first + block * LANES;
    if (target == TO_WIDE) {
        store(work->wide + row * linear->outputs + block * LANES, value);
    } else if (target == TO_MIXER) {
        store(work->wide + row * work->row_width + column, value);
    } else if (target == TO_JOINT) {
        store(work->joint + row * decoder->hidden + column, value);
    } else if (target == TO_START) {
        store(work->x + row * decoder->hidden + column, as_kept(decoder, value));
    } else if (target == TO_STREAM) {
        float *at = work->x + row * decoder->hidden + column;
        store(at, fma16(value, splat(decoder->residual_scale), load(at)));
    } else if (target == TO_PLAIN_MLP) {
        store_inner(work, row, column, activate(value, decoder->activation));
    } else {
        float *at = work->logits + row * decoder->vocab + column;
        int64_t left = decoder->vocab - column;
        value = value * decoder->logit_scale;
        if (decoder->logit_cap > 0.0f) value = capped(value, decoder->logit_cap);
        if (left >= LANES && work->pass->num_logits >= STREAMED_LOGITS) store_streamed(at, value);
        else if (left >= LANES) store(at, value);
        else
            for (int64_t i = 0; i < left; i++) at[i] = value[i];
    }
}

/* gate and up alternate: block 2i is of the gate, block 2i + 1 of up */
INLINE void finish_mlp(const Work *work, const Linear *linear, int64_t row, int64_t block, vf gate,
                       vf up) {
    const Decoder *decoder = work->decoder;
    gate = with_bias(linear, block, gate);
    up = with_bias(linear, block + 1, up);
    store_inner(work, row, linear->first + block / 2 * LANES,
                gated(decoder, gate, up));
}

INLINE void finish_blocks(const Work *work, const Linear *linear, int64_t row, int64_t block,
                          int count, const vf *values, int target) {
    if (target == TO_MLP)
        for (int i = 0; i < count; i += 2)
            finish_mlp(work, linear, row, block + i, values[i], values[i + 1]);
    else
        for (int i = 0; i < count; i++) finish(work, linear, row, block + i, values[i], target);
}

INLINE vf dequantized(const Work *work, const Linear *linear, int64_t row, int64_t block, vf sums) {
    return sums * (load(linear->scale + block * LANES) * work->input_scales[row]);
}

INLINE vf combine_bytes(vi high, vi low) {
    return fma16(__builtin_convertvector(high, vf), splat(256.0f),
                 __builtin_convertvector(low, vf));
}
