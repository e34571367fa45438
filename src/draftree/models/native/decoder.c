/* A pass of a decoder over a few rows, as close to the speed of memory as it gets.
 *
 * Every row is computed by the same arithmetic in the same order, whatever stands beside it: the product of a row with
 * a weight adds up along the inner dimension only, and attention adds a row's keys in the order of their positions, in
 * blocks of 64, wherever they lie. So a token's logits are bit-identical whether it is scored alone or in any tree.
 *
 * Weights are packed ahead. In blocks of 16 outputs:
 *   float32   [block][input][16 outputs]
 *   bfloat16  [block][32 inputs][16 pairs][16 outputs][2]
 *   int8      [block][64 inputs][16 quads][16 outputs][4], with a scale for each output
 * which is what AMX tiles, the dot products of AVX-512 and plain vectors all read without shuffling.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#define AMX 1
#else
#define AMX 0
#endif
#include "vectors.h"

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };
enum { SILU = 0, GELU_TANH = 1 };
enum { TILE_ROWS = 16, KEY_BLOCK = 64, ATTENTION_ROWS = 8, MAX_THREADS = 256 };

INLINE vf activate(vf x, int64_t kind) {
    /* gelu by tanh is x times the logistic of 2 sqrt(2 / pi) (x + 0.044715 x^3) */
    vf z = kind == SILU ? x : 1.5957691216f * fma16(0.044715f * x * x, x, x);
    return x / (1.0f + exp16(-z));
}

INLINE vf widen(half_row bits) { return (vf)(__builtin_convertvector(bits, vu) << 16); }
INLINE vf load_half(const uint16_t *p) { return widen(*(const half_loose *)p); }

INLINE half_row narrow(vf x) { /* to bfloat16, to nearest, ties to even; NaN stays NaN */
#if defined(__AVX512BF16__)
    return (half_row)_mm512_cvtneps_pbh((__m512)x);
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vi is_nan = x != x;
    return __builtin_convertvector((rounded & ~(vu)is_nan) | (0x7fc0 & (vu)is_nan), half_row);
#endif
}
INLINE void store_half(uint16_t *p, vf x) { *(half_loose *)p = narrow(x); }

/* ---- what a pass works on ---- */

typedef struct {
    const void *weight;
    const float *scale;  /* int8: one for each output */
    const int32_t *sums; /* int8: sum of each output's weights */
    const float *bias;   /* or NULL */
    int64_t inputs, outputs;
} Linear;

typedef struct {
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm, *query_norm, *key_norm;
    Linear qkv, output, gate_up, down;
    void *keys, *values; /* [slot][kv head][place][head_dim] */
    int64_t window;      /* 0: none */
    int64_t rope;        /* which of the pass's tables */
    float scaling;
} Layer;

typedef struct {
    int64_t hidden, heads, kv_heads, head_dim, mlp, num_layers, vocab;
    int64_t format, kv_format, activation;
    float epsilon, embedding_scale, norm_offset, residual_scale, logit_scale;
    const void *embedding; /* [vocab][hidden] in kv_format; NULL: the rows of the packed head */
    const float *final_norm;
    const Layer *layers;
    Linear head;
} Decoder;

typedef struct {
    int64_t rows, num_threads, first_layer, last_layer, num_logits, num_chunks, places, rotary_dim;
    const int64_t *tokens;
    const int64_t *slot, *place, *position; /* a row each */
    const int64_t *identical;               /* keys before this position lie at their position */
    const int64_t *list_start;              /* where a row's list of places behind them starts */
    const int64_t *list;
    const int64_t *chunks;      /* first row of each run of rows of one slot; the total behind them */
    const float *cosines[2], *sines[2]; /* [position][rotary_dim] */
    const float *hidden_in;     /* NULL: the tokens' embeddings */
    float *hidden_out;          /* NULL: not asked for */
    const uint8_t *skipped;     /* NULL, or for every layer whether attention and mlp are left out */
    const int64_t *logit_rows;
    float *logits;              /* [num_logits][vocab] */
} Pass;

typedef struct {
    const Decoder *decoder;
    const Pass *pass;
    int64_t rows, row_blocks; /* padded to tiles */
    float *x;                 /* the residual stream [row][hidden] */
    float *wide;              /* outputs of a product [row][widest] */
    float *mixed;             /* attention's result, or the activated mlp [row][...] */
    void *inputs;             /* what the next product reads, in the weights' format */
    float *input_scales;      /* int8: one for each row */
    float *scratch;           /* of each thread */
    int64_t scratch_size;
    atomic_long *next;        /* the next piece of each phase */
} Work;

/* ---- threads: they sleep between passes and spin within one ---- */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    pthread_t threads[MAX_THREADS];
    int started, wanted, finished;
    long round;
    pid_t owner;
    Work *work;
    atomic_long arrived, generation;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

INLINE void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

static void barrier(int threads) {
    if (threads == 1) return;
    long generation = atomic_load_explicit(&pool.generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&pool.arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&pool.arrived, 0, memory_order_relaxed);
        atomic_fetch_add_explicit(&pool.generation, 1, memory_order_release);
        return;
    }
    for (long spins = 0; atomic_load_explicit(&pool.generation, memory_order_acquire) == generation; spins++) {
        pause_briefly();
        if (spins > 4000) sched_yield(); /* someone else computes here as well */
    }
}

static void run_thread(Work *work, int thread, int threads);

static void *sleeper(void *argument) {
    int thread = (int)(intptr_t)argument;
    long seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.round == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = pool.round;
        if (thread >= pool.wanted) continue;
        pthread_mutex_unlock(&pool.lock);
        run_thread(pool.work, thread, pool.wanted);
        pthread_mutex_lock(&pool.lock);
        if (++pool.finished == pool.wanted - 1) pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static int start_threads(int wanted) { /* returns how many there are, the caller included */
    if (pool.owner != getpid()) { /* threads do not survive a fork */
        pool.owner = getpid();
        pool.started = 0;
        pool.round = 0;
        pthread_mutex_init(&pool.lock, NULL);
        pthread_cond_init(&pool.wake, NULL);
        pthread_cond_init(&pool.done, NULL);
    }
    if (wanted > MAX_THREADS) wanted = MAX_THREADS;
    while (pool.started < wanted - 1) {
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&pool.threads[pool.started], &attributes, sleeper, (void *)(intptr_t)(pool.started + 1));
        pthread_attr_destroy(&attributes);
        if (failed) break;
        pool.started++;
    }
    return wanted < pool.started + 1 ? wanted : pool.started + 1;
}

/* Where the process has an OpenMP library already, its threads are taken: they may still be spinning behind the last
 * operator of somebody else, and would keep ours from the cores. */
static struct {
    void (*parallel)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);
    int (*num_threads)(void);
} openmp;

void draftree_use_openmp(void *parallel, void *num_threads) {
    openmp.parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    openmp.num_threads = (int (*)(void))num_threads;
}

typedef struct {
    Work *work;
    atomic_int next_thread;
} Team;

static void run_in_team(void *argument) {
    Team *team = argument;
    run_thread(team->work, atomic_fetch_add(&team->next_thread, 1), openmp.num_threads());
}

/* calls `work` on every thread of a team, where there is one; else once */
void draftree_in_parallel(void (*work)(void *), void *argument, int threads) {
    if (openmp.parallel != NULL) openmp.parallel(work, argument, (unsigned)threads, 0);
    else work(argument);
}

static void run_threads(Work *work, int threads) {
    if (threads == 1) {
        run_thread(work, 0, 1);
        return;
    }
    atomic_store(&pool.arrived, 0);
    if (openmp.parallel != NULL) {
        Team team = {.work = work};
        openmp.parallel(run_in_team, &team, (unsigned)threads, 0);
        return;
    }
    pthread_mutex_lock(&pool.lock);
    pool.work = work;
    pool.wanted = threads;
    pool.finished = 0;
    pool.round++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    run_thread(work, 0, threads);
    pthread_mutex_lock(&pool.lock);
    while (pool.finished < threads - 1) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* ---- products of rows and packed weights ---- */

INLINE int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }
INLINE int64_t inner_block(int64_t format) { return format == INT8 ? 64 : format == BFLOAT16 ? 32 : 1; }
INLINE int64_t block_bytes(int64_t inputs, int64_t format) { /* of 16 outputs */
    return format == FLOAT32 ? inputs * 64 : blocks_of(inputs, inner_block(format)) * 1024;
}
/* bfloat16 and int8 rows lie in tiles of 16 rows by 64 bytes; float32 rows lie as they are */
INLINE int64_t tile_at(int64_t row, int64_t unit, int64_t units) { return ((row / 16 * units + unit) * 16 + row % 16) * 64; }

typedef void (*Epilogue)(const Work *, const Linear *, int64_t row, int64_t block, vf value, vf value_of_next);

INLINE vf with_bias(const Linear *linear, int64_t block, vf value) {
    return linear->bias == NULL ? value : value + load(linear->bias + block * LANES);
}

enum { TO_WIDE, TO_STREAM, TO_MLP, TO_LOGITS };

INLINE void finish(const Work *work, const Linear *linear, int64_t row, int64_t block, vf value, int target) {
    const Decoder *decoder = work->decoder;
    value = with_bias(linear, block, value);
    if (target == TO_WIDE) {
        store(work->wide + row * linear->outputs + block * LANES, value);
    } else if (target == TO_STREAM) {
        float *at = work->x + row * decoder->hidden + block * LANES;
        store(at, fma16(value, splat(decoder->residual_scale), load(at)));
    } else {
        float *at = work->pass->logits + row * decoder->vocab + block * LANES;
        int64_t left = decoder->vocab - block * LANES;
        value = value * decoder->logit_scale;
        if (left >= LANES) store(at, value);
        else for (int64_t i = 0; i < left; i++) at[i] = value[i];
    }
}

/* gate and up lie in turns: block 2i is of the gate, block 2i + 1 of what it lets through */
INLINE void finish_mlp(const Work *work, const Linear *linear, int64_t row, int64_t block, vf gate, vf up) {
    const Decoder *decoder = work->decoder;
    gate = with_bias(linear, block, gate);
    up = with_bias(linear, block + 1, up);
    vf value = activate(gate, decoder->activation) * up;
    int64_t column = block / 2 * LANES;
    if (decoder->format == BFLOAT16) {
        int64_t units = blocks_of(decoder->mlp, 32);
        store_half((uint16_t *)((char *)work->mixed + tile_at(row, column / 32, units)) + column % 32, value);
    } else {
        store(work->mixed + row * decoder->mlp + column, value);
    }
}

INLINE void finish_blocks(const Work *work, const Linear *linear, int64_t row, int64_t block, int count, const vf *values, int target) {
    if (target == TO_MLP)
        for (int i = 0; i < count; i += 2) finish_mlp(work, linear, row, block + i, values[i], values[i + 1]);
    else
        for (int i = 0; i < count; i++) finish(work, linear, row, block + i, values[i], target);
}

INLINE vf dequantised(const Work *work, const Linear *linear, int64_t row, int64_t block, vi sums) {
    return __builtin_convertvector(sums, vf) * (load(linear->scale + block * LANES) * work->input_scales[row]);
}

#if defined(__AVX512F__)
enum { GROUP = 4, ROWS_AT_ONCE = 4 };
#else
enum { GROUP = 2, ROWS_AT_ONCE = 2 };
#endif

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
    __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc believes that only its first bytes are read */
    _tile_loadconfig(&config);
}

/* one tile of rows by four blocks of outputs */
INLINE void product_by_tiles(const Work *work, const Linear *linear, int64_t row_block, int64_t block, int count, int target, int64_t rows) {
    const int64_t format = work->decoder->format, units = blocks_of(linear->inputs, inner_block(format));
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input = (const char *)work->inputs + row_block * units * 1024;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
#define STEP(tile, place, dot) { _tile_loadd(5, weight + (place) * units * 1024 + unit * 1024, 64); dot(tile, 4, 5); }
    if (format == BFLOAT16) {
        for (int64_t unit = 0; unit < units; unit++) {
            _tile_loadd(4, input + unit * 1024, 64);
            STEP(0, 0, _tile_dpbf16ps)
            if (count > 1) STEP(1, 1, _tile_dpbf16ps)
            if (count > 2) STEP(2, 2, _tile_dpbf16ps)
            if (count > 3) STEP(3, 3, _tile_dpbf16ps)
        }
    } else {
        for (int64_t unit = 0; unit < units; unit++) {
            _tile_loadd(4, input + unit * 1024, 64);
            STEP(0, 0, _tile_dpbssd)
            if (count > 1) STEP(1, 1, _tile_dpbssd)
            if (count > 2) STEP(2, 2, _tile_dpbssd)
            if (count > 3) STEP(3, 3, _tile_dpbssd)
        }
    }
#undef STEP
    union { vf value; vi sum; } found[4][16] __attribute__((aligned(64)));
    _tile_stored(0, found[0], 64);
    if (count > 1) _tile_stored(1, found[1], 64);
    if (count > 2) _tile_stored(2, found[2], 64);
    if (count > 3) _tile_stored(3, found[3], 64);
    for (int64_t r = 0; r < 16 && row_block * 16 + r < rows; r++) {
        int64_t row = row_block * 16 + r;
        vf values[4];
        for (int i = 0; i < count; i++)
            values[i] = format == INT8 ? dequantised(work, linear, row, block + i, found[i][r].sum) : found[i][r].value;
        finish_blocks(work, linear, row, block, count, values, target);
    }
}
#endif

INLINE void product_float32(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    const float *weight = (const float *)linear->weight + block * linear->inputs * LANES;
    const float *input = (const float *)work->inputs + row * linear->inputs;
    vf sums[ROWS_AT_ONCE][GROUP] = {0};
    for (int64_t k = 0; k < linear->inputs; k++) {
        vf w[GROUP];
        for (int i = 0; i < count; i++) w[i] = load(weight + (i * linear->inputs + k) * LANES);
        for (int r = 0; r < num_rows; r++) {
            vf a = splat(input[r * linear->inputs + k]);
            for (int i = 0; i < count; i++) sums[r][i] = fma16(a, w[i], sums[r][i]);
        }
    }
    for (int r = 0; r < num_rows; r++) finish_blocks(work, linear, row + r, block, count, sums[r], target);
}

INLINE void product_bfloat16(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    const int64_t units = blocks_of(linear->inputs, 32);
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input[ROWS_AT_ONCE];
    for (int r = 0; r < num_rows; r++) input[r] = (const char *)work->inputs + tile_at(row + r, 0, units);
    vf sums[ROWS_AT_ONCE][GROUP] = {0};
    for (int64_t unit = 0; unit < units; unit++) {
        for (int pair = 0; pair < 16; pair++) {
            vu w[GROUP];
            for (int i = 0; i < count; i++) w[i] = *(const vu_loose *)(weight + ((i * units + unit) * 16 + pair) * 64);
            for (int r = 0; r < num_rows; r++) {
                uint32_t both;
                memcpy(&both, input[r] + unit * 1024 + pair * 4, 4);
                vu a = (vu){0} + both;
                for (int i = 0; i < count; i++) {
#if defined(__AVX512BF16__)
                    sums[r][i] = (vf)_mm512_dpbf16_ps((__m512)sums[r][i], (__m512bh)a, (__m512bh)w[i]);
#else
                    sums[r][i] = fma16((vf)(a << 16), (vf)(w[i] << 16), sums[r][i]);
                    sums[r][i] = fma16((vf)(a & 0xffff0000u), (vf)(w[i] & 0xffff0000u), sums[r][i]);
#endif
                }
            }
        }
    }
    for (int r = 0; r < num_rows; r++) finish_blocks(work, linear, row + r, block, count, sums[r], target);
}

INLINE vi dot_of_quads(vi sum, vi a, vi w) { /* four signed products in each lane */
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)(a ^ (vi)((vu){0} + 0x80808080u)), (__m512i)w);
#else
    for (int shift = 24; shift >= 0; shift -= 8) sum += ((a << shift) >> 24) * ((w << shift) >> 24);
    return sum;
#endif
}

INLINE void product_int8(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    const int64_t units = blocks_of(linear->inputs, 64);
    const char *weight = (const char *)linear->weight + block * units * 1024;
    const char *input[ROWS_AT_ONCE];
    for (int r = 0; r < num_rows; r++) input[r] = (const char *)work->inputs + tile_at(row + r, 0, units);
    vi sums[ROWS_AT_ONCE][GROUP] = {0};
    for (int64_t unit = 0; unit < units; unit++) {
        for (int quad = 0; quad < 16; quad++) {
            vi w[GROUP];
            for (int i = 0; i < count; i++) w[i] = *(const vi_loose *)(weight + ((i * units + unit) * 16 + quad) * 64);
            for (int r = 0; r < num_rows; r++) {
                int32_t four;
                memcpy(&four, input[r] + unit * 1024 + quad * 4, 4);
                for (int i = 0; i < count; i++) sums[r][i] = dot_of_quads(sums[r][i], (vi){0} + four, w[i]);
            }
        }
    }
    for (int r = 0; r < num_rows; r++) {
        vf values[GROUP];
        for (int i = 0; i < count; i++) {
#if defined(__AVX512VNNI__) /* activations were read as unsigned, 128 too large */
            sums[r][i] -= *(const vi_loose *)(linear->sums + (block + i) * LANES) * 128;
#endif
            values[i] = dequantised(work, linear, row + r, block + i, sums[r][i]);
        }
        finish_blocks(work, linear, row + r, block, count, values, target);
    }
}

INLINE void product_rows(const Work *work, const Linear *linear, int64_t row, int num_rows, int64_t block, int count, int target) {
    switch (work->decoder->format) {
    case FLOAT32: product_float32(work, linear, row, num_rows, block, count, target); break;
    case BFLOAT16: product_bfloat16(work, linear, row, num_rows, block, count, target); break;
    default: product_int8(work, linear, row, num_rows, block, count, target);
    }
}

INLINE void product_of_group(const Work *work, const Linear *linear, int64_t rows, int64_t block, int count, int target) {
#if AMX
    if (work->decoder->format != FLOAT32) {
        for (int64_t row_block = 0; row_block * 16 < rows; row_block++)
            product_by_tiles(work, linear, row_block, block, count, target, rows);
        return;
    }
#endif
    int64_t row = 0;
    for (; row + ROWS_AT_ONCE <= rows; row += ROWS_AT_ONCE) product_rows(work, linear, row, ROWS_AT_ONCE, block, count, target);
    for (; row < rows; row++) product_rows(work, linear, row, 1, block, count, target);
}

/* a thread's share of a product: groups of blocks, taken as they come */
INLINE void product(const Work *work, const Linear *linear, int64_t rows, int phase, int target) {
    const int64_t blocks = blocks_of(linear->outputs, LANES);
    for (;;) {
        int64_t block = atomic_fetch_add_explicit(&work->next[phase], GROUP, memory_order_relaxed);
        if (block >= blocks) return;
        if (block + GROUP <= blocks) {
            product_of_group(work, linear, rows, block, GROUP, target);
        } else { /* the mlp's blocks come in pairs */
            int64_t step = target == TO_MLP ? 2 : 1;
            for (; block < blocks; block += step) product_of_group(work, linear, rows, block, (int)step, target);
        }
    }
}

/* ---- rows: norms, formats, positions ---- */

INLINE float inverse_rms(const float *row, int64_t size, float epsilon) {
    vf squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) squares = fma16(load(row + i), load(row + i), squares);
    return 1.0f / sqrtf(sum_of(squares) / (float)size + epsilon);
}

/* a row becomes the next product's input, normed first if there is a norm */
static void put_input(const Work *work, int64_t row, const float *from, int64_t size, const float *norm) {
    const Decoder *decoder = work->decoder;
    const vf inverse = splat(norm == NULL ? 1.0f : inverse_rms(from, size, decoder->epsilon));
    const vf offset = splat(decoder->norm_offset);
#define VALUE(i) (norm == NULL ? load(from + (i)) : load(from + (i)) * inverse * (load(norm + (i)) + offset))
    if (decoder->format == FLOAT32) {
        float *to = (float *)work->inputs + row * size;
        for (int64_t i = 0; i < size; i += LANES) store(to + i, VALUE(i));
    } else if (decoder->format == BFLOAT16) {
        int64_t units = blocks_of(size, 32);
        for (int64_t i = 0; i < size; i += LANES)
            store_half((uint16_t *)((char *)work->inputs + tile_at(row, i / 32, units)) + i % 32, VALUE(i));
        if (size % 32) store_half((uint16_t *)((char *)work->inputs + tile_at(row, size / 32, units)) + 16, splat(0.0f));
    } else {
        vf largest = splat(0.0f);
        for (int64_t i = 0; i < size; i += LANES) {
            vf value = VALUE(i);
            vf size_of = (vf)((vi)value & 0x7fffffff);
            largest = choose((size_of > largest) | (size_of != size_of), size_of, largest);
        }
        float most = max_of(largest), scale = most / 127.0f;
        for (int lane = 0; lane < LANES; lane++) if (largest[lane] != largest[lane]) scale = largest[lane];
        work->input_scales[row] = scale;
        const vf inverse_scale = splat(scale > 0.0f ? 127.0f / most : 0.0f), shift = splat(12582912.0f);
        int64_t units = blocks_of(size, 64);
        for (int64_t i = 0; i < units * 64; i += LANES) {
            vf value = i < size ? VALUE(i) * inverse_scale : splat(0.0f);
            vi whole = __builtin_convertvector(choose(value == value, (value + shift) - shift, splat(0.0f)), vi);
            typedef int8_t bytes __attribute__((vector_size(16)));
            bytes out = __builtin_convertvector(whole, bytes);
            memcpy((char *)work->inputs + tile_at(row, i / 64, units) + i % 64, &out, 16);
        }
    }
#undef VALUE
}

INLINE vf stored(const void *base, int64_t at, int64_t format) {
    return format == FLOAT32 ? load((const float *)base + at) : load_half((const uint16_t *)base + at);
}

static void embed(const Work *work, int64_t row) {
    const Decoder *decoder = work->decoder;
    const int64_t token = work->pass->tokens[row], hidden = decoder->hidden;
    float *to = work->x + row * hidden;
    if (decoder->embedding != NULL) {
        for (int64_t i = 0; i < hidden; i += LANES)
            store(to + i, stored(decoder->embedding, token * hidden + i, decoder->kv_format) * decoder->embedding_scale);
        return;
    }
    const char *block = (const char *)decoder->head.weight + token / LANES * block_bytes(hidden, decoder->format);
    const int64_t lane = token % LANES;
    for (int64_t i = 0; i < hidden; i++) {
        if (decoder->format == FLOAT32) {
            to[i] = ((const float *)block)[i * LANES + lane];
        } else {
            uint32_t bits = (uint32_t)((const uint16_t *)block)[(i / 2 * LANES + lane) * 2 + i % 2] << 16;
            memcpy(to + i, &bits, 4);
        }
    }
    for (int64_t i = 0; i < hidden; i += LANES) store(to + i, load(to + i) * decoder->embedding_scale);
}

/* norm of one head, then its turn by position */
static void place_head(const Work *work, float *head, const float *norm, int64_t row, int64_t rope) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, rotary = pass->rotary_dim, half = rotary / 2;
    if (norm != NULL) {
        const vf inverse = splat(inverse_rms(head, dim, decoder->epsilon));
        for (int64_t i = 0; i < dim; i += LANES)
            store(head + i, load(head + i) * inverse * (load(norm + i) + splat(decoder->norm_offset)));
    }
    if (rope < 0) return;
    const float *cosine = pass->cosines[rope] + pass->position[row] * rotary, *sine = pass->sines[rope] + pass->position[row] * rotary;
    for (int64_t i = 0; i < half; i++) {
        float low = head[i], high = head[i + half];
        head[i] = low * cosine[i] - high * sine[i];
        head[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

static void place_row(const Work *work, const Layer *layer, int64_t row) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, width = (decoder->heads + 2 * decoder->kv_heads) * dim;
    float *query = work->wide + row * width, *key = query + decoder->heads * dim, *value = key + decoder->kv_heads * dim;
    for (int64_t h = 0; h < decoder->heads; h++) place_head(work, query + h * dim, layer->query_norm, row, layer->rope);
    for (int64_t h = 0; h < decoder->kv_heads; h++) {
        place_head(work, key + h * dim, layer->key_norm, row, layer->rope);
        int64_t at = ((pass->slot[row] * decoder->kv_heads + h) * pass->places + pass->place[row]) * dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            if (decoder->kv_format == FLOAT32) {
                store((float *)layer->keys + at + i, load(key + h * dim + i));
                store((float *)layer->values + at + i, load(value + h * dim + i));
            } else {
                store_half((uint16_t *)layer->keys + at + i, load(key + h * dim + i));
                store_half((uint16_t *)layer->values + at + i, load(value + h * dim + i));
            }
        }
    }
}

/* ---- attention: a row's keys in the order of their positions, 64 at a time ---- */

typedef struct {
    float *keys, *values;  /* one block, widened: [64][head_dim] */
    float *sums;           /* [row][head of the group][head_dim] */
    float *largest, *total;
} Attending;

INLINE int64_t place_of(const Pass *pass, int64_t row, int64_t position) {
    int64_t identical = pass->identical[row];
    return position < identical ? position : pass->list[pass->list_start[row] + position - identical];
}

static void read_block(const Work *work, const Layer *layer, Attending *at, int64_t row, int64_t kv_head, int64_t first, int64_t end) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim;
    const int64_t base = (pass->slot[row] * decoder->kv_heads + kv_head) * pass->places;
    for (int64_t position = first; position < end; position++) {
        const int64_t from = (base + place_of(pass, row, position)) * dim, to = (position - first) * dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            store(at->keys + to + i, stored(layer->keys, from + i, decoder->kv_format));
            store(at->values + to + i, stored(layer->values, from + i, decoder->kv_format));
        }
    }
}

INLINE void add_values(float *sums, const float *values, const float *weights, int64_t dim, int count, int from, int to, vf factor) {
    vf sum[4];
    for (int i = 0; i < count; i++) sum[i] = load(sums + i * LANES) * factor;
    for (int key = from; key < to; key++) {
        vf weight = splat(weights[key]);
        for (int i = 0; i < count; i++) sum[i] = fma16(weight, load(values + key * dim + i * LANES), sum[i]);
    }
    for (int i = 0; i < count; i++) store(sums + i * LANES, sum[i]);
}

/* one query and one block; keys from `low` to `high` of the block are seen */
static void attend_block(const Attending *at, const float *query, int64_t dim, int64_t index, int low, int high, float scaling) {
    float scores[KEY_BLOCK] __attribute__((aligned(64))), weights[KEY_BLOCK] __attribute__((aligned(64)));
    const vf nothing = splat(-INFINITY);
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf largest = nothing;
    for (int group = 0; group < KEY_BLOCK; group += LANES) {
        vf dots[LANES];
        if (group + LANES <= low || group >= high) {
            store(scores + group, nothing);
            continue;
        }
        for (int key = 0; key < LANES; key++) {
            vf dot = splat(0.0f);
            for (int64_t i = 0; i < dim; i += LANES) dot = fma16(load(query + i), load(at->keys + (group + key) * dim + i), dot);
            dots[key] = dot;
        }
        vf found = sums_of(dots) * scaling;
        vi seen = (lanes + group >= low) & (lanes + group < high);
        found = choose(seen, found, nothing);
        store(scores + group, found);
        largest = choose((found > largest) | (found != found), found, largest);
    }
    float before = at->largest[index], now = before;
    for (int i = 0; i < LANES; i++) now = largest[i] > now || largest[i] != largest[i] ? largest[i] : now;
    vf total = splat(0.0f);
    for (int group = 0; group < KEY_BLOCK; group += LANES) {
        vf weight = exp16(load(scores + group) - splat(now));
        store(weights + group, weight);
        total += weight;
    }
    vf factor = exp16(splat(before) - splat(now));
    if (before == -INFINITY) factor = splat(0.0f);
    at->largest[index] = now;
    at->total[index] = at->total[index] * factor[0] + sum_of(total);
    float *sums = at->sums + index * dim;
    int64_t i = 0;
    for (; i + 64 <= dim; i += 64) add_values(sums + i, at->values + i, weights, dim, 4, low, high, factor);
    for (; i < dim; i += LANES) add_values(sums + i, at->values + i, weights, dim, 1, low, high, factor);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t first_seen(const Layer *layer, int64_t position) {
    return layer->window ? most(0, position + 1 - layer->window) : 0;
}

/* whether a block's keys lie in the same places for all rows, and which row sees most of them */
INLINE int shares_block(const Pass *pass, int64_t first_row, int64_t end_row, int64_t block, int64_t *widest) {
    int64_t most_seen = 0;
    int is_shared = 1;
    for (int64_t row = first_row; row < end_row; row++) {
        int64_t seen = least(block + KEY_BLOCK, pass->position[row] + 1);
        is_shared &= seen <= pass->identical[row];
        if (seen > most_seen) {
            most_seen = seen;
            *widest = row;
        }
    }
    return is_shared;
}

/* some rows of one slot and the query heads of one key head */
static void attend(const Work *work, const Layer *layer, float *scratch, int64_t first_row, int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    const int64_t width = (decoder->heads + 2 * decoder->kv_heads) * dim, queries = (end_row - first_row) * group;
    Attending at = {scratch, scratch + KEY_BLOCK * dim, scratch + 2 * KEY_BLOCK * dim, NULL, NULL};
    at.largest = at.sums + queries * dim;
    at.total = at.largest + queries;
    memset(at.sums, 0, (size_t)(queries * dim) * sizeof(float));
    int64_t start = INT64_MAX, end = 0;
    for (int64_t row = first_row; row < end_row; row++) {
        start = least(start, first_seen(layer, pass->position[row]));
        end = most(end, pass->position[row] + 1);
    }
    for (int64_t i = 0; i < queries; i++) {
        at.largest[i] = -INFINITY;
        at.total[i] = 0.0f;
    }
    for (int64_t block = start / KEY_BLOCK * KEY_BLOCK; block < end; block += KEY_BLOCK) {
        int64_t widest = first_row;
        const int is_shared = shares_block(pass, first_row, end_row, block, &widest);
        if (is_shared) read_block(work, layer, &at, widest, kv_head, block, least(block + KEY_BLOCK, pass->position[widest] + 1));
        for (int64_t row = first_row; row < end_row; row++) {
            const int64_t position = pass->position[row], high = least(block + KEY_BLOCK, position + 1);
            const int64_t low = most(block, first_seen(layer, position));
            if (low >= high) continue;
            if (!is_shared) read_block(work, layer, &at, row, kv_head, block, high);
            for (int64_t head = 0; head < group; head++) {
                const float *query = work->wide + row * width + (kv_head * group + head) * dim;
                attend_block(&at, query, dim, (row - first_row) * group + head, (int)(low - block), (int)(high - block), layer->scaling);
            }
        }
    }
    for (int64_t row = first_row; row < end_row; row++)
        for (int64_t head = 0; head < group; head++) {
            int64_t index = (row - first_row) * group + head;
            float *to = work->mixed + row * decoder->heads * dim + (kv_head * group + head) * dim;
            for (int64_t i = 0; i < dim; i += LANES) store(to + i, load(at.sums + index * dim + i) / at.total[index]);
        }
}

#if AMX
/* ---- the same by tiles: up to 16 queries of one key head at once, one in each lane ---- */

enum { QUERIES = 16 };

typedef struct {
    uint16_t *keys;    /* one block: [64][inner], the size of a head rounded up to 32 */
    uint16_t *values;  /* [32 pairs][head_dim][2] */
    uint16_t *queries; /* of each tile: [inner / 32][16 pairs][16 queries][2] */
    float *sums;       /* of each tile: [16 queries][head_dim] */
    float *largest, *total; /* of each tile: [16 queries] */
    int64_t inner, rows_of_tile, num_tiles;
} Tiles;

INLINE size_t tiles_bytes(int64_t dim, int64_t num_tiles) {
    const int64_t inner = blocks_of(dim, 32) * 32;
    return (size_t)(KEY_BLOCK * inner * 2 + KEY_BLOCK * dim * 2 + num_tiles * (inner * QUERIES * 2 + QUERIES * dim * 4 + 2 * QUERIES * 4));
}

static Tiles place_tiles(char *memory, int64_t dim, int64_t group, int64_t rows) {
    Tiles at = {.inner = blocks_of(dim, 32) * 32, .rows_of_tile = QUERIES / group};
    at.num_tiles = blocks_of(rows, at.rows_of_tile);
    at.sums = (float *)memory;
    at.largest = at.sums + at.num_tiles * QUERIES * dim;
    at.total = at.largest + at.num_tiles * QUERIES;
    at.queries = (uint16_t *)(at.total + at.num_tiles * QUERIES);
    at.keys = at.queries + at.num_tiles * at.inner * QUERIES;
    at.values = at.keys + KEY_BLOCK * at.inner;
    return at;
}

static void put_queries(const Work *work, Tiles *at, int64_t first_row, int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    const int64_t width = (decoder->heads + 2 * decoder->kv_heads) * dim;
    memset(at->queries, 0, (size_t)(at->num_tiles * at->inner * QUERIES) * 2);
    for (int64_t row = first_row; row < end_row; row++)
        for (int64_t head = 0; head < group; head++) {
            const int64_t index = row - first_row, lane = index % at->rows_of_tile * group + head;
            const float *query = work->wide + row * width + (kv_head * group + head) * dim;
            uint16_t *to = at->queries + index / at->rows_of_tile * at->inner * QUERIES;
            for (int64_t i = 0; i < dim; i += LANES) {
                uint32_t pairs[8];
                half_row bits = narrow(load(query + i));
                memcpy(pairs, &bits, 32);
                for (int pair = 0; pair < 8; pair++) memcpy(to + ((i / 2 + pair) * QUERIES + lane) * 2, pairs + pair, 4);
            }
        }
    for (int64_t i = 0; i < at->num_tiles * QUERIES; i++) {
        at->largest[i] = -INFINITY;
        at->total[i] = 0.0f;
    }
    memset(at->sums, 0, (size_t)(at->num_tiles * QUERIES * dim) * 4);
}

INLINE vf interleaved(half_row a, half_row b) { /* a0 b0 a1 b1 ... */
    return (vf)(__builtin_convertvector(a, vu) | (__builtin_convertvector(b, vu) << 16));
}

static void read_tiles(const Work *work, const Layer *layer, Tiles *at, int64_t row, int64_t kv_head, int64_t first, int64_t end) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, base = (pass->slot[row] * decoder->kv_heads + kv_head) * pass->places;
    const uint16_t *keys = layer->keys, *values = layer->values;
    const half_row nothing = {0};
    for (int64_t key = 0; key < KEY_BLOCK; key += 2) {
        const uint16_t *from[2] = {NULL, NULL};
        for (int i = 0; i < 2; i++) {
            uint16_t *to = at->keys + (key + i) * at->inner;
            if (first + key + i >= end) {
                memset(to, 0, (size_t)at->inner * 2);
                continue;
            }
            const int64_t place = (base + place_of(pass, row, first + key + i)) * dim;
            from[i] = values + place;
            for (int64_t d = 0; d < dim; d += LANES) *(half_loose *)(to + d) = *(const half_loose *)(keys + place + d);
            if (dim % 32) *(half_loose *)(to + dim) = nothing;
        }
        for (int64_t d = 0; d < dim; d += LANES) {
            half_row even = nothing, odd = nothing;
            if (from[0] != NULL) even = *(const half_loose *)(from[0] + d);
            if (from[1] != NULL) odd = *(const half_loose *)(from[1] + d);
            store((float *)(at->values + key * dim + d * 2), interleaved(even, odd));
        }
    }
}

/* rows to columns */
INLINE void transpose(vf *x) {
#define TURN(step, ...) \
    for (int i = 0; i < 16; i++) \
        if (!(i & step)) { \
            vf a = x[i], b = x[i + step]; \
            x[i] = __builtin_shufflevector(a, b, __VA_ARGS__); \
            x[i + step] = TURNED_##step; \
        }
#define TURNED_8 __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define TURNED_4 __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define TURNED_2 __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define TURNED_1 __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
    TURN(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
    TURN(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
    TURN(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
    TURN(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#undef TURN
}

/* one tile of queries and one block; lane i sees the block's keys from low[i] to high[i] */
static void attend_tile(const Tiles *at, int64_t tile, int64_t dim, vi low, vi high, float scaling) {
    float scores[KEY_BLOCK][LANES] __attribute__((aligned(64)));
    uint16_t weights[QUERIES][KEY_BLOCK] __attribute__((aligned(64)));
    float added[4][QUERIES][LANES] __attribute__((aligned(64)));
    const uint16_t *query = at->queries + tile * at->inner * QUERIES;
    const int64_t stride = at->inner * 2;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t i = 0; i < at->inner; i += 32) {
        _tile_loadd(5, query + i * QUERIES, 64);
        _tile_loadd(4, at->keys + i, stride); _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, at->keys + 16 * at->inner + i, stride); _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(4, at->keys + 32 * at->inner + i, stride); _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, at->keys + 48 * at->inner + i, stride); _tile_dpbf16ps(3, 6, 5);
    }
    _tile_stored(0, scores[0], 64); _tile_stored(1, scores[16], 64); _tile_stored(2, scores[32], 64); _tile_stored(3, scores[48], 64);
    const vf nothing = splat(-INFINITY), before = load(at->largest + tile * QUERIES);
    vf now = before;
    for (int key = 0; key < KEY_BLOCK; key++) {
        vi number = (vi){0} + key;
        vf score = choose((number >= low) & (number < high), load(scores[key]) * scaling, nothing);
        store(scores[key], score);
        now = choose((score > now) | (score != score), score, now);
    }
    const vf base = choose(now == -INFINITY, splat(0.0f), now), factor = exp16(before - base);
    vf total = load(at->total + tile * QUERIES) * factor;
    for (int group = 0; group < KEY_BLOCK; group += LANES) {
        vf rows[LANES];
        for (int key = 0; key < LANES; key++) {
            rows[key] = exp16(load(scores[group + key]) - base);
            total += rows[key];
        }
        transpose(rows);
        for (int lane = 0; lane < QUERIES; lane++) store_half(weights[lane] + group, rows[lane]);
    }
    store(at->largest + tile * QUERIES, now);
    store(at->total + tile * QUERIES, total);
    float *sums = at->sums + tile * QUERIES * dim;
    for (int64_t d = 0; d < dim; d += LANES) {
        _tile_zero(0);
        _tile_loadd(4, weights[0], KEY_BLOCK * 2);
        _tile_loadd(5, at->values + d * 2, dim * 4); _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, weights[0] + 32, KEY_BLOCK * 2);
        _tile_loadd(7, at->values + 32 * dim + d * 2, dim * 4); _tile_dpbf16ps(0, 6, 7);
        _tile_stored(0, added[0], 64);
        for (int lane = 0; lane < QUERIES; lane++) {
            if (high[lane] <= low[lane]) continue; /* another row's block */
            float *to = sums + lane * dim + d;
            store(to, fma16(load(to), splat(factor[lane]), load(added[0][lane])));
        }
    }
}

static void attend_by_tiles(const Work *work, const Layer *layer, float *scratch, int64_t first_row, int64_t end_row, int64_t kv_head) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    Tiles at = place_tiles((char *)scratch, dim, group, end_row - first_row);
    put_queries(work, &at, first_row, end_row, kv_head);
    int64_t start = INT64_MAX, end = 0;
    for (int64_t row = first_row; row < end_row; row++) {
        start = least(start, first_seen(layer, pass->position[row]));
        end = most(end, pass->position[row] + 1);
    }
    for (int64_t block = start / KEY_BLOCK * KEY_BLOCK; block < end; block += KEY_BLOCK) {
        int64_t widest = first_row;
        const int is_shared = shares_block(pass, first_row, end_row, block, &widest);
        if (is_shared) read_tiles(work, layer, &at, widest, kv_head, block, least(block + KEY_BLOCK, pass->position[widest] + 1));
        for (int64_t tile = 0; tile < at.num_tiles; tile++) {
            const int64_t from = first_row + tile * at.rows_of_tile, to = least(end_row, from + at.rows_of_tile);
            vi low = {0}, high = {0};
            for (int64_t row = from; row < to; row++) {
                const int64_t seen_from = most(block, first_seen(layer, pass->position[row])) - block;
                const int64_t seen_to = least(block + KEY_BLOCK, pass->position[row] + 1) - block;
                if (!is_shared) low = high = (vi){0};
                for (int64_t head = 0; head < group; head++) {
                    low[(row - from) * group + head] = (int)seen_from;
                    high[(row - from) * group + head] = (int)most(seen_from, seen_to);
                }
                if (is_shared || seen_to <= seen_from) continue;
                read_tiles(work, layer, &at, row, kv_head, block, block + seen_to);
                attend_tile(&at, tile, dim, low, high, layer->scaling);
            }
            if (is_shared) attend_tile(&at, tile, dim, low, high, layer->scaling);
        }
    }
    for (int64_t row = first_row; row < end_row; row++)
        for (int64_t head = 0; head < group; head++) {
            const int64_t index = row - first_row, tile = index / at.rows_of_tile;
            const int64_t lane = tile * QUERIES + index % at.rows_of_tile * group + head;
            float *to = work->mixed + (row * decoder->heads + kv_head * group + head) * dim;
            for (int64_t i = 0; i < dim; i += LANES) store(to + i, load(at.sums + lane * dim + i) / at.total[lane]);
        }
}
#endif

/* ---- the pass ---- */

#define EACH(index, count, phase) \
    for (int64_t index; (index = atomic_fetch_add_explicit(&work->next[phase], 1, memory_order_relaxed)) < (count);)

static void add_normed(const Work *work, int64_t row, const float *norm) { /* a product's normed result to the stream */
    const Decoder *decoder = work->decoder;
    const int64_t hidden = decoder->hidden;
    const float *from = work->wide + row * hidden;
    float *to = work->x + row * hidden;
    const vf inverse = splat(inverse_rms(from, hidden, decoder->epsilon));
    for (int64_t i = 0; i < hidden; i += LANES)
        store(to + i, load(to + i) + load(from + i) * inverse * (load(norm + i) + splat(decoder->norm_offset)));
}

static void attention_part(Work *work, const Layer *layer, float *scratch, int phase, int threads) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    EACH(row, work->rows, phase) put_input(work, row, work->x + row * decoder->hidden, decoder->hidden, layer->attention_norm);
    barrier(threads);
    product(work, &layer->qkv, work->rows, phase + 1, TO_WIDE);
    barrier(threads);
    EACH(row, work->rows, phase + 2) place_row(work, layer, row);
    barrier(threads);
    EACH(item, pass->num_chunks * decoder->kv_heads, phase + 3) {
        /* the last rows see most: they go first */
        int64_t chunk = pass->num_chunks - 1 - item / decoder->kv_heads;
        const int64_t from = pass->chunks[chunk], to = pass->chunks[chunk + 1], kv_head = item % decoder->kv_heads;
#if AMX
        if (decoder->kv_format == BFLOAT16 && decoder->heads / decoder->kv_heads <= QUERIES) {
            attend_by_tiles(work, layer, scratch, from, to, kv_head);
            continue;
        }
#endif
        attend(work, layer, scratch, from, to, kv_head);
    }
    barrier(threads);
    const int64_t width = decoder->heads * decoder->head_dim;
    EACH(row, work->rows, phase + 4) put_input(work, row, work->mixed + row * width, width, NULL);
    barrier(threads);
    product(work, &layer->output, work->rows, phase + 5, layer->attention_post_norm == NULL ? TO_STREAM : TO_WIDE);
    barrier(threads);
    if (layer->attention_post_norm == NULL) return;
    EACH(row, work->rows, phase + 6) add_normed(work, row, layer->attention_post_norm);
    barrier(threads);
}

static void mlp_part(Work *work, const Layer *layer, int phase, int threads) {
    const Decoder *decoder = work->decoder;
    EACH(row, work->rows, phase) put_input(work, row, work->x + row * decoder->hidden, decoder->hidden, layer->mlp_norm);
    barrier(threads);
    product(work, &layer->gate_up, work->rows, phase + 1, TO_MLP);
    barrier(threads);
    Work down = *work;
    if (decoder->format != INT8) { /* already in the right format */
        down.inputs = work->mixed;
    } else {
        EACH(row, work->rows, phase + 2) put_input(work, row, work->mixed + row * decoder->mlp, decoder->mlp, NULL);
        barrier(threads);
    }
    product(&down, &layer->down, work->rows, phase + 3, layer->mlp_post_norm == NULL ? TO_STREAM : TO_WIDE);
    barrier(threads);
    if (layer->mlp_post_norm == NULL) return;
    EACH(row, work->rows, phase + 4) add_normed(work, row, layer->mlp_post_norm);
    barrier(threads);
}

enum { PHASES = 12 };

static void run_thread(Work *work, int thread, int threads) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    float *scratch = work->scratch + thread * work->scratch_size;
#if AMX
    TileConfig before;
    const int tiles = decoder->format != FLOAT32;
    if (tiles) { _tile_storeconfig(&before); configure_tiles(); }
#endif
    EACH(row, work->rows, 0) {
        if (pass->hidden_in == NULL) embed(work, row);
        else memcpy(work->x + row * decoder->hidden, pass->hidden_in + row * decoder->hidden, (size_t)decoder->hidden * sizeof(float));
    }
    barrier(threads);
    int phase = 4;
    for (int64_t i = pass->first_layer; i < pass->last_layer; i++, phase += PHASES) {
        const Layer *layer = decoder->layers + i;
        if (pass->skipped == NULL || !pass->skipped[2 * i]) attention_part(work, layer, scratch, phase, threads);
        if (pass->skipped == NULL || !pass->skipped[2 * i + 1]) mlp_part(work, layer, phase + 7, threads);
    }
    if (pass->hidden_out != NULL)
        EACH(row, work->rows, 1) memcpy(pass->hidden_out + row * decoder->hidden, work->x + row * decoder->hidden, (size_t)decoder->hidden * sizeof(float));
    if (pass->num_logits) {
        EACH(row, pass->num_logits, 2) put_input(work, row, work->x + pass->logit_rows[row] * decoder->hidden, decoder->hidden, decoder->final_norm);
        barrier(threads);
        product(work, &decoder->head, pass->num_logits, 3, TO_LOGITS);
    }
    barrier(threads);
#if AMX
    /* another library may believe that its own configuration still stands */
    if (tiles) { if (before.palette) _tile_loadconfig(&before); else _tile_release(); }
#endif
}

static struct { char *memory; size_t size; } arena;
static pthread_mutex_t one_pass = PTHREAD_MUTEX_INITIALIZER;

static size_t put(char *base, size_t *used, size_t bytes) {
    (void)base;
    size_t at = *used;
    *used += (bytes + 127) / 64 * 64;
    return at;
}

/* 0: done; 1: no memory */
int draftree_pass(const Decoder *decoder, Pass *pass) {
    pthread_mutex_lock(&one_pass);
    Work work = {.decoder = decoder, .pass = pass, .rows = pass->rows};
    const int64_t rows = (pass->rows + 15) / 16 * 16, dim = decoder->head_dim;
    const int64_t all_heads = (decoder->heads + 2 * decoder->kv_heads) * dim, widest = most(all_heads, decoder->hidden);
    const int64_t inputs = most(most(decoder->hidden, decoder->heads * dim), decoder->mlp) + 64;
    const int64_t kept = most(decoder->heads * dim, decoder->mlp + 64);
    const int64_t queries = ATTENTION_ROWS * (decoder->heads / decoder->kv_heads);
    const int64_t phases = 4 + PHASES * (pass->last_layer - pass->first_layer);
    if (pass->num_threads > MAX_THREADS) pass->num_threads = MAX_THREADS;
    if (openmp.parallel == NULL) pass->num_threads = start_threads((int)pass->num_threads);
    work.scratch_size = (2 * KEY_BLOCK * dim + queries * (dim + 2) + 127) / 16 * 16;
#if AMX
    work.scratch_size = most(work.scratch_size, (int64_t)(tiles_bytes(dim, ATTENTION_ROWS) + 127) / 64 * 16);
#endif
    size_t used = 64;
    size_t x = put(NULL, &used, (size_t)(rows * decoder->hidden) * 4), wide = put(NULL, &used, (size_t)(rows * widest) * 4);
    size_t mixed = put(NULL, &used, (size_t)(rows * kept) * 4), input = put(NULL, &used, (size_t)(rows * inputs) * 4);
    size_t scales = put(NULL, &used, (size_t)rows * 4), next = put(NULL, &used, (size_t)phases * sizeof(atomic_long));
    size_t scratch = put(NULL, &used, (size_t)(work.scratch_size * pass->num_threads) * 4);
    if (used > arena.size) {
        free(arena.memory);
        arena.size = used + used / 4;
        arena.memory = NULL;
        if (posix_memalign((void **)&arena.memory, 64, arena.size)) arena.memory = NULL;
        if (arena.memory == NULL) {
            arena.size = 0;
            pthread_mutex_unlock(&one_pass);
            return 1;
        }
        memset(arena.memory, 0, arena.size);
    }
    char *base = arena.memory;
    work.x = (float *)(base + x); work.wide = (float *)(base + wide); work.mixed = (float *)(base + mixed);
    work.inputs = base + input; work.input_scales = (float *)(base + scales);
    work.scratch = (float *)(base + scratch); work.next = (atomic_long *)(base + next);
    memset(base + next, 0, (size_t)phases * sizeof(atomic_long));
    run_threads(&work, (int)pass->num_threads);
    pthread_mutex_unlock(&one_pass);
    return 0;
}

/* ---- packing ---- */

int64_t draftree_block_bytes(int64_t inputs, int64_t format) { return block_bytes(inputs, format); }

INLINE float element(const void *weight, int64_t at, int64_t format) {
    if (format == FLOAT32) return ((const float *)weight)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)weight)[at] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* outputs lie in rows of `weight`, of format `from`; block i of them becomes block first + step * i of `packed` */
void draftree_pack(const void *weight, int64_t from, int64_t outputs, int64_t inputs, void *packed, int64_t format,
                   int64_t first, int64_t step, float *scales, int32_t *sums) {
    const int64_t bytes = block_bytes(inputs, format), units = blocks_of(inputs, inner_block(format));
    for (int64_t block = 0; block * LANES < outputs; block++) {
        const int64_t to_block = first + step * block;
        char *to = (char *)packed + to_block * bytes;
        memset(to, 0, (size_t)bytes);
        for (int64_t lane = 0; lane < LANES && block * LANES + lane < outputs; lane++) {
            const int64_t row = (block * LANES + lane) * inputs;
            if (format == FLOAT32) {
                for (int64_t k = 0; k < inputs; k++) ((float *)to)[k * LANES + lane] = element(weight, row + k, from);
            } else if (format == BFLOAT16) {
                for (int64_t k = 0; k < inputs; k++) {
                    uint16_t bits;
                    if (from == BFLOAT16) bits = ((const uint16_t *)weight)[row + k];
                    else { half_row narrowed = narrow(splat(element(weight, row + k, from))); bits = narrowed[0]; }
                    ((uint16_t *)to)[(k / 2 * LANES + lane) * 2 + k % 2] = bits;
                }
            } else {
                float largest = 0.0f;
                int32_t sum = 0;
                for (int64_t k = 0; k < inputs; k++) largest = fmaxf(largest, fabsf(element(weight, row + k, from)));
                for (int64_t k = 0; k < inputs; k++) {
                    float scaled = largest > 0.0f ? element(weight, row + k, from) * 127.0f / largest : 0.0f;
                    int8_t whole = (int8_t)lrintf(scaled);
                    ((int8_t *)to)[(k / 4 * LANES + lane) * 4 + k % 4] = whole;
                    sum += whole;
                }
                scales[to_block * LANES + lane] = largest / 127.0f;
                sums[to_block * LANES + lane] = sum;
            }
        }
    }
    (void)units;
}

/* 1 if the tiles may be used; 0 if this build needs them and may not; asked once before the first pass */
int draftree_ready(void) {
#if AMX
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return 1;
#endif
}

const char *draftree_instructions(void) {
#if AMX
    return "AMX tiles";
#elif defined(__AVX512BF16__)
    return "AVX-512 with bfloat16 and int8 products";
#elif defined(__AVX512VNNI__)
    return "AVX-512 with int8 products";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__FMA__)
    return "AVX2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "plain vectors";
#endif
}

/* sizes that the other side must agree on */
void draftree_sizes(int64_t *sizes) {
    sizes[0] = sizeof(Linear); sizes[1] = sizeof(Layer); sizes[2] = sizeof(Decoder); sizes[3] = sizeof(Pass);
    sizes[4] = ATTENTION_ROWS;
}
