"""The report of a pass to the drafter and the sink: tokens read, verdicts, and hidden states if they need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.tensors import layers_of, rows_of
from draftree.core.tree import EMPTY, TokenTree
from draftree.core.types import Verdict
from draftree.drafters.base import Observation
from draftree.engine.parts import Parts
from draftree.engine.sequence import WritingSequence
from draftree.engine.sinks import StateRows
from draftree.models.base import PassResult


@dataclass(frozen=True, slots=True)
class Gain:
    """The nodes that a pass adds to the prefix of one sequence's slot.

    Attributes:
        sequence: whose slot it is.
        job: of the pass.
        nodes: of the job, those that become prefix.
        tokens_read: how many of them are text that was written before.
        drafted: the drafted tree, as the drafter gave it; empty for a prompt chunk.
        verdict: on that tree; None for a prompt chunk.
    """

    sequence: WritingSequence
    job: int
    nodes: Sequence[int]
    tokens_read: int
    drafted: TokenTree = EMPTY
    verdict: Verdict | None = None


def record(parts: Parts, gains: Sequence[Gain], result: PassResult) -> None:
    """Pass hidden states of the tokens that a pass read to the sink, before they are committed.

    Args:
        parts: with the sink; nothing is done without one.
        gains: of all sequences of the pass, those that ended included.
        result: of the pass, which captured the layers of `Parts.capture`.
    """
    if parts.sink is None or result.hidden is None:
        return
    texts = []
    for gain in gains:
        sequence = gain.sequence
        if sequence.error is None:
            assert sequence.slot is not None, "a sequence in a pass has a slot"
            start, first = sequence.slot.length, result.row_starts[gain.job]
            # a text may end before the end of the accepted path
            rows = [first + node for node in gain.nodes[: len(sequence.history) - 1 - start]]
            texts.append(StateRows(sequence, start, rows))
    columns = [parts.capture.index(layer) for layer in parts.sink.layers]
    is_all = columns == list(range(len(parts.capture)))
    parts.sink.take(result.hidden if is_all else result.hidden[:, columns], texts)


def observe(parts: Parts, gains: Sequence[Gain], result: PassResult) -> None:
    """Tell the drafter what a pass brought, after it was committed.

    Args:
        parts: with the drafter; nothing is done without one.
        gains: of the sequences that go on.
        result: of the pass, which captured the layers of `Parts.capture`.
    """
    gains = [gain for gain in gains if not gain.sequence.is_finished]
    if parts.drafter is None or not gains:
        return
    columns = [parts.capture.index(layer) for layer in parts.feature_layers]
    hidden = None if result.hidden is None else layers_of(result.hidden, columns)
    starts = result.row_starts
    parts.drafter.observe(
        [
            Observation(
                gain.sequence.draft_state,
                gain.tokens_read,
                gain.drafted,
                gain.verdict,
                None if hidden is None else rows_of(hidden, [starts[gain.job] + node for node in gain.nodes]),
            )
            for gain in gains
        ]
    )
