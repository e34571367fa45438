/* Attention by tiles: the queries of one key head, sixteen at once, one in each lane.
 *
 * Keys are the first side of a product and queries the second, so a tile of scores has a query in
 * each lane. Where many queries see the same keys in the same places, values are turned once for
 * all of them and are the first side as well: weights then need no turning, and sums have a query
 * in each lane too. Where there are few, weights are the first side. Either way a sum is added up
 * by tiles, in the order of the keys, and has the same bits.
 */
#pragma once
#include "attention_tiles_inputs.h"
#if AMX

enum { HELD = 64 /* numbers of a query's sum that fit into the tiles kept for sums */ };

INLINE void score_block(const Tiles *at, const uint16_t *query, const Block *block, Scores scores) {
    const int64_t step = block->step, bytes = step * 2;
    for (int key = 0; key < KEY_BLOCK; key += 32) {
        const uint16_t *keys = block->keys + key * step;
        _tile_zero(4);
        _tile_zero(5);
        for (int64_t i = 0; i < at->inner; i += 32) {
            _tile_loadd(7, query + i * QUERIES, 64);
            _tile_loadd(6, keys + i, bytes);
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(6, keys + 16 * step + i, bytes);
            _tile_dpbf16ps(5, 6, 7);
        }
        _tile_stored(4, scores[key], 64);
        _tile_stored(5, scores[key + 16], 64);
    }
}

/* up to four tiles of sums, from and to memory: `next` numbers from one to the other, `step` bytes
 * from row to row */
#define FOR_SUMS(what) \
    { \
        what(0); \
        if (count > 1) what(1); \
        if (count > 2) what(2); \
        if (count > 3) what(3); \
    }
#define LOAD_SUM(i) _tile_loadd(i, sums + (i) * next, step)
#define STORE_SUM(i) _tile_stored(i, sums + (i) * next, step)

INLINE void load_sums(const float *sums, int64_t count, int64_t next,
                      int64_t step){FOR_SUMS(LOAD_SUM)} INLINE
    void store_sums(float *sums, int64_t count, int64_t next, int64_t step){FOR_SUMS(STORE_SUM)}

INLINE void add_block_turned(const uint16_t *values, const uint16_t *weights, int64_t count) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, weights + 512, 64);
#define EARLIER(i) \
    _tile_loadd(6, values + (i) * 1024, 64); \
    _tile_dpbf16ps(i, 6, 4)
#define LATER(i) \
    _tile_loadd(7, values + (i) * 1024 + 512, 64); \
    _tile_dpbf16ps(i, 7, 5)
    FOR_SUMS(EARLIER)
    FOR_SUMS(LATER)
#undef EARLIER
#undef LATER
}

INLINE void add_block_in_rows(const uint16_t *values, const uint16_t *weights, int64_t count,
                              int64_t dim) {
    _tile_loadd(4, weights, KEY_BLOCK * 2);
    _tile_loadd(5, weights + 32, KEY_BLOCK * 2);
#define EARLIER(i) \
    _tile_loadd(6, values + (i) * 32, dim * 4); \
    _tile_dpbf16ps(i, 4, 6)
#define LATER(i) \
    _tile_loadd(7, values + 32 * dim + (i) * 32, dim * 4); \
    _tile_dpbf16ps(i, 5, 7)
    FOR_SUMS(EARLIER)
    FOR_SUMS(LATER)
#undef EARLIER
#undef LATER
}

static __attribute__((noinline)) void shrink(const Tiles *at, float *sums, int is_turned) {
    const vf factor = load(at->own.factor);
    for (int64_t i = 0; i < QUERIES * at->dim; i += LANES)
        store(sums + i, load(sums + i) * (is_turned ? factor : splat(factor[i / at->dim])));
}

INLINE int weigh(Tiles *at, Scores scores, int is_masked, int is_turned) {
    if (is_turned) return weigh_turned(&at->own, scores, is_masked);
    return at->own.is_few ? weigh_few(&at->own, scores)
                          : weigh_in_rows(&at->own, scores, is_masked);
}

/* one tile of queries and some blocks, the first of which begins at a position; where sums are few
 * they stay in tiles */
INLINE void attend_tile(Tiles *at, int64_t tile, const Block *blocks, int num_blocks, int64_t first,
                        int is_turned) {
    Scores scores[2] __attribute__((aligned(64)));
    const Sight *sight = at->sight + tile;
    const int64_t dim = at->dim, next = is_turned ? QUERIES * LANES : LANES,
                  step = is_turned ? 64 : dim * 4, held = dim <= HELD ? dim / LANES : 0;
    const uint16_t *query = at->queries + tile * at->inner * QUERIES;
    float *sums = at->sums + tile * QUERIES * dim;
    at->own.largest = at->largest + tile * QUERIES;
    at->own.total = at->total + tile * QUERIES;
    if (held) load_sums(sums, held, next, step);
    score_block(at, query, blocks, scores[0]);
    for (int i = 0; i < num_blocks; i++) {
        const int64_t start = first + i * KEY_BLOCK;
        /* the next block's products go on while this block's weights are computed */
        if (i + 1 < num_blocks) score_block(at, query, blocks + i + 1, scores[(i + 1) % 2]);
        at->own.low = sight->from - (int)start;
        at->own.high = sight->end - (int)start;
        const int is_masked = sight->most_from > start || sight->least_end < start + KEY_BLOCK;
        if (weigh(at, scores[i % 2], is_masked, is_turned)) {
            if (held) store_sums(sums, held, next, step);
            shrink(at, sums, is_turned);
            if (held) load_sums(sums, held, next, step);
        }
        for (int64_t d = 0; d < dim; d += HELD) {
            const int64_t count = held ? held : least(dim - d, HELD) / LANES,
                          place = d / LANES * next;
            if (!held) load_sums(sums + place, count, next, step);
            if (is_turned)
                add_block_turned(blocks[i].values + d * KEY_BLOCK, at->own.weights, count);
            else add_block_in_rows(blocks[i].values + d * 2, at->own.weights, count, dim);
            if (!held) store_sums(sums + place, count, next, step);
        }
    }
    if (held) store_sums(sums, held, next, step);
}

static void attend_turned(Tiles *at, int64_t tile, const Block *blocks, int num_blocks,
                          int64_t first) {
    attend_tile(at, tile, blocks, num_blocks, first, 1);
}
static void attend_in_rows(Tiles *at, int64_t tile, const Block *blocks, int num_blocks,
                           int64_t first) {
    attend_tile(at, tile, blocks, num_blocks, first, 0);
}

/* blocks whose keys lie in the same places for all rows: read once, by the row that sees most */
static void attend_shared(const Work *work, const Layer *layer, Tiles *at, int64_t widest,
                          int64_t kv_head, int is_turned) {
    const int64_t end = work->pass->position[widest] + 1;
    Block blocks[SPAN];
    for (int64_t first = at->start; first < at->shared_end; first += SPAN * KEY_BLOCK) {
        const int64_t count = least(SPAN, blocks_of(at->shared_end - first, KEY_BLOCK));
        for (int i = 0; i < count; i++) {
            const int64_t block = first + i * KEY_BLOCK;
            blocks[i] = read_tiles(work, layer, at, i, widest, kv_head, block,
                                   least(block + KEY_BLOCK, end), is_turned);
        }
        for (int64_t tile = 0; tile < at->num_tiles; tile++) {
            const Sight *sight = at->sight + tile;
            const int64_t from = most(0, sight->least_from - first) / KEY_BLOCK,
                          to = least(count, blocks_of(sight->most_end - first, KEY_BLOCK));
            if (from >= to) continue;
            at->own.first = 0;
            at->own.end = (int)least(QUERIES, at->num_lanes - tile * QUERIES);
            at->own.is_few = at->own.end <= FEW;
            (is_turned ? attend_turned : attend_in_rows)(at, tile, blocks + from, (int)(to - from),
                                                         first + from * KEY_BLOCK);
        }
    }
}

/* blocks of keys that lie elsewhere for each row, in whose lanes alone there are weights */
static void attend_apart(const Work *work, const Layer *layer, Tiles *at, int64_t first_row,
                         int64_t end_row, int64_t kv_head) {
    const Pass *pass = work->pass;
    at->own.is_few = 1;
    memset(at->own.weights, 0, sizeof at->own.weights);
    for (int64_t row = first_row; row < end_row; row++) {
        const int64_t position = pass->position[row], from = (row - first_row) * at->group,
                      to = from + at->group;
        for (int64_t block =
                 most(at->shared_end, first_seen(layer, position) / KEY_BLOCK * KEY_BLOCK);
             block <= position; block += KEY_BLOCK) {
            const Block read = read_tiles(work, layer, at, 0, row, kv_head, block,
                                          least(block + KEY_BLOCK, position + 1), 0);
            for (int64_t tile = from / QUERIES; tile * QUERIES < to; tile++) {
                at->own.first = (int)most(0, from - tile * QUERIES);
                at->own.end = (int)least(QUERIES, to - tile * QUERIES);
                attend_in_rows(at, tile, &read, 1, block);
                memset(at->own.weights + at->own.first * KEY_BLOCK, 0,
                       (size_t)((at->own.end - at->own.first) * KEY_BLOCK) * 2);
            }
        }
    }
}

static void turn_sums_back(const Tiles *at) {
    vf sums[QUERIES];
    for (int64_t tile = 0; tile < at->num_tiles; tile++) {
        float *from = at->sums + tile * QUERIES * at->dim, whole[QUERIES * at->dim];
        memcpy(whole, from, sizeof whole);
        for (int64_t d = 0; d < at->dim; d += LANES) {
            for (int i = 0; i < LANES; i++) sums[i] = load(whole + (d + i) * LANES);
            transpose(sums);
            for (int lane = 0; lane < QUERIES; lane++) store(from + lane * at->dim + d, sums[lane]);
        }
    }
}

static void attend_by_tiles(const Work *work, const Layer *layer, float *scratch, int64_t first_row,
                            int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    Tiles at;
    place_tiles(&at, (char *)scratch, dim, group, end_row - first_row);
    const int64_t widest = put_sight(work->pass, layer, &at, first_row, end_row);
    const int is_turned = at.num_tiles >= WORTH_TURNING;
    put_queries(work, &at, first_row, end_row, kv_head);
    at.own.scaling = layer->scaling * 1.44269504088896341f; /* of the logarithm to base 2 */
    attend_shared(work, layer, &at, widest, kv_head, is_turned);
    if (is_turned) turn_sums_back(&at);
    attend_apart(work, layer, &at, first_row, end_row, kv_head);
    for (int64_t lane = 0; lane < at.num_lanes; lane++) {
        float *to = work->mixed +
                    ((first_row + lane / group) * decoder->heads + kv_head * group + lane % group) *
                        dim;
        for (int64_t i = 0; i < dim; i += LANES)
            store(to + i, load(at.sums + lane * dim + i) / at.total[lane]);
    }
}
#endif
