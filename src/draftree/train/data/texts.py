"""Texts of training data, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TopRows:
    """The most likely next tokens of each row.

    Attributes:
        ids: token ids, best first, shape (rows, K), int64.
        logits: log-probabilities at temperature 1, shape (rows, K), float32.
        lse: logarithm of the sum of exponentials of all logits, shape (rows,), float32.
    """

    ids: Tensor
    logits: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One text: a prompt and an answer of the target, with states of all tokens but the last.

    Row i holds the states at token i, from which token i + 1 is predicted; so `tokens` has one entry more than the
    states have rows.

    Attributes:
        tokens: token ids, shape (rows + 1,), int64.
        prompt_length: number of tokens of the prompt; rows from `prompt_length - 1` on predict the answer.
        features: inputs of the captured layers, shape (rows, layers, hidden), in the dtype of the target.
        last: output of the last layer before the final norm, shape (rows, hidden); None with a top-k teacher.
        top: the most likely next tokens; None without a top-k teacher.
        temperature: temperature at which the answer was sampled.
        seed: seed of the answer.
        prompt_id: index of the prompt among all prompts of the data.
    """

    tokens: Tensor
    prompt_length: int
    features: Tensor
    last: Tensor | None
    top: TopRows | None
    temperature: float
    seed: int
    prompt_id: int

    @property
    def num_rows(self) -> int:
        """Number of rows of states."""
        return self.features.shape[0]


def stacked(texts: Sequence[Text]) -> dict[str, Tensor]:
    """Return the tensors of a shard of these texts; the format is described in `train/data/manifest.py`."""
    lengths = torch.tensor([0, *(text.num_rows for text in texts)])
    found = {
        "tokens": torch.cat([text.tokens[:-1] for text in texts]).int(),
        "starts": lengths.cumsum(0),
        "ends": torch.stack([text.tokens[-1] for text in texts]).int(),
        "prompt_lengths": torch.tensor([text.prompt_length for text in texts], dtype=torch.int32),
        "temperatures": torch.tensor([text.temperature for text in texts], dtype=torch.float32),
        "seeds": torch.tensor([text.seed for text in texts], dtype=torch.int64),
        "prompt_ids": torch.tensor([text.prompt_id for text in texts], dtype=torch.int64),
        "features": torch.cat([text.features for text in texts]),
    }
    if texts[0].last is not None:
        found["last"] = torch.cat([text.last for text in texts if text.last is not None])
    tops = [text.top for text in texts if text.top is not None]
    if tops:
        found["top_ids"] = torch.cat([top.ids for top in tops]).int()
        found["top_logits"] = torch.cat([top.logits for top in tops]).half()
        found["lse"] = torch.cat([top.lse for top in tops])
    return found


def text_of(tensors: dict[str, Tensor], index: int) -> Text:
    """Return one text of a shard; features and last states are views."""
    first, end = (int(tensors["starts"][place]) for place in (index, index + 1))
    top = None
    if "lse" in tensors:
        ids, logits, lse = (tensors[name][first:end] for name in ("top_ids", "top_logits", "lse"))
        top = TopRows(ids.long(), logits.float(), lse)
    return Text(
        tokens=torch.cat([tensors["tokens"][first:end], tensors["ends"][index : index + 1]]).long(),
        prompt_length=int(tensors["prompt_lengths"][index]),
        features=tensors["features"][first:end],
        last=tensors["last"][first:end] if "last" in tensors else None,
        top=top,
        temperature=round(float(tensors["temperatures"][index]), 6),  # 0.8 and not the nearest float32
        seed=int(tensors["seeds"][index]),
        prompt_id=int(tensors["prompt_ids"][index]),
    )
