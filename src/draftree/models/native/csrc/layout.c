/* The layout of the shared structures, and constants that Python must agree on. */
#include <stdio.h>
#include "compact.h"
#include "groups.h"

#define LINE(kind, field) \
    add("%s %s %zu %zu\n", #kind, #field, offsetof(kind, field), sizeof(((kind *)0)->field));
#define LINEAR_LINE(type, name) LINE(Linear, name)
#define LATENT_LINE(type, name) LINE(Latent, name)
#define EXPERTS_LINE(type, name) LINE(Experts, name)
#define RECURRENCE_LINE(type, name) LINE(Recurrence, name)
#define LAYER_LINE(type, name) LINE(Layer, name)
#define DECODER_LINE(type, name) LINE(Decoder, name)
#define PASS_LINE(type, name) LINE(Pass, name)
#define SEARCH_LINE(type, name) LINE(Search, name)
#define TREES_LINE(type, name) LINE(Trees, name)
#define SIZE(kind) add("%s %s %zu %zu\n", #kind, "-", (size_t)0, sizeof(kind));
#define CONSTANT(name) add("%s %s %zu %zu\n", "-", #name, (size_t)0, (size_t)name);

static char text[16384];
static size_t used;

static void add(const char *format, const char *kind, const char *name, size_t offset,
                size_t size) {
    if (used >= sizeof text) return;
    used += (size_t)snprintf(text + used, sizeof text - used, format, kind, name, offset, size);
}

/* Lines of four words: structure, field, offset, size. Field "-" gives the size of the structure;
 * structure "-" gives a constant, whose value stands for the size. Called once, by one thread. */
const char *draftree_layout(void) {
    used = 0;
    LINEAR_FIELDS(LINEAR_LINE)
    SIZE(Linear)
    LATENT_FIELDS(LATENT_LINE)
    SIZE(Latent)
    EXPERTS_FIELDS(EXPERTS_LINE)
    SIZE(Experts)
    RECURRENCE_FIELDS(RECURRENCE_LINE)
    SIZE(Recurrence)
    LAYER_FIELDS(LAYER_LINE)
    SIZE(Layer)
    DECODER_FIELDS(DECODER_LINE)
    SIZE(Decoder)
    PASS_FIELDS(PASS_LINE)
    SIZE(Pass)
    SEARCH_FIELDS(SEARCH_LINE)
    SIZE(Search)
    TREES_FIELDS(TREES_LINE)
    SIZE(Trees)
    CONSTANT(FLOAT32)
    CONSTANT(BFLOAT16)
    CONSTANT(INT8)
    CONSTANT(GROUPED)
    CONSTANT(NUM_KINDS)
    CONSTANT(SILU)
    CONSTANT(GELU_TANH)
    CONSTANT(GELU)
    CONSTANT(RELU)
    CONSTANT(RELU_SQUARED)
    CONSTANT(QUICK_GELU)
    CONSTANT(CLAMPED_SILU)
    CONSTANT(RMS_NORM)
    CONSTANT(LAYER_NORM)
    CONSTANT(SHORT_CONVOLUTION)
    CONSTANT(GATED_DELTA)
    CONSTANT(MAMBA2)
    CONSTANT(KEEPS_COMPACT)
    CONSTANT(LANES)
    CONSTANT(ATTENTION_ROWS)
    CONSTANT(MAX_COUNT)
    CONSTANT(MAX_EXPERTS)
    CONSTANT(SOFTMAX)
    CONSTANT(SIGMOID)
    CONSTANT(MAX_TAPS)
    CONSTANT(MAX_LATENTS)
    return used < sizeof text ? text : "";
}

const char *draftree_instructions(void) {
#if AMX
    return "AMX tiles";
#elif HALF_PAIRS
    return "AVX-512 with bfloat16 and int8 products";
#elif defined(__AVX512VNNI__)
    return "AVX-512 with int8 products";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVXVNNI__)
    return "AVX2 with int8 products";
#elif defined(__FMA__)
    return "AVX2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "plain vectors";
#endif
}
