"""Parameters of a beam search that contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftree.beam.params import BeamSearchParams


def conflicts(params: BeamSearchParams) -> list[tuple[bool, str, str]]:
    """Return whether each rule is broken, the parameter that it concerns, and what is allowed."""
    width, groups, is_sampled = params.beam_width, params.num_beam_groups, params.sampling != "none"
    constrained = bool(params.force_words_ids)
    return [
        (params.num_return_sequences > width, "num_return_sequences", f"it must be at most beam_width={width}"),
        (
            params.min_new_tokens > params.max_new_tokens and not params.max_len_ratio,
            "min_new_tokens",
            f"it must be at most max_new_tokens={params.max_new_tokens}",
        ),
        (
            params.patience != 1.0 and params.early_stopping != "fcfs",
            "patience",
            "it counts finished texts with early_stopping='fcfs' only: set that, or leave patience at 1",
        ),
        (
            bool(params.unk_penalty) and params.unk_token_id is None,
            "unk_penalty",
            "it needs unk_token_id: give the id of the unknown token",
        ),
        (width % groups > 0, "num_beam_groups", f"it must divide beam_width={width}"),
        (
            groups == 1 and params.diversity_penalty != 0.0,
            "diversity_penalty",
            "it acts between groups: set num_beam_groups to 2 or more",
        ),
        (
            params.diversity_discount != 0.0 and not params.diversity_penalty,
            "diversity_discount",
            "it weights diversity_penalty: set that too",
        ),
        (
            (params.top_k != 0 or params.top_p != 1.0) and not is_sampled,
            "top_k" if params.top_k else "top_p",
            "it acts on draws: set sampling to 'beam' or 'independent'",
        ),
        (
            sum((groups > 1, params.sibling_penalty != 0.0, is_sampled, constrained)) > 1,
            "num_beam_groups" if groups > 1 else "sibling_penalty" if params.sibling_penalty else "sampling",
            "num_beam_groups, sibling_penalty, sampling and force_words_ids exclude each other: keep one",
        ),
        (
            params.prefix_allowed_tokens_fn is not None and params.allowed_trie is not None,
            "allowed_trie",
            "it excludes prefix_allowed_tokens_fn: keep one",
        ),
        (params.ordered and not constrained, "ordered", "it orders force_words_ids: give those"),
        (params.strict and not constrained, "strict", "it concerns force_words_ids: give those"),
        (
            not params.count_prefix and not params.prefix_token_ids,
            "count_prefix",
            "it concerns prefix_token_ids: give those",
        ),
        (
            params.prefix_bias_beta != 0.0 and not (params.prefix_token_ids and params.count_prefix),
            "prefix_bias_beta",
            "it needs prefix_token_ids, whose log-probabilities count",
        ),
        (
            params.lm_weight != 1.0 and params.lm_model is None,
            "lm_weight",
            "it weights lm_model: give that",
        ),
        (
            params.match_source_len and params.length_bounds is not None,
            "length_bounds",
            "it excludes match_source_len: keep one",
        ),
        (
            params.sampling == "independent" and params.eos_rule != "top_k",
            "eos_rule",
            "every beam is sampled by its parameters: leave it at 'top_k'",
        ),
    ]
