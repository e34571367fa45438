/* Recurrent states of gated delta nets and of Mamba2, token by token along the paths of a tree.
 *
 * A head's state has a row for each number of a key and a column for each number of a value. A token
 * changes it to
 *     decay * state + key outer delta,
 * and its result is the product of the new state with its query. delta is factor * value, or by the
 * delta rule
 *     factor * (value - product of decay * state with the key).
 * Columns do not depend on each other: threads take blocks of them, small enough for the first
 * cache. */
#pragma once
#include "structures.h"

/* The steps of one slot. Its first `settled` ones are a chain.
 *   row      of the pass that wants the result; negative: none, its inputs are stored
 *   entry    of the stored inputs: to read without a row, and otherwise to write; negative: not
 *            stored
 *   parent   an earlier step; -1: the last token of the base state, -2 the one before it, ...
 *   from, to   levels of a stack of states: the parent's, and its own, which are the same for the
 *            last child of a parent. Level 0 starts with the base state, which is stored after the
 *            settled steps */
typedef struct {
    int64_t slot, count, settled;
    const int64_t *row, *entry, *parent, *from, *to;
} Steps;

INLINE int has_states(const Layer *layer) {
    return layer->recurrence != NULL && layer->recurrence->kind != SHORT_CONVOLUTION;
}

/* numbers of the base state of a layer in one slot, [head][block of columns][key_dim][32], from a
 * multiple of 64 bytes; zeros: no token */
SHARED int64_t state_size(const Recurrence *own);

/* blocks of columns of a head */
SHARED int64_t state_blocks(const Recurrence *own);

/* prepared numbers of a step: queries, keys and values, factors [head] and decays [head][decays] */
SHARED int64_t prepared_size(const Recurrence *own);

/* numbers of a thread's scratch memory, from a multiple of 64 bytes */
SHARED int64_t walk_size(const Recurrence *own, int64_t levels);

/* prepares the convolved and the other numbers of a step, in place */
SHARED void prepare_step(const Recurrence *own, float *numbers);

/* Applies the steps of a slot, in their order, to a block of columns of a head.
 *   base      state of the layer in the slot, which moves on over the settled steps if `keeps`
 *   prepared  [step][prepared_size]
 *   results   [row][all_results] */
SHARED void walk_block(const Recurrence *own, const Steps *steps, int keeps, float *base,
                       const float *prepared, float *results, int64_t head, int64_t block,
                       float *scratch);

/* multiplies the own results of a row with their gates, in place */
SHARED void gate_results(const Recurrence *own, float *results, const float *gates);

/* norms results of a row, in place: its own ones or, if norms are joint, all */
SHARED void norm_results(const Recurrence *own, float *results);
