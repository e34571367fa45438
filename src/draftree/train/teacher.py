"""The target's rows as training reads them: on the draft vocabulary, or the most likely tokens with the rest as one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from draftree.core.files import MALFORMED
from draftree.heads.base import TargetParts
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import first_chain
from draftree.train.checkpoints import TrainingError, load_checkpoint, save_checkpoint
from draftree.train.data.shards import Text, TopRows
from draftree.train.losses import LEAST_LOG, Rows


class Teacher(Protocol):
    """Distributions of the target for some positions."""

    def rows(self, logits: Tensor) -> Rows:
        """Return these distributions beside the drafter's.

        Args:
            logits: of the drafter, shape (rows, draft vocabulary).
        """

    def part(self, rows: Tensor | slice) -> Teacher:
        """Return the distributions of some of the rows."""


class FullTeacher:
    """Logits of the target on the draft vocabulary.

    Args:
        log_p: log-probabilities of the target on the draft vocabulary, shape (rows, draft vocabulary), float32.
        log_outside: log of the mass outside, shape (rows,).
        temperature: divisor of the drafter's logits; the target's were divided already.
    """

    __slots__ = ("_log_outside", "_log_p", "_temperature")

    def __init__(self, log_p: Tensor, log_outside: Tensor, temperature: float = 1.0) -> None:
        self._log_p, self._log_outside, self._temperature = log_p, log_outside, temperature

    def rows(self, logits: Tensor) -> Rows:
        """Return the distributions beside the drafter's, one column for each token of the draft vocabulary."""
        log_q = torch.log_softmax(logits / self._temperature, dim=-1)
        return Rows(self._log_p, log_q, self._log_outside, log_q.detach().amax(dim=-1))

    def part(self, rows: Tensor | slice) -> FullTeacher:
        """Return the distributions of some of the rows."""
        return FullTeacher(self._log_p[rows], self._log_outside[rows], self._temperature)


class TopTeacher:
    """The target's most likely tokens. All other tokens of the draft vocabulary are one column.

    The column hides differences among rare tokens. In return, nothing of the size of the draft vocabulary is kept, and
    losses read a few dozen columns.

    Args:
        draft_ids: rows of the draft vocabulary of the most likely tokens, shape (rows, k); -1 for tokens outside it.
        log_p: their log-probabilities, same shape, float32 or float64.
        log_outside: log of the mass outside the draft vocabulary, shape (rows,); None if `draft_ids` has all of it.
    """

    def __init__(
        self, draft_ids: Tensor, log_p: Tensor, log_outside: Tensor | None = None, temperature: float = 1.0
    ) -> None:
        self._draft_ids, self._log_p, self._log_outside = draft_ids, log_p, log_outside
        self._temperature = temperature

    def rows(self, logits: Tensor) -> Rows:
        """Return the distributions beside the drafter's; columns are the k tokens and the rest."""
        is_inside = self._draft_ids >= 0
        log_q, log_best = LogProbsAt.apply(logits, self._draft_ids.clamp_min(0), self._temperature)
        log_q = torch.where(is_inside, log_q, LEAST_LOG)
        log_p = torch.where(is_inside, self._log_p, LEAST_LOG)
        known = torch.where(is_inside, -math.inf, self._log_p).logsumexp(dim=-1)
        if self._log_outside is None:
            outside, rest_p = known, _log_complement(self._log_p)
        else:
            outside = self._log_outside
            rest_p = _log_complement(torch.cat((log_p, outside[:, None]), dim=-1))
        columns = (torch.cat((log_p, rest_p), dim=-1), torch.cat((log_q, _log_complement(log_q)), dim=-1))
        return Rows(*columns, outside.clamp_min(LEAST_LOG), log_best)

    def part(self, rows: Tensor | slice) -> TopTeacher:
        """Return the distributions of some of the rows."""
        outside = None if self._log_outside is None else self._log_outside[rows]
        return TopTeacher(self._draft_ids[rows], self._log_p[rows], outside, self._temperature)


class LogProbsAt(torch.autograd.Function):
    """Log-probabilities of some tokens: the values of `log_softmax` without a tensor of its size for gradients.

    One pass over the logits forward and one backward; composed operations need about ten.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities.

        Args:
            logits: shape (rows, tokens).
            places: tokens of each row, shape (rows, k); a token may be repeated.

        Returns:
            Those of the tokens, shape (rows, k), and the largest of each row, shape (rows,), without gradient.
        """
        scaled = logits / temperature if temperature != 1.0 else logits
        total = scaled.logsumexp(dim=-1)
        best = scaled.amax(dim=-1) - total
        found = scaled.gather(-1, places) - total[:, None]
        ctx.save_for_backward(scaled, total, places)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(best)
        return found, best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits."""
        scaled, total, places = ctx.saved_tensors
        own = gradients[0] / ctx.temperature
        found = (scaled - total[:, None]).exp_()
        found.mul_(-own.sum(dim=-1, keepdim=True)).scatter_add_(-1, places, own)
        return found, None, None


def _log_complement(log_probs: Tensor) -> Tensor:
    """Return log(1 - sum of probabilities), shape (rows, 1), bounded from below."""
    mass = log_probs.double().exp().sum(dim=-1, keepdim=True)
    return (1 - mass).clamp_min(1e-9).log().to(log_probs.dtype)


CHUNK_TOKENS = 8192
KEPT_TOKENS = 64
"""Most likely tokens that are kept for a row; at temperature 0.8 all others have under 1% of the mass of most rows."""
MOST_EXACT = 256
"""Largest draft vocabulary that is kept as a whole."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptRows:
    """Distributions after the tokens of a text.

    Attributes:
        ids: rows of the draft vocabulary of the most likely tokens, shape (rows, k), int32; None for all in order.
        log_p: log-probabilities of these tokens, shape (rows, k).
        log_outside: log of the mass outside the draft vocabulary, shape (rows,).
    """

    ids: Tensor | None
    log_p: Tensor
    log_outside: Tensor


class TargetRows:
    """Distributions of the target on a draft vocabulary.

    They are computed once for each text, always in the same way, and kept: of a large draft vocabulary the
    `KEPT_TOKENS` most likely tokens, 6 bytes each, and the mass outside. Products inside are computed in float32: their
    rounding in bfloat16 would be a tenth of a nat.

    Args:
        temperature: at which distributions are compared, above 0.
    """

    def __init__(self, parts: TargetParts, vocabulary: DraftVocabulary, temperature: float) -> None:
        self._parts, self._vocabulary, self._temperature = parts, vocabulary, temperature
        is_inside = vocabulary.mask().to(parts.output.device)
        self._inside, self._outside = (flags.nonzero()[:, 0] for flags in (is_inside, ~is_inside))
        self._inside_rows = parts.output[self._inside].float()
        self._outside_rows = parts.output[self._outside]
        self._kept: dict[int, KeptRows] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, keys: Sequence[int]) -> bool:
        """Return whether the distributions of all these texts are kept."""
        return self._kept.keys() >= set(keys)

    def save(self, path: Path, keys: range) -> None:
        """Write the kept distributions of those texts whose keys are in a range; an interruption leaves no file."""
        tensors = {
            f"{key - keys.start}/{name}": value
            for key, kept in self._kept.items()
            if key in keys
            for name in ("ids", "log_p", "log_outside")
            if (value := getattr(kept, name)) is not None
        }
        save_checkpoint(path, tensors, {})

    def load(self, path: Path, first: int) -> None:
        """Read distributions that `save` wrote, for texts whose keys begin at `first`."""
        found: dict[int, dict[str, Tensor]] = {}
        try:
            for name, value in load_checkpoint(path)[0].items():
                key, _, field = name.partition("/")
                found.setdefault(int(key), {})[field] = value
            for number, one in found.items():
                self._kept[first + number] = KeptRows(one.get("ids"), one["log_p"], one["log_outside"])
        except MALFORMED as error:
            raise TrainingError(f"{path} is damaged ({error!r}): delete it") from None

    def digest(self) -> str:
        """Return a hash of what the distributions depend on besides the texts."""
        facts = hashlib.blake2b(digest_size=8)
        facts.update(repr((self._temperature, KEPT_TOKENS, MOST_EXACT, str(self._parts.output.dtype))).encode())
        facts.update(self._inside.cpu().numpy().tobytes())
        return facts.hexdigest()

    def of(self, texts: Sequence[Text], keys: Sequence[int]) -> Teacher:
        """Return the distributions after each token that starts a chain.

        Args:
            keys: a number for each text, under which its distributions are kept.
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
        for text, key in zip(texts, keys, strict=True):
            if key not in self._kept:
                self._kept[key] = self._distributions(text)
        found = [self._kept[key] for key in keys]
        log_p, outside = (
            torch.cat([getattr(one, name) for one in found]).to(device).float() for name in ("log_p", "log_outside")
        )
        if found[0].ids is None:
            return FullTeacher(log_p, outside, self._temperature)
        ids = torch.cat([one.ids for one in found if one.ids is not None]).to(device=device, dtype=torch.int64)
        return TopTeacher(ids, log_p, outside, self._temperature)

    def _distributions(self, text: Text) -> KeptRows:
        """Compute the distributions after all tokens of a text that start a chain."""
        assert text.last is not None, "checked by the caller"
        device, dtype = self._inside_rows.device, self._parts.output.dtype
        states = self._parts.finish(text.last[first_chain(text) :].to(device=device, dtype=dtype))
        logits = self._logits(states.float(), self._inside_rows, self._inside)
        outside = self._outside_total(states)
        total = torch.logaddexp(logits.logsumexp(dim=-1), outside)
        log_outside = (outside - total).clamp_min(LEAST_LOG).cpu()
        if logits.shape[-1] <= MOST_EXACT:
            return KeptRows(None, (logits - total[:, None]).clamp_min(LEAST_LOG).cpu(), log_outside)
        values, ids = logits.topk(KEPT_TOKENS, dim=-1)
        log_p = (values - total[:, None]).clamp_min(LEAST_LOG)
        return KeptRows(ids.to(torch.int32).cpu(), log_p.half().cpu(), log_outside)

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
        return TopTeacher(torch.cat(ids), torch.cat(log_probs), temperature=self._temperature)

    def _tempered(self, log_p: Tensor) -> Tensor:
        """Return log-probabilities at the temperature, from those at 1; other tokens count as equally likely."""
        if self._temperature == 1.0:
            return log_p
        count = max(1, self._parts.vocab_size - log_p.shape[1])
        rest = (1 - log_p.double().exp().sum(dim=-1)).clamp_min(1e-9).log().float()
        tail = math.log(count) + (rest - math.log(count)) / self._temperature
        scaled = log_p / self._temperature
        return scaled - torch.logaddexp(scaled.logsumexp(dim=-1), tail)[:, None]
