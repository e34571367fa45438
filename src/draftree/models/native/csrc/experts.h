/* Perceptrons of which every row uses a few, chosen by a router ("mixture of experts").
 *
 * Rows are grouped by expert, so that a pass reads the weights of an expert once, however many rows
 * use it. A row's choice and the order in which its experts are added, ascending, depend on the row
 * alone. Every use of an expert by a row has a place: a row of the buffers of inputs and results.
 * The places of an expert start at a multiple of 16, as tiles of rows do.
 */
#pragma once
#include "products.h"
#include "rows.h"
#include "steps.h"

INLINE int64_t experts_of_row(const Experts *experts) { return experts->chosen + experts->shared; }
INLINE int64_t places_of_experts(const Experts *experts, int64_t rows) { /* at most */
    const int64_t uses = rows * experts_of_row(experts);
    return uses + 15 * min_int(experts->count + experts->shared, uses) + 16;
}

/* weights of the chosen experts: their scores, or the shares of these */
static void weigh_by_scores(const Experts *experts, const float *scores, const int64_t *chosen,
                            float *weights) {
    float total = 0.0f;
    for (int64_t i = 0; i < experts->chosen; i++) total += scores[chosen[i]];
    const float scale = experts->is_renormalized ? experts->scale / total : experts->scale;
    for (int64_t i = 0; i < experts->chosen; i++) weights[i] = scores[chosen[i]] * scale;
}

/* weights of the chosen experts by the exponentials of their logits, of which these are the largest */
static void weigh_by_softmax(const Experts *experts, const float *logits, const uint64_t *taken,
                             const int64_t *chosen, float largest, float *weights) {
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf sums = splat(0.0f);
    for (int64_t e = 0; e < experts->count; e += LANES) {
        const vi numbers = lanes + (int)e;
        vi counted = numbers < (int)experts->count;
        for (int i = 0; i < LANES && experts->is_renormalized; i++)
            if (!(taken[(e + i) / 64] >> (e + i) % 64 & 1)) counted[i] = 0;
        sums += choose(counted, exp_of_negative(load(logits + e) - splat(largest)), splat(0.0f));
    }
    const float total = sum_of(sums);
    for (int64_t i = 0; i < experts->chosen; i++)
        weights[i] = exp_of_negative(splat(logits[chosen[i]] - largest))[0] / total * experts->scale;
}

/* the largest number that is not taken yet, of equal ones the first; takes it */
INLINE int64_t take_largest(const float *numbers, int64_t count, uint64_t *taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!(taken[i / 64] >> i % 64 & 1) && (best < 0 || numbers[i] > numbers[best])) best = i;
    taken[best / 64] |= (uint64_t)1 << best % 64;
    return best;
}

/* puts the experts of all but a row's groups out of the choice */
static void choose_groups(const Experts *experts, float *choice) {
    const int64_t size = experts->count / experts->groups;
    float sums[MAX_EXPERTS] = {0};
    uint64_t chosen[MAX_EXPERTS / 64] = {0};
    for (int64_t group = 0; group < experts->groups; group++) {
        const float *own = choice + group * size;
        uint64_t taken[MAX_EXPERTS / 64] = {0};
        for (int64_t i = 0; i < experts->group_scores; i++)
            sums[group] += own[take_largest(own, size, taken)];
    }
    for (int64_t i = 0; i < experts->chosen_groups; i++)
        take_largest(sums, experts->groups, chosen);
    for (int64_t e = 0; e < experts->count; e++)
        if (!(chosen[e / size / 64] >> e / size % 64 & 1)) choice[e] = -INFINITY;
}

/* Chooses the experts of a row: the largest scores, of equal ones the first. */
static void choose_experts(const Work *work, const Experts *experts, int64_t row) {
    const int64_t each = experts_of_row(experts), count = experts->count;
    const float *logits = work->wide + row * experts->router.outputs, *scores = logits;
    float choice[MAX_EXPERTS], sigmoids[MAX_EXPERTS];
    if (experts->scores == SIGMOID) {
        for (int64_t e = 0; e < count; e += LANES)
            store(sigmoids + e, 1.0f / (1.0f + exp16(-load(logits + e))));
        scores = sigmoids;
    }
    const float *bias = experts->choice_bias;
    for (int64_t e = 0; e < count; e++) choice[e] = scores[e] + (bias == NULL ? 0.0f : bias[e]);
    if (experts->groups > 1) choose_groups(experts, choice);
    int64_t *chosen = work->routing->expert + row * each;
    float *weights = work->routing->weight + row * each;
    uint64_t taken[MAX_EXPERTS / 64] = {0};
    float largest = 0.0f;
    for (int64_t i = 0; i < experts->chosen; i++) {
        const int64_t best = take_largest(choice, count, taken);
        if (i == 0 || logits[best] > largest) largest = logits[best];
    }
    for (int64_t e = 0, i = 0; e < count; e++)
        if (taken[e / 64] >> e % 64 & 1) chosen[i++] = e;
    if (experts->scores == SIGMOID) weigh_by_scores(experts, scores, chosen, weights);
    else weigh_by_softmax(experts, logits, taken, chosen, largest, weights);
    if (!experts->shared) return;
    chosen[each - 1] = count;
    weights[each - 1] = experts->has_shared_gate ? 1.0f / (1.0f + exp16(splat(-logits[count]))[0])
                                                 : 1.0f;
}

/* Gives every use of an expert a place, and sets the numbers of pieces of later phases. They are kept
 * for each layer: a thread that joins late goes through the phases of earlier layers, too. */
static void group_rows(const Work *work, const Experts *experts, int phase) {
    Routing *routing = work->routing;
    const int64_t each = experts_of_row(experts), uses = work->rows * each;
    const int64_t all = experts->count + experts->shared;
    memset(routing->size, 0, (size_t)all * sizeof(int64_t));
    for (int64_t i = 0; i < uses; i++) routing->size[routing->expert[i]]++;
    Phase *phases = work->phases + phase;
    int64_t places = 0;
    routing->num_used = 0;
    for (int64_t e = 0; e < all; e++) {
        if (!routing->size[e]) continue;
        routing->used[routing->num_used++] = e;
        routing->first[e] = places;
        places += blocks_of(routing->size[e], 16) * 16;
        for (int64_t p = routing->first[e]; p < places; p++) routing->row[p] = -1;
        routing->size[e] = 0;
        phases[GATE_UP].pieces += groups_of(&experts->gate_up[e]);
        phases[DOWN].pieces += groups_of(&experts->down[e]);
    }
    phases[GATHER].pieces = phases[DOWN_INPUT].pieces = places;
    for (int64_t i = 0; i < uses; i++) {
        const int64_t e = routing->expert[i];
        routing->place[i] = routing->first[e] + routing->size[e]++;
        routing->row[routing->place[i]] = i / each;
        routing->expert_at[routing->place[i]] = e;
    }
}

/* the state of a pass as the rows of one expert see it, of which the first is row 0 */
INLINE Work work_of_expert(const Work *work, const Experts *experts, int64_t expert) {
    const int64_t first = work->routing->first[expert];
    Work own = *work;
    own.inputs = (char *)work->inputs + first * work->input_width * 4;
    own.input_scales = work->input_scales + first;
    own.mixed = work->mixed + first * work->mixed_width;
    own.joint = work->wide + first * work->decoder->hidden; /* read by this process alone */
    own.inner = experts->down[expert].inputs;
    return own;
}

/* writes the input of the products of the expert at a place: the normed stream, or for the last
 * product the result of the activation */
static void write_place(const Work *work, const Experts *experts, int64_t place, const float *from,
                        const float *norm) {
    const Routing *routing = work->routing;
    if (routing->row[place] < 0) return;
    const int64_t expert = routing->expert_at[place], hidden = work->decoder->hidden;
    const Work own = work_of_expert(work, experts, expert);
    const int64_t row = place - routing->first[expert];
    if (from != NULL) write_input(&own, row, from + routing->row[place] * hidden, hidden, norm);
    else write_input(&own, row, own.mixed + row * own.inner, own.inner, NULL);
}

/* distributes groups of blocks of all experts in use over the threads */
INLINE void products_of_experts(const Work *work, const Experts *experts, const Linear *linears,
                                int phase, int target) {
    const Routing *routing = work->routing;
    EACH(piece, work->phases[phase].pieces, phase) {
        int64_t i = 0, group = piece, groups;
        for (; group >= (groups = groups_of(&linears[routing->used[i]])); i++) group -= groups;
        const int64_t expert = routing->used[i];
        Work own = work_of_expert(work, experts, expert);
        if (target == TO_JOINT && work->decoder->format < INT8) own.inputs = own.mixed;
        product_of_piece(&own, &linears[expert], routing->size[expert], group, target);
    }
}

/* adds the weighted results of a row's experts, normed if there is a norm, to the residual stream, in
 * its own columns */
static void add_experts(const Work *work, const Experts *experts, const float *norm, int64_t row) {
    const Decoder *decoder = work->decoder;
    const int64_t hidden = decoder->hidden, each = experts_of_row(experts);
    const float *weights = work->routing->weight + row * each;
    const int64_t *places = work->routing->place + row * each;
    const int64_t first = experts->down->first, end = first + experts->down->outputs;
    float *to = work->x + row * hidden, *sums = work->wide + places[0] * hidden;
    for (int64_t i = first; i < end; i += LANES) {
        vf sum = splat(0.0f);
        for (int64_t e = 0; e < each; e++)
            sum = fma16(splat(weights[e]), load(work->wide + places[e] * hidden + i), sum);
        if (norm != NULL) store(sums + i, sum);
        else store(to + i, fma16(sum, splat(decoder->residual_scale), load(to + i)));
    }
    if (norm != NULL) add_normed(work, row, sums, norm);
}

/* The perceptron of a layer with experts. The normed rows are the inputs of the router already;
 * those of the experts are normed again, in the format of their weights. */
static void run_experts(Work *work, const Layer *layer, const float *stream, int phase) {
    const Experts *experts = layer->experts;
    const float *norm = work->decoder->is_post_norm ? NULL : layer->mlp_norm;
    product(work, &experts->router, work->rows, phase + ROUTER, TO_WIDE);
    EACH(row, work->rows, phase + CHOOSE) choose_experts(work, experts, row);
    EACH(all, 1, phase + GROUP_ROWS) group_rows(work, experts, phase);
    const int64_t places = work->phases[phase + GATHER].pieces;
    EACH(place, places, phase + GATHER) write_place(work, experts, place, stream, norm);
    products_of_experts(work, experts, experts->gate_up, phase + GATE_UP,
                        work->decoder->is_gated ? TO_MLP : TO_PLAIN_MLP);
    meet(work, phase + GATE_UP);
    if (work->decoder->format >= INT8)
        EACH(place, places, phase + DOWN_INPUT) write_place(work, experts, place, NULL, NULL);
    products_of_experts(work, experts, experts->down, phase + DOWN, TO_JOINT);
    EACH(row, work->rows, phase + MLP_POST_NORM)
        add_experts(work, experts, layer->mlp_post_norm, row);
    meet(work, phase + MLP_POST_NORM);
}
