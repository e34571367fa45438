"""The target's distributions at the tokens of texts, computed from cached hidden states or read from cached rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.heads.target_parts import TargetParts
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import first_chain
from draftree.train.data.texts import Text, TopRows
from draftree.train.errors import TrainingError
from draftree.train.teacher import FullTeacher, Teacher, TopTeacher

__all__ = ["TargetRows"]

CHUNK_TOKENS = 8192


class TargetRows:
    """Distributions of the target on a draft vocabulary.

    The sum over the tokens outside it is the largest part of the cost. It is computed once for each text, always in the
    same way, and kept: 4 bytes a token. Products inside are computed in float32: their rounding in bfloat16 would be a
    tenth of a nat.

    Args:
        parts: the target's parts, on the device of training.
        vocabulary: the draft vocabulary.
        temperature: at which distributions are compared, above 0.
    """

    def __init__(self, parts: TargetParts, vocabulary: DraftVocabulary, temperature: float) -> None:
        self._parts, self._vocabulary, self._temperature = parts, vocabulary, temperature
        is_inside = vocabulary.mask().to(parts.output.device)
        self._inside, self._outside = (flags.nonzero()[:, 0] for flags in (is_inside, ~is_inside))
        self._inside_rows = parts.output[self._inside].float()
        self._outside_rows = parts.output[self._outside]
        self._totals: dict[int, Tensor] = {}

    def of(self, texts: Sequence[Text], keys: Sequence[int]) -> Teacher:
        """Return the distributions after each token that starts a chain.

        Args:
            texts: the texts of a batch.
            keys: a number for each text, under which its sums are kept.

        Raises:
            TrainingError: the texts have neither hidden states of the last layer nor most likely tokens.
        """
        if all(text.last is not None for text in texts):
            return self._full(texts, keys)
        tops = [text.top for text in texts if text.top is not None]
        if len(tops) == len(texts):
            return self._top(texts, tops)
        raise TrainingError(
            "the data has neither the last layer's states nor the most likely tokens: make it with "
            "'draftree train data'"
        )

    def _full(self, texts: Sequence[Text], keys: Sequence[int]) -> Teacher:
        device = self._inside_rows.device
        logits, outside = [], []
        for text, key in zip(texts, keys, strict=True):
            assert text.last is not None, "checked by the caller"
            states = self._parts.finish(
                text.last[first_chain(text) :].to(device=device, dtype=self._parts.output.dtype)
            )
            if key not in self._totals:
                self._totals[key] = self._outside_total(states).cpu()
            outside.append(self._totals[key].to(device))
            logits.append(self._logits(states.float(), self._inside_rows, self._inside))
        return FullTeacher.from_logits(torch.cat(logits), torch.cat(outside), self._temperature)

    def _outside_total(self, states: Tensor) -> Tensor:
        if not len(self._outside):
            return torch.full((len(states),), -math.inf)
        pairs = zip(self._outside_rows.split(CHUNK_TOKENS), self._outside.split(CHUNK_TOKENS), strict=True)
        return torch.stack([self._logits(states, *pair).logsumexp(dim=-1) for pair in pairs]).logsumexp(dim=0)

    def _logits(self, states: Tensor, output: Tensor, ids: Tensor) -> Tensor:
        """Return logits over the temperature of some rows of the output head, float32."""
        facts = self._parts.facts
        products = (states.to(output.dtype) @ output.T).float()
        if facts.bias is not None:
            products = products + facts.bias[ids.to(facts.bias.device)].to(products.device)
        return facts.capped(products) / self._temperature

    def _top(self, texts: Sequence[Text], tops: Sequence[TopRows]) -> Teacher:
        device = self._inside_rows.device
        ids, log_probs = [], []
        for text, top in zip(texts, tops, strict=True):
            first = first_chain(text)
            ids.append(self._vocabulary.places(top.ids[first:].to(device)))
            log_probs.append(self._tempered(top.logits[first:].to(device)))
        return TopTeacher(torch.cat(ids), torch.cat(log_probs), self._temperature)

    def _tempered(self, log_p: Tensor) -> Tensor:
        """Return log-probabilities at the temperature, from those at 1; other tokens count as equally likely."""
        if self._temperature == 1.0:
            return log_p
        count = max(1, self._parts.vocab_size - log_p.shape[1])
        rest = (1 - log_p.double().exp().sum(dim=-1)).clamp_min(1e-9).log().float()
        tail = math.log(count) + (rest - math.log(count)) / self._temperature
        scaled = log_p / self._temperature
        return scaled - torch.logaddexp(scaled.logsumexp(dim=-1), tail)[:, None]
