/* Memory bandwidth and arithmetic peak of this processor, with the instructions of decoder.c.
 *
 * Each function is the share of one thread; the caller measures the time. Products work on registers only, so
 * that nothing but the arithmetic is timed.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#define AMX 1
#else
#define AMX 0
#endif
#if defined(__AVX512F__)
enum { WIDTH = 64 };
#elif defined(__AVX2__)
enum { WIDTH = 32 };
#else
enum { WIDTH = 16 };
#endif
typedef int32_t part_i __attribute__((vector_size(WIDTH)));

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint64_t vq __attribute__((vector_size(64)));

/* products under way at once: enough to hide how long one takes, and no more than there are registers for */
#if defined(__AVX512F__)
enum { CHAINS = 8 };
#else
enum { CHAINS = 5 };
#endif

int64_t probe_read(const char *memory, int64_t bytes) {
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

static volatile float sink;


/* each returns how many multiplications and additions it did */

#if defined(__FMA__)
typedef struct __attribute__((may_alias)) { __m256 low, high; } halves;
#endif

int64_t probe_float32(int64_t rounds) {
    vf sums[CHAINS], a = {1.0f}, b = {0.5f};
#if defined(__FMA__)
    const __m256 half = _mm256_set1_ps(0.5f);
    (void)half;
#endif
    for (int i = 0; i < CHAINS; i++) sums[i] = a * (float)i;
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < CHAINS; i++) {
#if defined(__AVX512F__)
            sums[i] = (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums[i]);
#elif defined(__FMA__)
            halves *sum = (halves *)&sums[i];
            sum->low = _mm256_fmadd_ps(half, half, sum->low);
            sum->high = _mm256_fmadd_ps(half, half, sum->high);
#else
            sums[i] = a * b + sums[i];
#endif
        }
    float found = 0.0f;
    for (int i = 0; i < CHAINS; i++) found += sums[i][0];
    sink = found;
    return rounds * CHAINS * 16 * 2;
}

#if AMX
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t columns[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

static int tiles_allowed(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

static int64_t probe_tiles(int64_t rounds, int is_int8) {
    if (!tiles_allowed()) return 0;
    TileConfig config = {.palette = 1};
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

int64_t probe_bfloat16(int64_t rounds) {
#if AMX
    return probe_tiles(rounds, 0);
#elif defined(__AVX512BF16__)
    vf sums[CHAINS] = {0};
    vi a = {0x3f803f80}, b = {0x3f003f00};
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < CHAINS; i++) sums[i] = (vf)_mm512_dpbf16_ps((__m512)sums[i], (__m512bh)a, (__m512bh)b);
    float found = 0.0f;
    for (int i = 0; i < CHAINS; i++) found += sums[i][0];
    sink = found;
    return rounds * CHAINS * 32 * 2;
#else
    return probe_float32(rounds); /* widened, then multiplied as float32 */
#endif
}

/* an input beside 8-bit weights has 16 bits: both of its bytes are multiplied, and it counts once */
int64_t probe_int8(int64_t rounds) {
#if AMX
    return probe_tiles(rounds, 1) / 2;
#elif defined(__AVX512VNNI__)
    vi sums[CHAINS] = {0}, a = {0x01020304}, b = {0x04030201};
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < CHAINS; i++) sums[i] = (vi)_mm512_dpbusd_epi32((__m512i)sums[i], (__m512i)a, (__m512i)b);
    int32_t found = 0;
    for (int i = 0; i < CHAINS; i++) found += sums[i][0];
    sink = (float)found;
    return rounds * CHAINS * 32 * 2;
#else
    part_i sums[CHAINS] = {0}, a = {0x00010002}, b = {0x00040003};
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < CHAINS; i++) {
#if defined(__AVX512BW__)
            sums[i] += (part_i)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
            sums[i] += (part_i)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
            sums[i] += ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
            __asm__ volatile("" : "+m"(a)); /* or the products are computed once */
        }
    int32_t found = 0;
    for (int i = 0; i < CHAINS; i++) found += sums[i][0];
    sink = (float)found;
    return rounds * CHAINS * (WIDTH / 2) * 2;
#endif
}
