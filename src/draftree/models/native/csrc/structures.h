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
#include "shared.h"
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

enum { TILE_ROWS = 16, KEY_BLOCK = 64, ATTENTION_ROWS = AMX ? 64 : 8, MAX_THREADS = 256 };

typedef struct {
    atomic_long taken, done;
} Phase; /* pieces of a step of a pass that threads have taken and done */

typedef struct {
    const Decoder *decoder;
    const Pass *pass;
    int64_t rows;
    float *x;            /* the residual stream [row][hidden] */
    float *wide;         /* outputs of a product [row][widest] */
    float *mixed;        /* attention's result, or the activated mlp [row][...] */
    void *inputs;        /* what the next product reads, in the weights' format */
    float *input_scales; /* int8: one for each row */
    float *scratch;      /* of each thread */
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
