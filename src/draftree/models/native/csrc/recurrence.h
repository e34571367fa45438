/* Mixers with a state.
 *
 * The steps of a slot are tokens in an order in which parents come first: committed tokens that are
 * not in the base state yet, the settled rows of the pass, then nodes of the tree, depth first. A
 * step follows from the state of its parent, by the same operations whatever else is computed, so
 * its bits do not depend on the tree, on the batch, or on when the base state moves on.
 */
#pragma once
#include <string.h>
#include "finishing.h"
#include "states.h"
#include "steps.h"
#include "threads.h"

INLINE Steps steps_of(const Pass *pass, int64_t run) {
    const int64_t first = pass->run_step[run];
    return (Steps){.slot = pass->run_slot[run], .count = pass->run_step[run + 1] - first,
                   .settled = pass->run_settled[run], .row = pass->step_row + first,
                   .entry = pass->step_entry + first, .parent = pass->step_parent + first,
                   .from = pass->step_from + first, .to = pass->step_to + first};
}

/* the parent of a step or of a token before all steps */
INLINE int64_t step_before(const Steps *steps, int64_t step) {
    return step >= 0 ? steps->parent[step] : step - 1;
}

/* Where the inputs of a slot's tokens are. */
typedef struct {
    const float *rows;    /* of the pass, row_step apart */
    float *window;        /* [taps - 1][channels] */
    float *stored;        /* entries, entry_step apart */
    int64_t row_step, entry_step, channels, taps;
} Inputs;

INLINE Inputs inputs_of(const Work *work, const Layer *layer, int64_t slot) {
    const Recurrence *own = layer->recurrence;
    const Pass *pass = work->pass;
    return (Inputs){.rows = inputs_of_row(work, layer, 0) + own->first_input, .row_step = layer->width,
                    .window = own->states + slot * pass->state_step + own->state_size,
                    .stored = own->stored + slot * pass->stored_step,
                    .entry_step = pass->entry_step, .channels = own->channels, .taps = own->taps};
}

INLINE const float *input_of(const Inputs *inputs, const Steps *steps, int64_t step) {
    if (step < 0) return inputs->window + (inputs->taps - 1 + step) * inputs->channels;
    if (steps->row[step] >= 0) return inputs->rows + steps->row[step] * inputs->row_step;
    return inputs->stored + steps->entry[step] * inputs->entry_step;
}

/* Convolves channels from `first` to `end`, multiples of 16, of one step along its ancestors. */
INLINE void convolve_step(const Recurrence *own, const Inputs *inputs, const Steps *steps,
                          int64_t step, int64_t first, int64_t end, float *to) {
    const float *past[MAX_TAPS]; /* the oldest first */
    const int64_t taps = own->taps, channels = own->channels;
    for (int64_t tap = taps - 1, at = step; tap >= 0; tap--, at = step_before(steps, at))
        past[tap] = input_of(inputs, steps, at);
    for (int64_t i = first; i < end; i += LANES) {
        vf sum = own->convolution_bias == NULL ? splat(0.0f) : load(own->convolution_bias + i);
        for (int64_t tap = 0; tap < taps; tap++)
            sum = fma16(load(own->convolution + tap * channels + i), load(past[tap] + i), sum);
        store(to + i, sum);
    }
}

/* After the convolutions of these channels, and of all other numbers that are stored: moves the window
 * on over the settled steps, and stores the inputs of rows. Entries of rows were not in use. */
INLINE void keep_inputs(const Pass *pass, const Inputs *inputs, const Steps *steps, int64_t first,
                        int64_t end) {
    const int64_t channels = min_int(end, inputs->channels) - first;
    if (pass->keeps_states && steps->settled > 0 && channels > 0)
        for (int64_t tap = 0; tap < inputs->taps - 1; tap++)
            memmove(inputs->window + tap * inputs->channels + first,
                    input_of(inputs, steps, steps->settled - inputs->taps + 1 + tap) + first,
                    (size_t)channels * sizeof(float));
    for (int64_t step = 0; step < steps->count; step++)
        if (steps->row[step] >= 0 && steps->entry[step] >= 0)
            memcpy(inputs->stored + steps->entry[step] * inputs->entry_step + first,
                   input_of(inputs, steps, step) + first, (size_t)(end - first) * sizeof(float));
}

enum { CHANNELS_AT_ONCE = 128 };

INLINE int64_t pieces_of_convolution(const Work *work, const Recurrence *own) {
    return work->pass->num_runs * blocks_of(own->width, CHANNELS_AT_ONCE);
}

/* Some channels of a slot: B times x takes the place of B, and C times its convolution is the
 * result. */
static void convolve_gated(const Work *work, const Layer *layer, int64_t piece) {
    const Recurrence *own = layer->recurrence;
    const int64_t channels = own->channels, blocks = blocks_of(channels, CHANNELS_AT_ONCE);
    const Steps steps = steps_of(work->pass, piece / blocks);
    const Inputs inputs = inputs_of(work, layer, steps.slot);
    const int64_t first = piece % blocks * CHANNELS_AT_ONCE,
                  end = min_int(first + CHANNELS_AT_ONCE, channels);
    for (int64_t step = 0; step < steps.count; step++) {
        if (steps.row[step] < 0) continue;
        float *row = work->wide + steps.row[step] * inputs.row_step;
        for (int64_t i = first; i < end; i += LANES)
            store(row + i, load(row + i) * load(row + 2 * channels + i));
    }
    for (int64_t step = 0; step < steps.count; step++) {
        if (steps.row[step] < 0) continue;
        const float *gate = work->wide + steps.row[step] * inputs.row_step + channels;
        float *to = work->mixed + steps.row[step] * own->all_results + own->first_result;
        convolve_step(own, &inputs, &steps, step, first, end, to);
        for (int64_t i = first; i < end; i += LANES) store(to + i, load(to + i) * load(gate + i));
    }
    keep_inputs(work->pass, &inputs, &steps, first, end);
}

INLINE float *prepared_of(const Work *work, const Recurrence *own, int64_t run) {
    return work->prepared + work->pass->run_step[run] * prepared_size(own);
}

/* convolves channels of a slot that its states follow from, and copies their other inputs */
static void convolve_inputs(const Work *work, const Layer *layer, int64_t piece) {
    const Recurrence *own = layer->recurrence;
    const int64_t blocks = blocks_of(own->width, CHANNELS_AT_ONCE), run = piece / blocks;
    const Steps steps = steps_of(work->pass, run);
    const Inputs inputs = inputs_of(work, layer, steps.slot);
    const int64_t first = piece % blocks * CHANNELS_AT_ONCE,
                  end = min_int(first + CHANNELS_AT_ONCE, own->width),
                  convolved = max_int(first, min_int(end, own->channels));
    for (int64_t step = 0; step < steps.count; step++) {
        float *to = prepared_of(work, own, run) + step * prepared_size(own);
        convolve_step(own, &inputs, &steps, step, first, convolved, to);
        memcpy(to + convolved, input_of(&inputs, &steps, step) + convolved,
               (size_t)(end - convolved) * sizeof(float));
    }
    keep_inputs(work->pass, &inputs, &steps, first, end);
}

/* results of recurrences come after those of attention, if the layer has both */
INLINE float *results_of(const Work *work, const Layer *layer) {
    const Decoder *decoder = work->decoder;
    const int64_t attention =
        layer->recurrence->first_input ? decoder->all_heads * decoder->head_dim : 0;
    return work->mixed + work->rows * attention;
}

/* Gates and norms results. Joint norms read what all processes have computed: each process norms some
 * rows for all. */
static void finish_results(const Work *work, const Layer *layer, float *results, int phase) {
    const Recurrence *recurrence = layer->recurrence;
    const int64_t all = recurrence->all_results, first = recurrence->first_result;
    const int is_joint = recurrence->has_joint_norm, is_norm_first = recurrence->is_norm_first;
    const float *gates = inputs_of_row(work, layer, 0) + recurrence->first_input + recurrence->width;
    EACH(row, work->rows, phase + GATE_RESULTS) {
        float *own = results + row * all + first;
        if (is_norm_first && is_joint) continue;
        if (is_norm_first) norm_results(recurrence, own);
        gate_results(recurrence, own, gates + row * layer->width);
        if (!is_norm_first && !is_joint) norm_results(recurrence, own);
    }
    meet(work, phase + GATE_RESULTS);
    if (!is_joint) return;
    EACH(index, num_own_rows(work, work->rows), phase + NORM_RESULTS)
        norm_results(recurrence, results + own_row(work, index) * all);
    meet(work, phase + NORM_RESULTS);
    if (!is_norm_first) return;
    EACH(row, work->rows, phase + GATE_NORMED)
        gate_results(recurrence, results + row * all + first, gates + row * layer->width);
    meet(work, phase + GATE_NORMED);
}

static void run_states(const Work *work, const Layer *layer, float *scratch, int phase) {
    const Recurrence *recurrence = layer->recurrence;
    const Pass *pass = work->pass;
    const int64_t blocks = state_blocks(recurrence), pieces = recurrence->heads * blocks;
    float *results = results_of(work, layer);
    EACH(piece, pieces_of_convolution(work, recurrence), phase + CONVOLVE)
        convolve_inputs(work, layer, piece);
    EACH(step, pass->run_step[pass->num_runs], phase + PREPARE)
        prepare_step(recurrence, work->prepared + step * prepared_size(recurrence));
    EACH(piece, pass->num_runs * pieces, phase + RECUR) {
        const Steps steps = steps_of(pass, piece / pieces);
        float *base = recurrence->states + steps.slot * pass->state_step;
        walk_block(recurrence, &steps, (int)pass->keeps_states, base,
                   prepared_of(work, recurrence, piece / pieces), results, piece % pieces / blocks,
                   piece % blocks, scratch);
    }
    finish_results(work, layer, results, phase);
}

/* Computes the results of a layer's recurrence from the product before it. */
static void run_recurrence(const Work *work, const Layer *layer, float *scratch, int phase) {
    const Recurrence *recurrence = layer->recurrence;
    if (recurrence->kind != SHORT_CONVOLUTION) {
        run_states(work, layer, scratch, phase);
        return;
    }
    EACH(piece, pieces_of_convolution(work, recurrence), phase + CONVOLVE)
        convolve_gated(work, layer, piece);
    meet(work, phase + CONVOLVE);
}

/* puts the results of attention and of the recurrence side by side, in place of a row's inputs */
static const float *joined_results(const Work *work, const Layer *layer, int64_t row) {
    const int64_t width = layer->output.inputs, first = results_of(work, layer) - work->mixed;
    const int64_t attention = first / work->rows, own = width - attention;
    float *to = work->wide + row * width;
    memcpy(to, work->mixed + row * attention, (size_t)attention * sizeof(float));
    memcpy(to + attention, work->mixed + first + row * own, (size_t)own * sizeof(float));
    return to;
}
