/* A forward pass of a decoder over a few rows, limited by memory bandwidth.
 *
 * The arithmetic of a row and its order do not depend on the other rows: the product of a row with
 * a weight sums along the inner dimension only, and attention sums over a row's keys in the order
 * of their positions, in blocks of 64, wherever they are stored. So a token's logits are
 * bit-identical in every batch and every tree.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "attention.h"
#include "experts.h"
#include "memory.h"
#include "products.h"
#include "recurrence.h"
#include "rows.h"
#include "steps.h"
#include "structures.h"
#include "threads.h"
#if AMX
#include <sys/syscall.h>
#endif

/* adds a product's normed result to the residual stream */
static void add_normed_row(const Work *work, int64_t row, const float *norm) {
    add_normed(work, row, work->joint + row * work->decoder->hidden, norm);
}

/* adds the residual stream to the results of a layer beside it */
static void add_stream(const Work *work, int64_t row) {
    const int64_t hidden = work->decoder->hidden;
    float *to = work->joint + row * hidden;
    for (int64_t i = 0; i < hidden; i += LANES)
        store(to + i, load(to + i) + load(work->x + row * hidden + i));
}

INLINE int is_captured(const Pass *pass, int64_t index, int64_t from, int64_t to) {
    return pass->captured_layers[index] >= from && pass->captured_layers[index] <= to;
}

INLINE int captures(const Pass *pass, int64_t from, int64_t to) {
    int found = 0;
    for (int64_t i = 0; i < pass->num_captured; i++) found |= is_captured(pass, i, from, to);
    return found;
}

/* copies a row of the residual stream for the captured layers in a range, both ends included */
static void capture_row(const Work *work, int64_t row, int64_t from, int64_t to) {
    const Pass *pass = work->pass;
    const int64_t hidden = work->decoder->hidden;
    for (int64_t i = 0; i < pass->num_captured; i++)
        if (is_captured(pass, i, from, to))
            memcpy(pass->captured + (row * pass->num_captured + i) * hidden, work->x + row * hidden,
                   (size_t)hidden * sizeof(float));
}

/* The first step of a sublayer: reads the residual stream `stream`, unchanged by the layers since
 * `from`, and writes the normed one in this format. */
static void norm_and_capture(const Work *work, const float *stream, const float *norm,
                             const Layer *joined, int64_t from, int64_t layer, int64_t format,
                             int phase) {
    const int64_t hidden = work->decoder->hidden;
    EACH(row, work->rows, phase) {
        float *x = work->x + row * hidden;
        capture_row(work, row, from, layer);
        if (row >= first_context(work->pass)) {
            write_formatted(work, row, x, hidden, work->decoder->context_norm, format);
        } else if (joined != NULL && joined->is_beside) {
            write_beside(work, row, norm);
        } else if (joined != NULL) {
            const float *state = write_joined(work, row, x, joined->embedding_norm, norm);
            if (joined->is_normed_residual) memcpy(x, state, (size_t)hidden * sizeof(float));
        } else if (work->decoder->is_post_norm) {
            norm_row(work, x, hidden, norm, x);
            write_formatted(work, row, x, hidden, NULL, format);
        } else {
            write_formatted(work, row, stream + row * hidden, hidden, norm, format);
        }
        if (work->decoder->is_parallel && stream == work->x)
            memcpy(work->before + row * hidden, x, (size_t)hidden * sizeof(float));
    }
}

/* Norms over all heads of a team: each process copies its heads for the others, and norms them by
 * what all have copied. */
static void norm_heads(const Work *work, const Layer *layer, int phase) {
    const Decoder *decoder = work->decoder;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads,
                  queries = decoder->heads * dim, keys = queries / group,
                  all_queries = decoder->all_heads * dim, all_keys = all_queries / group,
                  first_query = decoder->first_head * dim, first_key = first_query / group;
    EACH(row, work->rows, phase + SHARE_HEADS) {
        const float *query = inputs_of_row(work, layer, row);
        float *to = work->mixed + row * (all_queries + all_keys);
        memcpy(to + first_query, query, (size_t)queries * sizeof(float));
        memcpy(to + all_queries + first_key, query + queries, (size_t)keys * sizeof(float));
    }
    meet(work, phase + SHARE_HEADS);
    EACH(row, work->rows, phase + NORM_HEADS) {
        float *query = inputs_of_row(work, layer, row), *key = query + queries;
        const float *of_all = work->mixed + row * (all_queries + all_keys),
                    *keys_of_all = of_all + all_queries;
        const RowNorm of_query = norm_of(decoder, of_all, all_queries, layer->query_norm),
                      of_key = norm_of(decoder, keys_of_all, all_keys, layer->key_norm);
        for (int64_t i = 0; i < queries; i += LANES)
            store(query + i, normed(&of_query, of_all, first_query + i));
        for (int64_t i = 0; i < keys; i += LANES)
            store(key + i, normed(&of_key, keys_of_all, first_key + i));
    }
    meet(work, phase + NORM_HEADS);
}

static void run_attention(const Work *work, const Layer *layer, float *scratch, int phase) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    if (decoder->has_joint_norms && pass->team != NULL) norm_heads(work, layer, phase);
    EACH(row, work->rows, phase + PLACE) store_row(work, layer, row);
    EACH(item, pass->num_chunks * decoder->kv_heads, phase + ATTEND) {
        /* the last rows attend to most keys: they go first */
        int64_t chunk = pass->num_chunks - 1 - item / decoder->kv_heads;
        const int64_t first = pass->chunks[chunk], end = pass->chunks[chunk + 1];
        const int64_t kv_head = item % decoder->kv_heads;
        attend(work, layer, scratch, first, end, kv_head);
    }
    if (layer->gate_size > 0)
        EACH(row, work->rows, phase + GATE) gate_attention(work, layer, row);
    meet(work, phase + ATTEND);
}

/* computes the inputs of a mixer from the normed stream */
static void prepare_mixer(const Work *work, const Layer *layer, int phase) {
    Work own = *work;
    own.row_width = layer->width;
    product(&own, &layer->qkv, work->rows, phase + QKV, TO_MIXER);
    for (int i = 0; i < layer->num_latents; i++) {
        const int first = phase + LATENTS + 2 * i;
        EACH(row, work->rows, first) write_latent(work, layer, layer->latents + i, row);
        product(&own, &layer->latents[i].product, work->rows, first + 1, TO_MIXER);
    }
}

/* `stream`: the residual stream, or its sum with the results of the layer beside it */
static void mixer_part(Work *work, const float *stream, int64_t index, int64_t from, float *scratch,
                       int phase) {
    const Decoder *decoder = work->decoder;
    const Layer *layer = decoder->layers + index;
    const Layer *joined = layer->embedding_norm == NULL && !layer->is_beside ? NULL : layer;
    norm_and_capture(work, stream, layer->attention_norm, joined, from, index, decoder->format,
                     phase + ATTENTION_NORM);
    prepare_mixer(work, layer, phase);
    const Recurrence *recurrence = layer->recurrence;
    const int has_both = recurrence != NULL && recurrence->first_input > 0;
    if (recurrence == NULL || has_both) run_attention(work, layer, scratch, phase);
    if (recurrence != NULL) run_recurrence(work, layer, scratch, phase);
    const int64_t width = layer->output.inputs, rows = first_context(work->pass);
    if (rows == 0) return;
    EACH(row, rows, phase + OUTPUT_INPUT)
        write_input(work, row,
                    has_both ? joined_results(work, layer, row) : work->mixed + row * width, width,
                    NULL);
    product(work, &layer->output, rows, phase + OUTPUT,
            layer->attention_post_norm == NULL && !layer->is_beside ? TO_STREAM : TO_JOINT);
    meet(work, phase + OUTPUT);
    if (layer->attention_post_norm == NULL) return;
    EACH(index, num_own_rows(work, rows), phase + ATTENTION_POST_NORM)
        add_normed_row(work, own_row(work, index), layer->attention_post_norm);
    meet(work, phase + ATTENTION_POST_NORM);
}

/* attention to sources, the second part of a layer's attention */
static void source_part(Work *work, int64_t index, float *scratch, int phase) {
    const Decoder *decoder = work->decoder;
    const Layer *layer = decoder->layers + index;
    const Pass *pass = work->pass;
    /* no layer's input is here */
    norm_and_capture(work, work->x, layer->source_norm, NULL, index + 1, index, decoder->format,
                     phase + SOURCE_NORM);
    product(work, &layer->source_query, work->rows, phase + SOURCE_QUERY, TO_WIDE);
    EACH(item, pass->num_chunks * decoder->kv_heads, phase + SOURCE_ATTEND) {
        const int64_t chunk = item / decoder->kv_heads;
        attend_source(work, index, scratch, pass->chunks[chunk], pass->chunks[chunk + 1],
                      item % decoder->kv_heads);
    }
    const int64_t width = decoder->heads * decoder->head_dim;
    EACH(row, work->rows, phase + SOURCE_INPUT)
        write_input(work, row, work->mixed + row * width, width, NULL);
    product(work, &layer->source_output, work->rows, phase + SOURCE_OUTPUT, TO_STREAM);
}

/* `stream`: the residual stream, of a parallel layer the one before its attention, or of a layer beside
 * the residual stream the results of its attention */
static void mlp_part(Work *work, const float *stream, int64_t index, int64_t from, int phase) {
    const Decoder *decoder = work->decoder;
    const Layer *layer = decoder->layers + index;
    const Experts *experts = layer->experts;
    norm_and_capture(work, stream, layer->mlp_norm, NULL, from, index,
                     experts == NULL ? decoder->format : experts->router.format, phase + MLP_NORM);
    if (experts != NULL) {
        run_experts(work, layer, stream, phase);
        return;
    }
    Work down = *work;
    down.inner = layer->down.inputs;
    if (decoder->is_gated) product(&down, &layer->gate_up, work->rows, phase + GATE_UP, TO_MLP);
    else product(&down, &layer->gate_up, work->rows, phase + GATE_UP, TO_PLAIN_MLP);
    meet(work, phase + GATE_UP);
    if (decoder->format < INT8) { /* already in the right format */
        down.inputs = work->mixed;
    } else {
        EACH(row, work->rows, phase + DOWN_INPUT)
            write_input(work, row, work->mixed + row * down.inner, down.inner, NULL);
    }
    product(&down, &layer->down, work->rows, phase + DOWN,
            layer->mlp_post_norm == NULL && !layer->is_beside ? TO_STREAM : TO_JOINT);
    meet(work, phase + DOWN);
    if (layer->is_beside)
        EACH(row, work->rows, phase + ADD_STREAM) add_stream(work, row);
    if (layer->mlp_post_norm == NULL) return;
    EACH(index, num_own_rows(work, work->rows), phase + MLP_POST_NORM)
        add_normed_row(work, own_row(work, index), layer->mlp_post_norm);
    meet(work, phase + MLP_POST_NORM);
}

static void run_layers(Work *work, float *scratch) {
    const Pass *pass = work->pass;
    Work asking = *work; /* without context rows */
    asking.rows = first_context(pass);
    const int64_t last = pass->last_layer;
    int64_t from = pass->first_layer; /* the first layer whose input is not captured yet */
    int phase = PASS_PHASES;
    const float *input = work->x; /* of the next mixer */
    for (int64_t i = pass->first_layer; i < last; i++, phase += LAYER_PHASES) {
        const uint8_t *skipped = pass->skipped == NULL ? NULL : pass->skipped + 2 * i;
        const float *stream = work->x;
        const Layer *layer = work->decoder->layers + i;
        const int has_mixer = layer->qkv.weight != NULL,
                  has_perceptron = layer->experts != NULL || layer->gate_up.weight != NULL;
        if (has_mixer && (skipped == NULL || !skipped[0])) {
            mixer_part(work, input, i, from, scratch, phase);
            if (layer->source_query.weight != NULL)
                source_part(work, i, scratch, phase);
            if (work->decoder->is_parallel) stream = work->before;
            if (layer->is_beside) stream = work->joint;
            from = i + 1;
        }
        if (asking.rows && has_perceptron && (skipped == NULL || !skipped[1])) {
            mlp_part(&asking, stream, i, from, phase);
            from = i + 1;
        }
        input = stream == work->joint ? stream : work->x;
    }
    if (captures(pass, from, last))
        EACH(row, work->rows, CAPTURE_LAST) capture_row(work, row, from, last);
}

/* whether this process has the embedding of a row's token */
INLINE int has_token(const Work *work, int64_t row) {
    const Linear *head = &work->decoder->head;
    const int64_t column = work->pass->tokens[row] - head->first;
    return work->pass->team == NULL || (column >= 0 && column < head->outputs);
}

/* writes what enters the first layer */
static void start_stream(Work *work) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t hidden = decoder->hidden;
    const int64_t first = pass->num_context ? first_context(pass) : 0;
    if (pass->features != NULL) {
        Work featured = *work;
        featured.x += first * hidden;
        EACH(row, work->rows - first, PROJECTION_INPUT) write_features(work, row);
        product(&featured, &decoder->projection, work->rows - first, PROJECTION, TO_START);
        if (first == 0) return;
    }
    if (pass->hidden_in != NULL && decoder->fusion.weight != NULL) {
        EACH(row, work->rows, PROJECTION_INPUT)
            write_joined(work, row, pass->hidden_in + row * hidden, decoder->fusion_norm,
                         decoder->state_norm);
        product(work, &decoder->fusion, work->rows, PROJECTION, TO_START);
        return;
    }
    if (pass->hidden_in == NULL) {
        EACH(row, pass->features == NULL ? work->rows : first, EMBED) {
            if (has_token(work, row)) start_row(work, row);
        }
    } else {
        EACH(index, num_own_rows(work, work->rows), EMBED) {
            const int64_t row = own_row(work, index);
            memcpy(work->x + row * hidden, pass->hidden_in + row * hidden,
                   (size_t)hidden * sizeof(float));
        }
    }
    meet(work, EMBED);
}

static void run_thread(void *argument, int thread) {
    Work *work = argument;
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
#if AMX
    TileConfig before;
    const int tiles = decoder->format != FLOAT32;
    if (tiles) {
        _tile_storeconfig(&before);
        configure_tiles();
    }
#endif
    const int64_t hidden = decoder->hidden;
    meetings = work->meetings;
    start_stream(work);
    run_layers(work, work->scratch + thread * work->scratch_size);
    if (pass->num_logits) {
        EACH(row, pass->num_logits, FINAL_NORM)
            write_input(work, row, work->x + pass->logit_rows[row] * hidden, hidden,
                        decoder->final_norm);
        product(work, &decoder->head, pass->num_logits, HEAD, TO_LOGITS);
    }
    meet(work, END);
#if AMX
    /* restores the tile configuration of another library */
    if (tiles) {
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
#endif
}

static pthread_mutex_t one_pass = PTHREAD_MUTEX_INITIALIZER;

/* 0: done; 1: no memory */
int draftree_pass(const Decoder *decoder, Pass *pass) {
    pthread_mutex_lock(&one_pass);
    if (pass->num_threads > MAX_THREADS) pass->num_threads = MAX_THREADS;
    Routing routing;
    Work work = {.decoder = decoder, .pass = pass, .rows = pass->rows, .routing = &routing};
    const int64_t layers = pass->last_layer - pass->first_layer;
    const int has_place = place_work(&work, PASS_PHASES + LAYER_PHASES * layers);
    if (has_place) draftree_in_parallel(run_thread, &work, (int)pass->num_threads);
    if (has_place && pass->team != NULL && pass->logits != NULL)
        memcpy(pass->logits, work.logits,
               (size_t)(pass->num_logits * decoder->vocab) * sizeof(float));
    pthread_mutex_unlock(&one_pass);
    return !has_place;
}

/* 1 if this build needs no matrix tiles or the system permits them; 0 if it does not. Called once
 * before the first pass. */
int draftree_ready(void) {
#if AMX
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return 1;
#endif
}
