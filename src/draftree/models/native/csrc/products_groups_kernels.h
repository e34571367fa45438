/* Products of a few rows by packed codes, and what they share with products by unpacked ones. */
#pragma once
#include "groups.h"
#include "products_kernels.h"

enum {
    DIRECT_ROWS = PARTS == 1 ? 12 : 1, /* of a kernel that reads codes as they are packed */
    DIRECT_SUPERS = 2,                 /* that it reads at once if there are more rows */
    AHEAD_BYTES = 8192                 /* of the prefetches of one row */
};

/* four products of an unsigned and a signed byte in each lane; codes of less than 8 bits are
 * less than 64 */
INLINE part_i dot_of_codes(part_i sum, part_i codes, part_i bytes, int has_8_bits) {
#if defined(__AVX512VNNI__)
    return (part_i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)bytes);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (part_i)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)bytes);
#elif defined(__AVX512BW__)
    const __m512i ones = _mm512_set1_epi16(1);
    if (!has_8_bits)
        return added_now(sum + (part_i)_mm512_madd_epi16(
                                   _mm512_maddubs_epi16((__m512i)codes, (__m512i)bytes), ones));
    const part_i low = codes & 0x0f0f0f0f, high = codes >> 4 & 0x0f0f0f0f;
    return added_now(sum +
           (part_i)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)low, (__m512i)bytes), ones) +
           (part_i)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)high, (__m512i)bytes),
                                     _mm512_set1_epi16(16)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i ones = _mm256_set1_epi16(1);
    if (!has_8_bits)
        return added_now(sum + (part_i)_mm256_madd_epi16(
                                   _mm256_maddubs_epi16((__m256i)codes, (__m256i)bytes), ones));
    const part_i low = codes & 0x0f0f0f0f, high = codes >> 4 & 0x0f0f0f0f;
    return added_now(sum +
           (part_i)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)low, (__m256i)bytes), ones) +
           (part_i)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)high, (__m256i)bytes),
                                     _mm256_set1_epi16(16)));
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

/* minus the sum of a row's bytes, of a half or of all, times the zero: what codes have too much */
INLINE part_i start_of_sum(const RowGroup *row, int half, int halves, int zero) {
    if (zero == 0) return (part_i){0};
    const part_i sum = (part_i){0} + row->minus_sums[halves == 1 ? 2 : half];
#if defined(__AVX512F__) /* as a multiplication it would take a general register */
    return (part_i)_mm512_slli_epi32((__m512i)sum, (unsigned)__builtin_ctz((unsigned)zero));
#else
    return sum * zero;
#endif
}

/* Some rows by some super-groups of inputs of a block. */
typedef struct {
    const RowGroup *rows;     /* the first group of the first row */
    const char *block, *next; /* next: the block that is read after this one */
    int64_t inputs, from, to; /* super-groups */
    Sums *sums;               /* of the first row */
    int first_part, is_first; /* is_first: no other call has read these weights */
} PackedPiece;

/* Reads codes as they are packed, with all sums in registers. Weights are read and prefetched one
 * line after the other, as the processor's own prefetchers expect: reading four blocks in turns
 * costs a quarter of the bandwidth, and prefetches that come at once are dropped. */
INLINE void add_packed(const PackedPiece *given, int num_rows, int kind) {
    enum { count = 1 };
    const PackedPiece piece = *given;
    const int halves = halves_of(kind);
    const int64_t stride = input_groups(piece.inputs), supers = input_supers(piece.inputs);
    const int64_t size = bytes_of_super(GROUPS_OF_SUPER, kind), ahead = blocks_of(AHEAD_BYTES, size);
    const int64_t lines = blocks_of(size / 64, GROUPS_OF_SUPER);
    part_f total[SUMS_AT_ONCE];
    EACH_ROW(r)
        EACH_PART(i) total[PART_OF(r, i)] = piece.sums[r].value[piece.first_part + i];
    for (int64_t super = piece.from; super < piece.to; super++) {
        const SuperGroup at = super_group(piece.block, piece.inputs, kind, super);
        const int64_t groups = groups_of_super(piece.inputs, super), later = super + ahead - supers;
        const char *line = later < 0 ? piece.block + (super + ahead) * size : piece.next + later * size;
        for (int64_t group = 0; group < groups; group++) {
            const RowGroup *rows = piece.rows + super * GROUPS_OF_SUPER + group;
            UNROLLED for (int half = 0; half < halves; half++) {
                part_i sum[SUMS_AT_ONCE];
                EACH_ROW(r)
                    EACH_PART(i)
                        sum[PART_OF(r, i)] = start_of_sum(rows + r * stride, half, halves,
                                                          zero_of(kind));
                UNROLLED for (int step = 0; step < QUADS_OF_GROUP / halves; step++) {
                    /* quads that share their bytes follow each other */
                    const int quad = halves == 2 ? half * 4 + step : step / 2 + step % 2 * 4;
                    if (piece.is_first && half * 4 + step < lines)
                        prefetch_once(line + (half * 4 + step) * 64);
                    part_i codes[PARTS];
                    EACH_PART(i) codes[i] = codes_of(at.codes + group * code_bytes(kind), kind, quad, i);
                    EACH_ROW(r) {
                        const part_i bytes = broadcast_part(
                            (const char *)rows[r * stride].bytes + quad * 4);
                        EACH_PART(i)
                            sum[PART_OF(r, i)] = dot_of_codes(sum[PART_OF(r, i)], codes[i], bytes,
                                                              bits_of(kind) == 8 || has_table(kind));
                    }
                }
                const Parted scale = {scale_of_half(at, kind, group, half)};
                EACH_ROW(r)
                    EACH_PART(i)
                        total[PART_OF(r, i)] = scaled_and_added(total[PART_OF(r, i)],
                                                                sum[PART_OF(r, i)],
                                                                rows + r * stride, scale.part[i]);
            }
            if (piece.is_first && lines > QUADS_OF_GROUP)
                prefetch_once(line + QUADS_OF_GROUP * 64);
            line += lines * 64;
            if (!has_minimum(kind)) continue;
            const Parted minimum = {minimum_of(at, kind, group)};
            EACH_ROW(r)
                EACH_PART(i)
                    total[PART_OF(r, i)] = fma_part(splat_part(rows[r * stride].scaled_sum),
                                                    minimum.part[i], total[PART_OF(r, i)]);
        }
    }
    EACH_ROW(r)
        EACH_PART(i) piece.sums[r].value[piece.first_part + i] = total[PART_OF(r, i)];
}

#define DIRECT_CASE(rows, kind) \
    case rows: \
        if ((rows) <= DIRECT_ROWS) add_packed(piece, rows, kind); \
        break;
#define DIRECT(kind) \
    static __attribute__((noinline)) void add_direct_##kind(const PackedPiece *piece, int num_rows) { \
        switch (num_rows) { \
            DIRECT_CASE(1, kind) \
            DIRECT_CASE(2, kind) \
            DIRECT_CASE(3, kind) \
            DIRECT_CASE(4, kind) \
            DIRECT_CASE(5, kind) \
            DIRECT_CASE(6, kind) \
            DIRECT_CASE(7, kind) \
            DIRECT_CASE(8, kind) \
            DIRECT_CASE(9, kind) \
            DIRECT_CASE(10, kind) \
            DIRECT_CASE(11, kind) \
            DIRECT_CASE(12, kind) \
        } \
    }
#define EACH_KIND(DO) \
    DO(KIND_Q8_0) \
    DO(KIND_Q4_0) \
    DO(KIND_Q4_1) DO(KIND_Q5_0) DO(KIND_Q5_1) DO(KIND_IQ4_NL) DO(KIND_Q4_K) DO(KIND_Q5_K) \
        DO(KIND_Q6_K) DO(KIND_IQ4_XS)
EACH_KIND(DIRECT)

static void add_direct(const PackedPiece *piece, int num_rows, int kind) {
#define ONE(name) \
    case name: add_direct_##name(piece, num_rows); break;
    switch (kind) { EACH_KIND(ONE) }
#undef ONE
}
