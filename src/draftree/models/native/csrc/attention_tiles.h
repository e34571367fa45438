/* Attention by tiles: 16 queries of one key head at once, one in each lane.
 *
 * Keys are the first operand of a product and queries the second, so a tile of scores has a query
 * in each lane. If many queries attend to the same keys in the same places, values are transposed
 * once for all of them and are the first operand too: weights then need no transposition, and sums
 * have a query in each lane. For a few queries weights are the first operand. Both ways add a sum
 * in the order of the keys and give the same bits.
 */
#pragma once
#include "attention_tiles_inputs.h"
#if AMX

enum { DIMS_IN_TILES = 64 }; /* of a query's sum, that fit into four tiles */

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

/* Up to four tiles of sums, from and to memory: `next` numbers from one tile to the next, `step`
 * bytes from row to row. */
#define FOR_SUMS(macro) \
    { \
        macro(0); \
        if (count > 1) macro(1); \
        if (count > 2) macro(2); \
        if (count > 3) macro(3); \
    }
#define LOAD_SUM(i) _tile_loadd(i, sums + (i) * next, step)
#define STORE_SUM(i) _tile_stored(i, sums + (i) * next, step)

INLINE void load_sums(const float *sums, int64_t count, int64_t next,
                      int64_t step){FOR_SUMS(LOAD_SUM)} INLINE
    void store_sums(float *sums, int64_t count, int64_t next, int64_t step){FOR_SUMS(STORE_SUM)}

INLINE void add_block_transposed(const uint16_t *values, const uint16_t *weights, int64_t count) {
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

static __attribute__((noinline)) void rescale_sums(const Tiles *at, float *sums,
                                                   int is_transposed) {
    const vf factor = load(at->own.factor);
    for (int64_t i = 0; i < QUERIES * at->dim; i += LANES)
        store(sums + i, load(sums + i) * (is_transposed ? factor : splat(factor[i / at->dim])));
}

INLINE int weigh(Tiles *at, Scores scores, int is_masked, int is_transposed) {
    if (is_transposed) return weigh_transposed(&at->own, scores, is_masked);
    return at->own.is_few ? weigh_few(&at->own, scores)
                          : weigh_in_rows(&at->own, scores, is_masked);
}

/* One tile of queries and consecutive blocks, the first of which starts at position `first`. Sums
 * stay in tiles if they fit. */
INLINE void attend_tile(Tiles *at, int64_t tile, const Block *blocks, int num_blocks, int64_t first,
                        int is_transposed) {
    Scores scores[2] __attribute__((aligned(64)));
    const KeyRange *range = at->range + tile;
    const int64_t dim = at->dim, next = is_transposed ? QUERIES * LANES : LANES,
                  step = is_transposed ? 64 : dim * 4,
                  in_tiles = dim <= DIMS_IN_TILES ? dim / LANES : 0;
    const uint16_t *query = at->queries + tile * at->inner * QUERIES;
    float *sums = at->sums + tile * QUERIES * dim;
    at->own.largest = at->largest + tile * QUERIES;
    at->own.total = at->total + tile * QUERIES;
    if (in_tiles) load_sums(sums, in_tiles, next, step);
    score_block(at, query, blocks, scores[0]);
    for (int i = 0; i < num_blocks; i++) {
        const int64_t start = first + i * KEY_BLOCK;
        /* the products of the next block overlap with the weights of this one */
        if (i + 1 < num_blocks) score_block(at, query, blocks + i + 1, scores[(i + 1) % 2]);
        at->own.low = range->from - (int)start;
        at->own.high = range->end - (int)start;
        const int is_masked = range->max_from > start || range->min_end < start + KEY_BLOCK;
        if (weigh(at, scores[i % 2], is_masked, is_transposed)) {
            if (in_tiles) store_sums(sums, in_tiles, next, step);
            rescale_sums(at, sums, is_transposed);
            if (in_tiles) load_sums(sums, in_tiles, next, step);
        }
        for (int64_t d = 0; d < dim; d += DIMS_IN_TILES) {
            const int64_t count = in_tiles ? in_tiles : min_int(dim - d, DIMS_IN_TILES) / LANES,
                          place = d / LANES * next;
            if (!in_tiles) load_sums(sums + place, count, next, step);
            if (is_transposed)
                add_block_transposed(blocks[i].values + d * KEY_BLOCK, at->own.weights, count);
            else add_block_in_rows(blocks[i].values + d * 2, at->own.weights, count, dim);
            if (!in_tiles) store_sums(sums + place, count, next, step);
        }
    }
    if (in_tiles) store_sums(sums, in_tiles, next, step);
}

static void attend_transposed(Tiles *at, int64_t tile, const Block *blocks, int num_blocks,
                              int64_t first) {
    attend_tile(at, tile, blocks, num_blocks, first, 1);
}
static void attend_in_rows(Tiles *at, int64_t tile, const Block *blocks, int num_blocks,
                           int64_t first) {
    attend_tile(at, tile, blocks, num_blocks, first, 0);
}

/* Blocks whose keys are in the same places for all rows: packed once, for the row to which most are
 * visible. */
static void attend_shared(const Work *work, const Layer *layer, Tiles *at, int64_t widest,
                          int64_t kv_head, int is_transposed) {
    const int64_t end = end_of_visible(work->pass, layer, widest);
    Block blocks[SPAN];
    for (int64_t first = at->start; first < at->shared_end; first += SPAN * KEY_BLOCK) {
        const int64_t count = min_int(SPAN, blocks_of(at->shared_end - first, KEY_BLOCK));
        for (int i = 0; i < count; i++) {
            const int64_t block = first + i * KEY_BLOCK;
            blocks[i] = pack_block(work, layer, at, i, widest, kv_head, block,
                                   min_int(block + KEY_BLOCK, end), is_transposed);
        }
        for (int64_t tile = 0; tile < at->num_tiles; tile++) {
            const KeyRange *range = at->range + tile;
            const int64_t from = max_int(0, range->min_from - first) / KEY_BLOCK,
                          to = min_int(count, blocks_of(range->max_end - first, KEY_BLOCK));
            if (from >= to) continue;
            at->own.first = 0;
            at->own.end = (int)min_int(QUERIES, at->num_lanes - tile * QUERIES);
            at->own.is_few = at->own.end <= MAX_FEW_QUERIES;
            (is_transposed ? attend_transposed : attend_in_rows)(
                at, tile, blocks + from, (int)(to - from), first + from * KEY_BLOCK);
        }
    }
}

/* Blocks whose keys are in other places for each row: weights are zero in the lanes of other rows.
 */
static void attend_by_row(const Work *work, const Layer *layer, Tiles *at, int64_t first_row,
                          int64_t end_row, int64_t kv_head) {
    const Pass *pass = work->pass;
    at->own.is_few = 1;
    memset(at->own.weights, 0, sizeof at->own.weights);
    for (int64_t row = first_row; row < end_row; row++) {
        const int64_t end = end_of_visible(pass, layer, row), from = (row - first_row) * at->group,
                      to = from + at->group;
        for (int64_t block =
                 max_int(at->shared_end, first_visible(pass, layer, row) / KEY_BLOCK * KEY_BLOCK);
             block < end; block += KEY_BLOCK) {
            const Block read = pack_block(work, layer, at, 0, row, kv_head, block,
                                          min_int(block + KEY_BLOCK, end), 0);
            for (int64_t tile = from / QUERIES; tile * QUERIES < to; tile++) {
                at->own.first = (int)max_int(0, from - tile * QUERIES);
                at->own.end = (int)min_int(QUERIES, to - tile * QUERIES);
                attend_in_rows(at, tile, &read, 1, block);
                memset(at->own.weights + at->own.first * KEY_BLOCK, 0,
                       (size_t)((at->own.end - at->own.first) * KEY_BLOCK) * 2);
            }
        }
    }
}

static void transpose_sums_back(const Tiles *at) {
    vf sums[QUERIES];
    for (int64_t tile = 0; tile < at->num_tiles; tile++) {
        float *from = at->sums + tile * QUERIES * at->dim, whole[QUERIES * at->dim];
        memcpy(whole, from, sizeof whole);
        for (int64_t d = 0; d < at->dim; d += LANES) {
            for (int i = 0; i < LANES; i++) sums[i] = load(whole + (d + i) * LANES);
            transpose((part_f *)sums);
            for (int lane = 0; lane < QUERIES; lane++) store(from + lane * at->dim + d, sums[lane]);
        }
    }
}

static void attend_by_tiles(const Work *work, const Layer *layer, float *scratch, int64_t first_row,
                            int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    Tiles at;
    init_tiles(&at, (char *)scratch, dim, group, end_row - first_row);
    const int64_t widest = set_key_ranges(work->pass, layer, &at, first_row, end_row);
    const int is_transposed = at.num_tiles >= MIN_TILES_TO_TRANSPOSE;
    pack_queries(work, layer, &at, first_row, end_row, kv_head);
    at.own.scaling = layer->scaling * 1.44269504088896341f; /* for base 2 */
    attend_shared(work, layer, &at, widest, kv_head, is_transposed);
    if (is_transposed) transpose_sums_back(&at);
    attend_by_row(work, layer, &at, first_row, end_row, kv_head);
    for (int64_t lane = 0; lane < at.num_lanes; lane++) {
        float *to = work->mixed +
                    ((first_row + lane / group) * decoder->all_heads + decoder->first_head +
                     kv_head * group + lane % group) *
                        decoder->value_dim;
        for (int64_t i = 0; i < decoder->value_dim; i += LANES)
            store(to + i, load(at.sums + lane * dim + i) / at.total[lane]);
    }
}
#endif
