/* Attention to keys and values in bfloat16 by products of pairs: two dimensions of a key, two keys
 * of a dimension. Queries and weights are rounded to bfloat16, as with tiles; sums are float32.
 *
 * A query keeps a reference, in powers of two, to which its weights are relative. It moves only if
 * a score of a block is more than HEADROOM above it, so most blocks need no largest score.
 */
#pragma once

typedef uint16_t PairWeights[QUERIES_AT_ONCE][KEY_BLOCK];

#define EACH_SUM(q, i) EACH_QUERY(q) UNROLLED for (int i = 0; i < count; i++)

INLINE vf add_pairs(vf sum, vu a, vu b) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

INLINE vu two_halves(const uint16_t *at) { /* in every lane */
    uint32_t both;
    memcpy(&both, at, 4);
    return (vu){0} + both;
}

/* dot products of `num` queries and `count` groups of 16 keys */
INLINE void score_key_pairs(const AttentionState *at, const uint16_t *queries, int first,
                            Weights scores, int num, int count) {
    const int64_t pairs = at->dim / 2;
    const vu *keys = (const vu *)at->keys + first * pairs;
    vf sums[SUMS_AT_ONCE];
    Ahead ahead = *at->ahead;
    EACH_SUM(q, i) sums[q * count + i] = splat(0.0f);
    for (int64_t pair = 0; pair < pairs; pair++) {
        vu key[GROUP];
        if (ahead.when >> (pair & 31) & 1) prefetch_lines(&ahead, 1);
        for (int i = 0; i < count; i++) key[i] = keys[i * pairs + pair];
        EACH_QUERY(q) {
            const vu both = two_halves(queries + q * at->dim + 2 * pair);
            UNROLLED for (int i = 0; i < count; i++)
                sums[q * count + i] = add_pairs(sums[q * count + i], both, key[i]);
        }
    }
    EACH_SUM(q, i) store(scores[q] + (first + i) * LANES, sums[q * count + i]);
    at->ahead->keys = ahead.keys;
}

/* 16 scores as exponents of powers of two */
INLINE vf exponents(const AttentionState *at, const float *scores, int64_t query, int group) {
    const vf found = load(scores + group * LANES);
    if (at->cap == 0.0f && at->bias == NULL) return found * (at->scaling * LOG2_E);
    vf score = found * at->scaling;
    if (at->cap > 0.0f) score = capped(score, at->cap);
    if (at->bias != NULL)
        score += load(at->bias + at->bias_from[query] + at->block + group * LANES);
    return score * LOG2_E;
}

/* Turns the scores of one query into weights of the keys from `low` to `high`, and 0 for others;
 * returns the factor of its earlier sums. A NaN score gives a NaN weight, and so a NaN row. */
INLINE float weigh_pairs(const AttentionState *at, const float *scores, uint16_t *weights,
                         int64_t query, int low, int high) {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf found[KEY_GROUPS], largest = splat(-INFINITY), total = splat(0.0f);
    UNROLLED for (int group = 0; group < KEY_GROUPS; group++) {
        const int from = group * LANES;
        found[group] = splat(-INFINITY);
        if (from + LANES <= low || from >= high) continue;
        const vf all = exponents(at, scores, query, group);
        found[group] = from >= low && from + LANES <= high
                           ? all
                           : choose((lanes + from >= low) & (lanes + from < high), all,
                                    found[group]);
        largest = max16(found[group], largest);
    }
    const float before = at->largest[query];
    float factor = 1.0f, reference = before;
    if (_mm512_cmp_ps_mask((__m512)largest, (__m512)splat(before + HEADROOM), _CMP_GT_OQ)) {
        reference = max_of(largest);
        factor = power_of_two(splat(before - reference))[0];
        at->largest[query] = reference;
    }
    const vf base = splat(reference == -INFINITY ? 0.0f : reference);
    UNROLLED for (int group = 0; group < KEY_GROUPS; group++) {
        found[group] = power_of_two(found[group] - base);
        total += found[group];
        store_half(weights + group * LANES, found[group]);
    }
    float *totals = at->total + query * LANES;
    store(totals, fma16(load(totals), splat(factor), total));
    return factor;
}

/* `count` registers of pairs of values, 16 dimensions each */
INLINE void load_value_pairs(const AttentionState *at, vu *value, int pair, int64_t from, int count,
                             int is_own) {
    UNROLLED for (int i = 0; i < count; i += 2) {
        const int64_t dim = from + i * LANES;
        if (is_own) {
            const uint16_t *own = at->own_values;
            interleave_values(value + i, own + at->places[2 * pair] + dim,
                        own + at->places[2 * pair + 1] + dim);
        } else {
            const vu *placed = (const vu *)at->values + (pair * at->dim + dim) / LANES;
            value[i] = placed[0];
            value[i + 1] = placed[1];
        }
    }
}

/* adds the weighted values of keys from `low` to `high` to `count` parts of 16 of `num` sums; keys
 * beside them in a pair do not count, even if their values are not finite */
INLINE void add_value_pairs(const AttentionState *at, const PairWeights weights,
                            const float *factors, float *sums_at, int64_t from, int low, int high,
                            int num, int count, int is_own) {
    vf sums[SUMS_AT_ONCE];
    Ahead ahead = *at->ahead;
    EACH_SUM(q, i)
        sums[q * count + i] = load(sums_at + q * at->dim + from + i * LANES) * factors[q];
#define VALUE_STEP(pair, mask) \
    { \
        vu value[GROUP]; \
        if (ahead.when >> ((pair) & 31) & 1) prefetch_lines(&ahead, 1); \
        load_value_pairs(at, value, pair, from, count, is_own); \
        EACH_QUERY(q) { \
            const vu both = two_halves(weights[q] + 2 * (pair)); \
            UNROLLED for (int i = 0; i < count; i++) \
                sums[q * count + i] = add_pairs(sums[q * count + i], both, value[i] mask); \
        } \
    }
    int at_pair = low / 2;
    if (low % 2) {
        VALUE_STEP(at_pair, & 0xffff0000u)
        at_pair++;
    }
    for (; at_pair < high / 2; at_pair++) VALUE_STEP(at_pair, )
    if (high % 2) VALUE_STEP(at_pair, & 0xffffu)
#undef VALUE_STEP
    at->ahead->keys = ahead.keys;
    EACH_SUM(q, i) store(sums_at + q * at->dim + from + i * LANES, sums[q * count + i]);
}

/* `num` queries and one block, of which keys from `low` to `high`, exclusive, are visible */
INLINE void attend_query_pairs(const AttentionState *at, int64_t query, int low, int high, int num,
                               int is_own) {
    Weights scores __attribute__((aligned(64)));
    PairWeights weights __attribute__((aligned(64)));
    float factors[QUERIES_AT_ONCE];
    const uint16_t *queries = (const uint16_t *)at->queries + query * at->dim;
    float *sums = at->sums + query * at->dim;
    int group = low / LANES;
    const int end = (high + LANES - 1) / LANES;
    for (; group + GROUP <= end; group += GROUP)
        score_key_pairs(at, queries, group, scores, num, GROUP);
    for (; group < end; group++) score_key_pairs(at, queries, group, scores, num, 1);
    for (int q = 0; q < num; q++)
        factors[q] = low == 0 && high == KEY_BLOCK
                         ? weigh_pairs(at, scores[q], weights[q], query + q, 0, KEY_BLOCK)
                         : weigh_pairs(at, scores[q], weights[q], query + q, low, high);
    int64_t i = 0;
    for (; i + GROUP * LANES <= at->dim; i += GROUP * LANES)
        add_value_pairs(at, weights, factors, sums, i, low, high, num, GROUP, is_own);
    for (; i < at->dim; i += 2 * LANES)
        add_value_pairs(at, weights, factors, sums, i, low, high, num, 2, is_own);
}

#define PAIRS_CASE(num, is_own) \
    case num: attend_query_pairs(at, query, low, high, num, is_own); break;
#define ATTEND_PAIRS(name, is_own) \
    static __attribute__((noinline)) void name(const AttentionState *at, int64_t query, \
                                               int64_t end, int low, int high) { \
        while (query < end) { \
            const int64_t calls = blocks_of(end - query, QUERIES_AT_ONCE), \
                          num = (end - query) / calls; \
            switch (num) { \
                PAIRS_CASE(1, is_own) \
                PAIRS_CASE(2, is_own) PAIRS_CASE(3, is_own) PAIRS_CASE(4, is_own) \
                    PAIRS_CASE(5, is_own) PAIRS_CASE(6, is_own) \
            } \
            query += num; \
        } \
    }
ATTEND_PAIRS(attend_placed_pairs, 0)
ATTEND_PAIRS(attend_own_pairs, 1)
