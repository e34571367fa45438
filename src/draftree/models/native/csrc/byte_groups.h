/* Inputs of products with int8 weights on processors that multiply bytes, but have no tiles: bytes
 * in groups of 32 with a scale of their own. */
#pragma once
#include "structures.h"
#if BYTE_GROUPS

enum { BYTES_OF_GROUP = 32 };

/* `start`: what a sum starts with, since the multiplied weights are 128 larger than they are */
typedef struct {
    float scale;
    int32_t start;
    int8_t bytes[BYTES_OF_GROUP];
} ByteGroup;

INLINE ByteGroup *byte_groups(const Work *work, int64_t row, int64_t inputs) {
    return (ByteGroup *)work->inputs + row * blocks_of(inputs, BYTES_OF_GROUP);
}

/* NaN and infinity give a scale that is not finite */
INLINE void write_byte_group(ByteGroup *to, vf low, vf high) {
    const vi sizes = max_vi((vi)low & 0x7fffffff, (vi)high & 0x7fffffff);
    const float most = max_size(sizes);
    to->scale = most / 127.0f;
    const vf inverse = splat(most > 1e-30f ? 127.0f / most : 0.0f);
#if defined(__AVX512F__)
    const __m128i first = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)(low * inverse))),
                  second = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)(high * inverse)));
    _mm_storeu_si128((__m128i *)to->bytes, first);
    _mm_storeu_si128((__m128i *)(to->bytes + 16), second);
    const __m512i all = _mm512_zextsi256_si512(_mm256_set_m128i(second, first));
    const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), all);
    to->start = -128 * _mm512_reduce_add_epi32(sums);
#else
    const InParts scaled[2] = {{low * inverse}, {high * inverse}};
    const __m256i first = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)scaled[0].part[0]),
                                             _mm256_cvtps_epi32((__m256)scaled[0].part[1])),
                  second = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)scaled[1].part[0]),
                                              _mm256_cvtps_epi32((__m256)scaled[1].part[1]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second),
                                                      _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)to->bytes, bytes);
    const __m256i sums = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    to->start = -128 * _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
#endif
}
#endif
