/* Packs weights into blocks of 16 outputs; structures.h describes the layout. */
#include <math.h>
#include <string.h>
#include "unpacking.h"

int64_t draftree_block_bytes(int64_t inputs, int64_t format) { return block_bytes(inputs, format); }

/* the size of a product's blocks */
int64_t draftree_product_bytes(const Linear *linear) {
    const int64_t blocks = blocks_of(linear->outputs, LANES);
    int64_t bytes = 0;
    if (linear->format != GROUPED) return blocks * stored_bytes(linear);
    for (int64_t block = 0; block < blocks; block++)
        bytes += group_block_bytes(linear->inputs, kind_of_block(linear, block));
    return bytes;
}

/* writes `rows` outputs from `first` on, in float32 */
void draftree_unpack(const Linear *linear, int64_t first, int64_t rows, float *to) {
    for (int64_t row = 0; row < rows; row++)
        unpack_output(linear, first + row, to + row * linear->inputs);
}

INLINE float element(const void *weight, int64_t at, int64_t format) {
    if (format == FLOAT32) return ((const float *)weight)[at];
    return half_to_float(((const uint16_t *)weight)[at]);
}

/* Packs the rows of `weight`, one for each output, in format `from`. Block i of them becomes block
 * first + step * i of `packed`. */
void draftree_pack(const void *weight, int64_t from, int64_t outputs, int64_t inputs, void *packed,
                   int64_t format, int64_t first, int64_t step, float *scales, int32_t *sums) {
    const int64_t bytes = block_bytes(inputs, format);
    for (int64_t block = 0; block * LANES < outputs; block++) {
        const int64_t to_block = first + step * block;
        char *to = (char *)packed + to_block * bytes;
        memset(to, 0, (size_t)bytes);
        for (int64_t lane = 0; lane < LANES && block * LANES + lane < outputs; lane++) {
            const int64_t row = (block * LANES + lane) * inputs;
            if (format == FLOAT32) {
                for (int64_t k = 0; k < inputs; k++)
                    ((float *)to)[k * LANES + lane] = element(weight, row + k, from);
            } else if (format == BFLOAT16) {
                for (int64_t k = 0; k < inputs; k++) {
                    uint16_t bits;
                    if (from == BFLOAT16) bits = ((const uint16_t *)weight)[row + k];
                    else {
                        half_row narrowed = narrow(splat(element(weight, row + k, from)));
                        bits = narrowed[0];
                    }
                    ((uint16_t *)to)[(k / 2 * LANES + lane) * 2 + k % 2] = bits;
                }
            } else {
                float largest = 0.0f;
                int32_t sum = 0;
                for (int64_t k = 0; k < inputs; k++)
                    largest = fmaxf(largest, fabsf(element(weight, row + k, from)));
                for (int64_t k = 0; k < inputs; k++) {
                    float scaled = largest > 0.0f
                                       ? element(weight, row + k, from) * 127.0f / largest
                                       : 0.0f;
                    int8_t whole = (int8_t)lrintf(scaled);
                    ((int8_t *)to)[(k / 4 * LANES + lane) * 4 + k % 4] = whole;
                    sum += whole;
                }
                scales[to_block * LANES + lane] = largest / 127.0f;
                sums[to_block * LANES + lane] = sum;
            }
        }
    }
}
