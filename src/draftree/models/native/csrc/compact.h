/* Weights in bfloat16 that take 12 bits, without loss. The high byte of a weight, its sign and seven bits
 * of its exponent, is one of 16 in almost all weights of four outputs, so that its number says it; other
 * weights are exceptions, stored apart. Products look a few lines up at a time in registers, which takes
 * less time than the memory needs for the bits that are left out.
 *
 * Four lines of a block in bfloat16 are three lines of bytes: the low bytes of the first two lines, those
 * of the other two, and the numbers of the high bytes, of the other two in the upper halves. 16 bytes
 * belong to four outputs, eight to words of one line, and eight to those of the next one. Such lines
 * of two blocks take turns, so that a row has two sums, which do not wait for each other, and
 * the memory still gives one line after the other; a last block that is alone has its own lines only.
 * `sums` of the product are the tables, 16 high bytes for each four outputs.
 * `blocks` begins with the place in it of the first exception of each block, and the end. An exception
 * is 65536 times the word's place in its block in bfloat16, plus the weight; places ascend. */
#pragma once
#include "structures.h"

enum { FOUR_BYTES = 192 /* of four lines of a block */ };

/* Where it pays: tiles would restore weights again for every 32 rows of a prompt, and with 16 registers
 * of 256 bits four to 16 rows take up to 10% longer. */
#if defined(__AVX512BW__) && !AMX
#define KEEPS_COMPACT 1
#else
#define KEEPS_COMPACT 0
#endif

INLINE int is_compact(const Linear *linear) {
    return KEEPS_COMPACT && linear->format == BFLOAT16 && linear->blocks != NULL;
}
INLINE int64_t stored_bytes(const Linear *linear) { /* of a block */
    return block_bytes(linear->inputs, linear->format) / 4 * (is_compact(linear) ? 3 : 4);
}
/* the first lines of a block, and the distance of the next ones */
INLINE const char *first_lines(const Linear *linear, int64_t block) {
    return (const char *)linear->weight + block / 2 * 2 * stored_bytes(linear) + block % 2 * FOUR_BYTES;
}
INLINE int64_t lines_step(const Linear *linear, int64_t block) {
    return (block / 2 * 2 + 1 < blocks_of(linear->outputs, LANES) ? 2 : 1) * FOUR_BYTES;
}

INLINE const uint8_t *tables_of(const Linear *linear, int64_t block) {
    return (const uint8_t *)(linear->sums + block * LANES);
}

/* the place of a word of a line among the 64 bytes of its pair of lines */
INLINE int64_t byte_of(int64_t line, int64_t word) { return word / 8 * 16 + line % 2 * 8 + word % 8; }

/* the place of an exception in its block; of the one after the last, a place after all */
INLINE int64_t place_of(const Linear *linear, int64_t block, int64_t exception) {
    return exception < linear->blocks[block + 1] ? linear->blocks[exception] >> 16 : INT64_MAX;
}

/* the weight of a block at a place among its words, without exceptions */
INLINE uint16_t restored_at(const Linear *linear, int64_t block, int64_t place) {
    const int64_t line = place / 32, word = place % 32, pair = line / 2 % 2;
    const uint8_t *at = (const uint8_t *)first_lines(linear, block) + line / 4 * lines_step(linear, block) +
                        byte_of(line, word);
    const int number = at[128] >> pair * 4 & 15;
    return (uint16_t)(at[pair * 64] | tables_of(linear, block)[word / 8 * 16 + number] << 8);
}
