"""What a request gives: the text, its tokens, and how it came about in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import DraftreeError, GenerationError
from draftree.engine.sequence import FinishReason, TokenLogprob, WritingSequence
from draftree.verifiers.base import Promise


@dataclass(frozen=True, slots=True)
class CompletionStats:
    """Counts and seconds of one text. In a batch, seconds are of the rounds it took part in, shared with others.

    Attributes:
        rounds: passes of the loop; plain decoding has one a token.
        draft_tokens: tokens that were drafted.
        accepted_tokens: drafted tokens that are in the text; none that a stop or a limit cut off.
        acceptance_length: tokens written a round, the bonus included.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that were not read, since a text before begins as the prompt does.
        completion_tokens: tokens of the text.
        prefill_seconds: until the first round's tokens were written; reads the prompt.
        decode_seconds: all rounds behind the first.
        tokens_per_second: tokens written behind the first round, over `decode_seconds`; over all seconds if there
            was only one round.
        phase_seconds: `decode_seconds` by phase: plan, draft, score, verify, commit.
        drafted_by_depth: drafted tokens at depth 1, 2, …
        accepted_by_depth: accepted tokens at depth 1, 2, …
        drafted_by_source: where drafters are merged, or one draws on several places, tokens that each of them drafted;
            shared ones count for all.
        accepted_by_source: likewise the accepted ones.
        explain: why the planner last chose what it chose, for planners that weigh.
        kernels: what computed the target's passes; empty for a text of the drop-in.
        kernels_reason: why torch did, where passes in C were possible; else None.
        promise: what the text has in common with those of plain decoding, by the rule and the request's temperature.
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
    kernels_reason: str | None = None
    promise: Promise = Promise.SAME_TEXT

    @property
    def lossless(self) -> bool:
        """Whether the text is plain decoding's, or distributed as plain decoding's texts are."""
        return self.promise is not Promise.LOSSY

    @property
    def seconds(self) -> float:
        """Prefill and decoding together."""
        return self.prefill_seconds + self.decode_seconds


@dataclass(frozen=True, slots=True)
class Completion:
    """One text of a request.

    Attributes:
        text: without stop strings, and without special tokens unless they were asked for.
        token_ids: what was written, the token that ended it included.
        finish_reason: "stop" (end of text, a stop token or string) or "length".
        seed: gives the same text again.
        logprobs: one entry a token, if asked for.
        stats: counts and seconds.
        prompt_index: which of the prompts.
        index: which of the request's n.
        drafted: for each token whether it was drafted and accepted; False: picked by the target.
        stop_reason: the stop string or stop token id of the request that ended the text; None at the model's end of
            text and at a limit.
        prompt_logprobs: one entry for each prompt token, if asked for; None for the first one.
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
        """Whether the text is plain decoding's, or distributed as plain decoding's texts are."""
        return self.stats.lossless

    def to_json(self) -> dict[str, Any]:
        """Plain values, as the command line prints them."""
        stats = {name: getattr(self.stats, name) for name in CompletionStats.__dataclass_fields__}
        stats["promise"] = str(self.stats.promise)
        stats["lossless"] = self.stats.lossless
        stats["seconds"] = self.stats.seconds
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
    """The completion of a finished sequence."""
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
    """The numbers of a sequence so far."""
    counts, written = sequence.counts, sequence.history.num_output_tokens
    if counts.decode_seconds > 0:
        speed = (written - counts.first_tokens) / counts.decode_seconds
    else:
        speed = written / counts.prefill_seconds if counts.prefill_seconds else 0.0
    return CompletionStats(
        rounds=counts.rounds,
        draft_tokens=counts.draft_tokens,
        accepted_tokens=counts.accepted_tokens,
        acceptance_length=written / counts.rounds if counts.rounds else 0.0,
        prompt_tokens=sequence.history.prompt_length,
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
        kernels_reason=sequence.kernels_reason,
        promise=sequence.promise,
    )


def raise_failures(sequences: Sequence[WritingSequence], done: Sequence[Completion]) -> None:
    """Raise what sequences failed with, and hand over what the others gave."""
    errors = [sequence.error for sequence in sequences if sequence.error is not None]
    if not errors:
        return
    first = errors[0]
    # of one text, or of a request that was refused as a whole
    if isinstance(first, DraftreeError) and all(sequence.error is first for sequence in sequences):
        raise first
    raise GenerationError(f"{len(errors)} of {len(sequences)} requests failed; the first: {first}", done) from first
