/* Numbers of the steps of a pass, each of which all threads finish before the next one starts. */
#pragma once
#include "shared.h"

/* Steps of a pass. The steps of a layer are numbered from a base of the layer's own. */
enum { EMBED, PROJECTION_INPUT, PROJECTION, CAPTURE_LAST, FINAL_NORM, HEAD, END, PASS_PHASES };
enum {
    ATTENTION_NORM,
    QKV,
    LATENTS, /* two for each */
    SHARE_HEADS = LATENTS + 2 * MAX_LATENTS,
    NORM_HEADS,
    PLACE,
    ATTEND,
    GATE,
    CONVOLVE,
    PREPARE,
    RECUR,
    GATE_RESULTS,
    NORM_RESULTS,
    GATE_NORMED,
    OUTPUT_INPUT,
    OUTPUT,
    ATTENTION_POST_NORM,
    SOURCE_NORM,
    SOURCE_QUERY,
    SOURCE_ATTEND,
    SOURCE_INPUT,
    SOURCE_OUTPUT,
    MLP_NORM,
    ROUTER,
    CHOOSE,
    GROUP_ROWS,
    GATHER,
    GATE_UP,
    DOWN_INPUT,
    DOWN,
    MLP_POST_NORM,
    ADD_STREAM,
    LAYER_PHASES
};
