/* Keys and values of 8 bits: those of a token and head are head_dim codes and after them the scale
 * by which codes are multiplied, float32. The largest number has the code 127 or -127.
 */
#pragma once
#include <string.h>
#include "transposing.h"
#include "structures.h"

enum { SCALE_BYTES = 4 };

/* from one place of keys or values to the next, in numbers of their format */
INLINE int64_t kv_step(const Decoder *decoder) {
    return decoder->cache_format == INT8 ? decoder->head_dim + SCALE_BYTES : decoder->head_dim;
}

INLINE int64_t kv_bytes(const Decoder *decoder) { /* of a place */
    return kv_step(decoder) * (decoder->cache_format == FLOAT32    ? 4
                               : decoder->cache_format == BFLOAT16 ? 2
                                                                   : 1);
}

INLINE float scale_of_codes(const int8_t *codes, int64_t dim) {
    float scale;
    memcpy(&scale, codes + dim, SCALE_BYTES);
    return scale;
}

/* Stores numbers as codes. Numbers that are not finite give a scale that is not finite. */
INLINE void store_codes(int8_t *to, const float *from, int64_t dim) {
    const vf rounding = splat(12582912.0f); /* its last bit is 1: adding it rounds to an integer */
    vi largest = {0};
    for (int64_t i = 0; i < dim; i += LANES)
        largest = max_vi(largest, (vi)load(from + i) & 0x7fffffff);
    const float size = max_size(largest), scale = size / 127.0f;
    const vf inverse = splat(size > 1e-30f ? 127.0f / size : 0.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vi whole = (vi)(load(from + i) * inverse + rounding) - (vi)rounding;
        const byte_row codes = low_bytes(whole);
        memcpy(to + i, &codes, sizeof(codes));
    }
    memcpy(to + dim, &scale, SCALE_BYTES);
}

/* the numbers of 16 codes */
INLINE vf load_codes(const int8_t *codes, int64_t from, int64_t dim) {
    typedef int8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
    return __builtin_convertvector(*(const bytes *)(codes + from), vf) *
           splat(scale_of_codes(codes, dim));
}

/* the same, of a part */
INLINE part_f codes_part(const int8_t *codes, int64_t from, int64_t dim) {
    typedef int8_t bytes_of_part
        __attribute__((vector_size(PART_LANES), aligned(1), may_alias));
    return __builtin_convertvector(*(const bytes_of_part *)(codes + from), part_f) *
           splat_part(scale_of_codes(codes, dim));
}

/* Transposes 16 keys of codes, which start at these bytes of `from`, as `transpose_keys`. Four
 * dimensions lie in a lane while they are transposed. */
static void transpose_codes(float *to, const int8_t *from, const int64_t *at, int64_t dim) {
    part_f x[PART_LANES];
    for (int first = 0; first < LANES; first += PART_LANES) {
        part_f scales;
        int64_t i = 0;
        for (int key = 0; key < PART_LANES; key++)
            scales[key] = scale_of_codes(from + at[first + key], dim);
        for (; i + 4 * PART_LANES <= dim; i += 4 * PART_LANES) {
            for (int key = 0; key < PART_LANES; key++)
                x[key] = *(const part_f_loose *)(from + at[first + key] + i);
            transpose(x);
            UNROLLED for (int lane = 0; lane < PART_LANES; lane++) {
                part_f *column = (part_f *)(to + (i + 4 * lane) * LANES + first);
                for (int byte = 0; byte < 4; byte++) {
                    const part_i code = (part_i)((part_u)x[lane] << (24 - 8 * byte)) >> 24;
                    column[byte * PARTS] = __builtin_convertvector(code, part_f) * scales;
                }
            }
        }
        for (; i < dim; i += PART_LANES) {
            for (int key = 0; key < PART_LANES; key++)
                for (int lane = 0; lane < PART_LANES; lane++)
                    x[key][lane] = (float)from[at[first + key] + i + lane];
            transpose(x);
            for (int lane = 0; lane < PART_LANES; lane++)
                *(part_f *)(to + (i + lane) * LANES + first) = x[lane] * scales;
        }
    }
}
