/* Packs the blocks of a GGUF file; their layout is that of ggml (ggml-common.h). */
#include "packing_groups.h"

int64_t draftree_group_bytes(int64_t inputs, int64_t kind) {
    return kind < 0 || kind >= NUM_KINDS ? -1 : group_block_bytes(inputs, (int)kind);
}

static uint16_t bits16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

/* Blocks of 32 weights of a GGUF file. */
static void read_simple(const uint8_t *at, int kind, Group *to) {
    const int has_min = has_minimum(kind), has_high = bits_of(kind) == 5;
    const uint8_t *high = at + 2 + 2 * has_min, *codes = high + 4 * has_high;
    to->scale = bits16(at);
    if (has_min) to->minimum = bits16(at + 2);
    for (int i = 0; i < GROUP_INPUTS; i++) {
        if (kind == KIND_Q8_0) to->codes[i] = (uint8_t)(at[2 + i] + 128);
        else to->codes[i] = codes[i % 16] >> (i < 16 ? 0 : 4) & 15;
        if (has_high) to->codes[i] |= (uint8_t)((high[i / 8] >> i % 8 & 1) << 4);
    }
}

/* Blocks of 256 weights of a GGUF file: group `group` of 8. */
static void read_k_4_or_5(const uint8_t *at, int has_high, int group, Group *to) {
    const uint8_t *scales = at + 4, *high = at + 16, *codes = at + (has_high ? 48 : 16);
    if (group < 4) {
        to->scales[0] = scales[group] & 63;
        to->scales[1] = scales[group + 4] & 63;
    } else {
        to->scales[0] = (uint8_t)((scales[group + 4] & 15) | scales[group - 4] >> 6 << 4);
        to->scales[1] = (uint8_t)(scales[group + 4] >> 4 | scales[group] >> 6 << 4);
    }
    for (int i = 0; i < GROUP_INPUTS; i++) {
        to->codes[i] = codes[group / 2 * 32 + i] >> 4 * (group % 2) & 15;
        if (has_high) to->codes[i] |= (uint8_t)((high[i] >> group & 1) << 4);
    }
}

static void read_k_6(const uint8_t *at, int group, Group *to) {
    const uint8_t *low = at + group / 4 * 64 + group % 2 * 32, *high = at + 128 + group / 4 * 32;
    const int quarter = group % 4;
    for (int i = 0; i < GROUP_INPUTS; i++)
        to->codes[i] = (uint8_t)((low[i] >> (quarter < 2 ? 0 : 4) & 15) |
                                 (high[i] >> 2 * quarter & 3) << 4);
    to->scales[0] = at[192 + 2 * group];
    to->scales[1] = at[192 + 2 * group + 1];
}

static void read_iq4_xs(const uint8_t *at, int group, Group *to) {
    const uint8_t *codes = at + 8 + group * 16;
    const int low = at[4 + group / 2] >> 4 * (group % 2) & 15;
    const int high = bits16(at + 2) >> 2 * group & 3;
    to->scales[0] = (uint8_t)((low | high << 4) - 32);
    for (int i = 0; i < GROUP_INPUTS; i++)
        to->codes[i] = codes[i % 16] >> (i < 16 ? 0 : 4) & 15;
}

static void read_super(const uint8_t *at, int kind, char *to, int64_t inputs, int64_t super,
                       int64_t lane) {
    Group found = {{0}};
    const int scale_at = kind == KIND_Q6_K ? 208 : 0;
    put_super(to, inputs, kind, super, lane, bits16(at + scale_at), bits16(at + 2));
    for (int group = 0; group < GROUPS_OF_SUPER; group++) {
        if (kind == KIND_Q6_K) read_k_6(at, group, &found);
        else if (kind == KIND_IQ4_XS) read_iq4_xs(at, group, &found);
        else read_k_4_or_5(at, kind == KIND_Q5_K, group, &found);
        put_group(to, inputs, kind, super * GROUPS_OF_SUPER + group, lane, &found);
    }
}

/* Packs outputs from the blocks of a GGUF file, which stay as they are.
 *   rows, row_bytes   rows of the file, one for each output
 *   order             the row of each output
 *   weight, blocks    as in a product, from the first block on */
void draftree_pack_blocks(const uint8_t *rows, int64_t row_bytes, const int64_t *order,
                          int64_t outputs, int64_t inputs, char *weight, const int64_t *blocks) {
    for (int64_t output = 0; output < outputs; output++) {
        const int kind = (int)(blocks[output / LANES] & 15);
        char *to = weight + (blocks[output / LANES] >> 4);
        const int64_t lane = output % LANES;
        const uint8_t *row = rows + order[output] * row_bytes;
        if (lane == 0) memset(to, 0, (size_t)group_block_bytes(inputs, kind));
        if (has_supers(kind)) {
            const int64_t supers = inputs / (GROUP_INPUTS * GROUPS_OF_SUPER);
            for (int64_t super = 0; super < supers; super++)
                read_super(row + super * (row_bytes / supers), kind, to, inputs, super, lane);
        } else {
            const int64_t groups = inputs / GROUP_INPUTS, bytes = row_bytes / groups;
            for (int64_t group = 0; group < groups; group++) {
                Group found = {{0}};
                read_simple(row + group * bytes, kind, &found);
                put_group(to, inputs, kind, group, lane, &found);
            }
        }
    }
}
