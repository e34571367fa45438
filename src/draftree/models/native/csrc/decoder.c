/* A pass of a decoder over a few rows, as close to the speed of memory as it gets.
 *
 * Every row is computed by the same arithmetic in the same order, whatever stands beside it: the
 * product of a row with a weight adds up along the inner dimension only, and attention adds a row's
 * keys in the order of their positions, in blocks of 64, wherever they lie. So a token's logits are
 * bit-identical whether it is scored alone or in any tree.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include "attention.h"
#include "attention_tiles.h"
#include "products.h"
#include "rows.h"
#include "structures.h"
#include "threads.h"
#if AMX
#include <sys/syscall.h>
#endif

/* adds a product's normed result to the residual stream */
static void add_normed(const Work *work, int64_t row, const float *norm) {
    const Decoder *decoder = work->decoder;
    const int64_t hidden = decoder->hidden;
    const float *from = work->wide + row * hidden;
    float *to = work->x + row * hidden;
    const vf inverse = splat(inverse_rms(from, hidden, decoder->epsilon));
    for (int64_t i = 0; i < hidden; i += LANES)
        store(to + i, load(to + i) + load(from + i) * inverse *
                                         (load(norm + i) + splat(decoder->norm_offset)));
}

static void attention_part(Work *work, const Layer *layer, float *scratch, int phase) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    EACH(row, work->rows, phase)
        put_input(work, row, work->x + row * decoder->hidden, decoder->hidden,
                  layer->attention_norm);
    product(work, &layer->qkv, work->rows, phase + 1, TO_WIDE);
    EACH(row, work->rows, phase + 2) place_row(work, layer, row);
    EACH(item, pass->num_chunks * decoder->kv_heads, phase + 3) {
        /* the last rows see most: they go first */
        int64_t chunk = pass->num_chunks - 1 - item / decoder->kv_heads;
        const int64_t from = pass->chunks[chunk], to = pass->chunks[chunk + 1],
                      kv_head = item % decoder->kv_heads;
#if AMX
        if (decoder->kv_format == BFLOAT16) {
            attend_by_tiles(work, layer, scratch, from, to, kv_head);
            continue;
        }
#endif
        attend(work, layer, scratch, from, to, kv_head);
    }
    const int64_t width = decoder->heads * decoder->head_dim;
    EACH(row, work->rows, phase + 4) put_input(work, row, work->mixed + row * width, width, NULL);
    product(work, &layer->output, work->rows, phase + 5,
            layer->attention_post_norm == NULL ? TO_STREAM : TO_WIDE);
    if (layer->attention_post_norm == NULL) return;
    EACH(row, work->rows, phase + 6) add_normed(work, row, layer->attention_post_norm);
}

static void mlp_part(Work *work, const Layer *layer, int phase) {
    const Decoder *decoder = work->decoder;
    EACH(row, work->rows, phase)
        put_input(work, row, work->x + row * decoder->hidden, decoder->hidden, layer->mlp_norm);
    product(work, &layer->gate_up, work->rows, phase + 1, TO_MLP);
    Work down = *work;
    if (decoder->format != INT8) { /* already in the right format */
        down.inputs = work->mixed;
    } else {
        EACH(row, work->rows, phase + 2)
            put_input(work, row, work->mixed + row * decoder->mlp, decoder->mlp, NULL);
    }
    product(&down, &layer->down, work->rows, phase + 3,
            layer->mlp_post_norm == NULL ? TO_STREAM : TO_WIDE);
    if (layer->mlp_post_norm == NULL) return;
    EACH(row, work->rows, phase + 4) add_normed(work, row, layer->mlp_post_norm);
}

enum { PHASES = 12 };

static void run_thread(void *argument, int thread) {
    Work *work = argument;
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    float *scratch = work->scratch + thread * work->scratch_size;
#if AMX
    TileConfig before;
    const int tiles = decoder->format != FLOAT32;
    if (tiles) {
        _tile_storeconfig(&before);
        configure_tiles();
    }
#endif
    EACH(row, work->rows, 0) {
        if (pass->hidden_in == NULL) embed(work, row);
        else
            memcpy(work->x + row * decoder->hidden, pass->hidden_in + row * decoder->hidden,
                   (size_t)decoder->hidden * sizeof(float));
    }
    int phase = 4;
    for (int64_t i = pass->first_layer; i < pass->last_layer; i++, phase += PHASES) {
        const Layer *layer = decoder->layers + i;
        if (pass->skipped == NULL || !pass->skipped[2 * i])
            attention_part(work, layer, scratch, phase);
        if (pass->skipped == NULL || !pass->skipped[2 * i + 1]) mlp_part(work, layer, phase + 7);
    }
    if (pass->hidden_out != NULL)
        EACH(row, work->rows, 1)
            memcpy(pass->hidden_out + row * decoder->hidden, work->x + row * decoder->hidden,
                   (size_t)decoder->hidden * sizeof(float));
    if (pass->num_logits) {
        EACH(row, pass->num_logits, 2)
            put_input(work, row, work->x + pass->logit_rows[row] * decoder->hidden, decoder->hidden,
                      decoder->final_norm);
        product(work, &decoder->head, pass->num_logits, 3, TO_LOGITS);
    }
#if AMX
    /* another library may believe that its own configuration still stands */
    if (tiles) {
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
#endif
}

static struct {
    char *memory;
    size_t size;
} arena;
static pthread_mutex_t one_pass = PTHREAD_MUTEX_INITIALIZER;

static size_t put(char *base, size_t *used, size_t bytes) {
    (void)base;
    size_t at = *used;
    *used += (bytes + 127) / 64 * 64;
    return at;
}

/* 0: done; 1: no memory */
int draftree_pass(const Decoder *decoder, Pass *pass) {
    pthread_mutex_lock(&one_pass);
    Work work = {.decoder = decoder, .pass = pass, .rows = pass->rows};
    const int64_t rows = (pass->rows + 15) / 16 * 16, dim = decoder->head_dim;
    const int64_t all_heads = (decoder->heads + 2 * decoder->kv_heads) * dim,
                  widest = most(all_heads, decoder->hidden);
    const int64_t inputs = most(most(decoder->hidden, decoder->heads * dim), decoder->mlp) + 64;
    const int64_t kept = most(decoder->heads * dim, decoder->mlp + 64);
    int64_t queries = 0;
    for (int64_t i = 0; i < pass->num_chunks; i++)
        queries = most(queries, (pass->chunks[i + 1] - pass->chunks[i]) *
                                    (decoder->heads / decoder->kv_heads));
    const int64_t phases = 4 + PHASES * (pass->last_layer - pass->first_layer);
    if (pass->num_threads > MAX_THREADS) pass->num_threads = MAX_THREADS;
    work.scratch_size = (2 * KEY_BLOCK * dim + queries * (dim + 2) + 127) / 16 * 16;
#if AMX
    work.scratch_size = most(work.scratch_size,
                             (int64_t)(tiles_bytes(dim, blocks_of(queries, QUERIES)) + 127) / 64 *
                                 16);
#endif
    size_t used = 64;
    size_t x = put(NULL, &used, (size_t)(rows * decoder->hidden) * 4),
           wide = put(NULL, &used, (size_t)(rows * widest) * 4);
    size_t mixed = put(NULL, &used, (size_t)(rows * kept) * 4),
           input = put(NULL, &used, (size_t)(rows * inputs) * 4);
    size_t scales = put(NULL, &used, (size_t)rows * 4),
           next = put(NULL, &used, (size_t)phases * sizeof(Phase));
    size_t scratch = put(NULL, &used, (size_t)(work.scratch_size * pass->num_threads) * 4);
    if (used > arena.size) {
        free(arena.memory);
        arena.size = used + used / 4;
        arena.memory = NULL;
        if (posix_memalign((void **)&arena.memory, 64, arena.size)) arena.memory = NULL;
        if (arena.memory == NULL) {
            arena.size = 0;
            pthread_mutex_unlock(&one_pass);
            return 1;
        }
        memset(arena.memory, 0, arena.size);
    }
    char *base = arena.memory;
    work.x = (float *)(base + x);
    work.wide = (float *)(base + wide);
    work.mixed = (float *)(base + mixed);
    work.inputs = base + input;
    work.input_scales = (float *)(base + scales);
    work.scratch = (float *)(base + scratch);
    work.phases = (Phase *)(base + next);
    memset(base + next, 0, (size_t)phases * sizeof(Phase));
    draftree_in_parallel(run_thread, &work, (int)pass->num_threads);
    pthread_mutex_unlock(&one_pass);
    return 0;
}

/* 1 if the tiles may be used; 0 if this build needs them and may not; asked once before the first
 * pass */
int draftree_ready(void) {
#if AMX
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return 1;
#endif
}

const char *draftree_instructions(void) {
#if AMX
    return "AMX tiles";
#elif defined(__AVX512BF16__)
    return "AVX-512 with bfloat16 and int8 products";
#elif defined(__AVX512VNNI__)
    return "AVX-512 with int8 products";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__FMA__)
    return "AVX2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "plain vectors";
#endif
}

/* sizes that the other side must agree on */
void draftree_sizes(int64_t *sizes) {
    sizes[0] = sizeof(Linear);
    sizes[1] = sizeof(Layer);
    sizes[2] = sizeof(Decoder);
    sizes[3] = sizeof(Pass);
    sizes[4] = ATTENTION_ROWS;
}
