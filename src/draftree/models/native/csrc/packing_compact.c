/* Packs weights in bfloat16 into 12 bits, see compact.h. */
#include <stdlib.h>
#include "compact.h"

enum { BYTES = 256, NUMBERS = 16, TABLES = 4 /* of a block */ };

/* Writes the high bytes that most weights have; returns how many have another one. */
static int64_t choose_bytes(const uint32_t *counts, uint8_t *table) {
    int64_t others = 0;
    for (int byte = 0; byte < BYTES; byte++) {
        int at = (int)min_int(byte, NUMBERS);
        others += counts[byte];
        for (; at > 0 && counts[byte] > counts[table[at - 1]]; at--)
            if (at < NUMBERS) table[at] = table[at - 1];
        if (at < NUMBERS) table[at] = (uint8_t)byte;
    }
    for (int code = 0; code < NUMBERS; code++) others -= counts[table[code]];
    return others;
}

/* Finds the tables and the numbers of exceptions of the blocks from `first` to `end` of a packed
 * weight in bfloat16. */
void draftree_measure_blocks(const char *packed, int64_t inputs, int64_t first, int64_t end,
                             uint8_t *tables, int64_t *exceptions) {
    const int64_t words = block_bytes(inputs, BFLOAT16) / 2;
    uint32_t counts[TABLES][BYTES];
    for (int64_t block = first; block < end; block++) {
        const uint16_t *weight = (const uint16_t *)packed + block * words;
        memset(counts, 0, sizeof counts);
        for (int64_t at = 0; at < words; at += 32)
            for (int i = 0; i < 32; i++) counts[i / 8][weight[at + i] >> 8]++;
        exceptions[block] = 0;
        for (int i = 0; i < TABLES; i++)
            exceptions[block] += choose_bytes(counts[i], tables + (block * TABLES + i) * NUMBERS);
    }
}

/* Writes four lines of a block as three, and their exceptions; returns the end of these. */
static int64_t *compact_four(const uint16_t *lines, int64_t place, const uint8_t (*numbers)[BYTES],
                             uint8_t *to, int64_t *exception) {
    int all = 0;
    for (int64_t line = 0; line < 4; line++)
        for (int64_t i = 0; i < 32; i += 8)
            for (int64_t word = i; word < i + 8; word++) {
                const uint16_t weight = lines[line * 32 + word];
                const int number = numbers[i / 8][weight >> 8];
                uint8_t *at = to + byte_of(line, word);
                at[line / 2 * 64] = (uint8_t)weight;
                at[128] = (uint8_t)(line < 2 ? number & 15 : at[128] | number << 4);
                all |= number;
            }
    if (all < NUMBERS) return exception;
    for (int word = 0; word < 128; word++)
        if (numbers[word % 32 / 8][lines[word] >> 8] == NUMBERS) *exception++ = (place + word) << 16 | lines[word];
    return exception;
}

/* Writes the codes of the blocks from `first`, which is even, to `end` over them, one pair after the
 * other from `first` on, and their exceptions into `blocks`. Returns 0, or -1 if there is no memory. */
int draftree_compact_blocks(char *packed, int64_t inputs, int64_t first, int64_t end,
                            const uint8_t *tables, int64_t *blocks) {
    const int64_t words = block_bytes(inputs, BFLOAT16) / 2;
    uint8_t *to = (uint8_t *)packed + first * words * 2;
    uint16_t *pair = malloc((size_t)words * 4);
    uint8_t numbers[2 * TABLES][BYTES];
    if (pair == NULL) return -1;
    for (int64_t block = first; block < end; block += 2) {
        const int64_t count = min_int(2, end - block);
        int64_t *exceptions[2];
        memcpy(pair, (const uint16_t *)packed + block * words, (size_t)(count * words) * 2);
        memset(numbers, NUMBERS, sizeof numbers);
        for (int i = 0; i < count; i++) exceptions[i] = blocks + blocks[block + i];
        for (int i = 0; i < count * TABLES * NUMBERS; i++)
            numbers[i / NUMBERS][tables[block * TABLES * NUMBERS + i]] = (uint8_t)(i % NUMBERS);
        for (int64_t at = 0; at < words; at += 128)
            for (int i = 0; i < count; i++, to += FOUR_BYTES)
                exceptions[i] = compact_four(pair + i * words + at, at, numbers + i * TABLES, to, exceptions[i]);
    }
    free(pair);
    return 0;
}
