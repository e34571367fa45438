"""Parameters of a beam search, with the names of transformers and vLLM where they have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftree.beam.trie import TokenTrie
from draftree.core.errors import InvalidRequestError
from draftree.sampling.params import (
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    check_fields,
    flag,
    names_are_checked,
    number,
    one_of,
    parameter,
    refuse,
    require_length,
    strings,
    token_ids,
    whole,
)

MAX_PHRASES = 4096

_BOUND = number(-1e6, 1e6, "four numbers min_a, min_b, max_a, max_b")


def phrases(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Check for a list of lists of token ids, none empty."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise refuse(name, value, "a list of phrases, each a list of at least one token id")
    require_length(name, value, MAX_PHRASES, "phrases")
    checked = tuple(map(partial(token_ids(), name), value))
    if not all(checked):
        raise refuse(name, value, "a list of phrases, each a list of at least one token id")
    return checked


def optional(kind: Any, allowed: str) -> Callable[[str, Any], Any]:
    """Return a check for an instance of a type, or None."""

    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind | None):
            raise refuse(name, value, allowed)
        return value

    return check


def length_bounds(name: str, value: Any) -> tuple[float, ...] | None:
    """Check for four numbers, or None."""
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or len(value) != 4:
        raise refuse(name, value, "four numbers min_a, min_b, max_a, max_b")
    return tuple(_BOUND(name, item) for item in value)


def optional_model(name: str, value: Any) -> Any:
    """Check for a `LanguageModel` or None; of an `LLM` or a `LoadedModel` the model is taken."""
    if value is None:
        return None
    from draftree.models.base import LanguageModel  # here, so that the command line's help does not wait for torch

    for model in (value, getattr(value, "model", None)):
        if isinstance(model, LanguageModel):
            return model
    raise refuse(name, value, "an LLM or a LanguageModel")


def model_list(name: str, value: Any) -> tuple[Any, ...]:
    """Check for a list of models."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or any(item is None for item in value):
        raise refuse(name, value, "a list of LLMs or LanguageModels")
    return tuple(optional_model(name, item) for item in value)


def conflicts(params: BeamSearchParams) -> Iterator[tuple[str, str]]:
    """Yield each parameter that contradicts another, and what is allowed."""
    width = params.beam_width
    groups = params.num_beam_groups
    is_sampled = params.sampling != "none"
    constrained = bool(params.force_words_ids)
    if params.num_return_sequences > width:
        yield "num_return_sequences", f"it must be at most beam_width={width}"
    if params.min_new_tokens > params.max_new_tokens and not params.max_len_ratio:
        yield "min_new_tokens", f"it must be at most max_new_tokens={params.max_new_tokens}"
    if params.patience != 1.0 and params.early_stopping != "fcfs":
        text = "it counts finished sequences with early_stopping='fcfs' only: set that, or leave patience at 1"
        yield "patience", text
    if params.unk_penalty and params.unk_token_id is None:
        yield "unk_penalty", "it needs unk_token_id: give the id of the unknown token"
    if width % groups:
        yield "num_beam_groups", f"it must divide beam_width={width}"
    if groups == 1 and params.diversity_penalty:
        yield "diversity_penalty", "it acts between groups: set num_beam_groups to 2 or more"
    if params.diversity_discount and not params.diversity_penalty:
        yield "diversity_discount", "it weights diversity_penalty: set that too"
    if (params.top_k or params.top_p != 1.0) and not is_sampled:
        yield "top_k" if params.top_k else "top_p", "it acts on draws: set sampling to 'beam' or 'independent'"
    if (groups > 1) + (params.sibling_penalty != 0.0) + is_sampled + constrained > 1:
        name = "num_beam_groups" if groups > 1 else "sibling_penalty" if params.sibling_penalty else "sampling"
        yield name, "num_beam_groups, sibling_penalty, sampling and force_words_ids exclude each other: keep one"
    if params.prefix_allowed_tokens_fn is not None and params.allowed_trie is not None:
        yield "allowed_trie", "it excludes prefix_allowed_tokens_fn: keep one"
    if params.ordered and not constrained:
        yield "ordered", "it orders force_words_ids: give those"
    if params.strict and not constrained:
        yield "strict", "it concerns force_words_ids: give those"
    if not params.count_prefix and not params.prefix_token_ids:
        yield "count_prefix", "it concerns prefix_token_ids: give those"
    if params.prefix_bias_beta and not (params.prefix_token_ids and params.count_prefix):
        yield "prefix_bias_beta", "it needs prefix_token_ids, whose log-probabilities count"
    if params.lm_weight != 1.0 and params.lm_model is None:
        yield "lm_weight", "it weights lm_model: give that"
    if params.match_source_len and params.length_bounds is not None:
        yield "length_bounds", "it excludes match_source_len: keep one"
    if params.sampling == "independent" and params.eos_rule != "top_k":
        yield "eos_rule", "every beam is sampled by its parameters: leave it at 'top_k'"


PrefixFunction = Callable[[int, Sequence[int]], Sequence[int]]
LENGTH_BASES = ("generated", "generated_without_end", "prompt_and_generated")
EOS_RULES = ("top_k", "walk", "any")
FORCED_ENDS = ("none", "model_score", "zero_score")
STOP_RULES = (False, True, "never", "fcfs")
SAMPLINGS = ("none", "beam", "independent")
_ANY = number(-1e6, 1e6, "a number from -1e6 to 1e6")
_NOT_NEGATIVE = number(0.0, 1e6, "a number from 0 to 1e6")


@names_are_checked
@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """The parameters of one beam search. Validated on construction; sequences are stored as tuples.

    The defaults are the rules of transformers (`preset("hf")`).

    Raises:
        InvalidRequestError: an unknown name, a wrong type, a value out of range, or values that contradict each other;
            its `param` names the parameter.

    Example:
        >>> BeamSearchParams(beam_width=8, length_penalty=0.6).num_return_sequences
        1
    """

    beam_width: int = parameter(4, whole(1, 4096), "number of beams: sequences that are continued at each step")
    num_return_sequences: int = parameter(1, whole(1), "number of hypotheses that are returned, at most beam_width")
    max_new_tokens: int = parameter(64, whole(1), "maximum number of generated tokens, the end token included")
    max_len_ratio: float = parameter(
        0.0, _NOT_NEGATIVE, "added to max_new_tokens: this times the number of prompt tokens"
    )
    min_new_tokens: int = parameter(0, whole(0), "minimum number of generated tokens before an end token")
    length_penalty: float = parameter(
        1.0,
        number(-100.0, 100.0, "a number from -100 to 100"),
        "a score is the log-probability over length**length_penalty; 0 is the sum",
    )
    length_basis: str = parameter(
        "generated", one_of(LENGTH_BASES), f"tokens that count as length: {', '.join(LENGTH_BASES)}"
    )
    early_stopping: bool | str = parameter(
        False,
        one_of(STOP_RULES),
        "when a search with enough finished sequences ends: true at once, false if the best beam is worse at its "
        "present length, never if no beam can become better, fcfs at once and keeping those that finished first",
    )
    patience: float = parameter(
        1.0,
        number(0.0, 1e3, "a number above 0 and up to 1000", above_low=True),
        "with fcfs, beam_width times this many finished sequences end the search",
    )
    eos_rule: str = parameter(
        "top_k",
        one_of(EOS_RULES),
        "candidates with an end token that finish: among the best beam_width (top_k), all that precede the beams that "
        "go on (walk), or all (any)",
    )
    force_eos: str = parameter(
        "none",
        one_of(FORCED_ENDS),
        "end token at the last place: none, with the model's log-probability (model_score), or zero_score",
    )
    temperature: float = parameter(
        1.0, number(1e-4, 1e4, "a number from 0.0001 to 10000"), "logits are divided by it before the log-softmax"
    )
    ignore_eos: bool = parameter(False, flag, "the model's end-of-text token does not end a sequence")
    stop: str | Sequence[str] = parameter(
        (), strings(MAX_STOPS, MAX_STOP_CHARS, may_be_one=True), "strings that end a text"
    )
    stop_token_ids: Sequence[int] = parameter((), token_ids(MAX_STOP_IDS), "token ids that end a sequence")
    include_stop_str_in_output: bool = parameter(False, flag, "keep the stop string at the end of the text")
    no_repeat_ngram_size: int = parameter(0, whole(0), "no run of this many tokens occurs twice; 0 is off")
    ngram_scope: str = parameter(
        "all", one_of(("all", "generated")), "tokens in which runs are sought: all (prompt included), or generated"
    )
    unk_token_id: int | None = parameter(None, whole(0, optional=True), "the unknown token, for unk_penalty")
    unk_penalty: float = parameter(0.0, _ANY, "subtracted from the log-probability of unk_token_id")
    suppress_tokens: Sequence[int] = parameter((), token_ids(), "token ids that are never generated")
    prefix_token_ids: Sequence[int] = parameter((), token_ids(), "tokens with which every sequence begins")
    count_prefix: bool = parameter(True, flag, "whether the log-probabilities of prefix_token_ids count")
    prefix_allowed_tokens_fn: PrefixFunction | None = parameter(  # noqa: RUF009
        None,
        optional(Callable, "a function of the prompt's index and the tokens so far"),
        "function of the prompt's index and all tokens so far; returns the allowed next token ids",
    )
    allowed_trie: TokenTrie | None = parameter(  # noqa: RUF009
        None, optional(TokenTrie, "a TokenTrie"), "a TokenTrie; every completion is one of its sequences"
    )
    force_words_ids: Sequence[Sequence[int]] = parameter(
        (), phrases, "phrases of token ids that every sequence contains"
    )
    ordered: bool = parameter(False, flag, "whether the phrases occur in the given order")
    strict: bool = parameter(
        False,
        flag,
        "return only sequences with all phrases, and raise if there is none; otherwise their constraints_met is False",
    )
    num_beam_groups: int = parameter(1, whole(1), "groups of beams that avoid each other's tokens")
    diversity_penalty: float = parameter(0.0, _ANY, "subtracted for a token once for each earlier group that chose it")
    diversity_discount: float = parameter(
        0.0,
        number(0.0, 1.0, "a number from 0 to 1"),
        "weight of equal earlier tokens in the diversity penalty; 0 counts the present step only",
    )
    sibling_penalty: float = parameter(0.0, _ANY, "subtracted once for each better continuation of the same beam")
    sampling: str = parameter(
        "none",
        one_of(SAMPLINGS),
        "candidates are the best (none), drawn from all beams (beam), or each beam is sampled (independent)",
    )
    top_k: int = parameter(0, whole(0), "with sampling: keep this many of the most likely tokens; 0 keeps all")
    top_p: float = parameter(
        1.0,
        number(0.0, 1.0, "a number above 0 and up to 1", above_low=True),
        "with sampling: keep the most likely tokens that together have this probability",
    )
    seed: int = parameter(0, whole(0, 2**63 - 1), "seed of the draws")
    prefix_bias_beta: float = parameter(
        0.0,
        number(0.0, 0.999, "a number from 0 to 0.999"),
        "soft prefix: sequences that follow prefix_token_ids get this share of the probability; 0 forces the prefix",
    )
    models: Sequence[Any] = parameter((), model_list, "further models of an ensemble, whose probabilities are averaged")
    lm_model: Any = parameter(  # noqa: RUF009
        None, optional_model, "a language model whose log-probabilities are added (shallow fusion)"
    )
    lm_weight: float = parameter(1.0, _ANY, "weight of the log-probabilities of lm_model")
    coverage_penalty: float = parameter(
        0.0,
        _NOT_NEGATIVE,
        "for encoder-decoder models: this times the logarithm of the attention that each source token got, up to 1 "
        "each, is added to a finished sequence's score",
    )
    return_attention: bool = parameter(
        False, flag, "for encoder-decoder models: return where each token attends in the source"
    )
    match_source_len: bool = parameter(
        False, flag, "a sequence has at most as many tokens before its end as the prompt"
    )
    length_bounds: Sequence[float] | None = parameter(
        None,
        length_bounds,
        "min_a, min_b, max_a, max_b: a sequence has from min_a*n+min_b to max_a*n+max_b tokens for a prompt of n",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for param, reason in conflicts(self):
            raise InvalidRequestError(f"{param}={getattr(self, param)!r} is refused: {reason}", param=param)

    @property
    def increments_may_be_positive(self) -> bool:
        """Whether a token can raise the cumulative score, so that no score bounds a continuation."""
        return min(self.unk_penalty, self.diversity_penalty, self.sibling_penalty, self.lm_weight) < 0

    @property
    def reads_attention(self) -> bool:
        """Whether the weights of cross-attention are read."""
        return self.return_attention or self.coverage_penalty > 0

    def limit(self, prompt_length: int) -> int:
        """Return the maximum number of generated tokens for a prompt of this length."""
        limit = self.max_new_tokens + math.floor(self.max_len_ratio * prompt_length)
        if self.match_source_len:
            return min(limit, prompt_length + 1)
        if self.length_bounds is not None:
            return min(limit, math.floor(self.length_bounds[2] * prompt_length + self.length_bounds[3]) + 1)
        return limit

    def minimum(self, prompt_length: int) -> int:
        """Return the number of tokens before the earliest end for a prompt of this length."""
        if self.length_bounds is None:
            return self.min_new_tokens
        return max(self.min_new_tokens, math.ceil(self.length_bounds[0] * prompt_length + self.length_bounds[1]))

    @staticmethod
    def preset(name: str, **changes: Any) -> BeamSearchParams:
        """Return the rules of another library: "hf" (transformers), "fairseq" or "vllm".

        Args:
            name: the library.
            changes: parameters that differ from the preset.

        Raises:
            InvalidRequestError: an unknown library, or invalid parameters.
        """
        if name not in PRESETS:
            raise InvalidRequestError(
                f"preset '{name}' is unknown: it must be one of {', '.join(PRESETS)}", param="name"
            )
        values = PRESETS[name] | changes
        if name == "vllm":
            values.setdefault("num_return_sequences", values.get("beam_width", BeamSearchParams().beam_width))
        return BeamSearchParams(**values)


PRESETS: dict[str, dict[str, Any]] = {
    "hf": {},
    "fairseq": {
        "early_stopping": "fcfs",
        "force_eos": "model_score",
        "min_new_tokens": 1,
        "ngram_scope": "generated",
        "max_new_tokens": 201,
        "beam_width": 5,
    },
    "vllm": {
        "early_stopping": "never",
        "eos_rule": "any",
        "length_basis": "prompt_and_generated",
        "max_new_tokens": 16,
    },
}
"""Rules of other libraries, as changes of the defaults."""
