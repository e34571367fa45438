/* Attention of some rows of one slot, and of the query heads of one key head. */
#pragma once
#include "structures.h"

/* the scratch memory of a thread, for so many queries of a call */
SHARED int64_t attention_floats(int64_t dim, int64_t queries);

/* over a row's own keys in the order of their positions */
SHARED void attend(const Work *work, const Layer *layer, float *scratch, int64_t first_row,
                   int64_t end_row, int64_t kv_head);

/* over the keys of a source, which is the same for all these rows */
SHARED void attend_source(const Work *work, int64_t index, float *scratch, int64_t first_row,
                          int64_t end_row, int64_t kv_head);
