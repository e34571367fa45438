/* The state of a pass, and the layout of packed weights and rows.
 *
 * Weights are packed at load, in blocks of 16 outputs:
 *   float32   [block][input][16 outputs]
 *   bfloat16  [block][32 inputs][16 pairs][16 outputs][2]
 *             or in 12 bits, see compact.h
 *   int8      [block][64 inputs][16 quads][16 outputs][4], with a scale for each output
 * AMX tiles, dot products of AVX-512 and plain vectors read this layout without shuffles.
 */
#pragma once
#include "shared.h"
#include "vectors.h"
#if defined(__AMX_TILE__) && defined(__linux__)
#define AMX 1
#else
#define AMX 0
#endif

/* Inputs of products with int8 weights have 8 bits in groups with scales where dot products of bytes
 * are all there is, see byte_groups.h. Elsewhere they have 16 bits, in two bytes that are apart for
 * tiles, where a second product costs less than sums that leave the tiles. */
#define SPLIT_BYTES AMX
#if !AMX && ((defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)) || \
             (defined(__AVXVNNI__) && !defined(__AVX512F__)))
#define BYTE_GROUPS 1
#else
#define BYTE_GROUPS 0
#endif

/* Pairs of numbers in bfloat16 are multiplied without widening them, by rows and in attention, where
 * the variant has such products. */
#if defined(__AVX512BF16__)
#define HALF_PAIRS 1
#else
#define HALF_PAIRS 0
#endif

/* A row's weights in attention by tiles or in pairs may exceed 1 by this power of two. */
#define HEADROOM 8.0f

enum { TILE_ROWS = 16, KEY_BLOCK = 64, ATTENTION_ROWS = 64, MAX_THREADS = 256 };

typedef struct {
    atomic_long taken, done, met;
    int64_t pieces;
} Phase; /* pieces of a phase that threads have taken, those that are done, threads that met, and the
          * number of pieces if an earlier phase sets it */

/* The start of the memory that a team shares: how often a process has come to the end of a phase. */
typedef struct {
    atomic_long arrived;
} Team;

/* Which experts the rows of a pass use, and where: see experts.h. */
typedef struct {
    int64_t *expert; /* [row][experts of a row], ascending */
    float *weight;   /* [row][experts of a row] */
    int64_t *place;  /* [row][experts of a row] */
    int64_t *row, *expert_at; /* [place]; row -1: none */
    int64_t *first, *size;    /* [expert], places */
    int64_t *used;            /* experts with rows, ascending */
    int64_t num_used;
} Routing;

typedef struct {
    const Decoder *decoder;
    const Pass *pass;
    int64_t rows;
    float *x;            /* the residual stream [row][hidden] */
    float *wide;         /* outputs of a product [row][widest] */
    float *joint;        /* outputs of a product that are normed [row][hidden] */
    float *mixed;        /* result of attention, or of the activation [row][...] */
    float *before;       /* of a parallel layer: the residual stream before it [row][hidden] */
    float *logits;       /* [logit row][vocab] */
    void *inputs;        /* of the next product, in the format of the weights */
    float *input_scales; /* int8: one for each row */
    float *prepared;     /* numbers of the steps of a recurrence */
    float *scratch;      /* of each thread */
    int64_t scratch_size;
    int64_t inner;       /* results of the activation of a row */
    int64_t row_width;   /* numbers of a row before the mixer */
    int64_t input_width, mixed_width; /* room of a row in inputs and mixed, in units of 4 bytes */
    Routing *routing;    /* NULL without experts */
    Phase *phases;
    long meetings; /* of the team before this pass */
} Work; /* a team shares x, joint, mixed and logits */

/* the inputs of a layer's mixer in a row */
INLINE float *inputs_of_row(const Work *work, const Layer *layer, int64_t row) {
    return work->wide + row * layer->width + layer->first_input;
}

/* the first of the rows of which layers compute keys and values only */
INLINE int64_t first_context(const Pass *pass) { return pass->rows - pass->num_context; }

INLINE int64_t min_int(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_int(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }
INLINE int64_t inner_block(int64_t format) {
    return format == INT8 ? 64 : format == BFLOAT16 ? 32 : 1;
}
INLINE int64_t block_bytes(int64_t inputs, int64_t format) { /* of 16 outputs */
    return format == FLOAT32 ? inputs * 64 : blocks_of(inputs, inner_block(format)) * 1024;
}
INLINE int64_t widest_input(const Decoder *decoder) { /* of mixers, projection and fusion, in numbers of a row */
    int64_t widest = decoder->hidden;
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const Layer *layer = decoder->layers + i;
        widest = max_int(widest, layer->qkv.inputs);
        for (int64_t latent = 0; latent < layer->num_latents; latent++)
            widest = max_int(widest, layer->latents[latent].product.inputs);
    }
    return max_int(widest, max_int(decoder->projection.inputs, decoder->fusion.inputs));
}
/* numbers of a row before mixers, or joined results */
INLINE int64_t widest_mixer(const Decoder *decoder) {
    int64_t widest = (decoder->heads + 2 * decoder->kv_heads) * decoder->head_dim;
    for (int64_t i = 0; i < decoder->num_layers; i++)
        widest = max_int(widest, max_int(decoder->layers[i].width, decoder->layers[i].output.inputs));
    return widest;
}
INLINE int64_t widest_result(const Decoder *decoder) { /* of a mixer, in numbers of a row */
    int64_t widest = decoder->all_heads * decoder->head_dim;
    for (int64_t i = 0; i < decoder->num_layers; i++)
        widest = max_int(widest, decoder->layers[i].output.inputs);
    return widest;
}
INLINE int64_t widest_router(const Decoder *decoder) { /* outputs */
    int64_t widest = 0;
    for (int64_t i = 0; i < decoder->num_layers; i++)
        if (decoder->layers[i].experts != NULL)
            widest = max_int(widest, decoder->layers[i].experts->router.outputs);
    return widest;
}
/* Rows in bfloat16 and int8 are stored in tiles of 16 rows by 64 bytes; float32 rows are
 * contiguous, and so are groups of bytes. Another int8 row takes two rows of tiles: its high bytes and its low bytes, both signed,
 * or, if bytes are not apart, whole 16-bit numbers in the order 0 2 1 3 of each quad. */
INLINE int64_t tile_rows(int64_t format) { return format == INT8 ? 2 : 1; }
INLINE int64_t tile_at(int64_t row, int64_t unit, int64_t units) {
    return ((row / 16 * units + unit) * 16 + row % 16) * 64;
}

/* Inputs in bfloat16 are stored as float32, [row][inputs, filled up to a multiple of 32], if they are
 * multiplied as float32: a load then puts one into all lanes. */
#define WIDE_HALVES (!AMX && !HALF_PAIRS)

INLINE const float *wide_input(const void *inputs, int64_t row, int64_t size) {
    return (const float *)inputs + row * blocks_of(size, 32) * 32;
}

/* stores 16 inputs of a row of `size`, rounded to bfloat16, and zeros in what fills up the last 32 */
INLINE void store_half_input(void *inputs, int64_t row, int64_t column, int64_t size, vf value) {
    const int is_odd_end = column % 32 == 0 && column + LANES == size;
#if WIDE_HALVES
    float *to = (float *)wide_input(inputs, row, size) + column;
    store(to, widen(narrow(value)));
    if (is_odd_end) store(to + LANES, splat(0.0f));
#else
    const int64_t units = blocks_of(size, 32);
    uint16_t *to = (uint16_t *)((char *)inputs + tile_at(row, column / 32, units)) + column % 32;
    store_half(to, value);
    if (is_odd_end) store_half(to + LANES, splat(0.0f));
#endif
}

/* Blocks of outputs that a thread takes at once, and sums of a kernel, of one register each: as
 * many as there are registers left for. */
#if defined(__AVX512F__)
enum { GROUP = 4, SUMS_AT_ONCE = 24 };
#else
enum { GROUP = 2, SUMS_AT_ONCE = 12 };
#endif
enum { MOST_ROWS = 12 /* of a kernel */ };

/* without this, gcc leaves loops of more than 16 steps, and clang some of the shorter ones; their sums
 * are then in memory */
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 24")
#endif
/* clang unrolls loops of prefetches, of which most have one step: decoding with 4-bit weights takes
 * 1.25 times as long then */
#if defined(__clang__)
#define ROLLED _Pragma("clang loop unroll(disable)")
#else
#define ROLLED
#endif
/* Weights are read once in a pass and go past the outer caches, which then still hold the caller's
 * code and data for the time between two passes. */
INLINE void prefetch_once(const void *address) { __builtin_prefetch(address, 0, 0); }
#define EACH_PART(i) UNROLLED for (int i = 0; i < count * PARTS; i++)
