/* Attention of a row over its keys in the order of their positions, 64 at a time.
 *
 * Keys of a block are transposed and widened once for all rows, with a key in each lane, and
 * several queries are multiplied by them at once. A score adds the dimensions in their order, and a
 * sum of values the keys in theirs, whatever the number of queries.
 */
#include <string.h>
#include "attention.h"
#include "attention_keys.h"

typedef float Weights[QUERIES_AT_ONCE][KEY_BLOCK]; /* scores, and then weights */

#define EACH_QUERY(q) UNROLLED for (int q = 0; q < num; q++)
#define QUERY_PART(q, i) ((q) * count * PARTS + (i))

/* dot products of `num` queries and `count` groups of 16 keys */
INLINE void score_keys(const AttentionState *at, const float *queries, int first, Weights scores,
                       int num, int count) {
    const int64_t dim = at->dim;
    const float *keys = at->keys + first * LANES * dim;
    part_f sums[SUMS_AT_ONCE];
    EACH_QUERY(q)
        EACH_PART(i) sums[QUERY_PART(q, i)] = (part_f){0};
    for (int64_t k = 0; k < dim; k++) {
        part_f key[KEYS_AT_ONCE * PARTS];
        EACH_PART(i)
            key[i] = *(const part_f *)(keys + (i / PARTS * dim + k) * LANES +
                                       i % PARTS * PART_LANES);
        EACH_QUERY(q) {
            const part_f number = splat_part(queries[q * dim + k]);
            EACH_PART(i)
                sums[QUERY_PART(q, i)] = fma_part(number, key[i], sums[QUERY_PART(q, i)]);
        }
    }
    EACH_QUERY(q)
        EACH_PART(i)
            *(part_f *)(scores[q] + first * LANES + i * PART_LANES) = sums[QUERY_PART(q, i)];
}

/* Values are widened into a block if several kernel calls read them, and otherwise read from the
 * memory of the layer. */
enum { WIDENED, OWN_FLOAT32, OWN_BFLOAT16, OWN_INT8 };

INLINE part_f value_part(const AttentionState *at, int key, int64_t from, int source) {
    if (source == WIDENED) return *(const part_f *)(at->values + key * at->dim + from);
    if (source == OWN_INT8)
        return codes_part((const int8_t *)at->own_values + at->places[key], from, at->dim);
    const int64_t place = at->places[key] + from;
    if (source == OWN_FLOAT32) return *(const part_f_loose *)((const float *)at->own_values + place);
    return widen_part((const uint16_t *)at->own_values + place);
}

/* adds the weighted values of keys from `low` to `high` to `count` parts of 16 of `num` sums;
 * `source` is where the values are */
INLINE void add_values(const AttentionState *at, const Weights weights, const float *factors,
                       float *sums_at, int64_t from, int low, int high, int num, int count,
                       int source) {
    const int64_t dim = at->dim;
    part_f sums[SUMS_AT_ONCE];
    EACH_QUERY(q)
        EACH_PART(i)
            sums[QUERY_PART(q, i)] = *(part_f *)(sums_at + q * dim + from + i * PART_LANES) *
                                     factors[q];
    for (int key = low; key < high; key++) {
        part_f value[KEYS_AT_ONCE * PARTS];
        EACH_PART(i) value[i] = value_part(at, key, from + i * PART_LANES, source);
        EACH_QUERY(q) {
            const part_f weight = splat_part(weights[q][key]);
            EACH_PART(i)
                sums[QUERY_PART(q, i)] = fma_part(weight, value[i], sums[QUERY_PART(q, i)]);
        }
    }
    EACH_QUERY(q)
        EACH_PART(i)
            *(part_f *)(sums_at + q * dim + from + i * PART_LANES) = sums[QUERY_PART(q, i)];
}

/* Turns the scores of one query into weights of keys from `low` to `high`; returns the factor of
 * its earlier sums. A NaN score gives a NaN weight, and so a NaN row. */
INLINE float weigh_query(const AttentionState *at, float *scores, int64_t query, int low,
                         int high) {
    const vf nothing = splat(-INFINITY);
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int first = low / LANES * LANES;
    vf largest = nothing, total = splat(0.0f);
    for (int group = first; group < high; group += LANES) {
        vf found = load(scores + group) * at->scaling;
        if (at->cap > 0.0f) found = capped(found, at->cap);
        if (at->bias != NULL) found += load(at->bias + at->bias_from[query] + at->block + group);
        if (group < low || group + LANES > high)
            found = choose((lanes + group >= low) & (lanes + group < high), found, nothing);
        store(scores + group, found);
        largest = max16(found, largest);
    }
    const float before = at->largest[query], top = max_of(largest);
    const float now = top > before ? top : before;
    for (int group = first; group < high; group += LANES) {
        const vf weight = exp_of_negative(load(scores + group) - splat(now));
        store(scores + group, weight);
        total += weight;
    }
    float factor = 1.0f;
    if (now != before) {
        factor = before == -INFINITY ? 0.0f : exp_of_negative(splat(before) - splat(now))[0];
        at->largest[query] = now;
    }
    at->total[query] = at->total[query] * factor + sum_of(total);
    return factor;
}

/* `num` queries and one block, of which keys from `low` to `high`, exclusive, are visible */
INLINE void attend_queries(const AttentionState *at, int64_t query, int low, int high, int num,
                           int source) {
    Weights weights __attribute__((aligned(64)));
    float factors[QUERIES_AT_ONCE];
    const float *queries = at->queries + query * at->dim;
    float *sums = at->sums + query * at->dim;
    int group = low / LANES;
    const int end = (high + LANES - 1) / LANES;
    for (; group + KEYS_AT_ONCE <= end; group += KEYS_AT_ONCE)
        score_keys(at, queries, group, weights, num, KEYS_AT_ONCE);
    for (; group < end; group++) score_keys(at, queries, group, weights, num, 1);
    for (int q = 0; q < num; q++) factors[q] = weigh_query(at, weights[q], query + q, low, high);
    int64_t i = 0;
    for (; i + KEYS_AT_ONCE * LANES <= at->dim; i += KEYS_AT_ONCE * LANES)
        add_values(at, weights, factors, sums, i, low, high, num, KEYS_AT_ONCE, source);
    for (; i < at->dim; i += LANES)
        add_values(at, weights, factors, sums, i, low, high, num, 1, source);
}

#define QUERIES_CASE(num, source) \
    case num: \
        if (num <= QUERIES_AT_ONCE) attend_queries(at, query, low, high, num, source); \
        break;
#define ATTEND_BLOCK(name, source) \
    static __attribute__((noinline)) void name(const AttentionState *at, int64_t query, \
                                               int64_t end, int low, int high) { \
        for (; query < end; query += QUERIES_AT_ONCE) { \
            switch (min_int(end - query, QUERIES_AT_ONCE)) { \
                QUERIES_CASE(1, source) \
                QUERIES_CASE(2, source) QUERIES_CASE(3, source) QUERIES_CASE(4, source) \
                    QUERIES_CASE(5, source) QUERIES_CASE(6, source) \
            } \
        } \
    }
ATTEND_BLOCK(attend_widened, WIDENED)
ATTEND_BLOCK(attend_float32, OWN_FLOAT32)
ATTEND_BLOCK(attend_bfloat16, OWN_BFLOAT16)
ATTEND_BLOCK(attend_int8, OWN_INT8)

#if HALF_PAIRS
#include "attention_pairs.h"
#endif

static void attend_block(const Work *work, const AttentionState *at, int64_t query, int64_t end,
                         int low, int high) {
#if HALF_PAIRS
    if (at->in_pairs) {
        if (at->own_values == NULL) attend_placed_pairs(at, query, end, low, high);
        else attend_own_pairs(at, query, end, low, high);
        return;
    }
#endif
    if (at->own_values == NULL) attend_widened(at, query, end, low, high);
    else if (work->decoder->cache_format == INT8) attend_int8(at, query, end, low, high);
    else if (work->decoder->cache_format == FLOAT32) attend_float32(at, query, end, low, high);
    else attend_bfloat16(at, query, end, low, high);
}

/* The first position of a block from which rows find their keys in places of their own; the end of
 * the block if there is none. `widest` is the row to which most keys are visible. */
INLINE int64_t end_of_shared(const Pass *pass, const Layer *layer, int64_t first_row,
                             int64_t end_row, int64_t block, int64_t *widest) {
    int64_t shared = block + KEY_BLOCK;
    *widest = first_row;
    for (int64_t row = first_row; row < end_row; row++) {
        const int64_t end = end_of_visible(pass, layer, row),
                      seen = min_int(block + KEY_BLOCK, end);
        if (pass->identical[row] < seen) shared = min_int(shared, pass->identical[row]);
        if (end > end_of_visible(pass, layer, *widest)) *widest = row;
    }
    return max_int(block, shared);
}

/* one block of keys, some rows of one slot, and the query heads of one key head */
static void attend_rows(const Work *work, const Layer *layer, const AttentionState *at,
                        int64_t first_row, int64_t end_row, int64_t kv_head, int64_t block) {
    const Pass *pass = work->pass;
    const int64_t group = work->decoder->heads / work->decoder->kv_heads;
    int64_t widest, run = -1; /* first of the rows before this one that see the whole block */
    const int64_t shared = end_of_shared(pass, layer, first_row, end_row, block, &widest),
                  seen = end_of_visible(pass, layer, widest);
    const int64_t own = block + (shared - block) / LANES * LANES; /* widened for every row */
    const int64_t last = min_int(block + KEY_BLOCK, seen);
    const int is_shared = shared == block + KEY_BLOCK;
    prefetch_next(work, layer, at, first_row, end_row, kv_head, block, seen);
    widen_keys(work, layer, at, widest, kv_head, block, block,
               is_shared ? last : min_int(own, last));
    for (int64_t row = first_row; row <= end_row; row++) {
        int64_t low = block, high = 0; /* after the last row */
        if (row < end_row) {
            low = max_int(block, first_visible(pass, layer, row));
            high = min_int(block + KEY_BLOCK, end_of_visible(pass, layer, row));
        }
        const int is_whole = is_shared && low == block && high == block + KEY_BLOCK;
        if (is_whole) {
            if (run < 0) run = row;
            continue;
        }
        if (run >= 0)
            attend_block(work, at, (run - first_row) * group, (row - first_row) * group, 0,
                         KEY_BLOCK);
        run = -1;
        if (low >= high) continue;
        if (!is_shared) widen_keys(work, layer, at, row, kv_head, block, own, high);
        attend_block(work, at, (row - first_row) * group, (row - first_row + 1) * group,
                     (int)(low - block), (int)(high - block));
    }
    prefetch_rest(at->ahead);
}

/* places the state of `queries` queries in the memory of a thread */
static AttentionState start_attention(float *scratch, int64_t dim, int64_t queries, float scaling) {
    AttentionState at = {.keys = scratch, .values = scratch + KEY_BLOCK * dim,
                         .queries = scratch + 2 * KEY_BLOCK * dim, .dim = dim,
                         .scaling = scaling};
    at.sums = at.queries + queries * dim;
    at.total = at.sums + queries * dim;
    at.bias_from = (int64_t *)(at.total + queries * LANES);
    at.largest = (float *)(at.bias_from + queries);
    memset(at.sums, 0, (size_t)(queries * (dim + LANES)) * sizeof(float)); /* and totals */
    for (int64_t i = 0; i < queries; i++) at.largest[i] = -INFINITY;
    return at;
}

static void store_mixed(const Work *work, const AttentionState *at, int64_t first_row,
                        int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const int64_t dim = at->dim, group = decoder->heads / decoder->kv_heads;
    for (int64_t row = first_row; row < end_row; row++)
        for (int64_t head = 0; head < group; head++) {
            int64_t index = (row - first_row) * group + head;
            float *to = work->mixed + (row * decoder->all_heads + decoder->first_head +
                                       kv_head * group + head) *
                                          decoder->value_dim;
            const float total = at->in_pairs ? sum_of(load(at->total + index * LANES))
                                             : at->total[index];
            for (int64_t i = 0; i < decoder->value_dim; i += LANES)
                store(to + i, load(at->sums + index * dim + i) / total);
        }
}

INLINE void place_queries(const AttentionState *at, int64_t first, const float *from,
                          int64_t count) {
    for (int64_t i = 0; i < count; i += LANES)
        if (at->in_pairs) store_half((uint16_t *)at->queries + first + i, load(from + i));
        else store(at->queries + first + i, load(from + i));
}

#include "attention_tiles.h"

int64_t attention_floats(int64_t dim, int64_t queries) {
    const int64_t size = (2 * KEY_BLOCK * dim + queries * (2 * dim + 3 + LANES) + 127) / 16 * 16;
#if AMX
    const int64_t bytes = (int64_t)tiles_bytes(dim, blocks_of(queries, QUERIES));
    return max_int(size, (bytes + 127) / 64 * 16);
#else
    return size;
#endif
}

void attend(const Work *work, const Layer *layer, float *scratch, int64_t first_row,
                   int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
#if AMX
    if (decoder->cache_format == BFLOAT16 && layer->score_cap == 0.0f && layer->sinks == NULL &&
        layer->score_bias == NULL) {
        attend_by_tiles(work, layer, scratch, first_row, end_row, kv_head);
        return;
    }
#endif
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    const int64_t queries = (end_row - first_row) * group, of_row = group * dim;
    AttentionState at = start_attention(scratch, dim, queries, layer->scaling);
    int64_t places[KEY_BLOCK];
    Ahead ahead = {0};
    at.ahead = &ahead;
    at.in_pairs = HALF_PAIRS && decoder->cache_format == BFLOAT16 && dim % (2 * LANES) == 0;
    if (queries <= QUERIES_AT_ONCE * (at.in_pairs ? 2 : 1)) {
        at.places = places;
        at.own_values = layer->values;
    }
    at.cap = layer->score_cap;
    at.bias = layer->score_bias;
    int64_t start = INT64_MAX, end = 0;
    for (int64_t row = first_row; row < end_row; row++) {
        start = min_int(start, first_visible(pass, layer, row));
        end = max_int(end, end_of_visible(pass, layer, row));
        place_queries(&at, (row - first_row) * of_row,
                      inputs_of_row(work, layer, row) + kv_head * of_row, of_row);
    }
    for (int64_t i = 0; i < queries; i++) {
        const int64_t head = kv_head * group + i % group;
        if (layer->sinks != NULL) { /* a key of weight 1 at first, without a value */
            at.largest[i] = layer->sinks[head] * (at.in_pairs ? LOG2_E : 1.0f);
            at.total[i * (at.in_pairs ? LANES : 1)] = 1.0f;
        }
        at.bias_from[i] = head * (pass->bias_length + KEY_BLOCK) + pass->bias_length - 1 -
                          pass->position[first_row + i / group];
    }
    at.start = start / KEY_BLOCK * KEY_BLOCK;
    for (int64_t block = at.start; block < end; block += KEY_BLOCK) {
        at.block = block;
        attend_rows(work, layer, &at, first_row, end_row, kv_head, block);
    }
    store_mixed(work, &at, first_row, end_row, kv_head);
}

/* Attention to sources, whose keys and values were computed once, for all rows.
 *
 * A source is stored as [layer][keys, values][kv head]: its keys as [16 keys][head_dim][16], filled
 * up to a multiple of 16 keys, so that they need no transposition, and its values as
 * [key][head_dim], filled up likewise; both in the format of other keys and values.
 */

/* widens or finds the first `count` numbers at an address */
INLINE float *numbers_at(const char *from, float *room, int64_t count, int64_t format) {
    if (format == FLOAT32) return (float *)from;
    for (int64_t i = 0; i < count; i += LANES)
        store(room + i, load_half((const uint16_t *)from + i));
    return room;
}

void attend_source(const Work *work, int64_t index, float *scratch, int64_t first_row,
                          int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads,
                  of_row = group * dim, width = decoder->heads * dim,
                  queries = (end_row - first_row) * group, format = decoder->kv_format;
    const int64_t *source = pass->sources + 2 * pass->source[first_row];
    const int64_t length = source[1], of_head = blocks_of(length, LANES) * LANES * dim,
                  bytes = format == FLOAT32 ? 4 : 2;
    const char *keys = (const char *)source[0] +
                       (2 * index * decoder->kv_heads + kv_head) * of_head * bytes,
               *values = keys + decoder->kv_heads * of_head * bytes;
    AttentionState at = start_attention(scratch, dim, queries,
                                        decoder->layers[index].source_scaling);
    float *key_room = at.keys, *value_room = at.values;
    for (int64_t row = first_row; row < end_row; row++) {
        const float *from = work->wide + row * width + kv_head * of_row;
        memcpy(at.queries + (row - first_row) * of_row, from, (size_t)of_row * sizeof(float));
        if (pass->source_queries != NULL && index == decoder->num_layers - 1)
            memcpy(pass->source_queries + row * width + kv_head * of_row, from,
                   (size_t)of_row * sizeof(float));
    }
    for (int64_t block = 0; block < length; block += KEY_BLOCK) {
        const int64_t high = min_int(KEY_BLOCK, length - block),
                      count = blocks_of(high, LANES) * LANES * dim;
        at.keys = numbers_at(keys + block * dim * bytes, key_room, count, format);
        at.values = numbers_at(values + block * dim * bytes, value_room, count, format);
        attend_widened(&at, 0, queries, 0, (int)high);
    }
    store_mixed(work, &at, first_row, end_row, kv_head);
}
