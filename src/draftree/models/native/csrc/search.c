/* The largest entries of rows of logits, with the noise of a request added or without.
 *
 * The noise is the hash of core/noise.py. Its logarithms differ from torch's by less than 1e-4, so
 * a caller that needs the exact largest entry searches for a few and decides between entries that
 * are as close as that.
 */
#include <stdlib.h>
#include <string.h>
#include "shared.h"
#include "vectors.h"

enum { GROUP = 64 };
#define LARGEST_NOISE 22.3f

void draftree_in_parallel(void (*task)(void *, int), void *argument, int threads);

/* 1 minus the uniform variable of a token's noise, as an integer: the smaller, the larger the
 * noise */
INLINE vi hash16(vu token, uint32_t first, uint32_t odd) {
    vu x = token * 0x9E3779B9u;
    x = (x ^ (x >> 15)) * 0x7FEB352Du + first;
    x = (x ^ (x >> 16)) * odd;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return (vi)(x >> 1);
}

INLINE vf uniform16(vi hash) {
    return __builtin_convertvector(0x80000000u - (vu)hash, vf) * 4.656612873e-10f -
           2.328306437e-10f;
}

INLINE vf noise16(vi hash) {
    vf uniform = uniform16(hash);
    vf rest = __builtin_convertvector(hash, vf) * 4.656612873e-10f + 2.328306437e-10f;
    rest = max16(splat(5.960464478e-8f), rest);
    vf series = uniform *
                fma16(uniform,
                      fma16(uniform, fma16(uniform, splat(0.25f), splat(0.33333333f)), splat(0.5f)),
                      splat(1.0f));
    return -log16(choose(above(splat(0.015625f), uniform), series, -log16(rest)));
}

typedef struct {
    float values[MAX_COUNT];
    int64_t count, held;
} TopValues; /* in descending order */

INLINE void insert_value(TopValues *best, float value) {
    if (best->held == best->count && !(value > best->values[best->held - 1])) return;
    int64_t at = best->held < best->count ? best->held++ : best->held - 1;
    for (; at > 0 && value > best->values[at - 1]; at--) best->values[at] = best->values[at - 1];
    best->values[at] = value;
}

INLINE void insert_entry(int64_t *tokens, float *scores, int64_t count, int64_t *held,
                         int64_t token, float score) {
    if (*held == count && !(score > scores[count - 1])) return;
    int64_t at = *held < count ? (*held)++ : count - 1;
    for (; at > 0 && score > scores[at - 1]; at--) {
        tokens[at] = tokens[at - 1];
        scores[at] = scores[at - 1];
    }
    tokens[at] = token;
    scores[at] = score;
}

/* scores of one group and their largest; 1 if one of them is NaN */
INLINE int score_group(const Search *search, int64_t row, int64_t first, float bound, float *scores,
                       float *largest) {
    const float *logits = search->logits + row * search->stride + first;
    float ragged[GROUP] __attribute__((aligned(64)));
    if (first + GROUP > search->vocab) {
        for (int i = 0; i < GROUP; i++)
            ragged[i] = first + i < search->vocab ? logits[i] : -INFINITY;
        logits = ragged;
    }
    vf x[GROUP / LANES], top = splat(-INFINITY);
    vi unordered = {0};
    for (int i = 0; i < GROUP / LANES; i++) {
        x[i] = load(logits + i * LANES);
        top = max16(x[i], top);
        unordered |= is_nan(x[i]);
    }
    if (any_of(unordered)) return 1;
    const float temperature = search->temperatures[row];
    if (temperature == 0.0f) {
        if (search->totals != NULL)
            for (int i = 0; i < GROUP / LANES; i++) store(scores + i * LANES, x[i]);
        *largest = max_of(top);
        return 0;
    }
    if (temperature != 1.0f) {
        for (int i = 0; i < GROUP / LANES; i++) x[i] = x[i] / temperature;
        top = top / temperature;
    }
    *largest = max_of(top);
    /* every score is needed for a sum, or while there is no bound */
    const int needs_all = search->totals != NULL || bound == -INFINITY;
    const int may_win = *largest + LARGEST_NOISE >= bound;
    *largest = -INFINITY;
    if (!needs_all && !may_win) return 0;
    const uint32_t *key = search->keys + 2 * row;
    const vu column = (vu){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (uint32_t)first;
    vi hash[GROUP / LANES], winning = {0};
    for (int i = 0; i < GROUP / LANES; i++) {
        vu token = column + (uint32_t)(i * LANES);
        if (search->ids != NULL) token = *(const vu_loose *)(search->ids + first + i * LANES);
        hash[i] = hash16(token, key[0], key[1]);
        /* noise is below -log(uniform), so a score above the bound has a uniform below this */
        winning |= above(exp16(x[i] - splat(bound)) * 1.0001f, uniform16(hash[i]));
    }
    if (!needs_all && !any_of(winning)) return 0;
    top = splat(-INFINITY);
    for (int i = 0; i < GROUP / LANES; i++) {
        vf score = x[i] + noise16(hash[i]);
        top = max16(score, top);
        store(scores + i * LANES, score);
    }
    *largest = max_of(top);
    return 0;
}

static float log_sum_exp(const float *scores, int64_t size, float largest) {
    if (largest == -INFINITY) return -INFINITY;
    vf total = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) total += exp16(load(scores + i) - splat(largest));
    return largest + logf(sum_of(total));
}

static void search_row(const Search *search, int64_t row, float *scores, float *largest) {
    const int64_t groups = (search->vocab + GROUP - 1) / GROUP, count = search->count;
    int64_t *tokens = search->tokens + row * count, held = 0;
    float *found = search->scores + row * count;
    TopValues best = {.count = count};
    float bound = -INFINITY;
    for (int64_t group = 0; group < groups; group++) {
        if (score_group(search, row, group * GROUP, bound, scores + group * GROUP,
                        largest + group)) {
            const float *logits = search->logits + row * search->stride;
            for (int64_t i = 0; i < count; i++) {
                tokens[i] = 0;
                found[i] = -INFINITY;
            }
            tokens[0] = group * GROUP;
            while (logits[tokens[0]] == logits[tokens[0]]) tokens[0]++;
            found[0] = NAN;
            if (search->totals != NULL) search->totals[row] = NAN;
            return;
        }
        insert_value(&best, largest[group]);
        if (best.held == count) bound = best.values[count - 1];
    }
    const float *values = search->temperatures[row] == 0.0f ? search->logits + row * search->stride
                                                            : scores;
    for (int64_t group = 0; group < groups; group++) {
        if (largest[group] < bound) continue;
        const int64_t end = group * GROUP + GROUP < search->vocab ? group * GROUP + GROUP
                                                                  : search->vocab;
        for (int64_t i = group * GROUP; i < end; i++)
            if (values[i] >= bound) insert_entry(tokens, found, count, &held, i, values[i]);
    }
    if (search->totals != NULL) search->totals[row] = log_sum_exp(scores, groups * GROUP, found[0]);
}

/* memory of each thread: to allocate it for every search would cost more than the search */
static __thread struct {
    float *memory;
    int64_t size;
} kept;

static void search_rows(void *argument, int thread) {
    (void)thread;
    Search *search = argument;
    const int64_t groups = (search->vocab + GROUP - 1) / GROUP;
    if (kept.size < groups) {
        free(kept.memory);
        kept.size = groups;
        if (posix_memalign((void **)&kept.memory, 64,
                           (size_t)(groups * (GROUP + 1)) * sizeof(float))) {
            kept.memory = NULL;
            kept.size = 0;
            atomic_store(&search->failed, 1);
            return;
        }
    }
    for (int64_t row; (row = atomic_fetch_add(&search->next, 1)) < search->rows;)
        search_row(search, row, kept.memory, kept.memory + groups * GROUP);
}

/* 0: done; 1: no memory */
int draftree_search(Search *search, int64_t threads) {
    atomic_store(&search->next, 0);
    atomic_store(&search->failed, 0);
    if (search->rows < threads) threads = search->rows;
    draftree_in_parallel(search_rows, search, (int)threads);
    return atomic_load(&search->failed);
}
