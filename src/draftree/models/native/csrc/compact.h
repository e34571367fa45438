/* Weights in bfloat16 that take 12 bits, without loss: an output's weights have few exponents, so a
 * sign, an exponent above the output's lowest one and a mantissa say almost all of them. The others are
 * exceptions, stored apart. Products restore a few lines at a time in the nearest cache, which takes
 * less time than the memory needs for the bits that are left out.
 *
 * A code has a sign and 11 bits of exponent and mantissa; 0 is zero. Four lines of a block in
 * bfloat16, with codes a, b, c and d in their words, are three lines of words:
 *   sign of a, bits 10 to 7 of d, 11 bits of a
 *   sign of b, bits 6 to 3 of d, 11 bits of b
 *   sign of c, sign of d, bits 2 to 0 of d, 11 bits of c
 * Such lines of two blocks take turns, so that a row has two sums, which do not wait for each other, and
 * the memory still gives one line after the other; a last block that is alone has its own lines only.
 * `sums` of the product are the lowest exponents, in both halves of a number for each output.
 * `blocks` begins with the place in it of the first exception of each block, and the end. An exception
 * is 65536 times the word's place in its block in bfloat16, plus the weight; places ascend. */
#pragma once
#include "structures.h"

enum { CODE_BITS = 0x7ff, CODE_AND_SIGN = 0x87ff, WORDS_OF_UNIT = 512, FOUR_BYTES = 192,
       COMPACT_BYTES = 4 * FOUR_BYTES /* of a unit of a block */ };

/* Where it pays: tiles would restore weights again for every 32 rows of a prompt, and with 16 registers
 * of 256 bits it takes longer than reading them from a fast memory. */
#define KEEPS_COMPACT (!AMX && PARTS == 1)

enum { PIECE_LINES = 96, AHEAD_LINES = 128 /* of all blocks */ };

typedef uint16_t part_w __attribute__((vector_size(WIDTH), may_alias));
typedef part_w part_w_loose __attribute__((aligned(4), may_alias));

INLINE int is_compact(const Linear *linear) {
    return linear->format == BFLOAT16 && linear->blocks != NULL;
}
INLINE int64_t stored_bytes(const Linear *linear) { /* of a block */
    return is_compact(linear) ? blocks_of(linear->inputs, 32) * COMPACT_BYTES
                              : block_bytes(linear->inputs, linear->format);
}
/* the first lines of a block, and the distance of the next ones */
INLINE const char *first_lines(const Linear *linear, int64_t block) {
    return (const char *)linear->weight + block / 2 * 2 * stored_bytes(linear) + block % 2 * FOUR_BYTES;
}
INLINE int64_t lines_step(const Linear *linear, int64_t block) {
    return (block / 2 * 2 + 1 < blocks_of(linear->outputs, LANES) ? 2 : 1) * FOUR_BYTES;
}

INLINE part_w restored(part_w code, part_w lowest) {
#if defined(__AVX512BW__)
    const __mmask32 is_not_zero = _mm512_test_epi16_mask((__m512i)code, _mm512_set1_epi16(CODE_BITS));
    return (part_w)_mm512_mask_add_epi16((__m512i)code, is_not_zero, (__m512i)code, (__m512i)lowest);
#else
    return code + ((part_w)((code & CODE_BITS) != 0) & lowest);
#endif
}

/* restores parts of four lines from those of three */
INLINE void restore_four(const char *from, part_w lowest, part_w *to) {
    const part_w x = *(const part_w_loose *)from, y = *(const part_w_loose *)(from + 64),
                 z = *(const part_w_loose *)(from + 128);
    const part_w d = (x >> 4 & 0x0780) | (y >> 8 & 0x0078) | (z >> 11 & 0x0007) | (z << 1 & 0x8000);
    to[0] = restored(x & CODE_AND_SIGN, lowest);
    to[1] = restored(y & CODE_AND_SIGN, lowest);
    to[2] = restored(z & CODE_AND_SIGN, lowest);
    to[3] = restored(d, lowest);
}

/* writes the 16 lines of a unit of a block */
INLINE void restore_unit(const Linear *linear, int64_t block, int64_t unit, char *to) {
    const int64_t step = lines_step(linear, block);
    const char *from = first_lines(linear, block) + unit * 4 * step;
    for (int part = 0; part < 64; part += WIDTH) {
        const part_w least = *(const part_w_loose *)((const char *)(linear->sums + block * LANES) + part);
        for (int four = 0; four < 4; four++) {
            part_w lines[4];
            restore_four(from + four * step + part, least, lines);
            for (int line = 0; line < 4; line++)
                *(part_w *)(to + four * 256 + line * 64 + part) = lines[line];
        }
    }
}

/* the place of an exception in its block; of the one after the last, a place after all */
INLINE int64_t place_of(const Linear *linear, int64_t block, int64_t exception) {
    return exception < linear->blocks[block + 1] ? linear->blocks[exception] >> 16 : INT64_MAX;
}

/* Restores the exceptions from number `exception` on in the units of a block from `first` to `end`,
 * which begin at `to`; returns the number of the next one. */
INLINE int64_t restore_exceptions(const Linear *linear, int64_t block, int64_t exception, int64_t first,
                                  int64_t end, char *to) {
    for (int64_t place; (place = place_of(linear, block, exception)) < end * WORDS_OF_UNIT; exception++)
        ((uint16_t *)to)[place - first * WORDS_OF_UNIT] = (uint16_t)linear->blocks[exception];
    return exception;
}

/* the weight of a block at a place among its words, without exceptions */
INLINE uint16_t restored_at(const Linear *linear, int64_t block, int64_t place) {
    const int64_t line = place / 32, word = place % 32;
    const uint16_t *at = (const uint16_t *)(first_lines(linear, block) + line / 4 * lines_step(linear, block)) + word;
    const uint16_t x = at[0], y = at[32], z = at[64];
    const int own = line % 4 < 3
                        ? at[line % 4 * 32] & CODE_AND_SIGN
                        : (x >> 4 & 0x0780) | (y >> 8 & 0x0078) | (z >> 11 & 0x0007) | (z << 1 & 0x8000);
    const int lowest = linear->sums[block * LANES + word / 2] & 0xffff;
    return (uint16_t)(own & CODE_BITS ? own + lowest : own);
}

/* Lines of up to GROUP blocks that are restored piece by piece. */
typedef struct {
    const Linear *linear;
    int64_t block, exception[GROUP];
    int count;
    char lines[GROUP * PIECE_LINES * 64] __attribute__((aligned(64)));
} Restored;

INLINE void start_restoring(Restored *restored, const Linear *linear, int64_t block, int count) {
    restored->linear = linear;
    restored->block = block;
    restored->count = count;
    for (int i = 0; i < count; i++) restored->exception[i] = linear->blocks[block + i];
}

/* Restores inputs from `from` to `to`, `stride` bytes for each block. */
SHARED void restore(Restored *restored, int64_t from, int64_t to, int64_t stride);
