/* Products of rows and weights with a scale for each group of inputs. */
#pragma once
#include "products_rows.h"

/* up to ROWS_PER_CALL rows by a group of blocks */
SHARED void product_by_groups(const Work *work, const Linear *linear, int64_t row, int64_t num_rows,
                              int64_t block, int count, int target, int64_t next);
