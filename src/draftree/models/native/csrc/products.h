/* Products of rows and packed weights, with tiles or without. */
#pragma once
#include "products_groups.h"
#include "products_rows.h"
#include "products_tiles.h"
#include "threads.h"

INLINE void product_of_group(const Work *work, const Linear *linear, int64_t rows, int64_t block,
                             int count, int target) {
    if (linear->format == GROUPED) {
        for (int64_t row = 0; row < rows; row += ROWS_PER_CALL)
            product_by_groups(work, linear, row, min_int(ROWS_PER_CALL, rows - row), block, count,
                              target);
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
        product_by_rows(work, linear, row, min_int(ROWS_PER_CALL, rows - row), block, count,
                        target);
}

INLINE int64_t groups_of(const Linear *linear) {
    return blocks_of(blocks_of(linear->outputs, LANES), GROUP);
}

/* one group of blocks */
INLINE void product_of_piece(const Work *work, const Linear *linear, int64_t rows, int64_t group,
                             int target) {
    const int64_t blocks = blocks_of(linear->outputs, LANES);
    int64_t block = group * GROUP;
    if (block + GROUP <= blocks) {
        product_of_group(work, linear, rows, block, GROUP, target);
    } else { /* blocks of gate and up are computed in pairs */
        int64_t step = target == TO_MLP ? 2 : 1;
        for (; block < blocks; block += step)
            product_of_group(work, linear, rows, block, (int)step, target);
    }
}

/* Distributes blocks over the threads, in groups. Blocks left of groups that the threads share
 * evenly are taken in pairs. */
INLINE void product(const Work *work, const Linear *linear, int64_t rows, int phase, int target) {
    const int64_t threads = work->pass->num_threads, blocks = blocks_of(linear->outputs, LANES);
    const int64_t groups = blocks / (GROUP * threads) * threads;
    EACH(piece, groups + blocks_of(blocks - groups * GROUP, 2), phase) {
        if (piece < groups) {
            product_of_group(work, linear, rows, piece * GROUP, GROUP, target);
            continue;
        }
        const int64_t block = groups * GROUP + 2 * (piece - groups);
        if (block + 2 <= blocks) product_of_group(work, linear, rows, block, 2, target);
        else product_of_group(work, linear, rows, block, 1, target);
    }
}
