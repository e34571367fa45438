/* Inputs of attention by tiles: queries, keys and values in the layout of tiles, and the keys
 * visible to each lane. */
#pragma once
#include "attention_weights.h"
#if AMX

enum {
    SPAN = 2,                   /* blocks per call of attend_tile, whose sums stay in tiles */
    MIN_TILES_TO_TRANSPOSE = 3, /* of queries: with fewer, values are not transposed */
    MAX_FEW_QUERIES = 6         /* up to so many, softmax runs query by query */
};

typedef struct { /* keys that are visible to the lanes of a tile */
    vi from, end;
    int64_t min_from, max_from, min_end, max_end;
} KeyRange;

typedef struct {
    const uint16_t *keys; /* [64][step] */
    const uint16_t *values;
    int64_t step;
} Block;

typedef struct {
    KeyRange *range;        /* of each tile */
    uint16_t *queries;      /* of each tile: [inner / 32][16 pairs][16 queries][2] */
    float *sums;            /* of each tile: [16 queries][head_dim], or transposed */
    float *largest, *total; /* of each tile: [16 queries] */
    uint16_t *keys; /* of each block of a span: [64][inner], the size of a head rounded up to 32 */
    uint16_t *values; /* of each block of a span: [32 pairs][head_dim][2], or transposed:
                         [head_dim / 16][2][16 dims][32 keys] */
    uint16_t *zeros;  /* a row of zeros */
    int64_t dim, inner, group, num_lanes, num_tiles;
    int64_t start, shared_end; /* between: keys are in the same places for all rows */
    SoftmaxState own;
} Tiles;

INLINE size_t tiles_bytes(int64_t dim, int64_t num_tiles) {
    const int64_t inner = blocks_of(dim, 32) * 32;
    const size_t tile = sizeof(KeyRange) + (size_t)(QUERIES * (inner * 2 + dim * 4 + 2 * 4));
    return (size_t)num_tiles * tile +
           (size_t)(SPAN * KEY_BLOCK * (inner + dim) * 2 + inner * 2 + 64);
}

static void init_tiles(Tiles *at, char *memory, int64_t dim, int64_t group, int64_t rows) {
    at->dim = dim;
    at->inner = blocks_of(dim, 32) * 32;
    at->group = group;
    at->num_lanes = rows * group;
    at->num_tiles = blocks_of(at->num_lanes, QUERIES);
    at->range = (KeyRange *)memory;
    at->sums = (float *)(at->range + at->num_tiles);
    at->largest = at->sums + at->num_tiles * QUERIES * dim;
    at->total = at->largest + at->num_tiles * QUERIES;
    at->queries = (uint16_t *)(at->total + at->num_tiles * QUERIES);
    at->keys = at->queries + at->num_tiles * at->inner * QUERIES;
    at->values = at->keys + SPAN * KEY_BLOCK * at->inner;
    at->zeros = at->values + SPAN * KEY_BLOCK * dim;
    memset(at->zeros, 0, (size_t)at->inner * 2);
    memset(at->sums, 0, (size_t)(at->num_tiles * QUERIES * dim) * 4);
    memset(at->queries, 0, (size_t)(at->num_tiles * at->inner * QUERIES) * 2);
    for (int64_t i = 0; i < at->num_tiles; i++) {
        store(at->largest + i * QUERIES, splat(-INFINITY));
        store(at->total + i * QUERIES, splat(0.0f));
    }
}

/* Sets the keys visible to each lane; lanes after the last row repeat it. Returns the row to which
 * most keys are visible. */
static int64_t set_key_ranges(const Pass *pass, const Layer *layer, Tiles *at, int64_t first_row,
                              int64_t end_row) {
    int64_t widest = first_row;
    at->start = at->shared_end = INT64_MAX;
    for (int64_t row = first_row; row < end_row; row++) {
        const int64_t end = end_of_visible(pass, layer, row), identical = pass->identical[row];
        if (end > end_of_visible(pass, layer, widest)) widest = row;
        if (end > identical)
            at->shared_end = min_int(at->shared_end, identical / KEY_BLOCK * KEY_BLOCK);
        at->start = min_int(at->start, first_visible(pass, layer, row) / KEY_BLOCK * KEY_BLOCK);
    }
    at->shared_end = min_int(at->shared_end, end_of_visible(pass, layer, widest));
    for (int64_t tile = 0; tile < at->num_tiles; tile++) {
        KeyRange range = {.min_from = INT64_MAX, .min_end = INT64_MAX};
        for (int lane = 0; lane < QUERIES; lane++) {
            const int64_t row = min_int(first_row + (tile * QUERIES + lane) / at->group,
                                        end_row - 1);
            const int64_t end = end_of_visible(pass, layer, row),
                          from = first_visible(pass, layer, row);
            range.from[lane] = (int)from;
            range.end[lane] = (int)end;
            range.min_from = min_int(range.min_from, from);
            range.max_from = max_int(range.max_from, from);
            range.min_end = min_int(range.min_end, end);
            range.max_end = max_int(range.max_end, end);
        }
        at->range[tile] = range;
    }
    return widest;
}

static void pack_queries(const Work *work, const Layer *layer, Tiles *at, int64_t first_row,
                         int64_t end_row, int64_t kv_head) {
    const int64_t dim = at->dim;
    for (int64_t lane = 0; lane < at->num_lanes; lane++) {
        const float *query = inputs_of_row(work, layer, first_row + lane / at->group) +
                             (kv_head * at->group + lane % at->group) * dim;
        uint16_t *to = at->queries + lane / QUERIES * at->inner * QUERIES + lane % QUERIES * 2;
        for (int64_t i = 0; i < dim; i += LANES) {
            uint32_t pairs[8];
            half_row bits = narrow(load(query + i));
            memcpy(pairs, &bits, 32);
            for (int pair = 0; pair < 8; pair++)
                memcpy(to + (i / 2 + pair) * QUERIES * 2, pairs + pair, 4);
        }
    }
}

INLINE vf interleaved(const uint16_t *a, const uint16_t *b) { /* a0 b0 a1 b1 ... */
    const half_row x = *(const half_loose *)a, y = *(const half_loose *)b;
    return (vf)(__builtin_convertvector(x, vu) | (__builtin_convertvector(y, vu) << 16));
}

static void pair_values(uint16_t *to, const uint16_t *const *rows, int64_t dim) {
    for (int key = 0; key < KEY_BLOCK; key += 2, to += 2 * dim) {
        const uint16_t *even = rows[key], *odd = rows[key + 1];
        int64_t d = 0;
        for (; d + 32 <= dim; d += 32) {
            const halves a = *(const halves_loose *)(even + d),
                         b = *(const halves_loose *)(odd + d);
            *(halves_loose *)(to + 2 * d) = __builtin_shufflevector(a, b, LOWER_HALVES);
            *(halves_loose *)(to + 2 * d + 32) = __builtin_shufflevector(a, b, UPPER_HALVES);
        }
        if (d < dim) store((float *)(to + 2 * d), interleaved(even + d, odd + d));
    }
}

static void transpose_values(uint16_t *to, const uint16_t *const *rows, int64_t dim) {
    for (int64_t d = 0; d < dim; d += LANES)
        for (int half = 0; half < KEY_BLOCK; half += 32) {
            vf pairs[LANES];
            for (int i = 0; i < LANES; i++)
                pairs[i] = interleaved(rows[half + 2 * i] + d, rows[half + 2 * i + 1] + d);
            transpose((part_f *)pairs);
            for (int i = 0; i < LANES; i++, to += 32) store((float *)to, pairs[i]);
        }
}

/* keys and values of a block that are visible to a row, up to a position; zeros after it */
static Block pack_block(const Work *work, const Layer *layer, const Tiles *at, int slot_of_span,
                        int64_t row, int64_t kv_head, int64_t first, int64_t end,
                        int is_transposed) {
    const Pass *pass = work->pass;
    const int64_t base = pass->slot[row] * pass->slot_step + kv_head * pass->places, dim = at->dim;
    const uint16_t *rows[KEY_BLOCK];
    uint16_t *values = at->values + slot_of_span * KEY_BLOCK * dim,
             *keys = at->keys + slot_of_span * KEY_BLOCK * at->inner;
    for (int64_t key = 0; key < KEY_BLOCK; key++)
        rows[key] = first + key < end ? (uint16_t *)layer->values +
                                            (base + place_of_key(pass, row, first + key)) * dim
                                      : at->zeros;
    if (is_transposed) transpose_values(values, rows, dim);
    else pair_values(values, rows, dim);
    if (dim % 32 == 0 && first + KEY_BLOCK <= min_int(end, pass->identical[row])) /* in place */
        return (Block){(const uint16_t *)layer->keys + (base + first) * dim, values, dim};
    for (int64_t key = 0; key < KEY_BLOCK; key++) {
        const uint16_t *from = rows[key] == at->zeros
                                   ? rows[key]
                                   : (const uint16_t *)layer->keys +
                                         (rows[key] - (const uint16_t *)layer->values);
        memcpy(keys + key * at->inner, from, (size_t)dim * 2);
        if (dim % 32) memset(keys + key * at->inner + dim, 0, 32);
    }
    return (Block){keys, values, at->inner};
}
#endif
