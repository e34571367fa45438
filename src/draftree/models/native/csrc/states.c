/* Recurrent states, see states.h.
 *
 * A token is applied by the same operations in the same order wherever it stands, so the bits of a
 * state do not depend on the tree, nor on when the base moves on. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "finishing.h"
#include "states.h"

enum { COLUMNS = 32, COLUMN_PARTS = COLUMNS / PART_LANES };
/* rows of a block that are summed apart, so that a sum does not wait for the one before */
enum { APART = WIDTH == 64 ? 4 : 1 };

INLINE int64_t block_size(const Recurrence *own) { return own->key_dim * COLUMNS; }
INLINE int64_t filled_up(int64_t count) { return blocks_of(count, LANES) * LANES; }

int64_t state_blocks(const Recurrence *own) { return blocks_of(own->value_dim, COLUMNS); }

int64_t state_size(const Recurrence *own) {
    return own->heads * state_blocks(own) * block_size(own);
}

/* where the prepared numbers of a step are */
INLINE int64_t queries_at(const Recurrence *own) {
    return own->kind == MAMBA2 ? own->channels - own->groups * own->key_dim : 0;
}
INLINE int64_t keys_at(const Recurrence *own) {
    return own->kind == MAMBA2 ? own->heads * own->value_dim : own->groups * own->key_dim;
}
INLINE int64_t values_at(const Recurrence *own) {
    return own->kind == MAMBA2 ? 0 : 2 * own->groups * own->key_dim;
}
INLINE int64_t factors_at(const Recurrence *own) { return own->channels; }
INLINE int64_t decays_at(const Recurrence *own) { return own->channels + filled_up(own->heads); }

int64_t prepared_size(const Recurrence *own) {
    return decays_at(own) + filled_up(own->heads * own->decays);
}

/* a key and a query times their decays, and a block for each level of the stack */
int64_t walk_size(const Recurrence *own, int64_t levels) {
    return 2 * own->key_dim + levels * block_size(own);
}

/* scales a vector to length 1, then by `scale` */
INLINE void scale_to_length(float *vector, int64_t size, float scale) {
    vf squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES)
        squares = fma16(load(vector + i), load(vector + i), squares);
    const vf factor = splat(scale / sqrtf(sum_of(squares) + 1e-6f));
    for (int64_t i = 0; i < size; i += LANES) store(vector + i, load(vector + i) * factor);
}

void prepare_step(const Recurrence *own, float *numbers) {
    const vf least = splat(own->least_step), most = splat(own->most_step);
    float *factors = numbers + factors_at(own), *decays = numbers + decays_at(own);
    for (int64_t i = 0; i < own->channels; i += LANES)
        store(numbers + i, activate(load(numbers + i), SILU));
    for (int64_t i = 0; i < own->heads * own->decays; i += LANES) {
        const vf time = load((own->kind == MAMBA2 ? factors : decays) + i);
        vf step = softplus16(time + load(own->step_bias + i));
        step = choose(above(least, step), least, choose(above(step, most), most, step)); /* NaN stays */
        store(decays + i, exp16(step * load(own->decay_rate + i)));
        if (own->kind == MAMBA2) store(factors + i, step);
    }
    if (own->kind == MAMBA2) return;
    for (int64_t i = 0; i < own->heads; i += LANES)
        store(factors + i, own->factor_scale / (1.0f + exp16(-load(factors + i))));
    for (int64_t group = 0; group < own->groups; group++) {
        const int64_t at = group * own->key_dim;
        scale_to_length(numbers + queries_at(own) + at, own->key_dim,
                        1.0f / sqrtf((float)own->key_dim));
        scale_to_length(numbers + keys_at(own) + at, own->key_dim, 1.0f);
    }
}

/* the numbers of a step for one head, and what it adds to a block */
typedef struct {
    const float *key, *query, *value, *decay;
    int64_t decay_step;    /* 0: one decay for all rows */
    float factor, product; /* of key and query */
    part_f delta[COLUMN_PARTS];
} Token;

typedef struct {
    part_f keys[COLUMN_PARTS], queries[COLUMN_PARTS];
} Sums;

INLINE part_f load_part(const float *from) { return *(const part_f_loose *)from; }
INLINE void store_part(float *to, part_f value) { *(part_f_loose *)to = value; }

/* One run over a block: applies a token, if there is one, and stores the result; returns the sums of
 * rows times those of a key and of a query, as far as they are read. */
INLINE Sums run_over(const float *from, float *to, int64_t rows, const Token *token,
                     const float *key, const float *query) {
    part_f keys[APART][COLUMN_PARTS] = {{{0}}}, queries[APART][COLUMN_PARTS] = {{{0}}};
    part_f delta[COLUMN_PARTS];
    if (token != NULL) memcpy(delta, token->delta, sizeof delta);
    for (int64_t first = 0; first < rows; first += APART) {
        UNROLLED for (int apart = 0; apart < APART; apart++) {
            const int64_t row = first + apart;
            UNROLLED for (int i = 0; i < COLUMN_PARTS; i++) {
                const int64_t at = row * COLUMNS + i * PART_LANES;
                part_f state = load_part(from + at);
                if (token != NULL) {
                    const part_f decay = splat_part(token->decay[row * token->decay_step]);
                    state = fma_part(splat_part(token->key[row]), delta[i], state * decay);
                    store_part(to + at, state);
                }
                if (key != NULL)
                    keys[apart][i] = fma_part(splat_part(key[row]), state, keys[apart][i]);
                if (query != NULL)
                    queries[apart][i] = fma_part(splat_part(query[row]), state, queries[apart][i]);
            }
        }
    }
    Sums sums;
    UNROLLED for (int i = 0; i < COLUMN_PARTS; i++) {
        sums.keys[i] = keys[0][i];
        sums.queries[i] = queries[0][i];
        UNROLLED for (int apart = 1; apart < APART; apart++) {
            sums.keys[i] += keys[apart][i];
            sums.queries[i] += queries[apart][i];
        }
    }
    return sums;
}

/* reads a token of a head, and writes its key and its query times its decay */
INLINE Token read_token(const Recurrence *own, const float *numbers, int64_t head, int64_t column,
                        float *key, float *query) {
    /* heads of the first group that are another process's */
    const int64_t before = own->first_result / own->value_dim % own->heads_of_group;
    const int64_t group = own->is_tiled ? head % own->groups : (before + head) / own->heads_of_group;
    const int64_t size = own->key_dim, at = group * size;
    Token token = {.key = numbers + keys_at(own) + at,
                   .query = numbers + queries_at(own) + at,
                   .value = numbers + values_at(own) + head * own->value_dim + column,
                   .decay = numbers + decays_at(own) + head * own->decays,
                   .decay_step = own->decays > 1,
                   .factor = numbers[factors_at(own) + head]};
    vf product = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const vf decay = token.decay_step ? load(token.decay + i) : splat(*token.decay);
        product = fma16(load(token.key + i), load(token.query + i), product);
        store(key + i, load(token.key + i) * decay);
        store(query + i, load(token.query + i) * decay);
    }
    token.product = sum_of(product);
    return token;
}

/* writes the delta of a token whose sums with the state before it are known, and its result if a row
 * wants it */
INLINE void finish_token(const Recurrence *own, Token *token, const Sums *sums, int64_t head,
                         int64_t columns, float *result, int is_delta) {
    UNROLLED for (int i = 0; i < COLUMN_PARTS; i++) {
        token->delta[i] = (part_f){0};
        if (i * PART_LANES >= columns) continue;
        const part_f value = load_part(token->value + i * PART_LANES);
        part_f delta = value;
        if (is_delta) delta -= sums->keys[i];
        token->delta[i] = delta * splat_part(token->factor);
        if (result == NULL) continue;
        part_f sum = fma_part(token->delta[i], splat_part(token->product), sums->queries[i]);
        if (own->skip != NULL) sum = fma_part(splat_part(own->skip[head]), value, sum);
        store_part(result + i * PART_LANES, sum);
    }
}

/* The change by a step and the sums of the next one are one run over the block if the next one
 * follows from it. */
INLINE void walk(const Recurrence *own, const Steps *steps, int keeps, float *base,
                 const float *prepared, float *results, int64_t head, int64_t block, float *scratch,
                 int is_delta) {
    const int64_t size = block_size(own), rows = own->key_dim, width = prepared_size(own);
    const int64_t column = block * COLUMNS, columns = own->value_dim - column;
    float *key = scratch, *query = scratch + rows, *copies = scratch + 2 * rows;
    const float *read_key = is_delta ? key : NULL;
    /* level 0: the base itself, as long as it moves on, then a copy */
    float *lowest = base + (head * state_blocks(own) + block) * size;
    Token token, next;
    Sums sums;
    int is_summed = 0; /* whether the sums of this step are known */
    for (int64_t i = 0; i < steps->count; i++) {
        const float *from = steps->from[i] ? copies + steps->from[i] * size : lowest;
        if (is_summed) {
            token = next;
        } else {
            token = read_token(own, prepared + i * width, head, column, key, query);
            sums = run_over(from, NULL, rows, NULL, read_key, query);
        }
        float *result = NULL;
        if (steps->row[i] >= 0)
            result = results + steps->row[i] * own->all_results + own->first_result +
                     head * own->value_dim + column;
        finish_token(own, &token, &sums, head, columns, result, is_delta);
        const int is_kept = keeps && i < steps->settled;
        is_summed = i + 1 < steps->count && steps->parent[i + 1] == i;
        if (!is_summed && !is_kept) continue; /* nothing follows from its state */
        float *to = steps->to[i] ? copies + steps->to[i] * size : is_kept ? lowest : copies;
        if (!steps->to[i]) lowest = to;
        if (is_summed) {
            next = read_token(own, prepared + (i + 1) * width, head, column, key, query);
            sums = run_over(from, to, rows, &token, read_key, query);
        } else {
            run_over(from, to, rows, &token, NULL, NULL);
        }
    }
}

void walk_block(const Recurrence *own, const Steps *steps, int keeps, float *base,
                const float *prepared, float *results, int64_t head, int64_t block,
                float *scratch) {
    if (own->kind == GATED_DELTA)
        walk(own, steps, keeps, base, prepared, results, head, block, scratch, 1);
    else walk(own, steps, keeps, base, prepared, results, head, block, scratch, 0);
}

void gate_results(const Recurrence *own, float *results, const float *gates) {
    const int64_t count = own->heads * own->value_dim;
    for (int64_t i = 0; i < count; i += LANES) {
        const vf gate = load(gates + i);
        const vf factor = own->is_logistic ? 1.0f / (1.0f + exp16(-gate)) : activate(gate, SILU);
        store(results + i, load(results + i) * factor);
    }
}

void norm_results(const Recurrence *own, float *results) {
    const int64_t all = own->has_joint_norm ? own->all_results : own->heads * own->value_dim,
                  size = all / own->norm_groups;
    for (int64_t first = 0; first < all && own->norm != NULL; first += size) {
        vf squares = splat(0.0f);
        for (int64_t i = first; i < first + size; i += LANES)
            squares = fma16(load(results + i), load(results + i), squares);
        const vf inverse = splat(1.0f / sqrtf(sum_of(squares) / (float)size + own->norm_epsilon));
        for (int64_t i = first; i < first + size; i += LANES)
            store(results + i, load(results + i) * inverse * load(own->norm + i));
    }
}

/* Prepares and applies the steps of one slot on this thread, as a pass does, and gates the results of
 * its rows; 1: no memory. For tests and measurements. */
int draftree_recur(const Recurrence *own, const int64_t *columns, int64_t count, int64_t settled,
                   int64_t levels, int keeps, float *base, float *prepared, const float *gates,
                   float *results, int64_t rows) {
    const Steps steps = {.count = count, .settled = settled, .row = columns, .entry = columns + count,
                         .parent = columns + 2 * count, .from = columns + 3 * count,
                         .to = columns + 4 * count};
    const int64_t blocks = state_blocks(own), width = own->heads * own->value_dim;
    float *scratch;
    if (posix_memalign((void **)&scratch, 64, (size_t)walk_size(own, levels) * sizeof(float))) return 1;
    for (int64_t i = 0; i < count; i++) prepare_step(own, prepared + i * prepared_size(own));
    for (int64_t i = 0; i < own->heads * blocks; i++)
        walk_block(own, &steps, keeps, base, prepared, results, i / blocks, i % blocks, scratch);
    for (int64_t row = 0; row < rows; row++) {
        if (own->is_norm_first) norm_results(own, results + row * width);
        gate_results(own, results + row * width, gates + row * width);
        if (!own->is_norm_first) norm_results(own, results + row * width);
    }
    free(scratch);
    return 0;
}
