/* Products without tiles. A kernel multiplies a few rows by a few inputs of one, two or four blocks
 * of outputs, with all sums in registers. If there are sums for all rows, they are multiplied in
 * one sweep over the weights, two blocks at once if four are too many, so that a weight is loaded
 * into a register once. More rows take several calls for each piece of the inputs; sums are kept
 * between calls, so weights are in the nearest cache for all rows but the first ones. The order in
 * which inputs are added does not depend on the number of rows, so neither do a row's bits.
 */
#pragma once
#include "products_kernels.h"

enum { PREFETCH_BYTES = 2048, ROWS_PER_CALL = 48, LONG_PIECE = 640, LONG_FROM = 4 /* calls */ };

/* the largest number of rows of a kernel for `count` blocks */
INLINE int64_t rows_at_once(int64_t format, int64_t count) {
    const int64_t rows = SUMS_AT_ONCE / PARTS / count / (format == INT8 ? SUMS_OF_ROW : 1);
    return min_int(rows, MOST_ROWS);
}

/* Inputs per kernel call. If sums of 8-bit products are converted to float32 on the way, it must
 * not depend on the number of rows. With more rows than a few calls take, pieces are long: their
 * weights are in the second cache, and sums are loaded and stored less often. */
INLINE int64_t inputs_of_piece(int64_t format, int64_t inputs, int64_t calls) {
    if (format == INT8 && !SPLIT_BYTES && !BYTE_GROUPS) return UNITS_IN_SUM * 64;
    if (calls == 1) return inputs;
    if (format == FLOAT32 || calls < LONG_FROM) return format == INT8 ? 128 : 64;
    return blocks_of(inputs, blocks_of(inputs, LONG_PIECE) * 64) * 64;
}

/* The calls of a piece prefetch the weights that the next piece needs, each a share of them, so
 * that the memory is always in use. If there is one call only, it prefetches a little ahead itself. */
INLINE const char *weights_to_prefetch(const Work *work, const Linear *linear, int64_t block,
                                       int64_t from, int64_t to, int is_only) {
    const int64_t format = linear->format, bytes = block_bytes(linear->inputs, format);
    const int64_t of_input = format == FLOAT32 ? 64 : 1024 / inner_block(format);
    const char *weight = (const char *)linear->weight + block * bytes;
    if (is_only) return weight + from * of_input + PREFETCH_BYTES;
    return to < linear->inputs ? weight + to * of_input
                               : weight + work->pass->num_threads * GROUP * bytes;
}

/* Adds the products of some rows and `count` blocks to their sums. */
INLINE void add_blocks(const Work *work, const Linear *linear, int64_t row, int64_t num_rows,
                       int64_t block, int count, int first_part, Sums *sums) {
    const int64_t format = linear->format, most = rows_at_once(format, count);
    const int is_only = num_rows <= most;
    const int64_t calls = blocks_of(num_rows, most),
                  step = inputs_of_piece(format, linear->inputs, calls);
    for (int64_t from = 0; from < linear->inputs; from += step) {
        Piece piece = {work, linear, .block = block, .from = from,
                       .to = min_int(from + step, linear->inputs), .first_part = first_part};
        piece.next_weights = weights_to_prefetch(work, linear, block, from, piece.to, is_only);
        for (int64_t call = 0, r = 0, end; call < calls; call++, r = end) {
            end = num_rows * (call + 1) / calls;
            piece.first_step = (unsigned)blocks_of(call * STEPS_OF_UNIT, calls);
            piece.steps = (unsigned)blocks_of((call + 1) * STEPS_OF_UNIT, calls) - piece.first_step;
            piece.row = row + r;
            piece.partial_sums = sums + r;
            add_rows(piece, (int)(end - r), count);
        }
    }
}

/* Up to ROWS_PER_CALL rows by a group of blocks. */
INLINE void product_by_rows(const Work *work, const Linear *linear, int64_t row, int64_t num_rows,
                            int64_t block, int count, int target) {
    const int64_t format = linear->format;
    Sums sums[ROWS_PER_CALL];
    memset(sums, 0, (size_t)num_rows * sizeof(Sums));
    int at_once = count;
    while (at_once > 2 && num_rows > rows_at_once(format, at_once)) at_once /= 2;
    if (num_rows > rows_at_once(format, at_once)) at_once = count; /* no single sweep anyway */
    for (int i = 0; i < count; i += at_once)
        add_blocks(work, linear, row, num_rows, block + i, at_once, i * PARTS, sums);
    for (int64_t r = 0; r < num_rows; r++) {
        vf values[GROUP];
        memcpy(values, &sums[r], sizeof(values));
        for (int i = 0; i < count && format == INT8; i++) {
#if SPLIT_BYTES
            const vi extra = *(const vi_loose *)(linear->sums + (block + i) * LANES) * 128;
            values[i] = combine_bytes((vi)sums[r].bytes[0][i] - extra,
                                      (vi)sums[r].bytes[1][i] - extra);
#endif
            if (BYTE_GROUPS) values[i] *= load(linear->scale + (block + i) * LANES);
            else values[i] = dequantized(work, linear, row + r, block + i, values[i]);
        }
        finish_blocks(work, linear, row + r, block, count, values, target);
    }
}
