/* Memory of a pass: one arena for all passes, which run one after the other. */
#pragma once
#include <stdlib.h>
#include <string.h>
#include "attention.h"
#include "states.h"
#include "structures.h"

static struct {
    char *memory;
    size_t size;
} arena;

static size_t put(size_t *used, int64_t bytes) {
    size_t at = *used;
    *used += ((size_t)bytes + 127) / 64 * 64;
    return at;
}

static int has_memory(size_t bytes) { /* grows the arena if it is too small */
    if (bytes <= arena.size) return 1;
    free(arena.memory);
    arena.size = bytes + bytes / 4;
    arena.memory = NULL;
    if (posix_memalign((void **)&arena.memory, 64, arena.size)) arena.memory = NULL;
    if (arena.memory == NULL) {
        arena.size = 0;
        return 0;
    }
    memset(arena.memory, 0, arena.size);
    return 1;
}

static int64_t scratch_size(const Decoder *decoder, const Pass *pass) { /* of a thread, in floats */
    const int64_t dim = decoder->head_dim, group = decoder->heads / decoder->kv_heads;
    int64_t queries = 0;
    for (int64_t i = 0; i < pass->num_chunks; i++)
        queries = max_int(queries, (pass->chunks[i + 1] - pass->chunks[i]) * group);
    int64_t numbers = attention_floats(dim, queries);
    for (int64_t i = 0; i < decoder->num_layers; i++)
        if (has_states(decoder->layers + i))
            numbers = max_int(numbers, walk_size(decoder->layers[i].recurrence, pass->num_levels));
    return numbers;
}

static int64_t prepared_numbers(const Decoder *decoder, const Pass *pass) {
    int64_t widest = 0;
    for (int64_t i = 0; i < decoder->num_layers; i++)
        if (has_states(decoder->layers + i))
            widest = max_int(widest, prepared_size(decoder->layers[i].recurrence));
    return pass->num_runs ? pass->run_step[pass->num_runs] * widest : 0;
}

INLINE int64_t mixed_width(const Decoder *decoder) { /* of a row, in numbers */
    const int64_t queries = decoder->all_heads * decoder->head_dim,
                  keys = queries / decoder->heads * decoder->kv_heads;
    return max_int(max_int(widest_result(decoder), decoder->has_joint_norms * (queries + keys)),
                   decoder->mlp + 64);
}

/* room for the rows of a pass and the places of its experts, in rows */
static int64_t rows_and_places(const Decoder *decoder, int64_t rows) {
    int64_t most = rows;
    for (int64_t i = 0; i < decoder->num_layers; i++)
        if (decoder->layers[i].experts != NULL)
            most = max_int(most, places_of_experts(decoder->layers[i].experts, rows));
    return blocks_of(most, 16) * 16;
}

/* bytes that a team shares in a pass with these rows and rows of logits */
int64_t draftree_team_bytes(const Decoder *decoder, int64_t rows, int64_t num_logits) {
    const int64_t all = rows_and_places(decoder, rows);
    rows = (rows + 15) / 16 * 16;
    size_t used = 64;
    put(&used, sizeof(Team));
    put(&used, rows * decoder->hidden * 4);
    put(&used, rows * decoder->hidden * 4);
    put(&used, all * mixed_width(decoder) * 4);
    put(&used, num_logits * decoder->vocab * 4);
    return (int64_t)used;
}

static void place_team(Work *work) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t rows = (pass->rows + 15) / 16 * 16, all = rows_and_places(decoder, pass->rows);
    char *base = pass->team;
    size_t used = 64;
    put(&used, sizeof(Team));
    work->x = (float *)(base + put(&used, rows * decoder->hidden * 4));
    work->joint = (float *)(base + put(&used, rows * decoder->hidden * 4));
    work->mixed = (float *)(base + put(&used, all * mixed_width(decoder) * 4));
    work->logits = (float *)(base + put(&used, pass->num_logits * decoder->vocab * 4));
    work->meetings = atomic_load(&((Team *)pass->team)->arrived) / pass->team_size;
}

/* Places the state of the experts; returns its size in bytes. A NULL base only measures. */
static size_t place_routing(Routing *routing, const Decoder *decoder, int64_t rows, char *base) {
    size_t used = 0;
    int64_t uses = 0, all = 0;
    const int64_t places = rows_and_places(decoder, rows);
    for (int64_t i = 0; i < decoder->num_layers; i++) {
        const Experts *experts = decoder->layers[i].experts;
        if (experts == NULL) continue;
        uses = max_int(uses, rows * experts_of_row(experts));
        all = max_int(all, experts->count + experts->shared);
    }
    if (all == 0) return 0;
    routing->expert = (int64_t *)(base + put(&used, uses * 8));
    routing->place = (int64_t *)(base + put(&used, uses * 8));
    routing->weight = (float *)(base + put(&used, uses * 4));
    routing->row = (int64_t *)(base + put(&used, places * 8));
    routing->expert_at = (int64_t *)(base + put(&used, places * 8));
    routing->first = (int64_t *)(base + put(&used, all * 8));
    routing->size = (int64_t *)(base + put(&used, all * 8));
    routing->used = (int64_t *)(base + put(&used, all * 8));
    return used + 64;
}

/* places the state of a pass with this number of phases in the arena; 0 if there is no memory */
static int place_work(Work *work, int64_t phases_of_pass) {
    const Decoder *decoder = work->decoder;
    const Pass *pass = work->pass;
    const int64_t rows = (pass->rows + 15) / 16 * 16;
    const int64_t joined = widest_input(decoder), all = rows_and_places(decoder, pass->rows);
    const int64_t widest = max_int(max_int(widest_mixer(decoder), widest_router(decoder)),
                                   max_int(decoder->hidden, joined));
    const int64_t inputs = max_int(max_int(joined, widest_result(decoder)), decoder->mlp) + 64;
    const int64_t phase_bytes = phases_of_pass * (int64_t)sizeof(Phase);
    work->scratch_size = scratch_size(decoder, pass);
    size_t used = 64;
    const int64_t own = pass->team == NULL;
    const size_t x = put(&used, own * rows * decoder->hidden * 4),
                 mixed = put(&used, own * all * mixed_width(decoder) * 4);
    const size_t wide = put(&used, all * widest * 4), input = put(&used, all * inputs * 4);
    const size_t before = put(&used, decoder->is_parallel * rows * decoder->hidden * 4);
    const size_t routing = put(&used, (int64_t)place_routing(work->routing, decoder, pass->rows, NULL));
    const size_t scales = put(&used, all * 4), phases = put(&used, phase_bytes);
    const size_t prepared = put(&used, prepared_numbers(decoder, pass) * 4);
    const size_t scratch = put(&used, work->scratch_size * pass->num_threads * 4);
    if (!has_memory(used)) return 0;
    char *base = arena.memory;
    work->wide = (float *)(base + wide);
    if (own) {
        work->x = (float *)(base + x);
        work->joint = work->wide;
        work->mixed = (float *)(base + mixed);
        work->logits = pass->logits;
    } else {
        place_team(work);
    }
    work->inputs = base + input;
    work->input_width = inputs;
    work->mixed_width = mixed_width(decoder);
    work->before = (float *)(base + before);
    place_routing(work->routing, decoder, pass->rows, base + routing);
    work->input_scales = (float *)(base + scales);
    work->prepared = (float *)(base + prepared);
    work->scratch = (float *)(base + scratch);
    work->phases = (Phase *)(base + phases);
    memset(work->phases, 0, (size_t)phase_bytes);
    return 1;
}
