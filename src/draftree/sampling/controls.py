"""The sampling controls of a request, prepared for one model, in the order in which they apply to its logits.

Order: allowed tokens, logit bias, repetition penalty, presence and frequency penalty, no-repeat n-gram, bad words,
minimum of tokens, grammar; then temperature; then min-p, top-k, top-p, as in vLLM: top-p counts the mass that min-p
and top-k left. At temperature 0 the filters are omitted: they never remove the most likely token, so they would have no
effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from draftree.core.errors import InvalidRequestError, blaming
from draftree.core.noise import Noise
from draftree.sampling.grammar.compiler import Grammars
from draftree.sampling.grammar.guide import GrammarMask, Guide
from draftree.sampling.logits_processors import (
    AllowedTokens,
    BadWords,
    Ban,
    CountPenalty,
    Filter,
    LogitBias,
    MinP,
    MinTokens,
    NoRepeatNgram,
    Processor,
    RepetitionPenalty,
    TopK,
    TopP,
)
from draftree.sampling.params import SamplingParams

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Controls:
    """The mapping from the logits of one sequence to distributions and picks."""

    params: SamplingParams  # the user's sampling parameters
    noise: Noise  # the sequence's own noise
    temperature: float  # 0 selects the largest logit
    processors: tuple[Processor, ...]  # applied to the model's logits, in order
    filters: tuple[Filter, ...]  # applied after the temperature, in order; empty at temperature 0
    # token ids that end the text, including the model's end-of-text ids unless they are ignored
    stop_ids: frozenset[int]
    eos_ids: frozenset[int] = frozenset()  # the model's end-of-text ids among them; empty if they are ignored
    prediction: tuple[int, ...] = ()  # token ids of the expected text; for drafters, no distribution depends on it
    # the matcher of the sequence's grammar, if it has one; used by a processor and by drafters
    guide: Guide | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the model's logits are used unchanged."""
        return not self.processors and not self.filters and self.temperature in (0.0, 1.0)

    @property
    def only_bans(self) -> bool:
        """Whether nothing but a temperature and forbidden tokens changes the model's logits."""
        return not self.filters and all(isinstance(processor, Ban) for processor in self.processors)

    def sharpened(self, factor: float) -> Controls:
        """Return controls whose logits are multiplied by a factor if the text is sampled; filters come after it."""
        if factor == 1.0 or not self.temperature:
            return self
        return replace(self, temperature=self.temperature / factor)


def build_controls(
    params: SamplingParams,
    *,
    vocab_size: int,
    eos_ids: Sequence[int] = (),
    encode: Encode | None = None,
    grammars: Callable[[], Grammars] | None = None,
    seed: int,
) -> Controls:
    """Prepare a request's parameters for a model.

    Args:
        encode: text to token ids without special tokens; needed for bad words and a predicted text.
        grammars: returns the grammar compiler; called only if the text has to follow a grammar.
        seed: the sequence's seed; `params.seed` is not read, because it may be absent or shared by n sequences.
    """
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        _check_ids(name, getattr(params, name) or (), vocab_size)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise InvalidRequestError(
                f"{name}={count} is more than the model's {vocab_size} tokens: use at most {vocab_size}, "
                "or -1 for all of them",
                param=name,
            )
    ending_ids = frozenset(() if params.ignore_eos else eos_ids)
    stop_ids = frozenset(params.stop_token_ids or ()) | ending_ids
    guide = _guide(params, [*dict.fromkeys(i for i in (*eos_ids, *sorted(stop_ids)) if i in stop_ids)], grammars)
    return Controls(
        params=params,
        noise=Noise(seed),
        temperature=params.sampling.temperature,
        processors=(
            *_processors(params, stop_ids | frozenset(eos_ids), encode),
            *(() if guide is None else (GrammarMask(guide),)),
        ),
        filters=tuple(_filters(params, vocab_size)),
        stop_ids=stop_ids,
        eos_ids=ending_ids,
        prediction=_predicted(params.prediction, vocab_size, encode),
        guide=guide,
    )


def _guide(params: SamplingParams, ends: list[int], grammars: Callable[[], Grammars] | None) -> Guide | None:
    if params.constraint is None:
        if params.grammar_prefix is not None:
            raise InvalidRequestError(
                "grammar_prefix needs json_schema, regex or grammar: set one of them, or remove grammar_prefix",
                param="grammar_prefix",
            )
        return None
    if grammars is None:
        raise InvalidRequestError(
            f"{params.constraint[0]} needs a tokenizer, and this model has none", param=params.constraint[0]
        )
    with blaming(params.constraint[0]):
        return grammars().open(params, ends)


def _processors(params: SamplingParams, ends: frozenset[int], encode: Encode | None) -> Iterable[Processor]:
    """Yield all processors but the grammar's; `ends` are stop tokens and end-of-text tokens, ignored ones included."""
    if params.allowed_token_ids is not None:
        yield AllowedTokens(params.allowed_token_ids)
    if params.logit_bias:
        yield LogitBias(params.logit_bias)
    if params.sampling.repetition_penalty != 1.0:
        yield RepetitionPenalty(params.sampling.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        yield CountPenalty(params.presence_penalty, params.frequency_penalty)
    if params.no_repeat_ngram_size:
        yield NoRepeatNgram(params.no_repeat_ngram_size, includes_prompt=params.ngram_scope == "all")
    if params.bad_words:
        yield BadWords(_encoded(params.bad_words, encode))
    if params.min_tokens and ends:
        yield MinTokens(params.min_tokens, sorted(ends))


def _filters(params: SamplingParams, vocab_size: int) -> Iterable[Filter]:
    sampling = params.sampling
    if sampling.temperature == 0:
        return
    if sampling.min_p > 0:
        yield MinP(sampling.min_p)
    top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
    if top_k:
        yield TopK(top_k)
    if sampling.top_p < 1:
        yield TopP(sampling.top_p, top_k)


def _predicted(prediction: str | Sequence[int] | None, vocab_size: int, encode: Encode | None) -> tuple[int, ...]:
    if prediction is None:
        return ()
    if not isinstance(prediction, str):
        _check_ids("prediction", prediction, vocab_size)
        return tuple(prediction)
    if encode is None:
        raise InvalidRequestError(
            "the prediction is a text, but this model has no tokenizer: give token ids", param="prediction"
        )
    return tuple(encode(prediction))


def _encoded(words: Sequence[str], encode: Encode | None) -> list[tuple[int, ...]]:
    """Return token ids of every word without and with a space before it: many vocabularies have a token for each."""
    if encode is None:
        raise InvalidRequestError(
            f"bad_words={list(words)!r} need a tokenizer, and this model has none: "
            "forbid token ids instead, by logit_bias={id: -inf}",
            param="bad_words",
        )
    encoded: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        plain, spaced = tuple(encode(bare)), tuple(encode(f" {bare}"))
        if not plain:
            raise InvalidRequestError(
                f"bad_words: the tokenizer has no tokens for {word!r}: leave it out", param="bad_words"
            )
        encoded |= dict.fromkeys(filter(None, (plain, spaced)))
    return list(encoded)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise InvalidRequestError(
            f"{name} names token {outside[0]}, but the model's vocabulary ends at {vocab_size - 1}: "
            f"take ids from 0 to {vocab_size - 1}",
            param=name,
        )
