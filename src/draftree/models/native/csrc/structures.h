/* What a pass works on, and how it lies in memory.
 *
 * Weights are packed ahead. In blocks of 16 outputs:
 *   float32   [block][input][16 outputs]
 *   bfloat16  [block][32 inputs][16 pairs][16 outputs][2]
 *   int8      [block][64 inputs][16 quads][16 outputs][4], with a scale for each output
 * which is what AMX tiles, the dot products of AVX-512 and plain vectors all read without
 * shuffling.
 */
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include "vectors.h"
#if defined(__AMX_TILE__) && defined(__linux__)
#define AMX 1
#else
#define AMX 0
#endif

/* inputs beside int8 weights have 16 bits: their bytes lie apart where bytes are multiplied in
 * fours */
#if AMX || defined(__AVX512VNNI__)
#define BYTES_APART 1
#else
#define BYTES_APART 0
#endif
enum { INPUT_OFFSET = AMX ? 0 : 128 }; /* dot products outside tiles take one side unsigned */

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };
enum { SILU = 0, GELU_TANH = 1 };
enum { TILE_ROWS = 16, KEY_BLOCK = 64, ATTENTION_ROWS = AMX ? 64 : 8, MAX_THREADS = 256 };

typedef struct {
    const void *weight;
    const float *scale;  /* int8: one for each output */
    const int32_t *sums; /* int8: sum of each output's weights */
    const float *bias;   /* or NULL */
    int64_t inputs, outputs;
} Linear;

typedef struct {
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm, *query_norm,
        *key_norm;
    Linear qkv, output, gate_up, down;
    void *keys,
        *values;    /* [slot][kv head][place][head_dim]; slots lie the pass's slot_step apart */
    int64_t window; /* 0: none */
    int64_t rope;   /* which of the pass's tables */
    float scaling;
} Layer;

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, mlp, num_layers, vocab;
    int64_t format, kv_format, activation;
    float epsilon, embedding_scale, norm_offset, residual_scale, logit_scale;
    const void *embedding; /* [vocab][hidden] in kv_format; NULL: the rows of the packed head */
    const float *final_norm;
    const Layer *layers;
    Linear head;
} Decoder;

typedef struct { /* places: of a slot and head; slot_step: places from slot to slot */
    int64_t rows, num_threads, first_layer, last_layer, num_logits, num_chunks, places, slot_step,
        rotary_dim;
    const int64_t *tokens;
    const int64_t *slot, *place, *position; /* a row each */
    const int64_t *identical;               /* keys before this position lie at their position */
    const int64_t *list_start;              /* where a row's list of places behind them starts */
    const int64_t *list;
    const int64_t *chunks; /* first row of each run of rows of one slot; the total behind them */
    const float *cosines[2], *sines[2]; /* [position][rotary_dim] */
    const float *hidden_in;             /* NULL: the tokens' embeddings */
    float *hidden_out;                  /* NULL: not asked for */
    const uint8_t *skipped; /* NULL, or for every layer whether attention and mlp are left out */
    const int64_t *logit_rows;
    float *logits; /* [num_logits][vocab] */
} Pass;

typedef struct {
    atomic_long taken, done;
} Phase; /* pieces of a step of a pass that threads have taken and done */

typedef struct {
    const Decoder *decoder;
    const Pass *pass;
    int64_t rows, row_blocks; /* padded to tiles */
    float *x;                 /* the residual stream [row][hidden] */
    float *wide;              /* outputs of a product [row][widest] */
    float *mixed;             /* attention's result, or the activated mlp [row][...] */
    void *inputs;             /* what the next product reads, in the weights' format */
    float *input_scales;      /* int8: one for each row */
    float *scratch;           /* of each thread */
    int64_t scratch_size;
    Phase *phases;
} Work;

INLINE int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }
INLINE int64_t inner_block(int64_t format) {
    return format == INT8 ? 64 : format == BFLOAT16 ? 32 : 1;
}
INLINE int64_t block_bytes(int64_t inputs, int64_t format) { /* of 16 outputs */
    return format == FLOAT32 ? inputs * 64 : blocks_of(inputs, inner_block(format)) * 1024;
}
/* bfloat16 and int8 rows lie in tiles of 16 rows by 64 bytes; float32 rows lie as they are. A row
 * beside int8 weights takes two rows of tiles: its high bytes and its low ones, both signed, or
 * where bytes are not apart 16 bits whole, in the order 0 2 1 3 of each quad. */
INLINE int64_t tile_rows(int64_t format) { return format == INT8 ? 2 : 1; }
INLINE int64_t tile_at(int64_t row, int64_t unit, int64_t units) {
    return ((row / 16 * units + unit) * 16 + row % 16) * 64;
}
