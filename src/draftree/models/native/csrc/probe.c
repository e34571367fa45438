/* Memory bandwidth and arithmetic peak of this processor, with the instructions of passes.
 *
 * Each function is the share of one thread; the caller measures the time. Products work on registers only, so
 * that nothing but the arithmetic is timed. They are functions of the kernels, whose headers choose the
 * instructions as they do for a pass.
 */
#include <stdint.h>
#include "products_groups_kernels.h"

/* Products under way at once: enough to hide how long one takes, and no more than there are registers for. */
#if defined(__AVX512F__) || defined(__aarch64__)
enum { CHAINS = 16 };
#else
enum { CHAINS = 12 };
#endif

/* After this, the compiler does not know the value of a register; it is no instruction. */
#if defined(__AVX512F__)
#define HIDE(value) __asm__ volatile("" : "+v"(value))
#elif defined(__x86_64__)
#define HIDE(value) __asm__ volatile("" : "+x"(value))
#elif defined(__aarch64__)
#define HIDE(value) __asm__ volatile("" : "+w"(value))
#else
#define HIDE(value) __asm__ volatile("" : "+m"(value))
#endif

static volatile float sink;

int64_t draftree_probe_read(const char *memory, int64_t bytes) {
    typedef uint64_t vq __attribute__((vector_size(64)));
    vq sums[8] = {0};
    for (int64_t at = 0; at + 512 <= bytes; at += 512) {
        __builtin_prefetch(memory + at + 4096);
        for (int i = 0; i < 8; i++) sums[i] += *(const vq *)(memory + at + 64 * i);
    }
    int64_t total = 0;
    for (int i = 0; i < 8; i++)
        for (int lane = 0; lane < 8; lane++) total += (int64_t)sums[i][lane];
    return total;
}

/* Defines a function that returns how many multiplications and additions it did: `product` adds products of `a` and
 * `b` to `sum`, in each lane of 32 bits as many as `terms`. Each sum starts with another number, since compilers merge
 * sums that are equal. In all formats the numbers are ordinary ones, as codes less than 64. */
#define MULTIPLY(name, type, terms, product) \
    INLINE int64_t name(int64_t rounds) { \
        type sums[CHAINS], a = (type)((part_i){0} + 0x3f3f3f3f), b = a; \
        UNROLLED for (int i = 0; i < CHAINS; i++) sums[i] = (type)((part_i){0} + 0x3f3f3f3f + i); \
        for (int64_t round = 0; round < rounds; round++) { \
            UNROLLED for (int i = 0; i < CHAINS; i++) { \
                const type sum = sums[i]; \
                HIDE(a); /* or products that do not depend on the sum are computed once */ \
                sums[i] = product; \
            } \
        } \
        type found = sums[0]; \
        for (int i = 1; i < CHAINS; i++) found += sums[i]; \
        sink = (float)found[0]; \
        return rounds * CHAINS * PART_LANES * (terms) * 2; \
    }

MULTIPLY(multiply_floats, part_f, 1, fma_part(a, b, sum))
MULTIPLY(multiply_codes, part_i, 4, dot_of_codes(sum, a, b, 0))
#if HALF_PAIRS && !AMX
MULTIPLY(multiply_pairs, part_f, 2, (part_f)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b))
#endif
#if BYTE_GROUPS
MULTIPLY(multiply_bytes, part_i, 4, dot_of_quads(sum, a, b))
#elif !SPLIT_BYTES
MULTIPLY(multiply_bytes, part_i, 2, dot_of_pairs(sum, a, b))
#endif

#if AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t columns[16];
    uint8_t rows[16];
} __attribute__((packed)) ProbeTiles;

static int64_t multiply_tiles(int64_t rounds, int is_int8) {
    ProbeTiles config = {.palette = 1};
    for (int i = 0; i < 8; i++) { config.columns[i] = 64; config.rows[i] = 16; }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc believes that only its first bytes are read */
    _tile_loadconfig(&config);
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); _tile_zero(4); _tile_zero(5);
    for (int64_t round = 0; round < rounds; round++) {
        if (is_int8) {
            _tile_dpbssd(0, 4, 5); _tile_dpbssd(1, 4, 5); _tile_dpbssd(2, 4, 5); _tile_dpbssd(3, 4, 5);
        } else {
            _tile_dpbf16ps(0, 4, 5); _tile_dpbf16ps(1, 4, 5); _tile_dpbf16ps(2, 4, 5); _tile_dpbf16ps(3, 4, 5);
        }
    }
    _tile_release();
    return rounds * 4 * 16 * 16 * (is_int8 ? 64 : 32) * 2;
}
#endif

int64_t draftree_probe_float32(int64_t rounds) { return multiply_floats(rounds); }

int64_t draftree_probe_bfloat16(int64_t rounds) {
#if AMX
    return multiply_tiles(rounds, 0);
#elif HALF_PAIRS
    return multiply_pairs(rounds);
#else
    return multiply_floats(rounds); /* widened, then multiplied as float32 */
#endif
}

int64_t draftree_probe_int8(int64_t rounds) {
#if AMX
    return multiply_tiles(rounds, 1) / 2; /* an input of 16 bits takes two products, and counts once */
#else
    return multiply_bytes(rounds);
#endif
}

/* weights with a scale for each group of inputs: of 4 bits, and blocks of GGUF files */
int64_t draftree_probe_int4(int64_t rounds) { return multiply_codes(rounds); }
