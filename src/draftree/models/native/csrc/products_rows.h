/* Products without tiles. A kernel multiplies a few rows by a few inputs of one, two or four blocks
 * of outputs, with all sums in registers. If there are sums for all rows, they are multiplied in
 * one sweep over the weights, line after line: four blocks in turns would cost a quarter of the
 * memory's bandwidth. More rows take several calls for each piece of the inputs; sums are kept
 * between calls, so weights are in the nearest cache for all rows but the first ones. The order in
 * which inputs are added does not depend on the number of rows, so neither do a row's bits.
 */
#pragma once
#include "products_kernels.h"

enum { ROWS_PER_CALL = 96, ROWS_OF_ALL_BLOCKS = 2,
       PIECE_BYTES = GROUP * 6144, AHEAD_LINES = 128 /* of all blocks */ };

/* the largest number of rows of a kernel for `count` blocks */
INLINE int64_t rows_at_once(int64_t format, int64_t count) {
    const int64_t rows = SUMS_AT_ONCE / PARTS / count / (format == INT8 ? SUMS_OF_ROW : 1);
    const int unpacks = format == INT8 && PARTS > 1 && !BYTE_GROUPS; /* into registers, too */
    return min_int(rows, unpacks ? 4 : MOST_ROWS);
}

/* the distance of prefetches in `count` blocks, in inputs */
INLINE int64_t inputs_ahead(const Linear *linear, int count) {
    const int64_t lines = AHEAD_LINES / count;
    if (is_compact(linear)) return blocks_of(lines * 64, 4 * FOUR_BYTES) * 32;
    return linear->format == FLOAT32 ? lines : lines / 16 * inner_block(linear->format);
}

INLINE int64_t lines_of_block(int64_t inputs, int64_t format) { /* of 64 bytes */
    return block_bytes(inputs, format) / 64;
}

/* Inputs per kernel call. If sums of 8-bit products are converted to float32 on the way, it must
 * not depend on the number of rows. The weights of a piece and of the next one fit the first cache
 * if several calls read them. A single call is followed by one for the last lines. */
INLINE int64_t inputs_of_piece(const Linear *linear, int64_t calls, int count, int64_t from) {
    const int64_t format = linear->format, inputs = linear->inputs;
    if (format == INT8 && !SPLIT_BYTES && !BYTE_GROUPS) return UNITS_IN_SUM * 64;
    const int64_t unit = format == BFLOAT16 ? 32 : 64;
    if (calls > 1)
        return blocks_of(inputs, blocks_of(count * stored_bytes(linear), PIECE_BYTES) * unit) * unit;
    const int64_t ahead = inputs_ahead(linear, count), all = blocks_of(inputs, 64) * 64;
    return from == 0 && all > ahead ? all - ahead : ahead;
}

/* Plans what a kernel call prefetches: `lines` of each block from `next` on, while it multiplies
 * `steps` lines of each. */
INLINE void plan_prefetch(Piece *piece, const char *next, int64_t lines, int64_t steps) {
    static const uint8_t when[STEPS + 1] = {0, 0x01, 0x11, 0x49, 0x55, 0x6d, 0x77, 0x7f, 0xff};
    piece->next = next;
    piece->next_end = next + lines * 64;
    piece->when = when[min_int(STEPS, blocks_of(lines * STEPS, steps))];
}

/* The calls of a piece prefetch the weights that the next piece needs, each a share of them, so
 * that the memory is always in use. If there is one call only, it prefetches a little ahead itself.
 * `next`: the weights of the blocks after these. */
INLINE void plan_call(Piece *piece, const char *next, int64_t call, int64_t calls, int count,
                      int64_t step) {
    const Linear *linear = piece->linear;
    const int64_t format = linear->format, all = lines_of_block(linear->inputs, format),
                  done = lines_of_block(piece->to, format), left = all - done,
                  own = done - lines_of_block(piece->from, format);
    piece->streams = count;
    piece->stream_stride = piece->stride;
    if (calls == 1) {
        if (left > 0) plan_prefetch(piece, piece->weight + (done - own + AHEAD_LINES / count) * 64, own, own);
        else plan_prefetch(piece, next, own, own);
        return;
    }
    const int64_t lines = min_int(lines_of_block(step, format), left > 0 ? left : all);
    const int64_t first = lines * call / calls, end = lines * (call + 1) / calls;
    plan_prefetch(piece, (left > 0 ? piece->weight + done * 64 : next) + first * 64, end - first, own);
}

/* The same with weights in 12 bits. */
INLINE void plan_compact(Piece *piece, const char *next, int64_t call, int64_t calls, int count) {
    const int64_t ahead = calls > 1 ? piece->to : piece->from + inputs_ahead(piece->linear, count),
                  lines = blocks_of(piece->to - piece->from, 8) * piece->step / 64;
    if (ahead < piece->linear->inputs) next = piece->weight + ahead / 8 * piece->step;
    piece->next = next + lines * call / calls * 64;
    piece->next_step = blocks_of(piece->step / 64, calls) * 64;
}

/* Adds the products of some rows and `count` blocks to their sums. */
INLINE void add_blocks(const Work *work, const Linear *linear, int64_t row, int64_t num_rows,
                       int64_t block, int count, int first_part, Sums *sums, int64_t next_block) {
    const int64_t most = rows_at_once(linear->format, count), calls = blocks_of(num_rows, most);
    const int64_t bytes = stored_bytes(linear);
    const char *weights = linear->weight, *next = weights + next_block * bytes;
    int64_t first[GROUP], exceptions[GROUP]; /* before a piece, and after a call */
    if (is_compact(linear)) memcpy(exceptions, linear->blocks + block, (size_t)count * sizeof(int64_t));
    for (int64_t from = 0, step; from < linear->inputs; from += step) {
        step = inputs_of_piece(linear, calls, count, from);
        Piece piece = {work, linear, .from = from, .to = min_int(from + step, linear->inputs),
                       .weight = weights + block * bytes, .stride = bytes, .first_part = first_part,
                       .block = block};
        if (is_compact(linear)) {
            piece.weight = first_lines(linear, block);
            piece.step = lines_step(linear, block);
            piece.exceptions = exceptions;
            memcpy(first, exceptions, sizeof first);
        }
        for (int64_t call = 0, r = 0, end; call < calls; call++, r = end) {
            end = num_rows * (call + 1) / calls;
            if (is_compact(linear)) {
                memcpy(exceptions, first, sizeof first);
                plan_compact(&piece, next, call, calls, count);
            } else {
                plan_call(&piece, next, call, calls, count, step);
            }
            piece.row = row + r;
            piece.partial_sums = sums + r;
            add_rows(piece, (int)(end - r), count);
        }
    }
}

/* Up to ROWS_PER_CALL rows by a group of blocks. */
INLINE void product_by_rows(const Work *work, const Linear *linear, int64_t row, int64_t num_rows,
                            int64_t block, int count, int target, int64_t next) {
    const int64_t format = linear->format;
    Sums sums[ROWS_PER_CALL];
    memset(sums, 0, (size_t)num_rows * sizeof(Sums));
    /* halves: in one block widened ones wait for each other, and those of many rows for their loads */
    const int sweep = format == BFLOAT16 && (is_compact(linear) || WIDE_HALVES || num_rows > 4) ? 2 : 1;
    int at_once = count;
    if (PARTS == 1 && count > sweep && (is_compact(linear) || num_rows <= rows_at_once(format, sweep)))
        at_once = sweep;
    if (PARTS > 1 && num_rows > ROWS_OF_ALL_BLOCKS) at_once = 1; /* a weight of fewer blocks for more rows */
    for (int i = 0; i < count; i += at_once)
        add_blocks(work, linear, row, num_rows, block + i, at_once, i * PARTS, sums,
                   i + at_once < count ? block + i + at_once : next);
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
