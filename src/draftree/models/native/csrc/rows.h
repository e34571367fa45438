/* Rows: norms, formats, positions. */
#pragma once
#include <string.h>
#include "byte_groups.h"
#include "groups.h"
#include "kv_codes.h"
#include "unpacking.h"

INLINE float inverse_rms(const float *row, int64_t size, float epsilon) {
    vf squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES)
        squares = fma16(load(row + i), load(row + i), squares);
    return 1.0f / sqrtf(sum_of(squares) / (float)size + epsilon);
}

/* The norm of one row: by its root mean square, or by its mean and variance. */
typedef struct {
    const float *weight, *bias; /* NULL: no norm; no bias */
    vf mean, inverse, offset;
} RowNorm;

INLINE RowNorm norm_of(const Decoder *decoder, const float *from, int64_t size,
                       const float *weight) {
    RowNorm norm = {.weight = weight, .offset = splat(decoder->norm_offset)};
    if (weight == NULL) return norm;
    if (decoder->norm == RMS_NORM) {
        norm.inverse = splat(inverse_rms(from, size, decoder->epsilon));
        return norm;
    }
    vf sum = splat(0.0f), squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) sum += load(from + i);
    norm.mean = splat(sum_of(sum) / (float)size);
    for (int64_t i = 0; i < size; i += LANES) {
        const vf rest = load(from + i) - norm.mean;
        squares = fma16(rest, rest, squares);
    }
    norm.inverse = splat(1.0f / sqrtf(sum_of(squares) / (float)size + decoder->epsilon));
    norm.bias = weight + size;
    return norm;
}

INLINE vf normed(const RowNorm *norm, const float *from, int64_t i) {
    if (norm->weight == NULL) return load(from + i);
    const vf weight = load(norm->weight + i) + norm->offset;
    if (norm->bias == NULL) return load(from + i) * norm->inverse * weight;
    return fma16((load(from + i) - norm->mean) * norm->inverse, weight, load(norm->bias + i));
}

/* The last bit of this number is 1, so adding a small number to it rounds to an integer. */
#define ROUNDING 12582912.0f
#define LARGEST_INPUT 32639.0f /* 127 * 256 + 127: both signed bytes fit */

INLINE void store_int8(char *to, int64_t column, vi whole) {
#if SPLIT_BYTES
    const byte_row first = low_bytes((whole + 128) >> 8), second = low_bytes(whole);
    memcpy(to + column, &first, 16);
    memcpy(to + 64 + column, &second, 16);
#else
    const half_row halves = low_halves((vu)whole);
    const half_row out = __builtin_shufflevector(halves, halves, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11,
                                                 12, 14, 13, 15);
    memcpy(to + 2 * column, &out, 32);
#endif
}

/* writes a row as the next product's input, after a norm if there is one */
static void write_formatted(const Work *work, int64_t row, const float *from, int64_t size,
                            const float *norm, int64_t format) {
    const Decoder *decoder = work->decoder;
    const RowNorm own = norm_of(decoder, from, size, norm);
#define VALUE(i) normed(&own, from, i)
    if (format == FLOAT32) {
        float *to = (float *)work->inputs + row * size;
        for (int64_t i = 0; i < size; i += LANES) store(to + i, VALUE(i));
    } else if (format == BFLOAT16) {
        for (int64_t i = 0; i < size; i += LANES)
            store_half_input(work->inputs, row, i, size, VALUE(i));
    } else if (format == GROUPED) {
        RowGroup *groups = row_groups(work, row, size);
        for (int64_t i = 0; i < size; i += GROUP_INPUTS) {
            const vf values[2] = {VALUE(i), i + LANES < size ? VALUE(i + LANES) : splat(0.0f)};
            write_group(groups + i / GROUP_INPUTS, values);
        }
    } else {
#if BYTE_GROUPS
        ByteGroup *groups = byte_groups(work, row, size);
        for (int64_t i = 0; i < size; i += BYTES_OF_GROUP)
            write_byte_group(groups + i / BYTES_OF_GROUP, VALUE(i),
                             i + LANES < size ? VALUE(i + LANES) : splat(0.0f));
#else
        vi largest = {0};
        for (int64_t i = 0; i < size; i += LANES)
            largest = max_vi(largest, (vi)VALUE(i) & 0x7fffffff);
        const float size_limit = max_size(largest), scale = size_limit / LARGEST_INPUT;
        work->input_scales[row] = scale;
        const vf inverse_scale = splat(size_limit > 1e-30f ? LARGEST_INPUT / size_limit : 0.0f);
        const int64_t units = blocks_of(size, 64);
        for (int64_t i = 0; i < units * 64; i += LANES) {
            const vf value = i < size ? VALUE(i) * inverse_scale : splat(0.0f);
            store_int8((char *)work->inputs + tile_at(2 * row, i / 64, units), i % 64,
                       (vi)(value + ROUNDING) - (vi)splat(ROUNDING));
        }
#endif
    }
#undef VALUE
}

static void write_input(const Work *work, int64_t row, const float *from, int64_t size,
                        const float *norm) {
    write_formatted(work, row, from, size, norm, work->decoder->format);
}

INLINE vf stored(const void *base, int64_t at, int64_t format) {
    return format == FLOAT32 ? load((const float *)base + at)
                             : load_half((const uint16_t *)base + at);
}

/* writes the embedding of a row's token */
static void embed(const Work *work, int64_t row, float *to) {
    const Decoder *decoder = work->decoder;
    const int64_t token = work->pass->tokens[row] - decoder->head.first, hidden = decoder->hidden;
    if (decoder->embedding != NULL) {
        for (int64_t i = 0; i < hidden; i += LANES)
            store(to + i, stored(decoder->embedding, token * hidden + i, decoder->kv_format) *
                              decoder->embedding_scale);
        return;
    }
    unpack_output(&decoder->lookup, token, to);
    for (int64_t i = 0; i < hidden; i += LANES)
        store(to + i, load(to + i) * decoder->embedding_scale);
}

static void norm_row(const Work *work, const float *from, int64_t size, const float *norm,
                     float *to) {
    const RowNorm own = norm_of(work->decoder, from, size, norm);
    for (int64_t i = 0; i < size; i += LANES) store(to + i, normed(&own, from, i));
}

/* adds a normed row to the residual stream */
static void add_normed(const Work *work, int64_t row, const float *from, const float *norm) {
    const int64_t hidden = work->decoder->hidden;
    float *to = work->x + row * hidden;
    const RowNorm own = norm_of(work->decoder, from, hidden, norm);
    for (int64_t i = 0; i < hidden; i += LANES) store(to + i, load(to + i) + normed(&own, from, i));
}

/* writes what enters the first layer in place of a token: its embedding, position and norm */
static void start_row(const Work *work, int64_t row) {
    const Decoder *decoder = work->decoder;
    const int64_t hidden = decoder->hidden;
    float *x = work->x + row * hidden;
    embed(work, row, x);
    if (decoder->is_start_norm_first) norm_row(work, x, hidden, decoder->start_norm, x);
    if (decoder->positions != NULL && work->pass->tokens[row] != decoder->unplaced) {
        const float *position = decoder->positions + work->pass->rope_position[row] * hidden;
        for (int64_t i = 0; i < hidden; i += LANES) store(x + i, load(x + i) + load(position + i));
    }
    if (!decoder->is_start_norm_first && decoder->start_norm != NULL)
        norm_row(work, x, hidden, decoder->start_norm, x);
}

/* Writes the input of a product of the embedding of a row's token and a state, both normed; the
 * product after it overwrites work->wide. Returns the normed state. */
static const float *write_joined(const Work *work, int64_t row, const float *state,
                                 const float *embedding_norm, const float *state_norm) {
    const int64_t hidden = work->decoder->hidden;
    float *both = work->wide + row * 2 * hidden;
    embed(work, row, both);
    norm_row(work, both, hidden, embedding_norm, both);
    norm_row(work, state, hidden, state_norm, both + hidden);
    write_input(work, row, both, 2 * hidden, NULL);
    return both + hidden;
}

/* writes the input of a layer beside the residual stream; the product after it overwrites work->wide */
static void write_beside(const Work *work, int64_t row, const float *norm) {
    const int64_t hidden = work->decoder->hidden;
    float *both = work->wide + row * 2 * hidden;
    memcpy(both, work->x + row * hidden, (size_t)hidden * sizeof(float));
    embed(work, row, both + hidden);
    write_input(work, row, both, 2 * hidden, norm);
}

/* writes the input of the projection; the products after it overwrite work->wide */
static void write_features(const Work *work, int64_t row) {
    const Decoder *decoder = work->decoder;
    const int64_t size = decoder->projection.inputs, part = decoder->feature_part;
    const float *from = work->pass->features + row * size;
    if (decoder->feature_norm != NULL) {
        float *normed = work->wide + row * size;
        for (int64_t at = 0; at < size; at += part)
            norm_row(work, from + at, part, decoder->feature_norm + at, normed + at);
        from = normed;
    }
    write_formatted(work, row, from, size, NULL, decoder->projection.format);
}

/* norm of one head, then its rotation by position */
static void rotate_head(const Work *work, float *head, const float *norm, int64_t row,
                        int64_t rope) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, rotary = pass->rotary_dim, half = rotary / 2;
    if (norm != NULL) norm_row(work, head, dim, norm, head);
    if (rope < 0) return;
    if (decoder->shared_dim) head += dim - decoder->shared_dim;
    const float *cosine = pass->cosines[rope] + pass->rope_position[row] * rotary,
                *sine = pass->sines[rope] + pass->rope_position[row] * rotary;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vf low = load(head + i), high = load(head + i + half);
        store(head + i, low * load(cosine + i) - high * load(sine + i));
        store(head + i + half, high * load(cosine + i + half) + low * load(sine + i + half));
    }
    for (; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

/* multiplies the results of a row's attention by the logistic function of its gate */
static void gate_attention(const Work *work, const Layer *layer, int64_t row) {
    const Decoder *decoder = work->decoder;
    const int64_t dim = decoder->head_dim, width = decoder->heads * dim;
    const float *gate = inputs_of_row(work, layer, row) +
                        (decoder->heads + 2 * decoder->kv_heads) * dim;
    float *to = work->mixed + (row * decoder->all_heads + decoder->first_head) * dim;
    for (int64_t i = 0; i < width; i += LANES) {
        const vf of_numbers = layer->gate_size == 1 ? splat(gate[i / dim]) : load(gate + i);
        store(to + i, load(to + i) / (1.0f + exp16(-of_numbers)));
    }
}

/* writes the normed vector of a latent as the input of its product */
static void write_latent(const Work *work, const Layer *layer, const Latent *latent, int64_t row) {
    float *vector = work->wide + row * layer->width + latent->from;
    const int64_t size = latent->product.inputs;
    if (latent->norm != NULL) {
        const vf inverse = splat(inverse_rms(vector, size, latent->epsilon));
        for (int64_t i = 0; i < size; i += LANES)
            store(vector + i, load(vector + i) * inverse * load(latent->norm + i));
    }
    write_input(work, row, vector, size, NULL);
}

/* Latent attention: keys and values of all heads from what the last latent gives, each key before
 * its value, and from the part of the keys that heads share, which follows that latent vector. */
static void expand_row(const Work *work, const Layer *layer, int64_t row) {
    const Decoder *decoder = work->decoder;
    const Latent *latent = layer->latents + layer->num_latents - 1;
    const int64_t dim = decoder->head_dim, shared = decoder->shared_dim, own = dim - shared,
                  size = decoder->value_dim;
    const float *start = work->wide + row * layer->width,
                *last = start + latent->from + latent->product.inputs,
                *from = start + latent->product.first;
    float *key = inputs_of_row(work, layer, row) + decoder->heads * dim,
          *value = key + decoder->heads * dim;
    for (int64_t h = 0; h < decoder->heads; h++, key += dim, value += dim, from += own + size) {
        memcpy(key, from, (size_t)own * sizeof(float));
        memcpy(key + own, last, (size_t)shared * sizeof(float));
        memcpy(value, from + own, (size_t)size * sizeof(float));
        memset(value + size, 0, (size_t)(dim - size) * sizeof(float));
    }
}

static void store_row(const Work *work, const Layer *layer, int64_t row) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim;
    float *query = inputs_of_row(work, layer, row), *key = query + decoder->heads * dim,
          *value = key + decoder->kv_heads * dim;
    const float *query_norm = layer->query_norm, *key_norm = layer->key_norm;
    if (decoder->shared_dim) expand_row(work, layer, row);
    if (decoder->has_joint_norms) {
        if (work->pass->team != NULL) query_norm = key_norm = NULL; /* see norm_heads */
        if (query_norm != NULL) norm_row(work, query, decoder->heads * dim, query_norm, query);
        if (key_norm != NULL) norm_row(work, key, decoder->kv_heads * dim, key_norm, key);
        query_norm = key_norm = NULL;
    }
    for (int64_t h = 0; h < decoder->heads; h++)
        rotate_head(work, query + h * dim, query_norm, row, layer->rope);
    if (pass->query_scales != NULL) {
        const float scale = pass->query_scales[pass->rope_position[row]];
        for (int64_t i = 0; i < decoder->heads * dim; i += LANES)
            store(query + i, load(query + i) * scale);
    }
    for (int64_t h = 0; h < decoder->kv_heads; h++) {
        rotate_head(work, key + h * dim, key_norm, row, layer->rope);
        int64_t at = (pass->slot[row] * pass->slot_step + h * pass->places + pass->place[row]) *
                     kv_step(decoder);
        if (decoder->cache_format == INT8) {
            store_codes((int8_t *)layer->keys + at, key + h * dim, dim);
            store_codes((int8_t *)layer->values + at, value + h * dim, dim);
            continue;
        }
        for (int64_t i = 0; i < dim; i += LANES) {
            if (decoder->kv_format == FLOAT32) {
                store((float *)layer->keys + at + i, load(key + h * dim + i));
                store((float *)layer->values + at + i, load(value + h * dim + i));
            } else {
                store_half((uint16_t *)layer->keys + at + i, load(key + h * dim + i));
                store_half((uint16_t *)layer->values + at + i, load(value + h * dim + i));
            }
        }
    }
}
