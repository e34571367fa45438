/* The nodes of a tree that a head grows: how they are scored, which are the best, and which have
 * children. The rules are those of drafters/growing, in the same double precision. */
#pragma once
#include <math.h>
#include "structures.h"

#define MOST_SURE 1e-6 /* of heads/calibration.py */

/* A node.
 *   score   sum of the logarithms of the probabilities on its path
 *   depth   number of nodes on its path, its own included
 *   row     of the pass that reads it, or of the pass before that; place: of its keys in the slot
 *   is_out  whether others are better; is_unsure: whether it has no children */
typedef struct {
    double score;
    int64_t token, parent, depth, row, place;
    int is_out, is_unsure;
} Node;

/* A tree while it grows. `best`: its nodes by descending score, of equal ones the older first, if
 * only the best stay. */
typedef struct {
    Node *nodes;
    int64_t *best;
    int64_t count, num_best, first_new, num_read;
} Growing;

/* the logarithm of the probability that a token is picked, from that of its share of its row */
static double log_probability(double log_share, const double *map) {
    if (map == NULL || !(log_share > -INFINITY)) return log_share;
    double share = exp(log_share);
    share = share > MOST_SURE ? share : MOST_SURE;
    share = share < 1 - MOST_SURE ? share : 1 - MOST_SURE;
    const double value = map[0] * log(share / (1 - share)) + map[1];
    return (value < 0.0 ? value : 0.0) - log1p(exp(-fabs(value)));
}

INLINE double score_of(const Growing *tree, int64_t node) {
    return node < 0 ? 0.0 : tree->nodes[node].score;
}

/* whether a new node with this score would be among the best */
static int may_lead(const Growing *tree, int64_t limit, double score) {
    return tree->num_best < limit || score > tree->nodes[tree->best[tree->num_best - 1]].score;
}

static void insert_best(Growing *tree, int64_t limit, int64_t node) {
    if (tree->num_best == limit) tree->nodes[tree->best[--tree->num_best]].is_out = 1;
    int64_t at = tree->num_best++;
    for (; at > 0 && tree->nodes[tree->best[at - 1]].score < tree->nodes[node].score; at--)
        tree->best[at] = tree->best[at - 1];
    tree->best[at] = node;
}

/* Adds the children of a node. `columns` and `log_shares` have `width` candidates in descending
 * order. */
static void add_children(Growing *tree, const Trees *trees, int64_t own, int64_t parent,
                         int64_t level, const int64_t *columns, const double *log_shares,
                         int64_t width) {
    const int64_t limit = trees->nodes[own];
    const int64_t place = own * trees->levels + level;
    const double *map = trees->maps == NULL ? NULL : trees->maps + 2 * place;
    for (int64_t i = 0; i < width; i++) {
        const double value = log_probability(log_shares[i], map),
                     score = value + score_of(tree, parent);
        if (trees->is_best ? !may_lead(tree, limit, score) : tree->count == limit) return;
        if (!(value > -INFINITY)) continue; /* also for NaN */
        const int64_t column = columns[i];
        tree->nodes[tree->count] = (Node){
            .score = score,
            .token = trees->ids == NULL ? column : trees->ids[column],
            .parent = parent,
            .depth = level + 1,
            .is_unsure = (map != NULL && exp(value) < trees->least_confidence[own]) ||
                         score < trees->least_survival[own],
        };
        if (trees->is_best) insert_best(tree, limit, tree->count);
        tree->count++;
    }
}

/* whether a new node is read, so that it can have children */
INLINE int is_followed(const Growing *tree, const Trees *trees, int64_t own, int64_t node) {
    if (!trees->is_best && tree->count == trees->nodes[own]) return 0;
    return !tree->nodes[node].is_out && !tree->nodes[node].is_unsure;
}

/* Writes the nodes that stay, in the order in which they were added. */
static void write_tree(const Growing *tree, const Trees *trees, int64_t own) {
    int64_t count = 0;
    for (int64_t node = 0; node < tree->count; node++) {
        Node *from = tree->nodes + node;
        /* by rounding, a child may have a larger score than its parent */
        from->is_out |= from->parent >= 0 && tree->nodes[from->parent].is_out;
        if (from->is_out) continue;
        const int64_t to = own * trees->most_nodes + count;
        trees->tokens[to] = from->token;
        trees->parents[to] = from->parent < 0 ? -1 : tree->nodes[from->parent].row;
        trees->scores[to] = from->score;
        from->row = count++; /* the passes are over: where the node is now */
    }
    trees->counts[own] = count;
}
