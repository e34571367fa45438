/* The kernels of products without tiles for every number of rows and blocks. */
#include "products_kernels.h"

/* Kernels have constant numbers of rows and blocks. */
enum { SUMS_OF_add_float32 = 1, SUMS_OF_add_bfloat16 = 1, SUMS_OF_add_compact = 1,
       SUMS_OF_add_int8 = SUMS_OF_ROW };
#define CASE(add, rows, blocks) \
    case rows: \
        if ((rows) * (blocks) * PARTS * SUMS_OF_##add <= SUMS_AT_ONCE) add(piece, rows, blocks); \
        break;
#define FEW_ROWS(add, blocks) \
    CASE(add, 1, blocks) \
    CASE(add, 2, blocks) CASE(add, 3, blocks) CASE(add, 4, blocks) CASE(add, 5, blocks) \
        CASE(add, 6, blocks)
#define MORE_ROWS(add, blocks) \
    CASE(add, 7, blocks) \
    CASE(add, 8, blocks) CASE(add, 9, blocks) CASE(add, 10, blocks) CASE(add, 11, blocks) \
        CASE(add, 12, blocks)
#define BY_SHAPE(name, add) \
    static __attribute__((noinline)) void name(Piece piece, int num_rows, int count) { \
        if (count == 4) { \
            switch (num_rows) { FEW_ROWS(add, 4) } \
        } else if (count == 2) { \
            switch (num_rows) { FEW_ROWS(add, 2) MORE_ROWS(add, 2) } \
        } else { \
            switch (num_rows) { FEW_ROWS(add, 1) MORE_ROWS(add, 1) } \
        } \
    }
BY_SHAPE(add_rows_float32, add_float32)
BY_SHAPE(add_rows_bfloat16, add_bfloat16)
BY_SHAPE(add_rows_int8, add_int8)
#if KEEPS_COMPACT
BY_SHAPE(add_rows_compact, add_compact)
#endif

void add_rows(Piece piece, int num_rows, int count) {
#if KEEPS_COMPACT
    if (piece.exceptions != NULL) {
        add_rows_compact(piece, num_rows, count);
        return;
    }
#endif
    switch (piece.linear->format) {
    case FLOAT32: add_rows_float32(piece, num_rows, count); break;
    case BFLOAT16: add_rows_bfloat16(piece, num_rows, count); break;
    default: add_rows_int8(piece, num_rows, count);
    }
}
