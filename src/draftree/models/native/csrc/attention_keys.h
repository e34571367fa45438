/* Keys and values of a block for attention without tiles: where they are, and their widening. */
#pragma once
#include <string.h>
#include "rows.h"
#include "transposing.h"

/* with few registers one group of keys and more queries: a key is loaded for more products */
enum { KEYS_AT_ONCE = PARTS == 1 ? GROUP : 1, /* in groups of 16; parts of values likewise */
       KEY_GROUPS = KEY_BLOCK / LANES,
       QUERIES_AT_ONCE = SUMS_AT_ONCE / PARTS / KEYS_AT_ONCE };

/* Keys and values of the next block, which kernels of pairs prefetch line by line: what is asked for
 * faster than lines arrive is dropped. */
typedef struct {
    const char *keys, *end; /* the next line, and the end of the keys */
    ptrdiff_t to_values;    /* from a line of keys to that of values */
    uint32_t when;          /* bit s: in each 32 steps, a line is prefetched in step s */
} Ahead;

/* `in_pairs`: keys and values of a block stay in bfloat16. Each 32 bits of the keys are two
 * dimensions of a key, [16 keys][head_dim / 2][16][2], and those of the values two keys of a
 * dimension, [32][head_dim][2]. Queries are in bfloat16, too, and a total is in 16 parts. */
typedef struct {
    float *keys;    /* of a block: [16 keys][head_dim][16] */
    float *values;  /* of a block: [64][head_dim]; not used if values are read where they are */
    int64_t *places; /* of a block: where each value starts in those of the layer */
    const void *own_values; /* of the layer, if they are read where they are; otherwise NULL */
    float *queries; /* [row][head of the group][head_dim] */
    float *sums;    /* like queries */
    float *largest, *total;
    const float *bias;  /* added to scores; NULL: none */
    int64_t *bias_from; /* of each query: entry of the key at position 0 */
    int64_t dim, start, block; /* start, block: positions of the first key, and of a block's */
    float scaling, cap;
    int in_pairs;
    Ahead *ahead;
} AttentionState;

INLINE void prefetch_lines(Ahead *ahead, int lines) { /* the last ones may lie after the end */
    if (ahead->keys >= ahead->end) return;
    for (int line = 0; line < lines; line++) {
        __builtin_prefetch(ahead->keys + line * 64, 0, 2);
        __builtin_prefetch(ahead->keys + line * 64 + ahead->to_values, 0, 2);
    }
    ahead->keys += lines * 64;
}

INLINE void prefetch_rest(Ahead *ahead) {
    while (ahead->keys < ahead->end) prefetch_lines(ahead, 1);
}

enum { LINES_WHILE_PLACING = 8 };

INLINE int64_t first_visible(const Pass *pass, const Layer *layer, int64_t row) {
    return layer->window ? max_int(0, pass->position[row] + 1 - layer->window) : 0;
}

INLINE int64_t end_of_visible(const Pass *pass, const Layer *layer, int64_t row) {
    const int64_t end = pass->position[row] + 1;
    if (!layer->sees_block) return end;
    return layer->window ? min_int(pass->block_end[row] + 1, end - 1 + layer->window)
                         : pass->block_end[row] + 1;
}

INLINE int64_t place_of_key(const Pass *pass, int64_t row, int64_t position) {
    int64_t identical = pass->identical[row];
    return position < identical ? position
                                : pass->list[pass->list_start[row] + position - identical];
}

/* Transposes 16 keys, which start at these places of `from`. */
static void transpose_keys(float *to, const void *from, const int64_t *at, int64_t dim,
                           int64_t format) {
    part_f x[PART_LANES];
    if (format == INT8) {
        transpose_codes(to, from, at, dim);
        return;
    }
    const int in_pairs = format == BFLOAT16 && dim % (2 * PART_LANES) == 0;
    const int64_t step = in_pairs ? 2 * PART_LANES : PART_LANES;
    for (int first = 0; first < LANES; first += PART_LANES)
        for (int64_t i = 0; i < dim; i += step) {
            if (in_pairs) { /* two dimensions in a lane */
                for (int key = 0; key < PART_LANES; key++)
                    x[key] = *(const part_f_loose *)((const uint16_t *)from + at[first + key] + i);
                transpose(x);
                for (int pair = 0; pair < PART_LANES; pair++) {
                    part_u *column = (part_u *)(to + (i + 2 * pair) * LANES + first);
                    column[0] = (part_u)x[pair] << 16;
                    column[PARTS] = (part_u)x[pair] & 0xffff0000u;
                }
                continue;
            }
            for (int key = 0; key < PART_LANES; key++)
                for (int lane = 0; lane < PART_LANES; lane++) {
                    const int64_t place = at[first + key] + i + lane;
                    uint32_t bits;
                    if (format == FLOAT32) memcpy(&bits, (const float *)from + place, 4);
                    else bits = (uint32_t)((const uint16_t *)from)[place] << 16;
                    memcpy((float *)&x[key] + lane, &bits, 4);
                }
            transpose(x);
            for (int lane = 0; lane < PART_LANES; lane++)
                *(part_f *)(to + (i + lane) * LANES + first) = x[lane];
        }
}

#if HALF_PAIRS
/* `lines`: of the next block, prefetched for each 32 numbers */
INLINE void place_key_pairs(char *to, const uint16_t *from, const int64_t *at, int64_t dim,
                            Ahead *ahead, int lines) {
    part_f x[LANES];
    for (int64_t i = 0; i < dim; i += 2 * LANES) {
        prefetch_lines(ahead, lines);
        for (int key = 0; key < LANES; key++) x[key] = *(const part_f_loose *)(from + at[key] + i);
        transpose(x);
        for (int pair = 0; pair < LANES; pair++) ((part_f *)to)[i / 2 + pair] = x[pair];
    }
}

/* two values as pairs of a key each: 32 dimensions in two registers */
INLINE void interleave_values(vu *to, const uint16_t *even, const uint16_t *odd) {
    const halves a = *(const halves_loose *)even, b = *(const halves_loose *)odd;
    to[0] = (vu)__builtin_shufflevector(a, b, LOWER_HALVES);
    to[1] = (vu)__builtin_shufflevector(a, b, UPPER_HALVES);
}

INLINE void place_value_pairs(char *to, const uint16_t *from, const int64_t *at, int64_t dim) {
    for (int key = 0; key < LANES; key += 2, to += dim * 4)
        for (int64_t i = 0; i < dim; i += 2 * LANES)
            interleave_values((vu *)(to + i * 4), from + at[key] + i, from + at[key + 1] + i);
}
#endif

/* Widens or pairs keys and values of positions from `from` to `end`, as a row finds them, or
 * notes the places of values that are read where they are; `from` is at the start of a group of 16.
 */
static void widen_keys(const Work *work, const Layer *layer, const AttentionState *at, int64_t row,
                       int64_t kv_head, int64_t block, int64_t from, int64_t end) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, step = kv_step(decoder),
                  format = decoder->cache_format;
    const int64_t base = pass->slot[row] * pass->slot_step + kv_head * pass->places;
    for (int64_t group = from; group < end; group += LANES) {
        int64_t place[LANES];
        for (int key = 0; key < LANES; key++) /* the last key again in place of keys after it */
            place[key] = (base + place_of_key(pass, row, min_int(group + key, end - 1))) * step;
        if (at->own_values != NULL) memcpy(at->places + (group - block), place, sizeof(place));
#if HALF_PAIRS
        if (at->in_pairs) {
            const int64_t offset = (group - block) * dim * 2; /* in bytes */
            place_key_pairs((char *)at->keys + offset, layer->keys, place, dim, at->ahead,
                            at->own_values == NULL ? 0 : LINES_WHILE_PLACING);
            if (at->own_values == NULL)
                place_value_pairs((char *)at->values + offset, layer->values, place, dim);
            continue;
        }
#endif
        transpose_keys(at->keys + (group - block) * dim, layer->keys, place, dim, format);
        if (at->own_values != NULL) continue;
        for (int key = 0; key < LANES && group + key < end; key++)
            for (int64_t i = 0; i < dim; i += LANES)
                store(at->values + (group - block + key) * dim + i,
                      format == INT8
                          ? load_codes((const int8_t *)layer->values + place[key], i, dim)
                          : stored(layer->values, place[key] + i, format));
    }
}

/* Keys and values of a block that lie in the places of their positions. */
static Ahead block_ahead(const Work *work, const Layer *layer, int64_t row, int64_t kv_head,
                         int64_t block, int64_t end) {
    const Pass *pass = work->pass;
    const int64_t bytes = kv_bytes(work->decoder);
    const int64_t place = pass->slot[row] * pass->slot_step + kv_head * pass->places + block;
    const char *keys = (const char *)layer->keys + place * bytes;
    return (Ahead){.keys = keys,
                   .end = keys + max_int(0, min_int(block + KEY_BLOCK, end) - block) * bytes,
                   .to_values = (const char *)layer->values - (const char *)layer->keys};
}

/* Plans to prefetch while this number of kernel calls multiply a block. A call has as many steps as
 * a head has numbers, which is half of the lines of keys. */
INLINE void plan_ahead(Ahead *ahead, int64_t calls) {
    ahead->when = calls <= 2    ? 0xffffffffu
                  : calls <= 4  ? 0x55555555u
                  : calls <= 8  ? 0x11111111u
                  : calls <= 16 ? 0x01010101u
                                : 0x00010001u;
}

/* Plans to prefetch the block after this one, or the first one of the next key head. Kernels of
 * pairs do so line by line while they multiply this block; otherwise it is done at once. */
INLINE void prefetch_next(const Work *work, const Layer *layer, const AttentionState *at,
                          int64_t first_row, int64_t end_row, int64_t kv_head, int64_t block,
                          int64_t end) {
    const Decoder *decoder = work->decoder;
    const int64_t queries = (end_row - first_row) * (decoder->heads / decoder->kv_heads);
    if (block + KEY_BLOCK < end)
        *at->ahead = block_ahead(work, layer, first_row, kv_head, block + KEY_BLOCK, end);
    else if (kv_head + 1 < decoder->kv_heads)
        *at->ahead = block_ahead(work, layer, first_row, kv_head + 1, at->start, end);
    else at->ahead->end = at->ahead->keys;
    plan_ahead(at->ahead, blocks_of(queries, QUERIES_AT_ONCE));
    if (!at->in_pairs) prefetch_rest(at->ahead);
}
