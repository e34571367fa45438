/* Products of a few rows by packed codes, and what they share with products by unpacked ones. */
#pragma once
#include "groups.h"
#include "products_kernels.h"

enum {
    DIRECT_ROWS = PARTS == 1 ? 3 : 1, /* with codes as they are packed */
    PIECE_GROUPS = GROUPS_OF_SUPER,
    PREFETCHED_GROUPS = 8
};

/* four products of an unsigned and a signed byte in each lane; codes of less than 8 bits are
 * less than 64 */
INLINE part_i dot_of_codes(part_i sum, part_i codes, part_i bytes, int has_8_bits) {
#if defined(__AVX512VNNI__)
    return (part_i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)bytes);
#elif defined(__AVX512BW__)
    const __m512i ones = _mm512_set1_epi16(1);
    if (!has_8_bits)
        return sum + (part_i)_mm512_madd_epi16(
                         _mm512_maddubs_epi16((__m512i)codes, (__m512i)bytes), ones);
    const part_i low = codes & 0x0f0f0f0f, high = codes >> 4 & 0x0f0f0f0f;
    return sum +
           (part_i)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)low, (__m512i)bytes), ones) +
           (part_i)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)high, (__m512i)bytes),
                                     _mm512_set1_epi16(16));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i ones = _mm256_set1_epi16(1);
    if (!has_8_bits)
        return sum + (part_i)_mm256_madd_epi16(
                         _mm256_maddubs_epi16((__m256i)codes, (__m256i)bytes), ones);
    const part_i low = codes & 0x0f0f0f0f, high = codes >> 4 & 0x0f0f0f0f;
    return sum +
           (part_i)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)low, (__m256i)bytes), ones) +
           (part_i)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)high, (__m256i)bytes),
                                     _mm256_set1_epi16(16));
#elif defined(__ARM_FEATURE_DOTPROD)
    if (!has_8_bits)
        return (part_i)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)bytes);
    /* (code - 128) * byte + 64 * byte + 64 * byte */
    const int8x16_t half = vdupq_n_s8(64);
    int32x4_t all = vdotq_s32((int32x4_t)sum, (int8x16_t)(codes ^ (int32_t)0x80808080),
                              (int8x16_t)bytes);
    all = vdotq_s32(all, half, (int8x16_t)bytes);
    return (part_i)vdotq_s32(all, half, (int8x16_t)bytes);
#else
    sum += (codes & 255) * (bytes << 24 >> 24);
    sum += (codes >> 8 & 255) * (bytes << 16 >> 24);
    sum += (codes >> 16 & 255) * (bytes << 8 >> 24);
    return sum + (codes >> 24 & 255) * (bytes >> 24);
#endif
}

INLINE part_i table_values(part_i codes) {
#if defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)code_table));
    return (part_i)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)code_table));
    return (part_i)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (part_i)vqtbl1q_u8(vld1q_u8(code_table), (uint8x16_t)codes);
#else
    uint8_t bytes[WIDTH];
    memcpy(bytes, &codes, WIDTH);
    for (int i = 0; i < WIDTH; i++) bytes[i] = code_table[bytes[i]];
    memcpy(&codes, bytes, WIDTH);
    return codes;
#endif
}

/* part of the codes of a quad, one byte each */
INLINE part_i codes_of(const char *codes, int kind, int quad, int part) {
    const int at = part * WIDTH;
    if (bits_of(kind) == 8) return load_part(codes + quad * 64 + at);
    part_i found = load_part(codes + quad % 4 * 64 + at);
    found = (quad < 4 ? found : found >> 4) & 0x0f0f0f0f;
    if (has_table(kind)) return table_values(found);
    if (bits_of(kind) == 5)
        found |= (load_part(codes + 256 + at) >> quad & 0x01010101) << 4;
    if (bits_of(kind) == 6)
        found |= (load_part(codes + 256 + quad / 4 * 64 + at) >> 2 * (quad % 4) & 0x03030303) << 4;
    return found;
}

typedef union {
    vf whole;
    part_f part[PARTS];
} Parted;

INLINE part_f scaled_and_added(part_f total, part_i sum, const RowGroup *row, part_f scale) {
    return fma_part(__builtin_convertvector(sum, part_f) * row->scale, scale, total);
}

/* the sums of a row's bytes of a half, or of all, times the zero: what codes have too much */
INLINE int32_t excess(const RowGroup *row, int half, int halves, int zero) {
    return zero * (halves == 2 ? row->sums[half] : row->sums[0] + row->sums[1]);
}

/* a few rows by a group of blocks, whose codes are read as they are packed */
INLINE void add_packed(const Work *work, const Linear *linear, int64_t row, int num_rows,
                       int64_t block, int first_part, int kind, Sums *sums) {
    enum { count = GROUP };
    const int64_t groups = input_groups(linear->inputs);
    const int halves = halves_of(kind);
    const RowGroup *rows = row_groups(work, row, linear->inputs);
    GroupBlock at[count];
    part_f total[DIRECT_ROWS * count * PARTS];
    for (int i = 0; i < count; i++) at[i] = block_of(linear, block + i);
    EACH_ROW(r)
        EACH_PART(i) total[PART_OF(r, i)] = sums[r].value[first_part + i];
    for (int64_t group = 0; group < groups; group++) {
        Parted scale[MOST_HALVES][count], minimum[count];
        for (int i = 0; i < count; i++) {
            const GroupScales found = scales_of(at[i], kind, group);
            scale[0][i].whole = found.scale[0];
            if (halves == 2) scale[1][i].whole = found.scale[1];
            if (has_minimum(kind)) minimum[i].whole = found.minimum;
            for (int line = 0; line < bits_of(kind); line++)
                __builtin_prefetch(at[i].codes + (group + PREFETCHED_GROUPS) * code_bytes(kind) +
                                   line * 64);
        }
        UNROLLED for (int half = 0; half < halves; half++) {
            part_i sum[DIRECT_ROWS * count * PARTS];
            EACH_ROW(r)
                EACH_PART(i)
                    sum[PART_OF(r, i)] = (part_i){0} - excess(rows + r * groups + group, half,
                                                              halves, zero_of(kind));
            UNROLLED for (int step = 0; step < QUADS_OF_GROUP / halves; step++) {
                /* quads that share their bytes follow each other */
                const int quad = halves == 2 ? half * 4 + step : step / 2 + step % 2 * 4;
                part_i codes[count * PARTS];
                EACH_PART(i)
                    codes[i] = codes_of(at[i / PARTS].codes + group * code_bytes(kind), kind, quad,
                                        i % PARTS);
                EACH_ROW(r) {
                    const part_i bytes = broadcast_part(
                        (const char *)rows[r * groups + group].bytes + quad * 4);
                    EACH_PART(i)
                        sum[PART_OF(r, i)] = dot_of_codes(sum[PART_OF(r, i)], codes[i], bytes,
                                                          bits_of(kind) == 8 || has_table(kind));
                }
            }
            EACH_ROW(r)
                EACH_PART(i)
                    total[PART_OF(r, i)] = scaled_and_added(
                        total[PART_OF(r, i)], sum[PART_OF(r, i)], rows + r * groups + group,
                        scale[half][i / PARTS].part[i % PARTS]);
        }
        if (has_minimum(kind))
            EACH_ROW(r)
                EACH_PART(i)
                    total[PART_OF(r, i)] = fma_part(
                        (part_f){0} + rows[r * groups + group].scaled_sum,
                        minimum[i / PARTS].part[i % PARTS], total[PART_OF(r, i)]);
    }
    EACH_ROW(r)
        EACH_PART(i) sums[r].value[first_part + i] = total[PART_OF(r, i)];
}

#define DIRECT_CASE(rows, kind) \
    case rows: \
        if ((rows) <= DIRECT_ROWS) \
            add_packed(work, linear, row, rows, block, first_part, kind, sums); \
        break;
#define DIRECT(kind) \
    static __attribute__((noinline)) void add_direct_##kind( \
        const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, \
        int first_part, Sums *sums) { \
        switch (num_rows) { \
            DIRECT_CASE(1, kind) \
            DIRECT_CASE(2, kind) \
            DIRECT_CASE(3, kind) \
        } \
    }
#define EACH_KIND(DO) \
    DO(KIND_Q8_0) \
    DO(KIND_Q4_0) \
    DO(KIND_Q4_1) DO(KIND_Q5_0) DO(KIND_Q5_1) DO(KIND_IQ4_NL) DO(KIND_Q4_K) DO(KIND_Q5_K) \
        DO(KIND_Q6_K) DO(KIND_IQ4_XS)
EACH_KIND(DIRECT)

static void add_direct(const Work *work, const Linear *linear, int64_t row, int num_rows,
                       int64_t block, int first_part, int kind, Sums *sums) {
#define ONE(name) \
    case name: add_direct_##name(work, linear, row, num_rows, block, first_part, sums); break;
    switch (kind) { EACH_KIND(ONE) }
#undef ONE
}
