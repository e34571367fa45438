/* Kernels of products without tiles: a few rows by a few inputs of one, two or four blocks of
 * outputs, with all sums in registers.
 */
#pragma once
#include "byte_groups.h"
#include "compact.h"
#include "finishing.h"

enum {
    STEPS = 8, /* after which a kernel decides anew in which of the next ones it prefetches */
    UNITS_IN_SUM = 8 /* sums of 8 * 64 products of 16 and 8 bits fit into 32 bits */
};

typedef union {
    part_f value[GROUP * PARTS];
    part_i bytes[2][GROUP * PARTS];
} Sums; /* of one row and a group of blocks */

typedef struct {
    const Work *work;
    const Linear *linear;
    int64_t row, from, to; /* inputs from `from` to `to` */
    const char *weight;    /* of the first block, from its first input on */
    int64_t stride;        /* from a block to the next one in bytes */
    Sums *partial_sums;           /* of the rows from `row` on */
    int first_part;               /* place of the first block in these sums */
    const char *next, *next_end;  /* lines to prefetch of the first stream; in the others as far on */
    int64_t streams, stream_stride;
    unsigned when;                /* bit s: in step s of STEPS, a line of each block is prefetched */
    /* of weights in 12 bits: */
    int64_t block;           /* the first one */
    int64_t *exceptions;     /* numbers of the next ones of each block; NULL: weights have 16 bits */
    int64_t step, next_step; /* from four lines, and from those to prefetch, to the next ones */
} Piece;

#define EACH_ROW(r) UNROLLED for (int r = 0; r < num_rows; r++)
#define PART_OF(r, i) ((r) * count * PARTS + (i))
/* Before STEPS steps, and in each of them. Prefetches that come at once are dropped while the
 * processor waits for too many lines, and its own prefetchers follow lines in the order of their
 * addresses, so lines are asked for one after the other, at equal distances. The fences, which are
 * no instructions, keep compilers from moving the prefetches of several steps together. */
#define START_PREFETCH const char *next = piece.next
#define RENEW_PREFETCH const unsigned when = next < piece.next_end ? piece.when : 0
#define PREFETCH(step) \
    atomic_signal_fence(memory_order_seq_cst); \
    if (when >> (step) & 1) { \
        for (int i = 0; i < piece.streams; i++) prefetch_once(next + i * piece.stream_stride); \
        next += 64; \
    } \
    atomic_signal_fence(memory_order_seq_cst)

INLINE void add_float32(Piece piece, int num_rows, int count) {
    const int64_t inputs = piece.linear->inputs;
    const float *input = (const float *)piece.work->inputs + piece.row * inputs;
    part_f sums[SUMS_AT_ONCE];
    EACH_ROW(r)
        EACH_PART(i) sums[PART_OF(r, i)] = piece.partial_sums[r].value[piece.first_part + i];
    START_PREFETCH;
    for (int64_t unit = piece.from; unit < piece.to; unit += STEPS) {
        RENEW_PREFETCH;
        for (int step = 0; step < STEPS; step++) {
            const int64_t k = unit + step;
            part_f w[GROUP * PARTS];
            PREFETCH(step);
            EACH_PART(i)
                w[i] = *(const part_f_loose *)(piece.weight + i / PARTS * piece.stride + k * 64 +
                                               i % PARTS * WIDTH);
            EACH_ROW(r) {
                const part_f a = splat_part(input[r * inputs + k]);
                EACH_PART(i) sums[PART_OF(r, i)] = fma_part(a, w[i], sums[PART_OF(r, i)]);
            }
        }
    }
    EACH_ROW(r)
        EACH_PART(i) piece.partial_sums[r].value[piece.first_part + i] = sums[PART_OF(r, i)];
}

INLINE uint32_t number_at(const char *from) {
    uint32_t number;
    memcpy(&number, from, 4);
    return number;
}

#if WIDE_HALVES
/* The even or the odd ones of pairs of weights. With many sums there are too few registers to keep
 * pairs, so they are loaded for each. */
INLINE void load_halves(part_f *to, const char *weight, int64_t stride, int count, int is_odd,
                        int has_many_sums) {
    if (has_many_sums) __asm__("" : "+r"(weight));
    EACH_PART(i) {
        const part_u both = *(const part_u_loose *)(weight + i / PARTS * stride + i % PARTS * WIDTH);
        to[i] = (part_f)(is_odd ? both & 0xffff0000u : both << 16);
    }
}

INLINE void add_bfloat16(Piece piece, int num_rows, int count) {
    const int64_t stride = blocks_of(piece.linear->inputs, 32) * 32;
    const float *input = wide_input(piece.work->inputs, piece.row, piece.linear->inputs);
    part_f sums[SUMS_AT_ONCE], w[GROUP * PARTS];
    EACH_ROW(r)
        EACH_PART(i) sums[PART_OF(r, i)] = piece.partial_sums[r].value[piece.first_part + i];
    START_PREFETCH;
    for (int64_t unit = piece.from / 32; unit < blocks_of(piece.to, 32); unit++) {
        RENEW_PREFETCH;
        for (int pair = 0; pair < 16; pair++) {
            PREFETCH(pair % STEPS);
            UNROLLED for (int odd = 0; odd < 2; odd++) {
                load_halves(w, piece.weight + (unit * 16 + pair) * 64, piece.stride, count, odd,
                            num_rows * count > 4);
                EACH_ROW(r) {
                    const part_f a = splat_part(input[r * stride + unit * 32 + 2 * pair + odd]);
                    EACH_PART(i) sums[PART_OF(r, i)] = fma_part(a, w[i], sums[PART_OF(r, i)]);
                }
            }
        }
    }
    EACH_ROW(r)
        EACH_PART(i) piece.partial_sums[r].value[piece.first_part + i] = sums[PART_OF(r, i)];
}
#else
INLINE void add_bfloat16(Piece piece, int num_rows, int count) {
    const int64_t units = blocks_of(piece.linear->inputs, 32);
    const char *input[MOST_ROWS];
    part_f sums[SUMS_AT_ONCE];
    EACH_ROW(r) input[r] = (const char *)piece.work->inputs + tile_at(piece.row + r, 0, units);
    EACH_ROW(r)
        EACH_PART(i) sums[PART_OF(r, i)] = piece.partial_sums[r].value[piece.first_part + i];
    START_PREFETCH;
    for (int64_t unit = piece.from / 32; unit < blocks_of(piece.to, 32); unit++) {
        RENEW_PREFETCH;
        for (int pair = 0; pair < 16; pair++) {
            part_u w[GROUP * PARTS];
            PREFETCH(pair % STEPS);
            EACH_PART(i)
                w[i] = *(const part_u_loose *)(piece.weight + i / PARTS * piece.stride +
                                               (unit * 16 + pair) * 64 + i % PARTS * WIDTH);
            EACH_ROW(r) {
                const part_u both = (part_u){0} + number_at(input[r] + unit * 1024 + pair * 4);
                EACH_PART(i)
                    sums[PART_OF(r, i)] = (part_f)_mm512_dpbf16_ps((__m512)sums[PART_OF(r, i)],
                                                                   (__m512bh)both, (__m512bh)w[i]);
            }
        }
    }
    EACH_ROW(r)
        EACH_PART(i) piece.partial_sums[r].value[piece.first_part + i] = sums[PART_OF(r, i)];
}
#endif

#if KEEPS_COMPACT
typedef uint16_t Words[32] __attribute__((aligned(64)));

/* restores the first two of four lines of a block or, if `later`, the others */
INLINE void restore_two(const char *from, int later, const uint8_t *tables, part_u *to) {
    const __m512i low = _mm512_loadu_si512(from + later * 64), all = _mm512_loadu_si512(from + 128),
                  numbers = _mm512_and_si512(later ? _mm512_srli_epi16(all, 4) : all, _mm512_set1_epi8(15)),
                  high = _mm512_shuffle_epi8(_mm512_loadu_si512(tables), numbers);
    to[0] = (part_u)_mm512_unpacklo_epi8(low, high);
    to[1] = (part_u)_mm512_unpackhi_epi8(low, high);
}

/* Replaces weights by their exceptions in two lines of `count` blocks, which begin at word `place` of the
 * blocks; returns the place of the next exception. */
static __attribute__((noinline)) int64_t replace_exceptions(const Piece *piece, int64_t place, int count,
                                                            Words (*lines)[2]) {
    int64_t next = INT64_MAX;
    for (int i = 0; i < count; i++) {
        int64_t *exception = piece->exceptions + i, at;
        for (; (at = place_of(piece->linear, piece->block + i, *exception)) < place + 64; (*exception)++)
            lines[i][(at - place) / 32][at % 32] = (uint16_t)piece->linear->blocks[*exception];
        next = min_int(next, at);
    }
    return next;
}

/* Adds the products of a pair of inputs and their weights. */
#if WIDE_HALVES
enum { PAIR_BYTES = 8 };
INLINE int64_t inputs_at(uint64_t four) { return (int64_t)four * 4 * PAIR_BYTES; }
INLINE part_f add_pair(part_f sum, const char *inputs, part_u weights) {
    float pair[2];
    memcpy(pair, inputs, sizeof pair);
    sum = fma_part(splat_part(pair[0]), (part_f)(weights << 16), sum);
    return fma_part(splat_part(pair[1]), (part_f)(weights & 0xffff0000u), sum);
}
#else
enum { PAIR_BYTES = 4 };
INLINE int64_t inputs_at(uint64_t four) { return (int64_t)(four / 4 * 1024 + four % 4 * 16); }
INLINE part_f add_pair(part_f sum, const char *inputs, part_u weights) {
    const part_u both = (part_u){0} + number_at(inputs);
    return (part_f)_mm512_dpbf16_ps((__m512)sum, (__m512bh)both, (__m512bh)weights);
}
#endif

/* the same with weights in 12 bits; two lines at a time, since more do not stay in registers */
INLINE void add_compact(Piece piece, int num_rows, int count) {
    const Linear *linear = piece.linear;
    int64_t exception = INT64_MAX; /* the place of the next one */
    const char *input[MOST_ROWS], *from = piece.weight + piece.from / 8 * piece.step, *next = piece.next;
    part_f sums[SUMS_AT_ONCE];
    EACH_ROW(r)
#if WIDE_HALVES
        input[r] = (const char *)wide_input(piece.work->inputs, piece.row + r, linear->inputs);
#else
        input[r] = (const char *)piece.work->inputs + tile_at(piece.row + r, 0, blocks_of(linear->inputs, 32));
#endif
    for (int i = 0; i < count; i++)
        exception = min_int(exception, place_of(linear, piece.block + i, piece.exceptions[i]));
    EACH_ROW(r)
        EACH_PART(i) sums[PART_OF(r, i)] = piece.partial_sums[r].value[piece.first_part + i];
    for (int64_t four = piece.from / 8; four < blocks_of(piece.to, 32) * 4; four++, from += piece.step) {
        const int64_t offset = inputs_at((uint64_t)four);
        UNROLLED for (int later = 0; later < 2; later++) {
            const int64_t place = four * 128 + later * 64;
            part_u w[GROUP][2];
            EACH_PART(i)
                restore_two(from + i * FOUR_BYTES, later, tables_of(linear, piece.block + i), w[i]);
            if (__builtin_expect(exception < place + 64, 0)) {
                Words lines[GROUP][2]; /* so that the others stay in registers */
                EACH_PART(i) memcpy(lines[i], w[i], sizeof lines[i]);
                exception = replace_exceptions(&piece, place, count, lines);
                EACH_PART(i) memcpy(w[i], lines[i], sizeof lines[i]);
            }
            UNROLLED for (int line = 0; line < 2; line++) {
                atomic_signal_fence(memory_order_seq_cst); /* keeps loads, and so sums, in their order */
                EACH_ROW(r) {
                    const char *at = input[r] + offset + (later * 2 + line) * PAIR_BYTES;
                    EACH_PART(i) sums[PART_OF(r, i)] = add_pair(sums[PART_OF(r, i)], at, w[i][line]);
                }
            }
        }
        UNROLLED for (int line = 0; line < count * FOUR_BYTES; line += 64)
            if (line < piece.next_step) prefetch_once(next + line);
        next += piece.next_step;
    }
    EACH_ROW(r)
        EACH_PART(i) piece.partial_sums[r].value[piece.first_part + i] = sums[PART_OF(r, i)];
}
#endif

INLINE part_i load_part(const char *from) { return *(const part_i_loose *)from; }

INLINE part_i broadcast_part(const char *from) { return (part_i){0} + (int32_t)number_at(from); }

#if SPLIT_BYTES || BYTE_GROUPS
/* four products of an unsigned byte and a signed one in each lane */
INLINE part_i dot_of_quads(part_i sum, part_i a, part_i b) {
#if defined(__AVX512F__)
    return (part_i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#else
    return (part_i)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
#endif
}
#endif

#if BYTE_GROUPS && defined(__AVX512F__)
enum { SUMS_OF_ROW = 2 }; /* in int8, for each part of a block */
#include "products_bytes.h"
#elif BYTE_GROUPS
enum { SUMS_OF_ROW = 1 };
#include "products_bytes_avx.h"
#elif SPLIT_BYTES
enum { SUMS_OF_ROW = 2 };

INLINE void add_int8(Piece piece, int num_rows, int count) {
    const int64_t units = blocks_of(piece.linear->inputs, 64);
    const char *input[MOST_ROWS];
    part_i high[SUMS_AT_ONCE / 2], low[SUMS_AT_ONCE / 2];
    EACH_ROW(r)
        input[r] = (const char *)piece.work->inputs + tile_at(2 * (piece.row + r), 0, units);
    EACH_ROW(r)
        EACH_PART(i) {
            high[PART_OF(r, i)] = piece.partial_sums[r].bytes[0][piece.first_part + i];
            low[PART_OF(r, i)] = piece.partial_sums[r].bytes[1][piece.first_part + i];
        }
    START_PREFETCH;
    for (int64_t unit = piece.from / 64; unit < blocks_of(piece.to, 64); unit++) {
        RENEW_PREFETCH;
        for (int quad = 0; quad < 16; quad++) {
            part_i w[GROUP * PARTS];
            PREFETCH(quad % STEPS);
            EACH_PART(i)
                w[i] = load_part(piece.weight + i * piece.stride + (unit * 16 + quad) * 64);
            EACH_ROW(r) {
                part_i a = broadcast_part(input[r] + unit * 1024 + quad * 4),
                       b = broadcast_part(input[r] + unit * 1024 + 64 + quad * 4);
                /* signed bytes become unsigned, 128 larger */
                a ^= (part_i)((part_u){0} + 0x80808080u);
                b ^= (part_i)((part_u){0} + 0x80808080u);
                EACH_PART(i) {
                    high[PART_OF(r, i)] = dot_of_quads(high[PART_OF(r, i)], a, w[i]);
                    low[PART_OF(r, i)] = dot_of_quads(low[PART_OF(r, i)], b, w[i]);
                }
            }
        }
    }
    EACH_ROW(r)
        EACH_PART(i) {
            piece.partial_sums[r].bytes[0][piece.first_part + i] = high[PART_OF(r, i)];
            piece.partial_sums[r].bytes[1][piece.first_part + i] = low[PART_OF(r, i)];
        }
}
#else
enum { SUMS_OF_ROW = 1 };

/* two products of 16 bits in each lane */
INLINE part_i dot_of_pairs(part_i sum, part_i a, part_i w) {
#if defined(__AVX512BW__)
    return sum + (part_i)_mm512_madd_epi16((__m512i)a, (__m512i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (part_i)_mm256_madd_epi16((__m256i)a, (__m256i)w);
#else
    return sum + ((a << 16) >> 16) * ((w << 16) >> 16) + (a >> 16) * (w >> 16);
#endif
}

INLINE void add_int8(Piece piece, int num_rows, int count) {
    const int64_t units = blocks_of(piece.linear->inputs, 64);
    const char *input[MOST_ROWS];
    part_i sums[SUMS_AT_ONCE] = {0};
    EACH_ROW(r)
        input[r] = (const char *)piece.work->inputs + tile_at(2 * (piece.row + r), 0, units);
    START_PREFETCH;
    for (int64_t unit = piece.from / 64; unit < blocks_of(piece.to, 64); unit++) {
        RENEW_PREFETCH;
        for (int quad = 0; quad < 16; quad++) {
            part_s w[GROUP * PARTS];
            PREFETCH(quad % STEPS);
            EACH_PART(i)
                w[i] = (part_s)load_part(piece.weight + i / PARTS * piece.stride +
                                         (unit * 16 + quad) * 64 + i % PARTS * WIDTH);
            const int64_t at = unit * 1024 + quad * 8;
            EACH_ROW(r)
                EACH_PART(i)
                    sums[PART_OF(r, i)] = dot_of_pairs(sums[PART_OF(r, i)],
                                                       broadcast_part(input[r] + at),
                                                       (part_i)((w[i] << 8) >> 8));
            EACH_ROW(r)
                EACH_PART(i)
                    sums[PART_OF(r, i)] = dot_of_pairs(sums[PART_OF(r, i)],
                                                       broadcast_part(input[r] + at + 4),
                                                       (part_i)(w[i] >> 8));
        }
    }
    EACH_ROW(r)
        EACH_PART(i)
            piece.partial_sums[r].value[piece.first_part + i] +=
                __builtin_convertvector(sums[PART_OF(r, i)], part_f);
}
#endif

/* adds the products of a few rows and `count` blocks to their sums */
SHARED void add_rows(Piece piece, int num_rows, int count);
