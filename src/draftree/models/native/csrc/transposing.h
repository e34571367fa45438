/* Transposition of square tiles of registers, rows to columns, and of pairs of rows. */
#pragma once
#include "vectors.h"

#if defined(__AVX512F__)
#define TILE_STEPS(swap) swap(8) swap(4) swap(2) swap(1)
#define LEFT_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define RIGHT_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LEFT_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define RIGHT_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LEFT_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define RIGHT_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LEFT_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define RIGHT_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#elif defined(__AVX2__)
#define TILE_STEPS(swap) swap(4) swap(2) swap(1)
#define LEFT_4 0, 1, 2, 3, 8, 9, 10, 11
#define RIGHT_4 4, 5, 6, 7, 12, 13, 14, 15
#define LEFT_2 0, 1, 8, 9, 4, 5, 12, 13
#define RIGHT_2 2, 3, 10, 11, 6, 7, 14, 15
#define LEFT_1 0, 8, 2, 10, 4, 12, 6, 14
#define RIGHT_1 1, 9, 3, 11, 5, 13, 7, 15
#else
#define TILE_STEPS(swap) swap(2) swap(1)
#define LEFT_2 0, 1, 4, 5
#define RIGHT_2 2, 3, 6, 7
#define LEFT_1 0, 4, 2, 6
#define RIGHT_1 1, 5, 3, 7
#endif
#define SWAP_PARTS(step) \
    _Pragma("GCC unroll 16") for (int i = 0; i < PART_LANES; i++) if (!(i & step)) { \
        const part_f a = x[i], b = x[i + step]; \
        x[i] = __builtin_shufflevector(a, b, LEFT_##step); \
        x[i + step] = __builtin_shufflevector(a, b, RIGHT_##step); \
    }

/* PART_LANES vectors of as many lanes */
INLINE void transpose(part_f *x) { TILE_STEPS(SWAP_PARTS) }

/* two rows of 32 numbers of 16 bits, number by number */
typedef uint16_t halves __attribute__((vector_size(64)));
typedef halves halves_loose __attribute__((aligned(2), may_alias));

#define LOWER_HALVES \
    0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, \
        13, 45, 14, 46, 15, 47
#define UPPER_HALVES \
    16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, \
        59, 28, 60, 29, 61, 30, 62, 31, 63
