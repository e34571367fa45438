/* Quantizes weights to groups with scales; groups.h describes the layout. */
#include <math.h>
#include "packing_groups.h"

static float to_float16(float value, uint16_t *bits) { /* to nearest; returns the rounded value */
    float rest;
    uint32_t whole;
    memcpy(&whole, &value, 4);
    const uint16_t sign = (uint16_t)(whole >> 16 & 0x8000);
    const float size = fminf(fabsf(value), 65504.0f);
    if (size < 0x1p-14f) { /* subnormal: multiples of 2^-24 */
        const float count = rintf(size * 0x1p24f);
        *bits = (uint16_t)(sign | (uint16_t)count);
        rest = count * 0x1p-24f;
    } else {
        memcpy(&whole, &size, 4);
        whole += 0xfff + (whole >> 13 & 1);
        whole &= ~0x1fffu;
        memcpy(&rest, &whole, 4);
        *bits = (uint16_t)(sign | (uint16_t)((whole >> 13) - (112u << 10)));
    }
    return sign ? -rest : rest;
}

INLINE vf rounded(vf x) { return (x + splat(12582912.0f)) - splat(12582912.0f); }
INLINE vf limited(vf x, float low, float high) {
    x = choose(x < splat(low), splat(low), x);
    return choose(x > splat(high), splat(high), x);
}

typedef struct {
    float scale, minimum, error; /* a weight is about scale * code + minimum */
} Fit;

/* the least squares of codes that are given */
static Fit fit_to_codes(const vf *x, const vf *codes) {
    const float n = GROUP_INPUTS, sum = sum_of(codes[0] + codes[1]),
                squares = sum_of(codes[0] * codes[0] + codes[1] * codes[1]),
                x_sum = sum_of(x[0] + x[1]), products = sum_of(x[0] * codes[0] + x[1] * codes[1]),
                x_squares = sum_of(x[0] * x[0] + x[1] * x[1]);
    const float determinant = n * squares - sum * sum;
    Fit found = {0.0f, 0.0f, x_squares};
    if (determinant > 0.0f) {
        found.scale = (n * products - sum * x_sum) / determinant;
        found.minimum = (squares * x_sum - sum * products) / determinant;
    }
    if (found.minimum > 0.0f || found.scale <= 0.0f) {
        found.minimum = 0.0f;
        found.scale = squares > 0.0f ? fmaxf(products / squares, 0.0f) : 0.0f;
    }
    const vf first = x[0] - codes[0] * found.scale - found.minimum,
             second = x[1] - codes[1] * found.scale - found.minimum;
    found.error = sum_of(first * first + second * second);
    return found;
}

/* Scale and minimum, which is not positive, of a group in 4 bits: the best of some roundings of
 * codes, each with the least squares of its codes. */
static Fit best_fit(const vf *x) {
    float least = 0.0f, most = -INFINITY;
    for (int i = 0; i < GROUP_INPUTS; i++) {
        const float value = x[i / LANES][i % LANES];
        least = fminf(least, value);
        most = fmaxf(most, value);
    }
    Fit best = {0.0f, least, INFINITY};
    if (!(most > least)) return best;
    for (int step = -2; step <= 9; step++) {
        const float inverse = (15.0f + 0.3f * (float)step) / (most - least);
        vf codes[2];
        for (int i = 0; i < 2; i++)
            codes[i] = limited(rounded((x[i] - least) * inverse), 0.0f, 15.0f);
        const Fit found = fit_to_codes(x, codes);
        if (found.error < best.error) best = found;
    }
    return best;
}

static int32_t to_byte(float value, float unit, int32_t most) {
    return unit > 0.0f ? (int32_t)fminf(rintf(value / unit), (float)most) : 0;
}

/* writes up to 8 groups of an output as Q4_K */
static void quantize_super_4(const vf *x, int64_t count, char *to, int64_t inputs, int64_t super,
                             int64_t lane) {
    Fit fits[GROUPS_OF_SUPER];
    float scale = 0.0f, minimum = 0.0f;
    uint16_t scale_bits, minimum_bits;
    for (int64_t group = 0; group < count; group++) {
        fits[group] = best_fit(x + 2 * group);
        scale = fmaxf(scale, fits[group].scale);
        minimum = fmaxf(minimum, -fits[group].minimum);
    }
    scale = to_float16(scale / 255.0f, &scale_bits);
    minimum = to_float16(minimum / 255.0f, &minimum_bits);
    put_super(to, inputs, KIND_Q4_K, super, lane, scale_bits, minimum_bits);
    for (int64_t group = 0; group < count; group++) {
        Group found = {{0}};
        found.scales[0] = (uint8_t)to_byte(fits[group].scale, scale, 255);
        found.scales[1] = (uint8_t)to_byte(-fits[group].minimum, minimum, 255);
        const float own = scale * (float)found.scales[0], low = minimum * (float)found.scales[1];
        for (int i = 0; i < GROUP_INPUTS; i++) {
            const float value = x[2 * group + i / LANES][i % LANES] + low;
            const float code = own > 0.0f ? rintf(value / own) : 0.0f;
            found.codes[i] = (uint8_t)fminf(fmaxf(code, 0.0f), 15.0f);
        }
        put_group(to, inputs, KIND_Q4_K, super * GROUPS_OF_SUPER + group, lane, &found);
    }
}

/* The scale of 16 numbers in 6 bits: the best of some roundings, each with its least squares. */
static float best_scale_6(vf x) {
    float best = 0.0f, best_gain = 0.0f;
    const float most = max_of(choose(x < splat(0.0f), splat(0.0f) - x, x));
    for (int step = -4; step <= 4 && most > 0.0f; step++) {
        for (int sign = -1; sign <= 1; sign += 2) {
            const float inverse = (float)sign * (31.5f + 0.25f * (float)step) / most;
            const vf codes = limited(rounded(x * inverse), -32.0f, 31.0f);
            const float squares = sum_of(codes * codes), products = sum_of(codes * x);
            if (squares > 0.0f && products * products / squares > best_gain) {
                best_gain = products * products / squares;
                best = products / squares;
            }
        }
    }
    return best;
}

/* writes up to 8 groups of an output as Q6_K */
static void quantize_super_6(const vf *x, int64_t count, char *to, int64_t inputs, int64_t super,
                             int64_t lane) {
    float scales[2 * GROUPS_OF_SUPER], most = 0.0f;
    uint16_t bits;
    for (int64_t half = 0; half < 2 * count; half++) {
        scales[half] = best_scale_6(x[half]);
        most = fmaxf(most, fabsf(scales[half]));
    }
    const float scale = to_float16(most / 127.0f, &bits);
    put_super(to, inputs, KIND_Q6_K, super, lane, bits, 0);
    for (int64_t group = 0; group < count; group++) {
        Group found = {{0}};
        for (int half = 0; half < 2; half++) {
            const float wanted = scales[2 * group + half];
            const int32_t byte = (wanted < 0.0f ? -1 : 1) * to_byte(fabsf(wanted), scale, 127);
            const float own = scale * (float)byte;
            found.scales[half] = (uint8_t)(int8_t)byte;
            for (int i = 0; i < LANES; i++) {
                const float code = own != 0.0f ? rintf(x[2 * group + half][i] / own) : 0.0f;
                found.codes[16 * half + i] = (uint8_t)(fminf(fmaxf(code, -32.0f), 31.0f) + 32.0f);
            }
        }
        put_group(to, inputs, KIND_Q6_K, super * GROUPS_OF_SUPER + group, lane, &found);
    }
}

INLINE vf values_at(const void *weight, int64_t at, int64_t left, int64_t format) {
    if (left >= LANES)
        return format == FLOAT32 ? load((const float *)weight + at)
                                 : load_half((const uint16_t *)weight + at);
    vf found = splat(0.0f);
    for (int64_t i = 0; i < left; i++) {
        const vu bits = {format == FLOAT32 ? 0 : (uint32_t)((const uint16_t *)weight)[at + i] << 16};
        found[i] = format == FLOAT32 ? ((const float *)weight)[at + i] : ((vf)bits)[0];
    }
    return found;
}

/* Quantizes rows of `weight`, one for each output, in format `from`, to Q4_K or Q6_K with scales of
 * 8 bits. `packed` and `blocks` are as in a product, from the first block on. */
void draftree_quantize(const void *weight, int64_t from, int64_t outputs, int64_t inputs,
                       char *packed, const int64_t *blocks) {
    const int64_t groups = input_groups(inputs);
    for (int64_t output = 0; output < outputs; output++) {
        const int kind = (int)(blocks[output / LANES] & 15);
        char *to = packed + (blocks[output / LANES] >> 4);
        const int64_t lane = output % LANES;
        if (lane == 0) memset(to, 0, (size_t)group_block_bytes(inputs, kind));
        for (int64_t super = 0; super * GROUPS_OF_SUPER < groups; super++) {
            const int64_t first = super * GROUPS_OF_SUPER,
                          count = min_int(GROUPS_OF_SUPER, groups - first);
            vf x[2 * GROUPS_OF_SUPER];
            for (int64_t i = 0; i < 2 * count; i++) {
                const int64_t at = first * GROUP_INPUTS + i * LANES;
                x[i] = values_at(weight, output * inputs + at, inputs - at, from);
            }
            if (kind == KIND_Q6_K) quantize_super_6(x, count, to, inputs, super, lane);
            else quantize_super_4(x, count, to, inputs, super, lane);
        }
    }
}
