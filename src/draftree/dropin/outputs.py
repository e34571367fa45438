"""Return values of `generate` with `return_dict_in_generate=True`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from draftree.completion import CompletionStats, stats_of
from draftree.dropin.steps import Callbacks, Row, Steps


@dataclass
class DraftreeOutput(GenerateDecoderOnlyOutput):
    """Return value of `generate` with `return_dict_in_generate=True`, and the statistics of each row.

    The cache, `attentions` and `hidden_states` are None. In a batch `scores` and `logits` are zeros after the
    end of a row. `stats` is None where transformers wrote the text by itself.
    """

    stats: tuple[CompletionStats, ...] | None = None


@dataclass
class DraftreeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same for models with an encoder."""

    stats: tuple[CompletionStats, ...] | None = None


def output_of(
    steps: Steps, rows: Sequence[Row], calls: Callbacks, *, has_encoder: bool
) -> DraftreeOutput | DraftreeEncoderDecoderOutput:
    """Return the result of a call."""
    kind = DraftreeEncoderDecoderOutput if has_encoder else DraftreeOutput
    return kind(
        sequences=steps.sequences,  # type: ignore[arg-type]
        scores=tuple(steps.scores) if calls.keeps_scores else None,  # type: ignore[arg-type]
        logits=tuple(steps.logits) if calls.keeps_logits else None,  # type: ignore[arg-type]
        stats=tuple(stats_of(row.sequence) for row in rows),
    )
