/* Products of rows and packed weights, with tiles or without. */
#pragma once
#include "products_groups.h"
#include "products_rows.h"
#include "products_tiles.h"
#include "threads.h"

#define CALLED static __attribute__((noinline)) /* compilers take long if it is inlined */

/* `next`: the first block that the thread multiplies after these, as far as it is known */
CALLED void product_of_group(const Work *work, const Linear *linear, int64_t rows, int64_t block,
                             int count, int target, int64_t next) {
    if (linear->format == GROUPED) {
        for (int64_t row = 0; row < rows; row += ROWS_PER_CALL)
            product_by_groups(work, linear, row, min_int(ROWS_PER_CALL, rows - row), block, count,
                              target, row + ROWS_PER_CALL < rows ? block : next);
        return;
    }
#if AMX
    const int64_t format = linear->format;
    /* int8 sums are the same either way, and tiles are slower for one row */
    if (format == BFLOAT16 || (format == INT8 && rows > 1)) {
        product_by_tiles(work, linear, rows, block, count, target);
        return;
    }
#endif
    for (int64_t row = 0; row < rows; row += ROWS_PER_CALL)
        product_by_rows(work, linear, row, min_int(ROWS_PER_CALL, rows - row), block, count, target,
                        row + ROWS_PER_CALL < rows ? block : next);
}

INLINE int64_t groups_of(const Linear *linear) {
    return blocks_of(blocks_of(linear->outputs, LANES), GROUP);
}

/* one group of blocks */
INLINE void product_of_piece(const Work *work, const Linear *linear, int64_t rows, int64_t group,
                             int target) {
    const int64_t blocks = blocks_of(linear->outputs, LANES),
                  next = (group + work->pass->num_threads) * GROUP;
    int64_t block = group * GROUP;
    if (block + GROUP <= blocks) {
        product_of_group(work, linear, rows, block, GROUP, target, next);
    } else { /* blocks of gate and up are computed in pairs */
        int64_t step = target == TO_MLP ? 2 : 1;
        for (; block < blocks; block += step)
            product_of_group(work, linear, rows, block, (int)step, target, next);
    }
}

/* Distributes blocks over the threads, in groups. Blocks left of groups that the threads share
 * evenly are taken in pairs. A thread takes its next piece before it starts with one, so that it
 * knows which weights to prefetch. */
CALLED void product(const Work *work, const Linear *linear, int64_t rows, int phase, int target) {
    const int64_t threads = work->pass->num_threads, blocks = blocks_of(linear->outputs, LANES);
    const int64_t groups = blocks / (GROUP * threads) * threads,
                  pieces = groups + blocks_of(blocks - groups * GROUP, 2);
    int64_t own = 0;
    for (int64_t piece = take_piece(work, phase), later; piece < pieces; piece = later, own++) {
        later = take_piece(work, phase);
        const int64_t next = min_int(GROUP * min_int(later, groups) + 2 * max_int(later - groups, 0),
                                     blocks);
        const int64_t block = GROUP * min_int(piece, groups) + 2 * max_int(piece - groups, 0);
        if (piece < groups) product_of_group(work, linear, rows, block, GROUP, target, next);
        else if (block + 2 <= blocks) product_of_group(work, linear, rows, block, 2, target, next);
        else product_of_group(work, linear, rows, block, 1, target, next);
    }
    if (target == TO_LOGITS) end_streams();
    wait_for_phase(work, phase, own, pieces);
}
