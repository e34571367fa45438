/* Writes numbers into packed blocks with a scale for each group of inputs; groups.h describes the
 * layout. */
#pragma once
#include <string.h>
#include "groups.h"

/* Numbers of a group of one output. */
typedef struct {
    uint8_t codes[GROUP_INPUTS];
    uint16_t scale, minimum; /* float16, of kinds without super-groups */
    uint8_t scales[2];       /* bytes: of the halves, or scale and minimum */
} Group;

static void put_group(char *at, int64_t inputs, int kind, int64_t group, int64_t lane,
                      const Group *from) {
    const SuperGroup super = super_group(at, inputs, kind, group / GROUPS_OF_SUPER);
    uint8_t *codes = (uint8_t *)super.codes + group % GROUPS_OF_SUPER * code_bytes(kind),
            *scales = (uint8_t *)super.scales + group % GROUPS_OF_SUPER * scale_bytes(kind);
    for (int i = 0; i < GROUP_INPUTS; i++) {
        const int quad = i / 4, code = from->codes[i];
        uint8_t *byte = codes + lane * 4 + i % 4;
        if (bits_of(kind) == 8) {
            byte[quad * 64] = (uint8_t)code;
            continue;
        }
        byte[quad % 4 * 64] |= (uint8_t)((code & 15) << (quad < 4 ? 0 : 4));
        if (bits_of(kind) == 5) byte[256] |= (uint8_t)((code >> 4) << quad);
        if (bits_of(kind) == 6)
            byte[256 + quad / 4 * 64] |= (uint8_t)((code >> 4) << 2 * (quad % 4));
    }
    if (has_supers(kind)) {
        scales[lane] = from->scales[0];
        if (scale_bytes(kind) == 32) scales[16 + lane] = from->scales[1];
    } else {
        ((uint16_t *)scales)[lane] = from->scale;
        if (has_minimum(kind)) ((uint16_t *)scales)[16 + lane] = from->minimum;
    }
}

static void put_super(char *at, int64_t inputs, int kind, int64_t super, int64_t lane,
                      uint16_t scale, uint16_t minimum) {
    uint16_t *to = (uint16_t *)super_group(at, inputs, kind, super).supers;
    to[lane] = scale;
    if (has_minimum(kind)) to[16 + lane] = minimum;
}
