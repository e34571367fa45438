/* Trees of a head that reads its own states, and plain decoding: passes, choices and the rows that
 * follow, in one call. Between two passes no other code runs, so that its instructions and data
 * stay in the caches.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "growing.h"
#include "rows.h"

int draftree_pass(const Decoder *decoder, Pass *pass);
int draftree_search(Search *search, int64_t threads);

/* rows of one level, those of a tree together, and what is searched in their logits */
typedef struct {
    Growing *trees;
    int64_t count, width;
    int64_t *tree, *node, *tokens, *slots, *places, *positions, *rotary, *identical, *starts,
        *rows, *chunks, *list, *columns;
    double *log_shares;
    uint32_t *keys;
    float *temperatures, *scores, *totals, *inputs, *states;
} Level;

enum { ROW_COLUMNS = 10 };

/* one piece of memory for everything; its layout is made by a first call without memory */
static size_t place_level(Level *level, const Trees *trees, int64_t hidden, char *memory) {
    const int64_t rows = trees->most_rows, all = rows + 1, width = trees->most_width;
    size_t used = 0;
#define ROOM(pointer, numbers) \
    (pointer) = (void *)(memory + used); \
    used += ((size_t)(numbers) * sizeof *(pointer) + 63) / 64 * 64;
    int64_t **columns[ROW_COLUMNS] = {&level->tree,   &level->node,   &level->tokens,
                                      &level->slots,  &level->places, &level->positions,
                                      &level->rotary, &level->starts, &level->identical,
                                      &level->chunks};
    for (int i = 0; i < ROW_COLUMNS; i++) { ROOM(*columns[i], all) }
    ROOM(level->rows, all)
    ROOM(level->list, rows * trees->levels)
    ROOM(level->columns, rows * width)
    ROOM(level->log_shares, rows * width)
    ROOM(level->keys, 2 * rows)
    ROOM(level->temperatures, rows)
    ROOM(level->scores, rows * width)
    ROOM(level->totals, rows)
    ROOM(level->inputs, rows * hidden)
    ROOM(level->states, rows * hidden)
    ROOM(level->trees, trees->trees)
    for (int64_t own = 0; own < trees->trees; own++) {
        Growing tree = {0};
        ROOM(tree.nodes, trees->room)
        ROOM(tree.best, trees->nodes[own])
        if (memory != NULL) level->trees[own] = tree;
    }
#undef ROOM
    return used;
}

static void *start_level(Level *level, const Trees *trees, int64_t hidden) {
    char *memory;
    if (posix_memalign((void **)&memory, 64, place_level(level, trees, hidden, NULL))) return NULL;
    place_level(level, trees, hidden, memory);
    level->count = trees->trees;
    for (int64_t row = 0; row <= trees->most_rows; row++) level->rows[row] = row;
    for (int64_t own = 0; own < trees->trees; own++) {
        level->tree[own] = own;
        level->node[own] = -1;
    }
    return memory;
}

/* stores the states before the rows of the first pass */
static void keep_states(const Decoder *decoder, const Pass *pass, const Trees *trees) {
    const int64_t hidden = decoder->hidden;
    for (int64_t row = 0; row < pass->rows; row++) {
        const float *from = pass->features == NULL
                                ? pass->hidden_in + row * hidden
                                : pass->captured + row * pass->num_captured * hidden;
        const int64_t at = pass->slot[row] * trees->kept_step + pass->place[row] * hidden;
        for (int64_t i = 0; i < hidden; i += LANES) {
            if (decoder->kv_format == FLOAT32)
                store((float *)trees->kept + at + i, load(from + i));
            else store_half((uint16_t *)trees->kept + at + i, load(from + i));
        }
    }
}

/* finds the candidates of every row */
static int search_level(const Pass *pass, const Trees *trees, Level *level, int64_t depth,
                        int64_t vocab) {
    level->width = min_int(trees->widths[depth], vocab);
    for (int64_t row = 0; row < level->count; row++) {
        const int64_t own = level->tree[row];
        level->temperatures[row] = (float)trees->temperatures[own];
        if (trees->keys != NULL)
            memcpy(level->keys + 2 * row, trees->keys + 2 * (own * trees->levels + depth), 8);
    }
    Search search = {.logits = pass->logits,
                     .rows = level->count,
                     .stride = vocab,
                     .vocab = vocab,
                     .count = level->width,
                     .keys = level->keys,
                     .ids = trees->ids,
                     .temperatures = level->temperatures,
                     .tokens = level->columns,
                     .scores = level->scores,
                     .totals = level->totals};
    const int failed = draftree_search(&search, pass->num_threads);
    for (int64_t i = 0; i < level->count * level->width && !failed; i++)
        level->log_shares[i] = (double)level->scores[i] - (double)level->totals[i / level->width];
    return failed;
}

/* adds the nodes of a level */
static void add_level(const Trees *trees, Level *level, int64_t depth) {
    for (int64_t own = 0; own < trees->trees; own++)
        level->trees[own].first_new = level->trees[own].count;
    for (int64_t row = 0; row < level->count; row++) {
        const int64_t own = level->tree[row], first = row * level->width;
        add_children(level->trees + own, trees, own, level->node[row], depth,
                     level->columns + first, level->log_shares + first, level->width);
    }
}

/* Writes where the keys of a node's path are. Paths whose nodes follow each other in the slot need
 * no list. Returns the end of the lists. */
static int64_t list_path(const Growing *tree, Level *level, int64_t row, int64_t first,
                         int64_t end) {
    const Node *node = tree->nodes + level->node[row];
    int64_t identical = 0, path = node - tree->nodes;
    for (int64_t depth = node->depth; depth > 0; depth--, path = tree->nodes[path].parent)
        level->list[end + depth - 1] = tree->nodes[path].place;
    while (identical < node->depth && level->list[end + identical] == first + identical)
        identical++;
    level->identical[row] = first + identical;
    level->starts[row] = end + identical;
    return identical == node->depth ? end : end + node->depth;
}

/* Writes the rows of the new nodes that are read. */
static void follow(const Decoder *decoder, const Pass *pass, const Trees *trees, Level *level,
                   int64_t depth) {
    const Work work = {.decoder = decoder};
    const int64_t hidden = decoder->hidden, captured = pass->num_captured;
    int64_t row = 0, parent_row = 0, end = 0;
    /* rows of this level replace those of the last one, which parents refer to by `row` */
    for (int64_t i = 0; i < level->count; i++)
        if (level->node[i] >= 0) level->trees[level->tree[i]].nodes[level->node[i]].row = i;
    for (int64_t own = 0; own < trees->trees; own++) {
        Growing *tree = level->trees + own;
        if (depth + 1 >= trees->depths[own]) continue;
        for (int64_t node = tree->first_new; node < tree->count; node++) {
            Node *at = tree->nodes + node;
            if (!is_followed(tree, trees, own, node)) continue;
            parent_row = pass->logit_rows[at->parent < 0 ? own : tree->nodes[at->parent].row];
            const float *state = pass->captured + (parent_row * captured + captured - 1) * hidden;
            if (trees->is_normed)
                norm_row(&work, state, hidden, decoder->final_norm, level->inputs + row * hidden);
            else memcpy(level->inputs + row * hidden, state, (size_t)hidden * sizeof(float));
            at->place = trees->places[own] + tree->num_read++;
            level->tree[row] = own;
            level->node[row] = node;
            level->tokens[row] = at->token;
            level->slots[row] = trees->slots[own];
            level->places[row] = at->place;
            level->positions[row] = trees->places[own] + depth;
            level->rotary[row] = trees->positions[own] + depth;
            end = list_path(tree, level, row++, trees->places[own], end);
        }
    }
    level->count = row;
}

/* makes a pass over the rows of a level */
static void point_pass(const Decoder *decoder, Pass *pass, Level *level) {
    int64_t chunks = 0;
    for (int64_t row = 0; row < level->count; row++)
        if (!row || level->tree[row] != level->tree[row - 1] ||
            row - level->chunks[chunks - 1] == ATTENTION_ROWS)
            level->chunks[chunks++] = row;
    level->chunks[chunks] = level->count;
    pass->rows = pass->num_logits = level->count;
    pass->num_chunks = chunks;
    pass->num_captured = 1;
    pass->tokens = level->tokens;
    pass->slot = level->slots;
    pass->place = level->places;
    pass->position = level->positions;
    pass->rope_position = level->rotary;
    pass->identical = level->identical;
    pass->list_start = level->starts;
    pass->list = level->list;
    pass->chunks = level->chunks;
    pass->hidden_in = level->inputs;
    pass->features = NULL;
    pass->captured_layers = &pass->last_layer;
    pass->captured = level->states;
    pass->logit_rows = level->rows;
}

/* Grows trees. The first pass has the rows of the texts and captures the output of the last layer,
 * after the input of the first one if the rows have features. 0: done; 1: no memory */
int draftree_grow(const Decoder *decoder, const Pass *first, const Trees *trees) {
    Level level;
    void *memory = start_level(&level, trees, decoder->hidden);
    if (memory == NULL) return 1;
    Pass pass = *first;
    int failed = 0;
    for (int64_t depth = 0; level.count && !failed; depth++) {
        failed = draftree_pass(decoder, &pass);
        if (failed) break;
        if (depth == 0) keep_states(decoder, &pass, trees);
        failed = search_level(&pass, trees, &level, depth, decoder->vocab);
        if (failed) break;
        add_level(trees, &level, depth);
        follow(decoder, &pass, trees, &level, depth);
        point_pass(decoder, &pass, &level);
    }
    for (int64_t own = 0; own < trees->trees; own++) write_tree(level.trees + own, trees, own);
    free(memory);
    return failed;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Plain decoding: passes over one row of each text, whose chosen tokens are the rows of the next
 * pass. `keys` are [most][rows][2], of the noise, and `tokens` [most][rows] receives the choices.
 * No pass follows one of the `stops` or the end of the time. Returns the number of passes, without
 * a last one with a choice that the host has to make: there is no finite score, or another score
 * is within `near` of the largest. -1: no memory */
int64_t draftree_decode(const Decoder *decoder, Pass *pass, Search *search, const uint32_t *keys,
                        const int64_t *stops, int64_t *tokens, int64_t most, int64_t num_stops,
                        double seconds, double near) {
    const double end = seconds_now() + seconds;
    const int64_t rows = pass->rows;
    int64_t step = 0;
    for (int is_last = 0; step < most && !is_last; step++, tokens += rows) {
        memcpy((uint32_t *)search->keys, keys + 2 * rows * step, (size_t)rows * 8);
        if (draftree_pass(decoder, pass)) return -1;
        if (draftree_search(search, pass->num_threads)) return -1;
        for (int64_t row = 0; row < rows; row++) {
            const float *scores = search->scores + row * search->count;
            const int is_noisy = search->temperatures[row] != 0.0f && search->count > 1;
            if (!isfinite(scores[0])) return step;
            if (is_noisy && (double)scores[1] >= (double)scores[0] - near) return step;
            tokens[row] = search->tokens[row * search->count];
            for (int64_t i = 0; i < num_stops; i++) is_last |= tokens[row] == stops[i];
        }
        for (int64_t row = 0; row < rows; row++) {
            ((int64_t *)pass->tokens)[row] = tokens[row];
            ((int64_t *)pass->place)[row]++;
            ((int64_t *)pass->identical)[row]++;
            ((int64_t *)pass->position)[row]++;
            if (pass->rope_position != pass->position) ((int64_t *)pass->rope_position)[row]++;
        }
        is_last |= seconds_now() >= end;
    }
    return step;
}

/* states after the final norm */
void draftree_final_norm(const Decoder *decoder, const float *states, int64_t rows, float *to) {
    const Work work = {.decoder = decoder};
    for (int64_t row = 0; row < rows; row++)
        norm_row(&work, states + row * decoder->hidden, decoder->hidden, decoder->final_norm,
                 to + row * decoder->hidden);
}
