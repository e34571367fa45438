"""Results of a beam search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One finished sequence of a beam search.

    Attributes:
        tokens: generated token ids, the end token included.
        score: cumulative log-probability over length to the power of the length penalty; hypotheses are ranked by it.
        cumulative_logprob: sum of `token_logprobs`.
        token_logprobs: for each token the log-probability that was added to the score, penalties included.
        beam_indices: for each token the rank of the beam that it continued.
        finish_reason: "stop" after an end token or a stop string, "length" at the maximum length.
        constraints_met: whether all required phrases are contained; True without any.
        text: the decoded text without the end token; None without a tokenizer.
        stop_reason: the stop string or stop token of the parameters that ended the sequence; None at the model's end of
            text and at a limit.
        attention: for each token the weights with which it was predicted from the positions of the source, in the
            last layer of the decoder, mean of its heads; None unless `return_attention` is set.
    """

    tokens: tuple[int, ...]
    score: float
    cumulative_logprob: float
    token_logprobs: tuple[float, ...]
    beam_indices: tuple[int, ...]
    finish_reason: str
    constraints_met: bool = True
    text: str | None = None
    stop_reason: int | str | None = None
    attention: tuple[tuple[float, ...], ...] | None = None

    @property
    def alignment(self) -> tuple[int, ...] | None:
        """For each token the position of the source with the largest weight, the first of equals."""
        return None if self.attention is None else tuple(row.index(max(row)) for row in self.attention)


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The best hypotheses of one prompt.

    Attributes:
        prompt_token_ids: the prompt.
        hypotheses: by descending score; at most `num_return_sequences`, fewer only if fewer sequences were found.
        num_steps: number of steps, in each of which every beam gained a token.
        num_passes: passes of the model that scored beams; as many as steps without a drafter.
        num_drafted: drafted nodes that were scored.
        num_used: drafted nodes that became beams.
    """

    prompt_token_ids: tuple[int, ...]
    hypotheses: tuple[Hypothesis, ...]
    num_steps: int = 0
    num_passes: int = 0
    num_drafted: int = 0
    num_used: int = 0

    @property
    def passes_per_step(self) -> float:
        """Passes of the model per step; 1 without a drafter."""
        return self.num_passes / max(1, self.num_steps)

    @property
    def best(self) -> Hypothesis:
        """The hypothesis with the highest score."""
        return self.hypotheses[0]

    @property
    def text(self) -> str | None:
        """Text of the best hypothesis; None without a tokenizer."""
        return self.best.text
