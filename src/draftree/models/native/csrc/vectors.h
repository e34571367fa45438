/* Vectors of 16 numbers on any processor, and the functions of them that passes and searches need.
 * Contraction is off, so a product is fused in every copy of a loop or in none. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

enum { LANES = 16 };

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t half_row __attribute__((vector_size(32)));
typedef float vf_loose __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t vi_loose __attribute__((vector_size(64), aligned(4), may_alias));
typedef vu vu_loose __attribute__((aligned(4), may_alias));
typedef half_row half_loose __attribute__((aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
/* of a function of another object of the library, which no other library sees */
#define SHARED __attribute__((visibility("hidden")))

INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf load(const float *p) { return *(const vf_loose *)p; }
INLINE void store(float *p, vf x) { *(vf_loose *)p = x; }

/* Stores past the caches if the processor can, so that they keep weights, and the old contents are
 * not read first. end_streams orders these stores before later ones. */
INLINE void store_streamed(float *p, vf x) {
#if defined(__AVX512F__)
    if ((uintptr_t)p % 64 == 0) {
        _mm512_stream_ps(p, (__m512)x);
        return;
    }
#endif
    store(p, x);
}
INLINE void end_streams(void) {
#if defined(__AVX512F__)
    _mm_sfence();
#endif
}

/* The contents of one register. Sums of long loops are kept in these, since compilers spill wider
 * vectors. */
#if defined(__AVX512F__)
enum { WIDTH = 64 };
#elif defined(__AVX2__)
enum { WIDTH = 32 };
#else
enum { WIDTH = 16 };
#endif
enum { PARTS = 64 / WIDTH, PART_LANES = LANES / PARTS };
typedef float part_f __attribute__((vector_size(WIDTH), may_alias));
typedef int32_t part_i __attribute__((vector_size(WIDTH), may_alias));
typedef uint32_t part_u __attribute__((vector_size(WIDTH)));
typedef int16_t part_s __attribute__((vector_size(WIDTH)));
typedef part_f part_f_loose __attribute__((aligned(4)));
typedef part_i part_i_loose __attribute__((aligned(4)));
typedef part_u part_u_loose __attribute__((aligned(4), may_alias));

/* Registers of a vector, and quarters of it. gcc compares, shuffles and narrows vectors wider than a
 * register number by number. */
typedef float quarter_f __attribute__((vector_size(16), may_alias));
typedef int32_t quarter_i __attribute__((vector_size(16), may_alias));
typedef union {
    vf floats;
    vi ints;
    part_f part[PARTS];
    part_i part_ints[PARTS];
    quarter_f quarter[4];
    quarter_i quarter_ints[4];
} InParts;
INLINE vi above(vf a, vf b) { /* all bits where a > b */
    const InParts x = {a}, y = {b};
    InParts found;
    for (int i = 0; i < PARTS; i++) found.part_ints[i] = x.part[i] > y.part[i];
    return found.ints;
}
INLINE vi above_ints(vi a, vi b) {
    const InParts x = {.ints = a}, y = {.ints = b};
    InParts found;
    for (int i = 0; i < PARTS; i++) found.part_ints[i] = x.part_ints[i] > y.part_ints[i];
    return found.ints;
}
INLINE vi is_nan(vf a) {
    const InParts x = {a};
    InParts found;
    for (int i = 0; i < PARTS; i++) found.part_ints[i] = x.part[i] != x.part[i];
    return found.ints;
}

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }

INLINE vi max_vi(vi a, vi b) {
#if defined(__AVX512F__)
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    return (vi)choose(above_ints(a, b), (vf)a, (vf)b);
#endif
}

INLINE vf fma16(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    typedef union {
        vf v;
        __m256 half[2];
    } both;
    both x = {a}, y = {b}, z = {c};
    z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
    z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
    return z.v;
#elif defined(__ARM_NEON)
    typedef union {
        vf v;
        float32x4_t part[4];
    } all;
    all x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 4; i++) z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]);
    return z.v;
#else
    return a * b + c;
#endif
}

/* gcc moves additions of integers to the end of a loop, and spills what they add until then */
INLINE part_i added_now(part_i sum) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(sum));
#elif defined(__x86_64__)
    __asm__("" : "+x"(sum));
#endif
    return sum;
}

INLINE part_f splat_part(float x) { return x - (part_f){0}; } /* 0 + x would turn -0 into 0 */

INLINE part_f fma_part(part_f a, part_f b, part_f c) {
#if defined(__AVX512F__)
    return (part_f)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
    return (part_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (part_f)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float sum_of(vf x) {
    const InParts all = {x};
    const quarter_f sums = (all.quarter[0] + all.quarter[2]) + (all.quarter[1] + all.quarter[3]);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

INLINE int32_t sum_of_ints(vi x) {
    const InParts all = {.ints = x};
    const quarter_i sums = all.quarter_ints[0] + all.quarter_ints[1] + all.quarter_ints[2] +
                           all.quarter_ints[3];
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* the larger of each pair; a NaN in `one` gives `other` */
INLINE vf max16(vf one, vf other) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)one, (__m512)other);
#else
    return choose(above(one, other), one, other);
#endif
}

INLINE quarter_f max_quarter(quarter_f one, quarter_f other) {
    const quarter_i mask = one > other;
    return (quarter_f)(((quarter_i)one & mask) | ((quarter_i)other & ~mask));
}

INLINE float max_of(vf x) {
    const InParts all = {x};
    quarter_f top = max_quarter(max_quarter(all.quarter[3], all.quarter[1]),
                                max_quarter(all.quarter[2], all.quarter[0]));
    top = max_quarter(__builtin_shufflevector(top, top, 2, 3, 0, 1), top);
    return max_quarter(__builtin_shufflevector(top, top, 1, 0, 3, 2), top)[0];
}

INLINE int32_t max_of_ints(vi x) {
    const InParts all = {.ints = x};
    quarter_i top = all.quarter_ints[0];
    for (int i = 1; i < 4; i++) {
        const quarter_i mask = all.quarter_ints[i] > top;
        top = (all.quarter_ints[i] & mask) | (top & ~mask);
    }
    const int32_t low = top[0] > top[1] ? top[0] : top[1], high = top[2] > top[3] ? top[2] : top[3];
    return low > high ? low : high;
}

/* the largest of the bits of floats without signs, as a float: NaN, whose bits are the largest, if
 * there is one */
INLINE float max_size(vi sizes) {
    const int32_t bits = max_of_ints(sizes);
    float found;
    memcpy(&found, &bits, 4);
    return found;
}

INLINE int any_of(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    typedef int64_t pair __attribute__((vector_size(16)));
    const InParts all = {.ints = mask};
    const pair any = (pair)((all.quarter_ints[0] | all.quarter_ints[1]) |
                            (all.quarter_ints[2] | all.quarter_ints[3]));
    return (any[0] | any[1]) != 0;
#endif
}

/* the sums of 16 vectors, one in each lane */
INLINE vf sums_of(vf *x) {
    vf a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24,
                                       10, 26, 12, 28, 14, 30) +
               __builtin_shufflevector(x[2 * i], x[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25,
                                       11, 27, 13, 29, 15, 31);
    for (int i = 0; i < 4; i++)
        b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24,
                                       25, 12, 13, 28, 29) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11,
                                       26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; i++)
        c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10,
                                       11, 24, 25, 26, 27) +
               __builtin_shufflevector(b[2 * i], b[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13,
                                       14, 15, 28, 29, 30, 31);
    return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22,
                                   23) +
           __builtin_shufflevector(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29,
                                   30, 31);
}

#define LOG2_E 1.44269504088896341f

/* e to the y - n * ln 2, where n is the integer next to y / ln 2 */
INLINE vf exp_of_rest(vf y, vf n) {
    vf r = fma16(n, splat(-0.693359375f), y);
    r = fma16(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    return fma16(p, r * r, r + 1.0f);
}

/* e to the x; relative error about 1e-7; 0 below -87 */
INLINE vf exp16(vf x) {
    const vi tiny = above(splat(-87.0f), x), huge = above(x, splat(88.0f));
    vf y = choose(tiny, splat(-87.0f), choose(huge, splat(88.0f), x));
    vf shift = splat(12582912.0f); /* adding it rounds to an integer */
    vf n = fma16(y, splat(LOG2_E), shift) - shift;
    vf p = exp_of_rest(y, n);
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return choose(tiny, splat(0.0f), p * (vf)power);
}

/* the same for numbers up to 0, with fewer instructions of AVX-512; 0 below -104 */
INLINE vf exp_of_negative(vf x) {
#if defined(__AVX512F__)
    const vf y = max16(splat(-104.0f), x); /* NaN stays */
    const vf n = (vf)_mm512_roundscale_ps((__m512)(y * splat(LOG2_E)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf p = exp_of_rest(y, n);
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return exp16(x);
#endif
}

/* natural logarithm of positive normal numbers; relative error about 1e-7 */
INLINE vf log16(vf x) {
    vi bits = (vi)x;
    vi power = (bits >> 23) - 127;
    vf m = (vf)((bits & 0x7fffff) | 0x3f800000);
    const vi high = above(m, splat(1.41421356f));
    m = choose(high, m * 0.5f, m);
    vf e = __builtin_convertvector(power - high, vf); /* a mask is -1 */
    vf f = m - 1.0f, z = f * f;
    vf p = splat(7.0376836292e-2f);
    p = fma16(p, f, splat(-1.1514610310e-1f));
    p = fma16(p, f, splat(1.1676998740e-1f));
    p = fma16(p, f, splat(-1.2420140846e-1f));
    p = fma16(p, f, splat(1.4249322787e-1f));
    p = fma16(p, f, splat(-1.6668057665e-1f));
    p = fma16(p, f, splat(2.0000714765e-1f));
    p = fma16(p, f, splat(-2.4999993993e-1f));
    p = fma16(p, f, splat(3.3333331174e-1f));
    vf y = fma16(e, splat(-2.12194440e-4f), p * f * z);
    y = fma16(z, splat(-0.5f), y);
    return fma16(e, splat(0.693359375f), f + y);
}

/* logarithm of 1 + e to the x; relative error about 3e-7, of tiny results too */
INLINE vf softplus16(vf x) {
    const vi is_positive = above(x, splat(0.0f));
    const vf e = exp16(choose(is_positive, -x, x)), sum = e + 1.0f, rest = sum - 1.0f;
    /* the logarithm of the rounded sum, corrected by what the sum lost */
    const vf log = choose(above(rest, splat(0.0f)), log16(sum) * (e / rest), e);
    return choose(is_positive, x + log, log); /* NaN stays */
}

#if defined(__AVX512DQ__)
/* 2 to the x, relative error 3e-6: for weights that are rounded to 2e-3 anyway; minus infinity gives 0 */
INLINE vf power_of_two(vf x) {
    const vf rest = (vf)_mm512_reduce_ps((__m512)x, 1); /* fraction */
    vf p = splat(0.01353416523921686f);
    p = fma16(p, rest, splat(0.05201146575410819f));
    p = fma16(p, rest, splat(0.24144275385223166f));
    p = fma16(p, rest, splat(0.6930038350290227f));
    p = fma16(p, rest, splat(1.0000025933554215f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
}
#endif

/* `cap` times the hyperbolic tangent of x / cap; NaN stays */
INLINE vf capped(vf x, float cap) {
    const vi is_negative = above(splat(0.0f), x);
    const vf size = choose(is_negative, -x, x) * (1.0f / cap), e = exp_of_negative(-2.0f * size);
    const vf found = cap * ((1.0f - e) / (1.0f + e));
    return choose(is_negative, -found, found);
}

INLINE vf widen(half_row bits) { return (vf)(__builtin_convertvector(bits, vu) << 16); }
INLINE vf load_half(const uint16_t *p) { return widen(*(const half_loose *)p); }

INLINE part_f widen_part(const uint16_t *p) {
    typedef uint16_t halves_of_part __attribute__((vector_size(WIDTH / 2), aligned(2), may_alias));
    return (part_f)(__builtin_convertvector(*(const halves_of_part *)p, part_u) << 16);
}

/* the low halves of numbers */
INLINE half_row low_halves(vu x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const InParts all = {.ints = (vi)(x & 0xffff)};
    const __m256i packed = _mm256_packus_epi32((__m256i)all.part_ints[0], (__m256i)all.part_ints[1]);
    return (half_row)_mm256_permute4x64_epi64(packed, 0xd8);
#else
    return __builtin_convertvector(x, half_row);
#endif
}

/* the low bytes of numbers */
typedef int8_t byte_row __attribute__((vector_size(16)));
INLINE byte_row low_bytes(vi x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i halves = (__m256i)low_halves((vu)(x & 0xff));
    return (byte_row)_mm_packus_epi16(_mm256_castsi256_si128(halves),
                                      _mm256_extracti128_si256(halves, 1));
#else
    return __builtin_convertvector(x, byte_row);
#endif
}

INLINE half_row narrow(vf x) { /* to bfloat16, to nearest, ties to even; NaN stays NaN */
#if defined(__AVX512BF16__)
    return (half_row)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vu nan = (vu)is_nan(x);
    return low_halves((rounded & ~nan) | (0x7fc0 & nan));
#endif
}
INLINE void store_half(uint16_t *p, vf x) { *(half_loose *)p = narrow(x); }
