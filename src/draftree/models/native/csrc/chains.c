/* Chains of a head that reads its own states: passes, choices and the rows that follow, in one
 * call. Between two passes no other code runs, so that its instructions and data stay in the
 * caches.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "rows.h"

int draftree_pass(const Decoder *decoder, Pass *pass);
int draftree_search(Search *search, int64_t threads);

/* rows of the chains that go on, and what is searched in their logits */
typedef struct {
    int64_t *chain, *tokens, *slots, *places, *positions, *identical, *starts, *rows, *chunks,
        *columns;
    uint32_t *keys;
    float *temperatures, *scores, *totals, *inputs, *states;
} ChainRows;

static void *place_rows(ChainRows *rows, int64_t chains, int64_t hidden) {
    enum { WHOLE = 10, FLOATS = 5 };
    const int64_t whole = WHOLE * (chains + 1), floats = (FLOATS * chains + 15) / 16 * 16;
    char *memory;
    if (posix_memalign((void **)&memory, 64, (size_t)((2 * chains * hidden + floats) * 4 + whole * 8)))
        return NULL;
    float *numbers = (float *)memory;
    rows->inputs = numbers;
    rows->states = numbers + chains * hidden;
    numbers += 2 * chains * hidden;
    rows->keys = (uint32_t *)numbers;
    rows->temperatures = numbers + 2 * chains;
    rows->scores = numbers + 3 * chains;
    rows->totals = numbers + 4 * chains;
    int64_t **columns[WHOLE] = {&rows->chain,     &rows->tokens,    &rows->slots,  &rows->places,
                                &rows->positions, &rows->identical, &rows->starts, &rows->rows,
                                &rows->chunks,    &rows->columns};
    for (int i = 0; i < WHOLE; i++)
        *columns[i] = (int64_t *)(numbers + floats) + i * (chains + 1);
    for (int64_t i = 0; i <= chains; i++) {
        rows->chain[i] = rows->rows[i] = rows->chunks[i] = i;
        rows->starts[i] = 0;
    }
    return memory;
}

/* stores the states before the rows of the first pass */
static void keep_states(const Decoder *decoder, const Pass *pass, const Chain *chain) {
    const int64_t hidden = decoder->hidden;
    for (int64_t row = 0; row < pass->rows; row++) {
        const float *from = pass->features == NULL
                                ? pass->hidden_in + row * hidden
                                : pass->captured + row * pass->num_captured * hidden;
        const int64_t at = pass->slot[row] * chain->kept_step + pass->place[row] * hidden;
        for (int64_t i = 0; i < hidden; i += LANES) {
            if (decoder->kv_format == FLOAT32)
                store((float *)chain->kept + at + i, load(from + i));
            else store_half((uint16_t *)chain->kept + at + i, load(from + i));
        }
    }
}

static int search_level(const Pass *pass, const Chain *chain, const ChainRows *rows, int64_t count,
                        int64_t level, int64_t vocab) {
    for (int64_t row = 0; row < count; row++) {
        const int64_t own = rows->chain[row];
        rows->temperatures[row] = (float)chain->temperatures[own];
        if (chain->keys != NULL)
            memcpy(rows->keys + 2 * row, chain->keys + 2 * (own * chain->levels + level), 8);
    }
    Search search = {.logits = pass->logits,
                     .rows = count,
                     .stride = vocab,
                     .vocab = vocab,
                     .count = 1,
                     .keys = rows->keys,
                     .ids = chain->ids,
                     .temperatures = rows->temperatures,
                     .tokens = rows->columns,
                     .scores = rows->scores,
                     .totals = rows->totals};
    return draftree_search(&search, pass->num_threads);
}

/* Notes the choices of a level, and writes the rows of the chains that go on. Returns their number. */
static int64_t follow(const Decoder *decoder, const Pass *pass, const Chain *chain,
                      const ChainRows *rows, int64_t count, int64_t level) {
    const Work work = {.decoder = decoder};
    const int64_t hidden = decoder->hidden, captured = pass->num_captured;
    int64_t next = 0;
    for (int64_t row = 0; row < count; row++) {
        const int64_t own = rows->chain[row], at = own * chain->levels + level;
        const int64_t column = rows->columns[row];
        const double share = (double)rows->scores[row] - (double)rows->totals[row];
        chain->tokens[at] = chain->ids == NULL ? column : chain->ids[column];
        chain->shares[at] = share;
        chain->counts[own] = level + 1;
        /* also for NaN: it is not followed */
        if (level + 1 >= chain->depths[own] || !(share > -INFINITY) || share < chain->least[at])
            continue;
        const float *state = pass->captured +
                             (pass->logit_rows[row] * captured + captured - 1) * hidden;
        if (chain->is_normed)
            norm_row(&work, state, hidden, decoder->final_norm, rows->inputs + next * hidden);
        else memcpy(rows->inputs + next * hidden, state, (size_t)hidden * sizeof(float));
        rows->chain[next] = own;
        rows->tokens[next] = chain->tokens[at];
        rows->slots[next] = chain->slots[own];
        rows->places[next] = chain->places[own] + level;
        rows->identical[next] = rows->places[next] + 1;
        rows->positions[next++] = chain->positions[own] + level;
    }
    return next;
}

static void point_pass(const Decoder *decoder, Pass *pass, const ChainRows *rows, int64_t count) {
    pass->rows = pass->num_logits = pass->num_chunks = count;
    pass->num_captured = 1;
    pass->tokens = rows->tokens;
    pass->slot = rows->slots;
    pass->place = pass->position = rows->places;
    pass->rope_position = rows->positions;
    pass->identical = rows->identical;
    pass->list_start = rows->starts;
    pass->chunks = rows->chunks;
    pass->hidden_in = rows->inputs;
    pass->features = NULL;
    pass->captured_layers = &pass->last_layer;
    pass->captured = rows->states;
    pass->logit_rows = rows->rows;
}

/* Grows chains. The first pass has the rows of the texts and captures the output of the last layer,
 * after the input of the first one if the rows have features. 0: done; 1: no memory */
int draftree_chain(const Decoder *decoder, const Pass *first, const Chain *chain) {
    ChainRows rows;
    void *memory = place_rows(&rows, chain->chains, decoder->hidden);
    if (memory == NULL) return 1;
    Pass pass = *first;
    int failed = 0;
    int64_t count = chain->chains;
    for (int64_t level = 0; count && !failed; level++) {
        failed = draftree_pass(decoder, &pass);
        if (failed) break;
        if (level == 0) keep_states(decoder, &pass, chain);
        failed = search_level(&pass, chain, &rows, count, level, decoder->vocab);
        count = follow(decoder, &pass, chain, &rows, count, level);
        point_pass(decoder, &pass, &rows, count);
    }
    free(memory);
    return failed;
}

/* states after the final norm */
void draftree_final_norm(const Decoder *decoder, const float *states, int64_t rows, float *to) {
    const Work work = {.decoder = decoder};
    for (int64_t row = 0; row < rows; row++)
        norm_row(&work, states + row * decoder->hidden, decoder->hidden, decoder->final_norm,
                 to + row * decoder->hidden);
}
