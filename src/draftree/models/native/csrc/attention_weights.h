/* Softmax of one tile of queries and one block of keys.
 *
 * A row keeps a reference, the exponent of a power of two near its largest score so far; its
 * weights are relative to that power. The reference moves only if a block's largest score is more
 * than HEADROOM above it, which is rare after the first blocks, so sums are rarely rescaled.
 * Weights up to 2^HEADROOM cost no accuracy, since the sum of weighted values is divided by the sum
 * of weights. Whether a reference moves depends on the row's own scores only. The three functions
 * below give the same bits.
 */
#pragma once
#include "transposing.h"
#include "vectors.h"
#include "structures.h"
#if AMX

enum { QUERIES = 16 };

typedef struct {
    uint16_t weights[QUERIES * KEY_BLOCK]; /* [query][key], or [pair of keys][query][2] */
    float factor[QUERIES];                 /* by which earlier sums are multiplied */
    float *largest, *total;                /* references, and sums of weights */
    vi low, high;                          /* keys visible to each lane; read if some are not */
    float scaling;                         /* of scores, to powers of two */
    int first, end;                        /* lanes with a query */
    int is_few;                            /* whether softmax runs for these lanes only */
} __attribute__((aligned(64))) SoftmaxState;

typedef float Scores[KEY_BLOCK][LANES];

/* Moves references for a block's largest scores. A NaN score gives a NaN weight, and so a NaN row.
 */
INLINE vf update_reference(SoftmaxState *at, vf top, int *rescales) {
    const vf before = load(at->largest), wanted = top * at->scaling;
    const vi grown = wanted > before + HEADROOM;
    const vf now = choose(grown, wanted, before);
    *rescales = any_of(grown);
    store(at->factor,
          *rescales ? choose(grown, power_of_two(before - now), splat(1.0f)) : splat(1.0f));
    store(at->largest, now);
    return choose(now == -INFINITY, splat(0.0f), -now);
}

INLINE void add_to_total(const SoftmaxState *at, vf sum) {
    store(at->total, fma16(load(at->total), load(at->factor), sum));
}

INLINE vf interleave_narrow(vf even, vf odd) { /* to bfloat16: even0 odd0 even1 odd1 ... */
    const halves both = (halves)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (vf)__builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                       7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30,
                                       15, 31);
}

INLINE void mask_scores(const SoftmaxState *at, Scores scores) {
    for (int key = 0; key < KEY_BLOCK; key++) {
        const vi number = (vi){0} + key;
        store(scores[key], choose((number >= at->low) & (number < at->high), load(scores[key]),
                                  splat(-INFINITY)));
    }
}

INLINE vf max_scores(const SoftmaxState *at, const Scores scores) {
    vf top[4];
    for (int i = 0; i < 4; i++) top[i] = splat(-INFINITY);
    for (int key = 0; key < KEY_BLOCK; key += 4)
        for (int i = 0; i < 4; i++) top[i] = max16(load(scores[key + i]), top[i]);
    return max16(max16(top[0], top[1]), max16(top[2], top[3]));
}

/* Adds sums of the weights of keys 0, 16, 32, 48, of keys 1, 17, 33, 49, and so on, in the order of
 * sum_of. */
INLINE vf sum_of_sums(vf *sums) {
    for (int key = 0; key < 8; key++) sums[key] += sums[key + 8];
    for (int key = 0; key < 4; key++) sums[key] += sums[key + 4];
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

#define FOR_16_KEYS(macro) \
    macro(0) macro(1) macro(2) macro(3) macro(4) macro(5) macro(6) macro(7) macro(8) macro(9) \
        macro(10) macro(11) macro(12) macro(13) macro(14) macro(15)
#define NO_SUM(key) vf sum##key = splat(0.0f);
#define ADD_WEIGHT(key) \
    const vf weight##key = power_of_two(fma16(load(scores[group + key]), scaling, minus_base)); \
    sum##key += weight##key;
#define SUM(key) sum##key,
#define WEIGHT(key) weight##key,
#define ADD_TWO(key, next) \
    ADD_WEIGHT(key) \
    ADD_WEIGHT(next) \
    store(pairs + key / 2 * QUERIES, interleave_narrow(weight##key, weight##next));

/* A query in each lane. Unrolled by key, so that the sums stay in registers. */
static __attribute__((noinline)) int weigh_transposed(SoftmaxState *at, Scores scores,
                                                      int is_masked) {
    int rescales;
    if (is_masked) mask_scores(at, scores);
    const vf minus_base = update_reference(at, max_scores(at, scores), &rescales),
             scaling = splat(at->scaling);
    float *pairs = (float *)at->weights;
    FOR_16_KEYS(NO_SUM)
    for (int group = 0; group < KEY_BLOCK; group += LANES, pairs += LANES / 2 * QUERIES) {
        ADD_TWO(0, 1)
        ADD_TWO(2, 3)
        ADD_TWO(4, 5) ADD_TWO(6, 7) ADD_TWO(8, 9) ADD_TWO(10, 11) ADD_TWO(12, 13) ADD_TWO(14, 15)
    }
    vf sums[] = {FOR_16_KEYS(SUM)};
    add_to_total(at, sum_of_sums(sums));
    return rescales;
}

/* A query in each lane of the scores, and a key in each lane of the weights. */
static __attribute__((noinline)) int weigh_in_rows(SoftmaxState *at, Scores scores, int is_masked) {
    int rescales;
    if (is_masked) mask_scores(at, scores);
    const vf minus_base = update_reference(at, max_scores(at, scores), &rescales),
             scaling = splat(at->scaling);
    FOR_16_KEYS(NO_SUM)
    for (int group = 0; group < KEY_BLOCK; group += LANES) {
        FOR_16_KEYS(ADD_WEIGHT)
        vf rows[] = {FOR_16_KEYS(WEIGHT)};
        transpose((part_f *)rows);
        for (int lane = 0; lane < QUERIES; lane++)
            store_half(at->weights + lane * KEY_BLOCK + group, rows[lane]);
    }
    vf sums[] = {FOR_16_KEYS(SUM)};
    add_to_total(at, sum_of_sums(sums));
    return rescales;
}

/* A key in each lane, so that lanes without a query take no time. */
static int weigh_few(SoftmaxState *at, Scores scores) {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf seen[QUERIES][KEY_GROUPS], tops = splat(-INFINITY), sums = splat(0.0f);
    int rescales;
    for (int query = at->first; query < at->end; query++) {
        float line[KEY_BLOCK] __attribute__((aligned(64)));
        vf top = splat(-INFINITY);
        for (int key = 0; key < KEY_BLOCK; key++) line[key] = scores[key][query];
        for (int group = 0; group < KEY_GROUPS; group++) {
            const vi number = lanes + group * LANES;
            seen[query][group] = choose((number >= at->low[query]) & (number < at->high[query]),
                                        load(line + group * LANES), splat(-INFINITY));
            top = max16(seen[query][group], top);
        }
        tops[query] = _mm512_reduce_max_ps((__m512)top);
    }
    const vf minus_base = update_reference(at, tops, &rescales), scaling = splat(at->scaling);
    for (int query = at->first; query < at->end; query++) {
        vf sum = splat(0.0f);
        for (int group = 0; group < KEY_GROUPS; group++) {
            const vf weight = power_of_two(
                fma16(seen[query][group], scaling, splat(minus_base[query])));
            sum += weight;
            store_half(at->weights + query * KEY_BLOCK + group * LANES, weight);
        }
        sums[query] = sum_of(sum);
    }
    add_to_total(at, sums);
    return rescales;
}
#endif
