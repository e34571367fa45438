/* Packs weights in bfloat16 into 12 bits, see compact.h. */
#include <stdlib.h>
#include "compact.h"

enum { EXPONENTS = 256, WINDOW = 16 /* exponents of codes */ };

/* the bits of exponent and mantissa above the lowest exponent; 0 of zero and of exceptions */
INLINE uint16_t code_of(uint16_t weight, uint16_t lowest) {
    const uint16_t above = (uint16_t)((weight & 0x7fff) - lowest);
    return above <= CODE_BITS && (weight & 0x7fff) != 0 ? above : 0;
}

INLINE int is_exception(uint16_t weight, uint16_t lowest) {
    return (weight & 0x7fff) != 0 && code_of(weight, lowest) == 0;
}

/* the lowest of the WINDOW exponents that most weights have */
static uint16_t lowest_exponent(const uint32_t *counts) {
    int64_t found = 0, most = -1, best = 0;
    for (int first = -WINDOW + 1; first < EXPONENTS; first++) {
        if (first + WINDOW - 1 < EXPONENTS) found += counts[first + WINDOW - 1];
        if (first > 0) found -= counts[first - 1];
        if (first >= 0 && first + WINDOW <= EXPONENTS && found > most) most = found, best = first;
    }
    return (uint16_t)(best << 7);
}

/* Finds the lowest exponents and the numbers of exceptions of the blocks from `first` to `end` of a
 * packed weight in bfloat16. */
void draftree_measure_blocks(const char *packed, int64_t inputs, int64_t first, int64_t end,
                             int32_t *lowest, int64_t *exceptions) {
    const int64_t words = blocks_of(inputs, 32) * WORDS_OF_UNIT;
    uint32_t counts[LANES][EXPONENTS];
    for (int64_t block = first; block < end; block++) {
        const uint16_t *weight = (const uint16_t *)packed + block * words;
        memset(counts, 0, sizeof counts);
        for (int64_t at = 0; at < words; at += 32)
            for (int i = 0; i < 32; i++)
                counts[i / 2][weight[at + i] >> 7 & 0xff] += (weight[at + i] & 0x7fff) != 0;
        uint16_t least[32];
        for (int i = 0; i < 32; i++) least[i] = lowest_exponent(counts[i / 2]);
        memcpy(lowest + block * LANES, least, sizeof least);
        exceptions[block] = 0;
        for (int64_t at = 0; at < words; at += 32) {
            int found = 0;
            for (int i = 0; i < 32; i++) found += is_exception(weight[at + i], least[i]);
            exceptions[block] += found;
        }
    }
}

/* Writes four lines of a block as three, and their exceptions; returns the end of these. */
static int64_t *compact_four(const uint16_t *lines, int64_t place, const uint16_t *lowest, uint16_t *to,
                             int64_t *exception) {
    uint16_t codes[4][32];
    for (int line = 0; line < 4; line++) {
        const uint16_t *weight = lines + line * 32;
        int found = 0;
        for (int i = 0; i < 32; i++) {
            const int is_apart = is_exception(weight[i], lowest[i]);
            codes[line][i] = is_apart ? 0 : code_of(weight[i], lowest[i]) | (weight[i] & 0x8000);
            found += is_apart;
        }
        for (int i = 0; found > 0 && i < 32; i++)
            if (is_exception(weight[i], lowest[i])) *exception++ = (place + line * 32 + i) << 16 | weight[i];
    }
    for (int i = 0; i < 32; i++) {
        const uint16_t d = codes[3][i];
        to[i] = codes[0][i] | (d << 4 & 0x7800);
        to[32 + i] = codes[1][i] | (d << 8 & 0x7800);
        to[64 + i] = codes[2][i] | (d & 7) << 11 | (d >> 15) << 14;
    }
    return exception;
}

/* Writes the codes of the blocks from `first`, which is even, to `end` over them, one pair after the
 * other from `first` on, and their exceptions into `blocks`. Returns 0, or -1 if there is no memory. */
int draftree_compact_blocks(char *packed, int64_t inputs, int64_t first, int64_t end,
                            const int32_t *lowest, int64_t *blocks) {
    const int64_t words = blocks_of(inputs, 32) * WORDS_OF_UNIT;
    uint16_t *to = (uint16_t *)packed + first * words, *pair = malloc((size_t)words * 4);
    if (pair == NULL) return -1;
    for (int64_t block = first; block < end; block += 2) {
        const int64_t count = min_int(2, end - block);
        int64_t *exceptions[2];
        memcpy(pair, (const uint16_t *)packed + block * words, (size_t)(count * words) * 2);
        for (int i = 0; i < count; i++) exceptions[i] = blocks + blocks[block + i];
        for (int64_t at = 0; at < words; at += 128)
            for (int i = 0; i < count; i++, to += FOUR_BYTES / 2) {
                uint16_t least[32];
                memcpy(least, lowest + (block + i) * LANES, sizeof least);
                exceptions[i] = compact_four(pair + i * words + at, at, least, to, exceptions[i]);
            }
    }
    free(pair);
    return 0;
}
