/* Packed weights with a scale for each group of inputs.
 *
 * A block holds 16 outputs. Its inputs are divided into groups of 32, the last one filled up with
 * zeros, and 8 groups are a super-group; the last one may have fewer. A weight is scale * (code -
 * zero) + minimum, with one zero for each kind. A block is its super-groups, in the order in which
 * products read them, each of which starts at a multiple of 64 bytes:
 *   codes    [group][...], in quads of 4 inputs as in int8 blocks: [quad][16 outputs][4]
 *            4 bits: byte 64 * j + i has quad j in its low half and quad j + 4 in its high half
 *            5 bits: and 64 bytes, of which bit q has the highest bits of quad q
 *            6 bits: and 2 * 64 bytes, of which bits 2 * (q % 4) and the next of byte 64 * (q / 4)
 *            have the two highest bits of quad q
 *   scales   [group][...][16 outputs]: float16 scales and minimums, or bytes that are multiplied
 *            with those of the super-group
 *   supers   [...][16 outputs]: float16, of kinds whose scales are bytes
 *
 * The inputs of a product are rounded to 8 bits, with a scale for each row and group.
 */
#pragma once
#include "structures.h"

enum { GROUP_INPUTS = 32, GROUPS_OF_SUPER = 8, QUADS_OF_GROUP = 8, MOST_HALVES = 2 };

/* Kinds, named as in GGUF where they hold the same numbers. */
enum {
    KIND_Q8_0,
    KIND_Q4_0,
    KIND_Q4_1,
    KIND_Q5_0,
    KIND_Q5_1,
    KIND_IQ4_NL,
    KIND_Q4_K,
    KIND_Q5_K,
    KIND_Q6_K,
    KIND_IQ4_XS,
    NUM_KINDS
};

INLINE int bits_of(int kind) {
    return kind == KIND_Q8_0                         ? 8
           : kind == KIND_Q6_K                       ? 6
           : kind == KIND_Q5_0 || kind == KIND_Q5_1  ? 5
           : kind == KIND_Q5_K                       ? 5
                                                     : 4;
}
INLINE int has_table(int kind) { return kind == KIND_IQ4_NL || kind == KIND_IQ4_XS; }
INLINE int has_minimum(int kind) {
    return kind == KIND_Q4_1 || kind == KIND_Q5_1 || kind == KIND_Q4_K || kind == KIND_Q5_K;
}
INLINE int has_supers(int kind) { return kind >= KIND_Q4_K; }
INLINE int halves_of(int kind) { return kind == KIND_Q6_K ? 2 : 1; } /* scales of a group */
INLINE int zero_of(int kind) {
    if (kind == KIND_Q8_0 || has_table(kind)) return 128;
    return kind == KIND_Q6_K ? 32 : kind == KIND_Q5_0 ? 16 : kind == KIND_Q4_0 ? 8 : 0;
}
INLINE int64_t code_bytes(int kind) { return 64 * bits_of(kind); } /* of a group */
INLINE int64_t scale_bytes(int kind) {                             /* of a group */
    if (has_supers(kind)) return kind == KIND_IQ4_XS ? 16 : 32;
    return has_minimum(kind) ? 64 : 32;
}
INLINE int64_t super_bytes(int kind) { return !has_supers(kind) ? 0 : has_minimum(kind) ? 64 : 32; }
INLINE int64_t input_groups(int64_t inputs) { return blocks_of(inputs, GROUP_INPUTS); }
INLINE int64_t input_supers(int64_t inputs) { return blocks_of(input_groups(inputs), GROUPS_OF_SUPER); }
INLINE int64_t groups_of_super(int64_t inputs, int64_t super) {
    return min_int(GROUPS_OF_SUPER, input_groups(inputs) - super * GROUPS_OF_SUPER);
}
INLINE int64_t bytes_of_super(int64_t groups, int kind) {
    return blocks_of(groups * (code_bytes(kind) + scale_bytes(kind)) + super_bytes(kind), 64) * 64;
}
INLINE int64_t group_block_bytes(int64_t inputs, int kind) {
    const int64_t last = input_supers(inputs) - 1;
    return last * bytes_of_super(GROUPS_OF_SUPER, kind) +
           bytes_of_super(groups_of_super(inputs, last), kind);
}

/* A super-group of a packed block. */
typedef struct {
    const char *codes, *scales, *supers;
} SuperGroup;

INLINE SuperGroup super_group(const char *block, int64_t inputs, int kind, int64_t super) {
    const int64_t groups = groups_of_super(inputs, super);
    const char *codes = block + super * bytes_of_super(GROUPS_OF_SUPER, kind),
               *scales = codes + groups * code_bytes(kind);
    return (SuperGroup){codes, scales, scales + groups * scale_bytes(kind)};
}

/* blocks of a product: 16 * offset from its weight + kind */
INLINE int kind_of_block(const Linear *linear, int64_t block) {
    return (int)(linear->blocks[block] & 15);
}
INLINE const char *block_at(const Linear *linear, int64_t block) {
    return (const char *)linear->weight + (linear->blocks[block] >> 4);
}

/* values of the 4-bit codes of IQ4_NL and IQ4_XS, 128 larger */
#define TABLE_VALUES 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241
static const uint8_t code_table[16] __attribute__((aligned(16))) = {TABLE_VALUES};

INLINE vf load_float16(const char *at) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#elif defined(__F16C__) && defined(__AVX2__)
    InParts found;
    for (int i = 0; i < PARTS; i++)
        found.part[i] = (part_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at + i));
    return found.floats;
#else
    const vu bits = __builtin_convertvector(*(const half_loose *)at, vu);
    /* the exponents of float16 are 112 smaller */
    const vf size = (vf)((bits & 0x7fff) << 13) * splat(0x1p112f);
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

INLINE vf load_bytes(const char *at, int is_signed) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128((const __m128i *)at);
    return (vf)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(bytes)
                                            : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
    InParts found;
    for (int i = 0; i < PARTS; i++) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)(at + i * PART_LANES));
        found.part[i] = (part_f)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(bytes)
                                                             : _mm256_cvtepu8_epi32(bytes));
    }
    return found.floats;
#else
    vf found;
    for (int i = 0; i < LANES; i++)
        found[i] = is_signed ? (float)((const int8_t *)at)[i] : (float)((const uint8_t *)at)[i];
    return found;
#endif
}

/* scales of half a group, or of all of it, one for each output; `group` is of the super-group */
INLINE vf scale_of_half(SuperGroup super, int kind, int64_t group, int half) {
    const char *at = super.scales + group * scale_bytes(kind);
    if (!has_supers(kind)) return load_float16(at);
    return load_float16(super.supers) * load_bytes(at + 16 * half, !has_minimum(kind));
}

/* minimums of a group, one for each output */
INLINE vf minimum_of(SuperGroup super, int kind, int64_t group) {
    const char *at = super.scales + group * scale_bytes(kind);
    if (!has_supers(kind)) return load_float16(at + 32);
    return splat(0.0f) - load_float16(super.supers + 32) * load_bytes(at + 16, 0);
}

/* the code of one weight; input is of the group */
INLINE int code_at(const char *codes, int kind, int input, int64_t lane) {
    const int quad = input / 4;
    const int64_t byte = lane * 4 + input % 4;
    if (bits_of(kind) == 8) return ((const uint8_t *)codes)[quad * 64 + byte];
    int code = ((const uint8_t *)codes)[quad % 4 * 64 + byte] >> (quad < 4 ? 0 : 4) & 15;
    if (has_table(kind)) return code_table[code];
    if (bits_of(kind) == 5) code |= (((const uint8_t *)codes)[256 + byte] >> quad & 1) << 4;
    if (bits_of(kind) == 6)
        code |= (((const uint8_t *)codes)[256 + quad / 4 * 64 + byte] >> 2 * (quad % 4) & 3) << 4;
    return code;
}

/* writes the weights of one output */
static void unpack_groups_of(const Linear *linear, int64_t output, float *to) {
    const int kind = kind_of_block(linear, output / LANES);
    const int64_t lane = output % LANES, inputs = linear->inputs;
    for (int64_t at = 0; at < inputs; at += GROUP_INPUTS) {
        const int64_t group = at / GROUP_INPUTS % GROUPS_OF_SUPER;
        const SuperGroup super = super_group(block_at(linear, output / LANES), inputs, kind,
                                             at / GROUP_INPUTS / GROUPS_OF_SUPER);
        const vf scales[2] = {scale_of_half(super, kind, group, 0),
                              scale_of_half(super, kind, group, halves_of(kind) - 1)};
        const float minimum = has_minimum(kind) ? minimum_of(super, kind, group)[lane] : 0.0f;
        for (int i = 0; i < min_int(GROUP_INPUTS, inputs - at); i++) {
            const int code = code_at(super.codes + group * code_bytes(kind), kind, i, lane);
            to[at + i] = scales[i / 16][lane] * (float)(code - zero_of(kind)) + minimum;
        }
    }
}

/* A group of a row: 32 bytes, their scale and their sums. */
typedef struct {
    float scale, scaled_sum; /* of all 32 */
    int32_t minus_sums[3];   /* of each 16 and of all 32 */
    int8_t bytes[GROUP_INPUTS];
} RowGroup;

INLINE RowGroup *row_groups(const Work *work, int64_t row, int64_t inputs) {
    return (RowGroup *)work->inputs + row * input_groups(inputs);
}

/* writes a group of a row; NaN and infinity give a scale that is not finite */
INLINE void write_group(RowGroup *to, const vf *values) {
    const vf rounding = splat(12582912.0f); /* adding it rounds to an integer */
    const vi sizes = max_vi((vi)values[0] & 0x7fffffff, (vi)values[1] & 0x7fffffff);
    const float most = max_size(sizes);
    const vf inverse = splat(most > 1e-30f ? 127.0f / most : 0.0f);
    to->scale = most / 127.0f;
    for (int half = 0; half < 2; half++) {
        const vi whole = (vi)(values[half] * inverse + rounding) - (vi)rounding;
        const byte_row bytes = low_bytes(whole);
        memcpy(to->bytes + 16 * half, &bytes, 16);
        to->minus_sums[half] = -sum_of_ints(whole);
    }
    to->minus_sums[2] = to->minus_sums[0] + to->minus_sums[1];
    to->scaled_sum = to->scale * (float)-to->minus_sums[2];
}
