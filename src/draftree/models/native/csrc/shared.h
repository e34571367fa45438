/* Structures that Python fills in. Each has one list of fields: the declaration is made from it,
 * and so is the layout in layout.c, which Python compares with its own structures. */
#pragma once
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, GROUPED = 3 };
enum { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, QUICK_GELU = 4, CLAMPED_SILU = 5, RELU_SQUARED = 6 };
enum { MAX_EXPERTS = 1024 /* of a layer */ };
enum { SOFTMAX = 0, SIGMOID = 1 }; /* from logits of experts to their weights */
enum { RMS_NORM = 0, LAYER_NORM = 1 };
enum { SHORT_CONVOLUTION = 0, GATED_DELTA = 1, MAMBA2 = 2 }; /* kinds of recurrences */
enum { MAX_TAPS = 16 /* of a convolution */ };
enum { MAX_LATENTS = 2 /* of a layer */ };

typedef const float *TablePair[2];

#define DECLARE(type, name) type name;

/* A linear layer.
 *   format   of the packed weight and of its inputs
 *   weight   packed blocks of 16 outputs
 *   scale    int8: one for each output
 *   sums     int8: sum of each output's weights; bfloat16 in 12 bits: see compact.h
 *   bias     one for each output, or NULL
 *   blocks   grouped: place and kind of each block, see groups.h; bfloat16 in 12 bits: see compact.h;
 *            otherwise NULL
 *   first    of a share: the first of its outputs in the whole layer, of gate and up their first
 *            column; otherwise 0 */
#define LINEAR_FIELDS(FIELD) \
    FIELD(const void *, weight) \
    FIELD(const float *, scale) \
    FIELD(const int32_t *, sums) \
    FIELD(const float *, bias) \
    FIELD(const int64_t *, blocks) \
    FIELD(int64_t, inputs) \
    FIELD(int64_t, outputs) \
    FIELD(int64_t, format) \
    FIELD(int64_t, first)

typedef struct {
    LINEAR_FIELDS(DECLARE)
} Linear;

/* A product of what another one computes from the normed stream: of a latent vector.
 *   from       where the vector starts in the row before the mixer
 *   norm       of the vector; NULL: none
 *   epsilon    of that norm, by the root mean square
 *   product    whose results start in that row at its `first` */
#define LATENT_FIELDS(FIELD) \
    FIELD(int64_t, from) \
    FIELD(const float *, norm) \
    FIELD(float, epsilon) \
    FIELD(Linear, product)

typedef struct {
    LATENT_FIELDS(DECLARE)
} Latent;

/* The experts of a layer, of which a row uses some.
 *   router      logits of the experts, and after them that of the shared expert's gate, if any; its
 *               format is that of keys and values
 *   gate_up, down   [count], and after them those of the shared expert, if any
 *   chosen      experts of a row, besides the shared one
 *   is_renormalized   whether the weights of a row's experts, whose sum is at most 1, are scaled to 1
 *   shared      number of shared experts, which every row uses: 0 or 1
 *   has_shared_gate   whether a logistic gate is the weight of the shared expert; otherwise 1
 *   scores      SOFTMAX or SIGMOID
 *   groups, chosen_groups   equal groups of experts, and those of a row, from which it chooses
 *   group_scores   largest scores of a group whose sum is that of the group
 *   choice_bias [count], added to the scores where experts are chosen; NULL: none
 *   scale       factor of the weights of the chosen experts */
#define EXPERTS_FIELDS(FIELD) \
    FIELD(Linear, router) \
    FIELD(const Linear *, gate_up) \
    FIELD(const Linear *, down) \
    FIELD(int64_t, count) \
    FIELD(int64_t, chosen) \
    FIELD(int64_t, is_renormalized) \
    FIELD(int64_t, shared) \
    FIELD(int64_t, has_shared_gate) \
    FIELD(int64_t, scores) \
    FIELD(int64_t, groups) \
    FIELD(int64_t, chosen_groups) \
    FIELD(int64_t, group_scores) \
    FIELD(const float *, choice_bias) \
    FIELD(float, scale)

typedef struct {
    EXPERTS_FIELDS(DECLARE)
} Experts;

/* A mixer with a state, in place of attention. `qkv` of its layer gives the inputs of the recurrence,
 * and `output` reads its results.
 *
 * The state of a slot after its first tokens is the base state, followed by the window: the last
 * taps - 1 inputs of the convolution, [taps - 1][channels], the oldest first. The inputs of later
 * tokens are stored: their channels, and then what else the recurrence needs of a token.
 *   first_input      where its inputs are in those of the mixer: after those of attention, which the
 *                    layer has as well, whose results come before its own; 0: no attention
 *   taps, channels   of the convolution
 *   width            stored numbers of a token
 *   state_size       numbers of the base state before the window
 *   first_result, all_results   where its results begin among those of a row, and their number, which
 *                    are more than its own if a team shares them
 *   convolution      [taps][channels], the oldest input first
 *   convolution_bias   [channels], or NULL
 *   states           [slot][state_size + (taps - 1) * channels]; slots lie the pass's state_step apart
 *   stored           [slot][entry][width]; slots and entries lie the pass's stored_step and entry_step
 *                    apart
 * Of GATED_DELTA and MAMBA2, whose channels are queries, keys and values, or values, keys and queries;
 * numbers of heads are filled up to a multiple of 16:
 *   heads            of values
 *   groups           heads of queries and of keys
 *   heads_of_group   heads of values for each of them; of a share, some of the first and of the last
 *                    group may be another one's
 *   key_dim, value_dim   numbers of a key and of a value, multiples of 16
 *   decays           decays of a head: 1, or one for each number of a key
 *   decay_rate       [head][decays], factors of time steps in the logarithms of decays
 *   step_bias        [head][decays], added to time steps before their softplus
 *   least_step, most_step   limits of time steps
 *   factor_scale     of GATED_DELTA: largest factor of a delta
 *   skip             [head], factor of values in results; NULL: none
 *   norm             [head][value_dim] of results; NULL: none
 *   norm_groups      equal parts of the results of a row that are normed apart
 *   is_norm_first    whether the norm comes before the gate
 *   is_logistic      whether the gate is a logistic function; otherwise SiLU
 *   is_tiled         whether heads next to each other are of different groups
 *   has_joint_norm   whether the norm_groups are of all_results
 *   norm_epsilon     of that norm */
#define RECURRENCE_FIELDS(FIELD) \
    FIELD(int64_t, kind) \
    FIELD(int64_t, first_input) \
    FIELD(int64_t, taps) \
    FIELD(int64_t, channels) \
    FIELD(int64_t, width) \
    FIELD(int64_t, state_size) \
    FIELD(int64_t, first_result) \
    FIELD(int64_t, all_results) \
    FIELD(const float *, convolution) \
    FIELD(const float *, convolution_bias) \
    FIELD(float *, states) \
    FIELD(float *, stored) \
    FIELD(int64_t, heads) \
    FIELD(int64_t, groups) \
    FIELD(int64_t, heads_of_group) \
    FIELD(int64_t, key_dim) \
    FIELD(int64_t, value_dim) \
    FIELD(int64_t, decays) \
    FIELD(int64_t, norm_groups) \
    FIELD(int64_t, is_norm_first) \
    FIELD(int64_t, is_logistic) \
    FIELD(int64_t, is_tiled) \
    FIELD(int64_t, has_joint_norm) \
    FIELD(const float *, decay_rate) \
    FIELD(const float *, step_bias) \
    FIELD(const float *, skip) \
    FIELD(const float *, norm) \
    FIELD(float, least_step) \
    FIELD(float, most_step) \
    FIELD(float, factor_scale) \
    FIELD(float, norm_epsilon)

typedef struct {
    RECURRENCE_FIELDS(DECLARE)
} Recurrence;

/* A layer. Norms that it does not have are NULL. After the weights of a norm with a mean lie its
 * biases.
 *   embedding_norm       of a joined layer, whose attention reads the normed embedding of the token
 *                        and after it the normed residual stream; otherwise NULL
 *   is_normed_residual   of a joined layer: its residual stream starts after attention_norm
 *   is_beside      whether the layer reads the residual stream and after it the embedding of the
 *                  token, normed together, and its results are not added to the residual stream, but
 *                  to what the mixer of the next layer reads
 *   keys, values   [slot][kv head][place][head_dim]; slots lie the pass's slot_step apart; codes
 *                  of 8 bits have a scale after each head_dim
 *   qkv, output    of attention, or of the recurrence; weights NULL: no mixer
 *   latents, num_latents   products of latent vectors, which the row before the mixer starts with
 *   first_input    numbers of that row before the inputs of the mixer: its latent vectors
 *   width          numbers of that row: latent vectors, inputs of the mixer, and of attention to
 *                  latent keys what its keys and values are expanded from
 *   gate_up, down  weights NULL: no perceptron, unless there are experts
 *   experts        in place of gate_up and down, or NULL
 *   recurrence     in place of attention, or NULL
 *   gate_size      of the gate of attention, whose outputs follow the values: numbers of each head,
 *                  1 or head_dim; 0: no gate
 *   sinks          [query head], scores of a key without a value that every row sees; NULL: none
 *   score_cap      scores are this times the hyperbolic tangent of scores / cap; 0: no cap
 *   window         positions that a row attends to, its own included; 0: all
 *   sees_block     whether a row also attends to later rows, up to its block_end
 *   rope           index of the pass's tables; negative: no rotary positions
 *   score_bias     [head][bias_length + 64], added to scores by distance, the most distant key
 *                  first; NULL: none
 *   source_norm, source_query, source_output, source_scaling   of the attention to sources; weights
 *                  NULL: none */
#define LAYER_FIELDS(FIELD) \
    FIELD(const float *, attention_norm) \
    FIELD(const float *, embedding_norm) \
    FIELD(const float *, attention_post_norm) \
    FIELD(const float *, mlp_norm) \
    FIELD(const float *, mlp_post_norm) \
    FIELD(const float *, query_norm) \
    FIELD(const float *, key_norm) \
    FIELD(Linear, qkv) \
    FIELD(Linear, output) \
    FIELD(Linear, gate_up) \
    FIELD(Linear, down) \
    FIELD(void *, keys) \
    FIELD(void *, values) \
    FIELD(int64_t, window) \
    FIELD(int64_t, sees_block) \
    FIELD(int64_t, rope) \
    FIELD(int64_t, is_normed_residual) \
    FIELD(int64_t, is_beside) \
    FIELD(const float *, score_bias) \
    FIELD(const float *, source_norm) \
    FIELD(Linear, source_query) \
    FIELD(Linear, source_output) \
    FIELD(float, source_scaling) \
    FIELD(float, scaling) \
    FIELD(float, score_cap) \
    FIELD(const float *, sinks) \
    FIELD(const Experts *, experts) \
    FIELD(const Recurrence *, recurrence) \
    FIELD(int64_t, gate_size) \
    FIELD(const Latent *, latents) \
    FIELD(int64_t, num_latents) \
    FIELD(int64_t, first_input) \
    FIELD(int64_t, width)

typedef struct {
    LAYER_FIELDS(DECLARE)
} Layer;

/* A model.
 *   format      of packed weights; kv_format: of the embedding, and of keys and values unless
 *   cache_format   the format of keys and values in slots, is INT8, see kv_codes.h
 *   embedding   [vocab][hidden]; NULL: the rows of `lookup`
 *   lookup      embedding in packed blocks
 *   projection  from the features of a row to what enters the first layer; weight NULL: none
 *   feature_norm, feature_part   norm of each part of that size of a row's features; NULL: none
 *   value_dim    results of a head, the first ones of its head_dim; the others are zeros
 *   shared_dim   of latent attention: numbers at the end of a key that all heads share, and that
 *                rotate; 0: other attention
 *   context_norm   norm of what the layers read of context rows
 *   fusion      from the embedding of a row's token and the state before it, side by side, to what
 *               enters the first layer, in place of hidden_in; weight NULL: none
 *   fusion_norm, state_norm   norms of that embedding and of that state; NULL: none
 *   all_heads, first_head   of a share, whose heads are heads and kv_heads: query heads of all shares,
 *                           and its first one; otherwise heads and 0. Its embedding has the rows
 *                           of its part of the head
 *   norm          kind of all norms
 *   is_post_norm  whether the norm before a sublayer replaces the residual stream, which makes it
 *                 the norm after the sublayer before
 *   is_gated      whether perceptrons have gates
 *   is_parallel   whether attention and perceptron of a layer read the same residual stream
 *   has_joint_norms   whether norms of queries and keys are over all heads together
 *   logit_cap     as score_cap, of logits
 *   gate_limit, gate_slope   of CLAMPED_SILU
 *   positions     [position][hidden], added to embeddings; NULL: none
 *   unplaced      token to which none is added; negative: no such token
 *   start_norm    norm of what enters the first layer; NULL: none
 *   is_start_norm_first   whether positions are added after it */
#define DECODER_FIELDS(FIELD) \
    FIELD(int64_t, hidden) \
    FIELD(int64_t, heads) \
    FIELD(int64_t, kv_heads) \
    FIELD(int64_t, head_dim) \
    FIELD(int64_t, value_dim) \
    FIELD(int64_t, shared_dim) \
    FIELD(int64_t, mlp) \
    FIELD(int64_t, num_layers) \
    FIELD(int64_t, vocab) \
    FIELD(int64_t, format) \
    FIELD(int64_t, kv_format) \
    FIELD(int64_t, cache_format) \
    FIELD(int64_t, activation) \
    FIELD(float, epsilon) \
    FIELD(float, embedding_scale) \
    FIELD(float, norm_offset) \
    FIELD(float, residual_scale) \
    FIELD(float, logit_scale) \
    FIELD(const void *, embedding) \
    FIELD(const float *, final_norm) \
    FIELD(const Layer *, layers) \
    FIELD(Linear, head) \
    FIELD(Linear, lookup) \
    FIELD(Linear, projection) \
    FIELD(Linear, fusion) \
    FIELD(const float *, fusion_norm) \
    FIELD(const float *, state_norm) \
    FIELD(const float *, context_norm) \
    FIELD(const float *, feature_norm) \
    FIELD(int64_t, feature_part) \
    FIELD(int64_t, all_heads) \
    FIELD(int64_t, first_head) \
    FIELD(int64_t, norm) \
    FIELD(int64_t, is_post_norm) \
    FIELD(int64_t, is_gated) \
    FIELD(int64_t, is_parallel) \
    FIELD(int64_t, has_joint_norms) \
    FIELD(float, logit_cap) \
    FIELD(float, gate_limit) \
    FIELD(float, gate_slope) \
    FIELD(const float *, positions) \
    FIELD(int64_t, unplaced) \
    FIELD(const float *, start_norm) \
    FIELD(int64_t, is_start_norm_first)

typedef struct {
    DECODER_FIELDS(DECLARE)
} Decoder;

/* A pass over rows, which run through the layers from first_layer to last_layer, exclusive.
 *   places             positions that a slot and head has room for
 *   slot_step          places from one slot to the next
 *   tokens ... list    of each row; see models/native/decoder.py
 *   rope_position      of a row: its entry in the rotary tables
 *   block_end          of a row: the last position that it sees in layers with sees_block
 *   identical          of a row: keys before this position lie at their position
 *   list_start, list   of a row: where its list of the other keys' places starts, and all lists
 *   chunks             first row of each run of rows of one slot, and the total after the last
 *   cosines, sines     [position][rotary_dim]
 *   query_scales       [position], factors of rotated queries; NULL: none
 *   hidden_in          [row][hidden], what enters the first layer; NULL: the tokens' embeddings
 *   num_context        the last rows, which have features, and of which layers compute keys and
 *                      values only; 0: none
 *   features           [row][inputs of the projection], in place of hidden_in, of context rows or, if
 *                      there are none, of all rows; NULL: none
 *   captured_layers    layers whose input is captured; last_layer stands for the last one's output
 *   captured           [row][num_captured][hidden], written by the pass
 *   skipped            NULL, or for every layer whether attention and mlp are left out
 *   logits             [num_logits][vocab], written by the pass; of a share NULL: not wanted
 *   source             of a row: index of its source
 *   sources            [source][2], address and length of its keys and values, see
 *                      attention_source.h; NULL: none
 *   source_queries     [row][heads][head_dim], queries of the last attention to sources, written by
 *                      the pass; NULL: not wanted
 *   bias_length        distances in the layers' score biases
 *   num_runs           slots whose recurrences run; 0 without recurrences
 *   run_slot, run_step, run_settled   of each slot: its index, its first step, and how many of its
 *                      steps the base state moves on over; after the last run_step the total
 *   step_row ... step_to   of each step, see recurrence.h
 *   num_levels         levels of states that a slot needs at most
 *   keeps_states       whether the base states move on
 *   state_step, stored_step, entry_step   numbers from one to the next, see Recurrence
 *   team               memory that the processes of a team share; NULL: one process
 *   team_rank, team_size   of this process, and the number of processes */
#define PASS_FIELDS(FIELD) \
    FIELD(int64_t, rows) \
    FIELD(int64_t, num_context) \
    FIELD(int64_t, num_threads) \
    FIELD(int64_t, first_layer) \
    FIELD(int64_t, last_layer) \
    FIELD(int64_t, num_logits) \
    FIELD(int64_t, num_chunks) \
    FIELD(int64_t, num_captured) \
    FIELD(int64_t, places) \
    FIELD(int64_t, slot_step) \
    FIELD(int64_t, rotary_dim) \
    FIELD(const int64_t *, tokens) \
    FIELD(const int64_t *, slot) \
    FIELD(const int64_t *, place) \
    FIELD(const int64_t *, position) \
    FIELD(const int64_t *, rope_position) \
    FIELD(const int64_t *, block_end) \
    FIELD(const int64_t *, identical) \
    FIELD(const int64_t *, list_start) \
    FIELD(const int64_t *, list) \
    FIELD(const int64_t *, chunks) \
    FIELD(TablePair, cosines) \
    FIELD(TablePair, sines) \
    FIELD(const float *, query_scales) \
    FIELD(const float *, hidden_in) \
    FIELD(const float *, features) \
    FIELD(const int64_t *, captured_layers) \
    FIELD(float *, captured) \
    FIELD(const uint8_t *, skipped) \
    FIELD(const int64_t *, logit_rows) \
    FIELD(float *, logits) \
    FIELD(const int64_t *, source) \
    FIELD(const int64_t *, sources) \
    FIELD(float *, source_queries) \
    FIELD(int64_t, bias_length) \
    FIELD(int64_t, num_runs) \
    FIELD(int64_t, num_levels) \
    FIELD(int64_t, keeps_states) \
    FIELD(int64_t, state_step) \
    FIELD(int64_t, stored_step) \
    FIELD(int64_t, entry_step) \
    FIELD(const int64_t *, run_slot) \
    FIELD(const int64_t *, run_step) \
    FIELD(const int64_t *, run_settled) \
    FIELD(const int64_t *, step_row) \
    FIELD(const int64_t *, step_entry) \
    FIELD(const int64_t *, step_parent) \
    FIELD(const int64_t *, step_from) \
    FIELD(const int64_t *, step_to) \
    FIELD(void *, team) \
    FIELD(int64_t, team_rank) \
    FIELD(int64_t, team_size)

typedef struct {
    PASS_FIELDS(DECLARE)
} Pass;

/* A search for the largest entries of rows of logits.
 *   logits         [rows][stride]
 *   keys           [rows][2], the second odd
 *   ids            tokens of the columns, filled up to a multiple of 64; NULL: columns are tokens
 *   temperatures   [rows], divisors of the logits; 0: no division and no noise
 *   tokens         [rows][count], columns, descending by score; of equal scores the lower first
 *   scores         [rows][count]; if a row holds a NaN, it comes first and alone
 *   totals         [rows], logarithms of the sums of exponentials; NULL: not wanted
 *   next, failed   used by the search */
#define SEARCH_FIELDS(FIELD) \
    FIELD(const float *, logits) \
    FIELD(int64_t, rows) \
    FIELD(int64_t, stride) \
    FIELD(int64_t, vocab) \
    FIELD(int64_t, count) \
    FIELD(const uint32_t *, keys) \
    FIELD(const int32_t *, ids) \
    FIELD(const float *, temperatures) \
    FIELD(int64_t *, tokens) \
    FIELD(float *, scores) \
    FIELD(float *, totals) \
    FIELD(atomic_long, next) \
    FIELD(atomic_int, failed)

typedef struct {
    SEARCH_FIELDS(DECLARE)
} Search;

enum { MAX_COUNT = 64 /* largest count of a search */ };

/* Trees of a head, one for each row of the first pass with logits.
 *   levels        maximum number of levels of a tree
 *   is_best       whether the nodes of the highest scores stay; otherwise the first ones
 *   is_normed     whether a row reads its parent's state after the final norm
 *   room          nodes that a tree has at most while it grows; most_nodes: afterwards
 *   most_rows     rows of a pass at most; most_width: the largest width
 *   widths        [levels], children of a node
 *   depths, nodes   [trees], maximum numbers of levels and nodes of each
 *   keys          [trees][levels][2], of the noise, the second odd; NULL: no tree has noise
 *   temperatures  [trees], as in a search
 *   maps          [trees][levels][2], slopes and offsets from scores to probabilities; NULL: none
 *   least_confidence, least_survival   [trees], of a node with children: probability given its
 *                 parent, and the least score
 *   ids           as in a search
 *   slots, places, positions   [trees], of the row of the first node: slot, place and entry in the
 *                 rotary tables
 *   kept          [slot][place][hidden], states before the rows of the first pass, in the format of
 *                 keys; slots lie kept_step numbers apart
 *   tokens, parents, scores   [trees][most_nodes]
 *   counts        [trees], number of these */
#define TREES_FIELDS(FIELD) \
    FIELD(int64_t, trees) \
    FIELD(int64_t, levels) \
    FIELD(int64_t, is_best) \
    FIELD(int64_t, is_normed) \
    FIELD(int64_t, room) \
    FIELD(int64_t, most_nodes) \
    FIELD(int64_t, most_rows) \
    FIELD(int64_t, most_width) \
    FIELD(const int64_t *, widths) \
    FIELD(const int64_t *, depths) \
    FIELD(const int64_t *, nodes) \
    FIELD(const uint32_t *, keys) \
    FIELD(const double *, temperatures) \
    FIELD(const double *, maps) \
    FIELD(const double *, least_confidence) \
    FIELD(const double *, least_survival) \
    FIELD(const int32_t *, ids) \
    FIELD(const int64_t *, slots) \
    FIELD(const int64_t *, places) \
    FIELD(const int64_t *, positions) \
    FIELD(void *, kept) \
    FIELD(int64_t, kept_step) \
    FIELD(int64_t *, tokens) \
    FIELD(int64_t *, parents) \
    FIELD(double *, scores) \
    FIELD(int64_t *, counts)

typedef struct {
    TREES_FIELDS(DECLARE)
} Trees;
