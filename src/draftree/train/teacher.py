"""The target's rows as training reads them: on the draft vocabulary, or the most likely tokens with the rest as one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.files import MALFORMED
from draftree.heads.base import TargetParts
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import first_chain
from draftree.train.checkpoints import TrainingError, load_checkpoint, save_checkpoint
from draftree.train.data.shards import Text
from draftree.train.losses import LEAST_LOG, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """Distributions of the target for some positions: of the whole draft vocabulary, or of its most likely tokens.

    With `ids`, all other tokens of the draft vocabulary are one column. It hides differences among rare tokens. In
    return, nothing of the size of the draft vocabulary is kept, and losses read a few dozen columns.
    """

    log_p: Tensor  # log-probabilities of the tokens, shape (rows, tokens)
    # log of the mass outside the draft vocabulary, shape (rows,); None if `ids` names all of it
    log_outside: Tensor | None = None
    # rows of the draft vocabulary of the tokens, shape (rows, k), -1 for tokens outside it; None for the whole draft
    # vocabulary in order
    ids: Tensor | None = None
    temperature: float = 1.0  # divisor of the drafter's logits; the target's were divided already

    def part(self, rows: Tensor | slice) -> Teacher:
        """Return the distributions of some of the rows."""
        outside = None if self.log_outside is None else self.log_outside[rows]
        ids = None if self.ids is None else self.ids[rows]
        return Teacher(self.log_p[rows], outside, ids, self.temperature)

    def rows(self, logits: Tensor) -> Rows:
        """Return these distributions beside the drafter's.

        `logits`: of the drafter, shape (rows, draft vocabulary).
        """
        if self.ids is None:
            assert self.log_outside is not None, "the draft vocabulary has columns only"
            log_q = torch.log_softmax(logits / self.temperature, dim=-1)
            return Rows(self.log_p, log_q, self.log_outside, log_q.detach().amax(dim=-1))
        is_inside = self.ids >= 0
        log_q, log_best = LogProbsAt.apply(logits, self.ids.clamp_min(0), self.temperature)
        log_q = torch.where(is_inside, log_q, LEAST_LOG)
        log_p = torch.where(is_inside, self.log_p, LEAST_LOG)
        if self.log_outside is None:
            outside = torch.where(is_inside, -math.inf, self.log_p).logsumexp(dim=-1)
            rest_p = _log_complement(self.log_p)
        else:
            outside = self.log_outside
            rest_p = _log_complement(torch.cat((log_p, outside[:, None]), dim=-1))
        columns = (torch.cat((log_p, rest_p), dim=-1), torch.cat((log_q, _log_complement(log_q)), dim=-1))
        return Rows(*columns, outside.clamp_min(LEAST_LOG), log_best)


class LogProbsAt(torch.autograd.Function):
    """Log-probabilities of some tokens: the values of `log_softmax` without a tensor of its size for gradients.

    One pass over the logits forward and one backward; composed operations need about ten.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of `places`, and the largest of each row, shape (rows,), without gradient.

        `logits`: shape (rows, tokens). `places`: tokens of each row, shape (rows, k); a token may be repeated.
        """
        scaled = logits / temperature if temperature != 1.0 else logits
        total = scaled.logsumexp(dim=-1)
        best = scaled.amax(dim=-1) - total
        log_probs = scaled.gather(-1, places) - total[:, None]
        ctx.save_for_backward(scaled, total, places)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(best)
        return log_probs, best

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        scaled, total, places = ctx.saved_tensors
        output_gradient = gradients[0] / ctx.temperature
        gradient = (scaled - total[:, None]).exp_()
        gradient.mul_(-output_gradient.sum(dim=-1, keepdim=True)).scatter_add_(-1, places, output_gradient)
        return gradient, None, None


def _log_complement(log_probs: Tensor) -> Tensor:
    """Return log(1 - sum of probabilities), shape (rows, 1), bounded from below."""
    mass = log_probs.double().exp().sum(dim=-1, keepdim=True)
    return (1 - mass).clamp_min(1e-9).log().to(log_probs.dtype)


CHUNK_TOKENS = 8192
KEPT_TOKENS = 64
"""Most likely tokens that are kept for a row; at temperature 0.8 all others have under 1% of the mass of most rows."""
MOST_EXACT = 256  # largest draft vocabulary that is kept as a whole
FIELDS = ("ids", "log_p", "log_outside")


class TargetRows:
    """Distributions of the target on a draft vocabulary.

    They are computed once for each text, always in the same way, and kept: of a large draft vocabulary the
    `KEPT_TOKENS` most likely tokens, 6 bytes each, and the mass outside. Products inside are computed in float32: their
    rounding in bfloat16 would be a tenth of a nat.

    `temperature`: at which distributions are compared, above 0.
    """

    def __init__(self, parts: TargetParts, vocabulary: DraftVocabulary, temperature: float) -> None:
        self._parts, self._vocabulary, self._temperature = parts, vocabulary, temperature
        is_inside = vocabulary.mask().to(parts.output.device)
        self._inside, self._outside = (flags.nonzero()[:, 0] for flags in (is_inside, ~is_inside))
        self._inside_rows = parts.output[self._inside].float()
        self._outside_rows = parts.output[self._outside]
        self._kept: dict[int, Teacher] = {}

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
            for name in FIELDS
            if (value := getattr(kept, name)) is not None
        }
        save_checkpoint(path, tensors, {})

    def load(self, path: Path, first: int) -> None:
        """Read distributions that `save` wrote, for texts whose keys begin at `first`."""
        texts: dict[int, dict[str, Tensor]] = {}
        try:
            for name, value in load_checkpoint(path)[0].items():
                key, _, field = name.partition("/")
                texts.setdefault(int(key), {})[field] = value
            for number, tensors in texts.items():
                log_p, log_outside = tensors["log_p"], tensors["log_outside"]
                self._kept[first + number] = Teacher(log_p, log_outside, tensors.get("ids"), self._temperature)
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

        `keys`: a number for each text, under which its distributions are kept.
        """
        if all(text.last is not None for text in texts):
            for text, key in zip(texts, keys, strict=True):
                if key not in self._kept:
                    self._kept[key] = self._distributions(text)
            return self._joined([self._kept[key] for key in keys])
        if all(text.top is not None for text in texts):
            return self._joined([self._top(text) for text in texts])
        raise TrainingError(
            "the data has neither the last layer's states nor the most likely tokens: make it with "
            "'draftree train data'"
        )

    def _joined(self, parts: Sequence[Teacher]) -> Teacher:
        """Return the rows of several texts on the device of computation, in float32."""

        def joined(name: str) -> Tensor | None:
            tensors = [value for part in parts if (value := getattr(part, name)) is not None]
            return torch.cat(tensors).to(self._inside.device) if tensors else None

        ids, log_p, outside = (joined(name) for name in FIELDS)
        assert log_p is not None, "a batch has texts"
        return replace(
            parts[0],
            log_p=log_p.float(),
            log_outside=None if outside is None else outside.float(),
            ids=None if ids is None else ids.long(),
        )

    def _distributions(self, text: Text) -> Teacher:
        """Compute the distributions after all tokens of a text that start a chain."""
        assert text.last is not None, "checked by the caller"
        device = self._inside.device
        dtype = self._parts.output.dtype
        states = self._parts.finish(text.last[first_chain(text) :].to(device=device, dtype=dtype))
        logits = self._logits(states.float(), self._inside_rows, self._inside)
        outside = torch.full((len(states),), -math.inf)
        if len(self._outside):
            chunks = zip(self._outside_rows.split(CHUNK_TOKENS), self._outside.split(CHUNK_TOKENS), strict=True)
            outside = torch.stack([self._logits(states, *chunk).logsumexp(dim=-1) for chunk in chunks]).logsumexp(dim=0)
        total = torch.logaddexp(logits.logsumexp(dim=-1), outside)
        log_outside = (outside - total).clamp_min(LEAST_LOG).cpu()
        if logits.shape[-1] <= MOST_EXACT:
            log_p = (logits - total[:, None]).clamp_min(LEAST_LOG).cpu()
            return Teacher(log_p, log_outside, temperature=self._temperature)
        values, ids = logits.topk(KEPT_TOKENS, dim=-1)
        log_p = (values - total[:, None]).clamp_min(LEAST_LOG).half().cpu()
        return Teacher(log_p, log_outside, ids.to(torch.int32).cpu(), self._temperature)

    def _logits(self, states: Tensor, output: Tensor, ids: Tensor) -> Tensor:
        """Return logits over the temperature of some rows of the output head, float32."""
        facts = self._parts.facts
        products = (states.to(output.dtype) @ output.T).float()
        if facts.bias is not None:
            products = products + facts.bias[ids.to(facts.bias.device)].to(products.device)
        return facts.capped(products) / self._temperature

    def _top(self, text: Text) -> Teacher:
        """Return stored most likely tokens at the temperature; all others count as equally likely."""
        assert text.top is not None, "checked by the caller"
        first = first_chain(text)
        device = self._inside.device
        temperature = self._temperature
        log_p = text.top.logits[first:].to(device)
        if temperature != 1.0:
            log_count = math.log(max(1, self._parts.vocab_size - log_p.shape[1]))
            rest = (1 - log_p.double().exp().sum(dim=-1)).clamp_min(1e-9).log().float()
            tail = log_count + (rest - log_count) / temperature
            log_p = log_p / temperature
            log_p = log_p - torch.logaddexp(log_p.logsumexp(dim=-1), tail)[:, None]
        return Teacher(log_p, ids=self._vocabulary.places(text.top.ids[first:].to(device)), temperature=temperature)
