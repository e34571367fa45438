/* Attention of a row over its keys in the order of their positions, 64 at a time. */
#pragma once
#include <string.h>
#include "rows.h"

typedef struct {
    float *keys, *values; /* one block, widened: [64][head_dim] */
    float *sums;          /* [row][head of the group][head_dim] */
    float *largest, *total;
} AttentionState;

INLINE int64_t place_of_key(const Pass *pass, int64_t row, int64_t position) {
    int64_t identical = pass->identical[row];
    return position < identical ? position
                                : pass->list[pass->list_start[row] + position - identical];
}

static void widen_block(const Work *work, const Layer *layer, AttentionState *at, int64_t row,
                        int64_t kv_head, int64_t first, int64_t end) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim;
    const int64_t base = pass->slot[row] * pass->slot_step + kv_head * pass->places;
    for (int64_t position = first; position < end; position++) {
        const int64_t from = (base + place_of_key(pass, row, position)) * dim,
                      to = (position - first) * dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            store(at->keys + to + i, stored(layer->keys, from + i, decoder->kv_format));
            store(at->values + to + i, stored(layer->values, from + i, decoder->kv_format));
        }
    }
}

INLINE void add_values(float *sums, const float *values, const float *weights, int64_t dim,
                       int count, int from, int to, vf factor) {
    vf sum[4];
    for (int i = 0; i < count; i++) sum[i] = load(sums + i * LANES) * factor;
    for (int key = from; key < to; key++) {
        vf weight = splat(weights[key]);
        for (int i = 0; i < count; i++)
            sum[i] = fma16(weight, load(values + key * dim + i * LANES), sum[i]);
    }
    for (int i = 0; i < count; i++) store(sums + i * LANES, sum[i]);
}

/* one query and one block, of which keys from `low` to `high`, exclusive, are visible */
static void attend_block(const AttentionState *at, const float *query, int64_t dim, int64_t index,
                         int low, int high, float scaling) {
    float scores[KEY_BLOCK] __attribute__((aligned(64))),
        weights[KEY_BLOCK] __attribute__((aligned(64)));
    const vf nothing = splat(-INFINITY);
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf largest = nothing;
    for (int group = 0; group < KEY_BLOCK; group += LANES) {
        vf dots[LANES];
        if (group + LANES <= low || group >= high) {
            store(scores + group, nothing);
            continue;
        }
        for (int key = 0; key < LANES; key++) {
            vf dot = splat(0.0f);
            for (int64_t i = 0; i < dim; i += LANES)
                dot = fma16(load(query + i), load(at->keys + (group + key) * dim + i), dot);
            dots[key] = dot;
        }
        vf found = sums_of(dots) * scaling;
        vi seen = (lanes + group >= low) & (lanes + group < high);
        found = choose(seen, found, nothing);
        store(scores + group, found);
        largest = choose((found > largest) | (found != found), found, largest);
    }
    float before = at->largest[index], now = before;
    for (int i = 0; i < LANES; i++)
        now = largest[i] > now || largest[i] != largest[i] ? largest[i] : now;
    vf total = splat(0.0f);
    for (int group = 0; group < KEY_BLOCK; group += LANES) {
        vf weight = exp16(load(scores + group) - splat(now));
        store(weights + group, weight);
        total += weight;
    }
    vf factor = exp16(splat(before) - splat(now));
    if (before == -INFINITY) factor = splat(0.0f);
    at->largest[index] = now;
    at->total[index] = at->total[index] * factor[0] + sum_of(total);
    float *sums = at->sums + index * dim;
    int64_t i = 0;
    for (; i + 64 <= dim; i += 64)
        add_values(sums + i, at->values + i, weights, dim, 4, low, high, factor);
    for (; i < dim; i += LANES)
        add_values(sums + i, at->values + i, weights, dim, 1, low, high, factor);
}

INLINE int64_t first_visible(const Layer *layer, int64_t position) {
    return layer->window ? max_int(0, position + 1 - layer->window) : 0;
}

/* whether a block's keys are stored in the same places for all rows; `widest` is the row to which
 * most of them are visible */
INLINE int shares_block(const Pass *pass, int64_t first_row, int64_t end_row, int64_t block,
                        int64_t *widest) {
    int64_t most_seen = 0;
    int is_shared = 1;
    for (int64_t row = first_row; row < end_row; row++) {
        int64_t seen = min_int(block + KEY_BLOCK, pass->position[row] + 1);
        is_shared &= seen <= pass->identical[row];
        if (seen > most_seen) {
            most_seen = seen;
            *widest = row;
        }
    }
    return is_shared;
}

/* some rows of one slot and the query heads of one key head */
static void attend(const Work *work, const Layer *layer, float *scratch, int64_t first_row,
                   int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    const int64_t width = (decoder->heads + 2 * decoder->kv_heads) * dim,
                  queries = (end_row - first_row) * group;
    AttentionState at = {scratch, scratch + KEY_BLOCK * dim, scratch + 2 * KEY_BLOCK * dim, NULL,
                         NULL};
    at.largest = at.sums + queries * dim;
    at.total = at.largest + queries;
    memset(at.sums, 0, (size_t)(queries * dim) * sizeof(float));
    int64_t start = INT64_MAX, end = 0;
    for (int64_t row = first_row; row < end_row; row++) {
        start = min_int(start, first_visible(layer, pass->position[row]));
        end = max_int(end, pass->position[row] + 1);
    }
    for (int64_t i = 0; i < queries; i++) {
        at.largest[i] = -INFINITY;
        at.total[i] = 0.0f;
    }
    for (int64_t block = start / KEY_BLOCK * KEY_BLOCK; block < end; block += KEY_BLOCK) {
        int64_t widest = first_row;
        const int is_shared = shares_block(pass, first_row, end_row, block, &widest);
        if (is_shared)
            widen_block(work, layer, &at, widest, kv_head, block,
                        min_int(block + KEY_BLOCK, pass->position[widest] + 1));
        for (int64_t row = first_row; row < end_row; row++) {
            const int64_t position = pass->position[row],
                          high = min_int(block + KEY_BLOCK, position + 1);
            const int64_t low = max_int(block, first_visible(layer, position));
            if (low >= high) continue;
            if (!is_shared) widen_block(work, layer, &at, row, kv_head, block, high);
            for (int64_t head = 0; head < group; head++) {
                const float *query = work->wide + row * width + (kv_head * group + head) * dim;
                attend_block(&at, query, dim, (row - first_row) * group + head, (int)(low - block),
                             (int)(high - block), layer->scaling);
            }
        }
    }
    for (int64_t row = first_row; row < end_row; row++)
        for (int64_t head = 0; head < group; head++) {
            int64_t index = (row - first_row) * group + head;
            float *to = work->mixed + (row * decoder->all_heads + decoder->first_head +
                                       kv_head * group + head) *
                                          dim;
            for (int64_t i = 0; i < dim; i += LANES)
                store(to + i, load(at.sums + index * dim + i) / at.total[index]);
        }
}
