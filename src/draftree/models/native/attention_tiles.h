/* Attention by tiles: up to 16 queries of one key head at once, one in each lane. */
#pragma once
#include "attention.h"
#if AMX

enum { QUERIES = 16 };

typedef struct {
    uint16_t *keys;    /* one block: [64][inner], the size of a head rounded up to 32 */
    uint16_t *values;  /* [32 pairs][head_dim][2] */
    uint16_t *queries; /* of each tile: [inner / 32][16 pairs][16 queries][2] */
    float *sums;       /* of each tile: [16 queries][head_dim] */
    float *largest, *total; /* of each tile: [16 queries] */
    int64_t inner, rows_of_tile, num_tiles;
} Tiles;

INLINE size_t tiles_bytes(int64_t dim, int64_t num_tiles) {
    const int64_t inner = blocks_of(dim, 32) * 32;
    return (size_t)(KEY_BLOCK * inner * 2 + KEY_BLOCK * dim * 2 + num_tiles * (inner * QUERIES * 2 + QUERIES * dim * 4 + 2 * QUERIES * 4));
}

static Tiles place_tiles(char *memory, int64_t dim, int64_t group, int64_t rows) {
    Tiles at = {.inner = blocks_of(dim, 32) * 32, .rows_of_tile = QUERIES / group};
    at.num_tiles = blocks_of(rows, at.rows_of_tile);
    at.sums = (float *)memory;
    at.largest = at.sums + at.num_tiles * QUERIES * dim;
    at.total = at.largest + at.num_tiles * QUERIES;
    at.queries = (uint16_t *)(at.total + at.num_tiles * QUERIES);
    at.keys = at.queries + at.num_tiles * at.inner * QUERIES;
    at.values = at.keys + KEY_BLOCK * at.inner;
    return at;
}

static void put_queries(const Work *work, Tiles *at, int64_t first_row, int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    const int64_t width = (decoder->heads + 2 * decoder->kv_heads) * dim;
    memset(at->queries, 0, (size_t)(at->num_tiles * at->inner * QUERIES) * 2);
    for (int64_t row = first_row; row < end_row; row++)
        for (int64_t head = 0; head < group; head++) {
            const int64_t index = row - first_row, lane = index % at->rows_of_tile * group + head;
            const float *query = work->wide + row * width + (kv_head * group + head) * dim;
            uint16_t *to = at->queries + index / at->rows_of_tile * at->inner * QUERIES;
            for (int64_t i = 0; i < dim; i += LANES) {
                uint32_t pairs[8];
                half_row bits = narrow(load(query + i));
                memcpy(pairs, &bits, 32);
                for (int pair = 0; pair < 8; pair++) memcpy(to + ((i / 2 + pair) * QUERIES + lane) * 2, pairs + pair, 4);
            }
        }
    for (int64_t i = 0; i < at->num_tiles * QUERIES; i++) {
        at->largest[i] = -INFINITY;
        at->total[i] = 0.0f;
    }
    memset(at->sums, 0, (size_t)(at->num_tiles * QUERIES * dim) * 4);
}

INLINE vf interleaved(half_row a, half_row b) { /* a0 b0 a1 b1 ... */
    return (vf)(__builtin_convertvector(a, vu) | (__builtin_convertvector(b, vu) << 16));
}

static void read_tiles(const Work *work, const Layer *layer, Tiles *at, int64_t row, int64_t kv_head, int64_t first, int64_t end) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, base = pass->slot[row] * pass->slot_step + kv_head * pass->places;
    const uint16_t *keys = layer->keys, *values = layer->values;
    const half_row nothing = {0};
    for (int64_t key = 0; key < KEY_BLOCK; key += 2) {
        const uint16_t *from[2] = {NULL, NULL};
        for (int i = 0; i < 2; i++) {
            uint16_t *to = at->keys + (key + i) * at->inner;
            if (first + key + i >= end) {
                memset(to, 0, (size_t)at->inner * 2);
                continue;
            }
            const int64_t place = (base + place_of(pass, row, first + key + i)) * dim;
            from[i] = values + place;
            for (int64_t d = 0; d < dim; d += LANES) *(half_loose *)(to + d) = *(const half_loose *)(keys + place + d);
            if (dim % 32) *(half_loose *)(to + dim) = nothing;
        }
        for (int64_t d = 0; d < dim; d += LANES) {
            half_row even = nothing, odd = nothing;
            if (from[0] != NULL) even = *(const half_loose *)(from[0] + d);
            if (from[1] != NULL) odd = *(const half_loose *)(from[1] + d);
            store((float *)(at->values + key * dim + d * 2), interleaved(even, odd));
        }
    }
}

/* rows to columns */
INLINE void transpose(vf *x) {
#define TURN(step, ...) \
    for (int i = 0; i < 16; i++) \
        if (!(i & step)) { \
            vf a = x[i], b = x[i + step]; \
            x[i] = __builtin_shufflevector(a, b, __VA_ARGS__); \
            x[i + step] = TURNED_##step; \
        }
#define TURNED_8 __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define TURNED_4 __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define TURNED_2 __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define TURNED_1 __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
    TURN(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
    TURN(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
    TURN(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
    TURN(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#undef TURN
}

/* softmax of one tile and block: weights, and by what sums so far shrink; lanes `first` to `end` see keys from low to high */
typedef struct {
    float scores[KEY_BLOCK][LANES];
    uint16_t weights[QUERIES][KEY_BLOCK];
    float factor[QUERIES];
    float *largest, *total;
    vi low, high;
    float scaling;
    int first, end;
} __attribute__((aligned(64))) Weighing;

INLINE vf seen_scores(const Weighing *at, vf scores, vi number, vi low, vi high) {
    return choose((number >= low) & (number < high), scores * at->scaling, splat(-INFINITY));
}

INLINE vf largest_of(vf one, vf other) { return choose((one > other) | (one != one), one, other); } /* NaN is largest */

static void weigh_all(Weighing *at) { /* a query in each lane */
    vf sums[LANES], now = load(at->largest);
    const vf before = now;
    for (int key = 0; key < KEY_BLOCK; key++) {
        const vf score = seen_scores(at, load(at->scores[key]), (vi){0} + key, at->low, at->high);
        store(at->scores[key], score);
        now = largest_of(score, now);
    }
    const vf base = choose(now == -INFINITY, splat(0.0f), now), factor = exp16(before - base);
    for (int key = 0; key < LANES; key++) sums[key] = splat(0.0f);
    for (int group = 0; group < KEY_BLOCK; group += LANES) {
        vf rows[LANES];
        for (int key = 0; key < LANES; key++) {
            rows[key] = exp16(load(at->scores[group + key]) - base);
            sums[key] += rows[key];
        }
        transpose(rows);
        for (int lane = 0; lane < QUERIES; lane++) store_half(at->weights[lane] + group, rows[lane]);
    }
    for (int key = 0; key < 8; key++) sums[key] += sums[key + 8]; /* in the order of sum_of */
    for (int key = 0; key < 4; key++) sums[key] += sums[key + 4];
    store(at->largest, now);
    store(at->total, load(at->total) * factor + ((sums[0] + sums[2]) + (sums[1] + sums[3])));
    store(at->factor, factor);
}

static void weigh_few(Weighing *at) { /* the same bits; a key in each lane, so that lanes without a query take no time */
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    memset(at->weights, 0, sizeof at->weights);
    for (int query = at->first; query < at->end; query++) {
        float line[KEY_BLOCK] __attribute__((aligned(64)));
        vf scores[KEY_BLOCK / LANES], largest = splat(-INFINITY), sum = splat(0.0f);
        for (int key = 0; key < KEY_BLOCK; key++) line[key] = at->scores[key][query];
        for (int group = 0; group < KEY_BLOCK / LANES; group++) {
            const vi number = lanes + group * LANES, nothing = {0};
            scores[group] = seen_scores(at, load(line + group * LANES), number, nothing + at->low[query], nothing + at->high[query]);
            largest = largest_of(scores[group], largest);
        }
        const float before = at->largest[query];
        float now = before;
        for (int i = 0; i < LANES; i++) now = largest[i] > now || largest[i] != largest[i] ? largest[i] : now;
        const vf base = splat(now == -INFINITY ? 0.0f : now);
        for (int group = 0; group < KEY_BLOCK / LANES; group++) {
            const vf weight = exp16(scores[group] - base);
            sum += weight;
            store_half(at->weights[query] + group * LANES, weight);
        }
        at->factor[query] = exp16(splat(before) - base)[0];
        at->largest[query] = now;
        at->total[query] = at->total[query] * at->factor[query] + sum_of(sum);
    }
}

/* one tile of queries and one block */
static void attend_tile(const Tiles *at, int64_t tile, int64_t dim, Weighing *own) {
    const uint16_t *query = at->queries + tile * at->inner * QUERIES;
    const int64_t stride = at->inner * 2;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < at->inner; i += 32) {
        _tile_loadd(5, query + i * QUERIES, 64);
        _tile_loadd(4, at->keys + i, stride); _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, at->keys + 16 * at->inner + i, stride); _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(4, at->keys + 32 * at->inner + i, stride); _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, at->keys + 48 * at->inner + i, stride); _tile_dpbf16ps(3, 6, 5);
    }
    _tile_stored(0, own->scores[0], 64); _tile_stored(1, own->scores[16], 64);
    _tile_stored(2, own->scores[32], 64); _tile_stored(3, own->scores[48], 64);
    own->largest = at->largest + tile * QUERIES;
    own->total = at->total + tile * QUERIES;
    if (own->end - own->first <= QUERIES / 2) weigh_few(own);
    else weigh_all(own);
    float added[QUERIES][LANES] __attribute__((aligned(64)));
    float *sums = at->sums + tile * QUERIES * dim;
    for (int64_t d = 0; d < dim; d += LANES) {
        _tile_zero(0);
        _tile_loadd(4, own->weights[0], KEY_BLOCK * 2);
        _tile_loadd(5, at->values + d * 2, dim * 4); _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, own->weights[0] + 32, KEY_BLOCK * 2);
        _tile_loadd(7, at->values + 32 * dim + d * 2, dim * 4); _tile_dpbf16ps(0, 6, 7);
        _tile_stored(0, added[0], 64);
        for (int lane = own->first; lane < own->end; lane++) {
            if (own->high[lane] <= own->low[lane]) continue; /* nothing of this block */
            float *to = sums + lane * dim + d;
            store(to, fma16(load(to), splat(own->factor[lane]), load(added[lane])));
        }
    }
}

static void attend_by_tiles(const Work *work, const Layer *layer, float *scratch, int64_t first_row, int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    Tiles at = place_tiles((char *)scratch, dim, group, end_row - first_row);
    put_queries(work, &at, first_row, end_row, kv_head);
    Weighing own;
    own.scaling = layer->scaling;
    int64_t start = INT64_MAX, end = 0;
    for (int64_t row = first_row; row < end_row; row++) {
        start = least(start, first_seen(layer, pass->position[row]));
        end = most(end, pass->position[row] + 1);
    }
    for (int64_t block = start / KEY_BLOCK * KEY_BLOCK; block < end; block += KEY_BLOCK) {
        int64_t widest = first_row;
        const int is_shared = shares_block(pass, first_row, end_row, block, &widest);
        if (is_shared) read_tiles(work, layer, &at, widest, kv_head, block, least(block + KEY_BLOCK, pass->position[widest] + 1));
        for (int64_t tile = 0; tile < at.num_tiles; tile++) {
            const int64_t from = first_row + tile * at.rows_of_tile, to = least(end_row, from + at.rows_of_tile);
            own.first = 0;
            own.end = (int)((to - from) * group);
            own.low = own.high = (vi){0};
            for (int64_t row = from; row < to; row++) {
                const int64_t seen_from = most(block, first_seen(layer, pass->position[row])) - block;
                const int64_t seen_to = least(block + KEY_BLOCK, pass->position[row] + 1) - block;
                if (!is_shared) own.low = own.high = (vi){0};
                for (int64_t head = 0; head < group; head++) {
                    own.low[(row - from) * group + head] = (int)seen_from;
                    own.high[(row - from) * group + head] = (int)most(seen_from, seen_to);
                }
                if (is_shared || seen_to <= seen_from) continue;
                own.first = (int)((row - from) * group);
                own.end = own.first + (int)group;
                read_tiles(work, layer, &at, row, kv_head, block, block + seen_to);
                attend_tile(&at, tile, dim, &own);
            }
            if (is_shared) attend_tile(&at, tile, dim, &own);
        }
    }
    for (int64_t row = first_row; row < end_row; row++)
        for (int64_t head = 0; head < group; head++) {
            const int64_t index = row - first_row, tile = index / at.rows_of_tile;
            const int64_t lane = tile * QUERIES + index % at.rows_of_tile * group + head;
            float *to = work->mixed + (row * decoder->heads + kv_head * group + head) * dim;
            for (int64_t i = 0; i < dim; i += LANES) store(to + i, load(at.sums + lane * dim + i) / at.total[lane]);
        }
}
#endif
