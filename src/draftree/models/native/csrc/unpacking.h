/* Packed weights as numbers, for embeddings and for Python. */
#pragma once
#include "compact.h"
#include "groups.h"

INLINE float half_to_float(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* writes the weights of one output */
static void unpack_output(const Linear *linear, int64_t output, float *to) {
    if (linear->format == GROUPED) {
        unpack_groups_of(linear, output, to);
        return;
    }
    const int64_t block = output / LANES, lane = output % LANES, inputs = linear->inputs;
    if (is_compact(linear)) {
        for (int64_t i = 0; i < inputs; i++)
            to[i] = half_to_float(restored_at(linear, block, (i / 2 * LANES + lane) * 2 + i % 2));
        for (int64_t at = linear->blocks[block]; at < linear->blocks[block + 1]; at++) {
            const int64_t entry = linear->blocks[at], word = entry >> 16;
            if (word / 2 % LANES == lane) to[word / 32 * 2 + word % 2] = half_to_float((uint16_t)entry);
        }
        return;
    }
    const char *at = (const char *)linear->weight + block * block_bytes(inputs, linear->format);
    for (int64_t i = 0; i < inputs; i++) {
        if (linear->format == FLOAT32) to[i] = ((const float *)at)[i * LANES + lane];
        else if (linear->format == BFLOAT16)
            to[i] = half_to_float(((const uint16_t *)at)[(i / 2 * LANES + lane) * 2 + i % 2]);
        else
            to[i] = (float)((const int8_t *)at)[(i / 4 * LANES + lane) * 4 + i % 4] * linear->scale[output];
    }
}
