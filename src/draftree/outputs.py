"""Results of a request: the text, its tokens, and statistics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import DraftreeError, GenerationError
from draftree.engine.sequence import FinishReason, TokenLogprob, WritingSequence
from draftree.sampling.grammar.schema import violations
from draftree.sampling.grammar.schema_grammar import schema_grammar
from draftree.verifiers.base import Guarantee

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompletionStats:
    """Counts and seconds of one text. In a batch, the seconds of its rounds are shared with other sequences.

    Attributes:
        rounds: passes of the loop; plain decoding has one per token.
        draft_tokens: drafted tokens.
        accepted_tokens: drafted tokens in the text, without those that a stop or a limit cut off.
        acceptance_length: tokens written per round, the bonus included.
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were not prefilled, because a cached prefix matched.
        completion_tokens: tokens of the text.
        prefill_seconds: time until the first round's tokens were written; includes the prefill.
        decode_seconds: time of all rounds after the first.
        tokens_per_second: tokens written after the first round, divided by `decode_seconds`; divided by all seconds if
            there was only one round.
        phase_seconds: `decode_seconds` by phase: plan, draft, score, verify, commit.
        drafted_by_depth: drafted tokens at depth 1, 2, …
        accepted_by_depth: accepted tokens at depth 1, 2, …
        drafted_by_source: drafted tokens per merged drafter, or per source of one drafter; shared tokens count for
            each.
        accepted_by_source: accepted tokens likewise.
        explain: the reason of the planner's last decision, for adaptive planners.
        kernels: kernels of the target's passes; empty for a text of the drop-in.
        fallback_reason: why torch was used although native kernels were possible; else None.
        promise: relation of the text to plain decoding, by the verifier and the request's temperature.
        unenforced: what `json_schema` says that its grammar cannot enforce, each with its place.
        violations: the keywords of `json_schema` that the finished text breaks; empty if the grammar enforces all.
    """

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_length: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    phase_seconds: dict[str, float]
    drafted_by_depth: tuple[int, ...]
    accepted_by_depth: tuple[int, ...]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    explain: str
    kernels: str = ""
    fallback_reason: str | None = None
    promise: Guarantee = Guarantee.SAME_TEXT
    unenforced: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()

    @property
    def lossless(self) -> bool:
        """Whether the text equals plain decoding's, or has the same distribution."""
        return self.promise is not Guarantee.LOSSY

    @property
    def seconds(self) -> float:
        """Prefill and decode seconds together."""
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True, slots=True)
class Completion:
    """One text of a request.

    Attributes:
        text: the text without stop strings, and without special tokens unless they were requested.
        token_ids: the generated tokens, including the one that ended the text.
        finish_reason: "stop" (end of text, a stop token or string) or "length".
        seed: seed that reproduces the text.
        logprobs: one entry per token, if requested.
        stats: counts and seconds.
        prompt_index: index of the prompt.
        index: index among the request's n completions.
        drafted: for each token whether it was drafted and accepted; False: a target token.
        stop_reason: the stop string or stop token id of the request that ended the text; None at the model's end of
            text and at a limit.
        prompt_logprobs: one entry per prompt token, if requested; None for the first one.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    logprobs: tuple[TokenLogprob, ...] | None
    stats: CompletionStats
    prompt_index: int = 0
    index: int = 0
    drafted: tuple[bool, ...] = ()
    stop_reason: int | str | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def lossless(self) -> bool:
        """Whether the text equals plain decoding's, or has the same distribution."""
        return self.stats.lossless

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as the command line prints them."""
        names = (*CompletionStats.__dataclass_fields__, "lossless", "seconds")
        stats = {name: getattr(self.stats, name) for name in names} | {"promise": str(self.stats.promise)}
        logprobs = {
            name: [None if entry is None else _plain(entry) for entry in entries]
            for name, entries in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs))
            if entries is not None
        }
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "seed": self.seed,
            **logprobs,
            "stats": stats,
        }


def _plain(entry: TokenLogprob) -> dict[str, Any]:
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top": dict(entry.top)}


def completion_of(sequence: WritingSequence, *, prompt_index: int) -> Completion:
    """Return the completion of a finished sequence."""
    assert sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), "only a finished text is a completion"
    params = sequence.controls.params
    return Completion(
        text="".join(sequence.texts),
        token_ids=tuple(sequence.history.output.tolist()),
        finish_reason=str(sequence.finish_reason),
        seed=sequence.controls.noise.seed,
        logprobs=tuple(sequence.logprobs) if params.logprobs is not None else None,
        stats=stats_of(sequence),
        prompt_index=prompt_index,
        index=sequence.index,
        drafted=tuple(sequence.drafted),
        stop_reason=sequence.stop_reason,
        prompt_logprobs=None if params.prompt_logprobs is None else tuple(sequence.prompt_logprobs),
    )


def stats_of(sequence: WritingSequence) -> CompletionStats:
    """Return the statistics of a sequence so far."""
    counts, written = sequence.counts, sequence.history.num_output_tokens
    if counts.decode_seconds > 0:
        speed = (written - counts.first_tokens) / counts.decode_seconds
    else:
        speed = written / counts.prefill_seconds if counts.prefill_seconds else 0.0
    schema = sequence.controls.params.json_schema
    unenforced = schema_grammar(schema).unenforced if isinstance(schema, str) else ()
    return CompletionStats(
        rounds=counts.rounds,
        draft_tokens=counts.draft_tokens,
        accepted_tokens=counts.accepted_tokens,
        acceptance_length=written / counts.rounds if counts.rounds else 0.0,
        prompt_tokens=sequence.num_prompt_tokens,
        cached_tokens=counts.cached_tokens,
        completion_tokens=written,
        prefill_seconds=counts.prefill_seconds,
        decode_seconds=counts.decode_seconds,
        tokens_per_second=speed,
        phase_seconds={
            phase: getattr(counts, f"{phase}_seconds") for phase in ("plan", "draft", "score", "verify", "commit")
        },
        drafted_by_depth=tuple(counts.drafted_by_depth),
        accepted_by_depth=tuple(counts.accepted_by_depth),
        drafted_by_source=dict(counts.drafted_by_source),
        accepted_by_source=dict(counts.accepted_by_source),
        explain=counts.explain,
        kernels=sequence.kernels,
        fallback_reason=sequence.fallback_reason,
        promise=sequence.promise,
        unenforced=unenforced,
        violations=_violations(sequence) if unenforced else (),
    )


def _violations(sequence: WritingSequence) -> tuple[str, ...]:
    """Check a finished text against its schema, once."""
    if sequence.violations is None and sequence.finish_reason is FinishReason.STOP:
        params = sequence.controls.params
        text = "".join(sequence.texts)
        assert isinstance(params.json_schema, str)
        sequence.violations = violations(params.json_schema, text, has_prefix=params.grammar_prefix is not None)
        if sequence.violations:
            logger.warning("%s: the text breaks its schema: %s", sequence.request_id, "; ".join(sequence.violations))
    return sequence.violations or ()


def completions_of(batch: Sequence[Sequence[WritingSequence]]) -> list[Completion]:
    """Return the completions of finished requests, in the order of the requests.

    Args:
        batch: the sequences of each request.

    Raises:
        DraftreeError: the error of the only request, or of all.
        GenerationError: sequences failed; its `completions` holds those of the others.
    """
    done = [
        completion_of(sequence, prompt_index=place)
        for place, sequences in enumerate(batch)
        for sequence in sequences
        if sequence.finish_reason is not FinishReason.ERROR
    ]
    sequences = [sequence for request in batch for sequence in request]
    errors = [sequence.error for sequence in sequences if sequence.error is not None]
    if errors:
        first = errors[0]
        # the error of a single text, or of a request that was refused as a whole
        if isinstance(first, DraftreeError) and all(sequence.error is first for sequence in sequences):
            raise first
        raise GenerationError(f"{len(errors)} of {len(sequences)} requests failed; the first: {first}", done) from first
    return done
