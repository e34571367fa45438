/* Products by matrix tiles of 16 rows in bfloat16 or int8. */
#pragma once
#include "finishing.h"

#if AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t columns[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

static void configure_tiles(void) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.columns[i] = 64;
        config.rows[i] = 16;
    }
    /* gcc assumes that only the first bytes of the configuration are read */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

typedef union {
    vf value[16];
    vi sum[16];
} __attribute__((aligned(64))) TileSums;

INLINE void finish_tile(const Work *work, const Linear *linear, int64_t row_tile, int64_t block,
                        int count, const TileSums *found, int target, int64_t rows) {
    const int64_t format = linear->format, in_tile = TILE_ROWS / tile_rows(format);
    for (int64_t r = 0; r < in_tile && row_tile * in_tile + r < rows; r++) {
        const int64_t row = row_tile * in_tile + r;
        vf values[GROUP];
        for (int i = 0; i < count; i++)
            values[i] = format != INT8 ? found[i].value[r]
                                       : dequantized(work, linear, row, block + i,
                                                     combine_bytes(found[i].sum[2 * r],
                                                                   found[i].sum[2 * r + 1]));
        finish_blocks(work, linear, row, block, count, values, target);
    }
}

/* One tile of rows by up to four blocks of outputs. */
INLINE void product_by_tile(const Work *work, const Linear *linear, int64_t row_tile, int64_t block,
                            int count, int target, int64_t rows) {
    const int64_t format = linear->format,
                  units = blocks_of(linear->inputs, inner_block(format));
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input = (const char *)work->inputs + row_tile * units * 1024;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#define STEP(tile, place, dot) \
    { \
        _tile_loadd(5, weight + (place) * units * 1024 + unit * 1024, 64); \
        dot(tile, 4, 5); \
    }
#define UNITS(dot) \
    for (int64_t unit = 0; unit < units; unit++) { \
        _tile_loadd(4, input + unit * 1024, 64); \
        STEP(0, 0, dot) \
        if (count > 1) STEP(1, 1, dot) \
        if (count > 2) STEP(2, 2, dot) \
        if (count > 3) STEP(3, 3, dot) \
    }
    if (format == BFLOAT16) {
        UNITS(_tile_dpbf16ps)
    } else {
        UNITS(_tile_dpbssd)
    }
#undef UNITS
#undef STEP
    TileSums found[4];
    _tile_stored(0, &found[0], 64);
    if (count > 1) _tile_stored(1, &found[1], 64);
    if (count > 2) _tile_stored(2, &found[2], 64);
    if (count > 3) _tile_stored(3, &found[3], 64);
    finish_tile(work, linear, row_tile, block, count, found, target, rows);
}

INLINE void prefetch_tile(const char *at) {
    for (int i = 0; i < 16; i++) __builtin_prefetch(at + i * 64, 0, 2);
}

/* Two tiles of rows by two blocks of outputs: each tile is used twice. The memory is idle
 * meanwhile, so weights of later groups are prefetched; one tile of rows is limited by memory
 * anyway. */
INLINE void product_by_tile_pair(const Work *work, const Linear *linear, int64_t row_tile,
                                 int64_t block, int target, int64_t rows) {
    const int64_t ahead = work->pass->num_threads * GROUP *
                          block_bytes(linear->inputs, linear->format);
    const int64_t format = linear->format,
                  units = blocks_of(linear->inputs, inner_block(format));
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input = (const char *)work->inputs + row_tile * units * 1024;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#define UNITS(dot) \
    for (int64_t unit = 0; unit < units; unit++) { \
        _tile_loadd(4, input + unit * 1024, 64); \
        _tile_loadd(6, weight + unit * 1024, 64); \
        if (row_tile == 0) prefetch_tile(weight + unit * 1024 + ahead); \
        dot(0, 4, 6); \
        _tile_loadd(7, weight + (units + unit) * 1024, 64); \
        if (row_tile == 0) prefetch_tile(weight + (units + unit) * 1024 + ahead); \
        dot(1, 4, 7); \
        _tile_loadd(5, input + (units + unit) * 1024, 64); \
        dot(2, 5, 6); \
        dot(3, 5, 7); \
    }
    if (format == BFLOAT16) {
        UNITS(_tile_dpbf16ps)
    } else {
        UNITS(_tile_dpbssd)
    }
#undef UNITS
    TileSums found[4];
    _tile_stored(0, &found[0], 64);
    _tile_stored(1, &found[1], 64);
    _tile_stored(2, &found[2], 64);
    _tile_stored(3, &found[3], 64);
    finish_tile(work, linear, row_tile, block, 2, found, target, rows);
    finish_tile(work, linear, row_tile + 1, block, 2, found + 2, target, rows);
}

INLINE void product_by_tiles(const Work *work, const Linear *linear, int64_t rows, int64_t block,
                             int count, int target) {
    const int64_t tiles = blocks_of(rows * tile_rows(linear->format), TILE_ROWS);
    int64_t tile = 0;
    if (count % 2 == 0)
        for (; tile + 2 <= tiles; tile += 2)
            for (int i = 0; i < count; i += 2)
                product_by_tile_pair(work, linear, tile, block + i, target, rows);
    for (; tile < tiles; tile++) product_by_tile(work, linear, tile, block, count, target, rows);
}
#endif
