/* Attention to sources, whose keys and values were computed once, for all rows.
 *
 * A source is stored as [layer][keys, values][kv head]: its keys as [16 keys][head_dim][16], filled
 * up to a multiple of 16 keys, so that they need no transposition, and its values as
 * [key][head_dim], filled up likewise; both in the format of other keys and values.
 */
#pragma once
#include <string.h>
#include "attention.h"

/* widens or finds the first `count` numbers at an address */
INLINE float *numbers_at(const char *from, float *room, int64_t count, int64_t format) {
    if (format == FLOAT32) return (float *)from;
    for (int64_t i = 0; i < count; i += LANES)
        store(room + i, load_half((const uint16_t *)from + i));
    return room;
}

/* some rows of one slot, which have one source, and the query heads of one key head */
static void attend_source(const Work *work, int64_t index, float *scratch, int64_t first_row,
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
