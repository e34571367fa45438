/* Corrections of a head's logits that are learned from verified tokens; the equations are in
 * drafters/learning/correction.py.
 *
 * Rows are stored by rank: rows[k * tokens + i], mix[k * hidden + j].
 */
#include <math.h>
#include <string.h>
#include "shared.h"
#include "vectors.h"

enum { MAX_RANK = 8, MAX_CHOSEN = 1024, PIECE = 512 };
#define LEAST_PROBABILITY 1e-3f

typedef struct {
    float *bias, *rows, *mix, *bias_squares, *rows_squares, *mix_squares;
    int64_t tokens, hidden, rank;
} Correction;

/* returns the factor that scales a state to a root mean square of 1 */
static float mixed_state(const Correction *c, const float *state, float *mixed) {
    float squares = 0.0f;
    for (int64_t j = 0; j < c->hidden; j++) squares += state[j] * state[j];
    const float scale = 1.0f / sqrtf(squares / (float)c->hidden + 1e-6f);
    for (int64_t k = 0; k < c->rank; k++) {
        const float *mix = c->mix + k * c->hidden;
        vf total = splat(0.0f);
        int64_t j = 0;
        for (; j + LANES <= c->hidden; j += LANES)
            total = fma16(load(mix + j), load(state + j), total);
        float sum = sum_of(total);
        for (; j < c->hidden; j++) sum += mix[j] * state[j];
        mixed[k] = sum * scale;
    }
    return scale;
}

static void correct_row(const Correction *c, float *logits, const float *mixed) {
    for (int64_t first = 0; first < c->tokens; first += PIECE) {
        const int64_t count = c->tokens - first < PIECE ? c->tokens - first : PIECE;
        float *piece = logits + first;
        for (int64_t i = 0; i < count; i++) piece[i] += c->bias[first + i];
        for (int64_t k = 0; k < c->rank; k++) {
            const float *row = c->rows + k * c->tokens + first, factor = mixed[k];
            for (int64_t i = 0; i < count; i++) piece[i] += factor * row[i];
        }
    }
}

void draftree_correct(const Correction *c, float *logits, int64_t stride, const float *states,
                      int64_t count) {
    float mixed[MAX_RANK];
    for (int64_t row = 0; row < count; row++) {
        mixed_state(c, states + row * c->hidden, mixed);
        correct_row(c, logits + row * stride, mixed);
    }
}

/* replaces logits by exponentials; returns their sum, or 0 if there is no finite one */
static float exponentials(float *logits, int64_t tokens, float temperature) {
    float largest = -INFINITY;
    for (int64_t i = 0; i < tokens; i++) largest = logits[i] > largest ? logits[i] : largest;
    if (!(largest > -INFINITY && largest < INFINITY)) return 0.0f;
    vf total = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= tokens; i += LANES) {
        vf power = exp16((load(logits + i) - splat(largest)) / splat(temperature));
        store(logits + i, power);
        total += power;
    }
    float sum = sum_of(total);
    for (; i < tokens; i++) sum += logits[i] = expf((logits[i] - largest) / temperature);
    return sum;
}

INLINE float step_of(float gradient, float *square, float rate) {
    *square += gradient * gradient;
    return rate * gradient / sqrtf(*square);
}

static void learn_row(const Correction *c, float *logits, const float *state, int64_t column,
                      float temperature, float rate) {
    float mixed[MAX_RANK], along[MAX_RANK] = {0}, errors[MAX_CHOSEN];
    int64_t chosen[MAX_CHOSEN], held = 0;
    const float scale = mixed_state(c, state, mixed);
    correct_row(c, logits, mixed);
    const float total = exponentials(logits, c->tokens, temperature);
    if (!(total > 0.0f)) return;
    /* fewer than a thousand tokens have a larger probability */
    const float bound = LEAST_PROBABILITY * total;
    for (int64_t i = 0; i < c->tokens; i++) {
        if (!(logits[i] > bound) && i != column) continue;
        const float error = logits[i] / total - (i == column ? 1.0f : 0.0f);
        if (held == MAX_CHOSEN || fabsf(error) <= LEAST_PROBABILITY) continue;
        chosen[held] = i;
        errors[held++] = error;
    }
    for (int64_t n = 0; n < held; n++)
        c->bias[chosen[n]] -= step_of(errors[n], c->bias_squares + chosen[n], rate);
    for (int64_t k = 0; k < c->rank; k++) {
        float *row = c->rows + k * c->tokens, *squares = c->rows_squares + k * c->tokens;
        for (int64_t n = 0; n < held; n++) along[k] += row[chosen[n]] * errors[n];
        for (int64_t n = 0; n < held; n++)
            row[chosen[n]] -= step_of(mixed[k] * errors[n], squares + chosen[n], rate);
        float *mix = c->mix + k * c->hidden, *sums = c->mix_squares + k * c->hidden;
        for (int64_t j = 0; j < c->hidden; j++)
            mix[j] -= step_of(along[k] * scale * state[j], sums + j, rate);
    }
}

/* one step for each row, in order; overwrites the logits */
void draftree_learn(const Correction *c, float *logits, int64_t stride, const float *states,
                    const int64_t *columns, const float *temperatures, int64_t count, float rate) {
    for (int64_t row = 0; row < count; row++)
        learn_row(c, logits + row * stride, states + row * c->hidden, columns[row],
                  temperatures[row], rate);
}
