"""The draft vocabulary, the target's tokens that a head can propose, and the maps of it in a head's file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.heads.config import HeadConfig


@final
class DraftVocabulary:
    """Ascending token ids of the target, int64, one for each row of a head's logits."""

    def __init__(self, ids: Tensor, vocab_size: int) -> None:
        ids = ids.to(torch.int64)
        if ids.dim() != 1 or not ids.numel():
            raise ModelLoadError(f"a draft vocabulary has shape {tuple(ids.shape)}: it must name at least one token")
        if bool((ids[1:] <= ids[:-1]).any()):
            raise ModelLoadError("the token ids of a draft vocabulary must ascend, each once: its map is damaged")
        if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            raise ModelLoadError(
                f"a draft vocabulary names tokens {int(ids[0])} to {int(ids[-1])}, and the target has {vocab_size}: "
                "the head was made for another target, or its map is damaged"
            )
        self.ids = ids
        self.vocab_size = vocab_size
        self._places: Tensor | None = None

    @classmethod
    def full(cls, vocab_size: int) -> DraftVocabulary:
        return cls(torch.arange(vocab_size), vocab_size)

    @classmethod
    def from_offsets(cls, offsets: Tensor, vocab_size: int) -> DraftVocabulary:
        """Return the vocabulary of a tensor `d2t`: entry i is the token id of row i, minus i."""
        if offsets.dim() != 1 or offsets.is_floating_point():
            raise ModelLoadError(f"d2t has shape {tuple(offsets.shape)} and {offsets.dtype}: it must be integers")
        return cls(offsets.to(torch.int64) + torch.arange(offsets.numel(), device=offsets.device), vocab_size)

    @classmethod
    def from_counts(
        cls, counts: Tensor, size: int, *, always: Iterable[int] = (), vocab_size: int | None = None
    ) -> DraftVocabulary:
        """Return the `size` most frequent tokens; of equal counts, those with the lowest ids.

        `always` are included whatever their count, such as end of text. `vocab_size` is that of `counts` by default.
        """
        total = counts.numel() if vocab_size is None else vocab_size
        forced = sorted(set(always))
        if not max(1, len(forced)) <= size <= total or counts.numel() > total:
            raise ConfigurationError(
                f"a draft vocabulary of {size} tokens is out of range: it must hold {max(1, len(forced))} to {total}"
            )
        if forced and not 0 <= forced[0] <= forced[-1] < total:
            raise ConfigurationError(f"tokens {forced[0]} to {forced[-1]} are to be drafted: the target has {total}")
        weights = torch.zeros(total, dtype=torch.float64)
        weights[: counts.numel()] = counts.double().cpu()
        weights[forced] = torch.inf
        order = torch.sort(weights, descending=True, stable=True).indices[:size]
        return cls(order.sort().values, total)

    def __len__(self) -> int:
        return self.ids.numel()

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, DraftVocabulary):
            return NotImplemented
        return self.vocab_size == other.vocab_size and torch.equal(self.ids.cpu(), other.ids.cpu())

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_full(self) -> bool:
        """Whether it has every token, so that rows are token ids."""
        return len(self) == self.vocab_size

    def offsets(self) -> Tensor:
        """Return the tensor `d2t`: token ids minus their row, shape (draft vocabulary,), int64."""
        return self.ids - torch.arange(len(self), device=self.ids.device)

    def mask(self) -> Tensor:
        """Return the tensor `t2d`: whether a token can be drafted, shape (vocabulary,), bool."""
        mask = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.ids.device)
        mask[self.ids] = True
        return mask

    def places(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, -1 for tokens that cannot be drafted; int64, shape of `tokens`."""
        if self._places is None or self._places.device != tokens.device:
            table = torch.full((self.vocab_size,), -1, dtype=torch.int64, device=tokens.device)
            table[self.ids.to(tokens.device)] = torch.arange(len(self), device=tokens.device)
            self._places = table
        return self._places[tokens.long()]

    def to(self, device: torch.device) -> DraftVocabulary:
        return self if self.ids.device == device else DraftVocabulary(self.ids.to(device), self.vocab_size)


EMBEDDING = "embed_tokens.weight"
OUTPUT = "lm_head.weight"
OFFSETS, MASK = "d2t", "t2d"
"""Maps of a reduced vocabulary: offsets of the tokens that can be drafted, and whether a token can be drafted."""


def vocabulary_of(tensors: Mapping[str, Tensor], config: HeadConfig) -> DraftVocabulary:
    offsets, mask = tensors.get(OFFSETS), tensors.get(MASK)
    if offsets is None:
        if config.is_full:
            return DraftVocabulary.full(config.vocab_size)
        raise ModelLoadError(
            f"it drafts {config.draft_vocab_size} of {config.vocab_size} tokens, and has no tensor '{OFFSETS}' that "
            "names them: the folder is incomplete"
        )
    if offsets.numel() != config.draft_vocab_size:
        raise ModelLoadError(
            f"'{OFFSETS}' has {offsets.numel()} entries, and config.json {config.draft_vocab_size} tokens"
        )
    if offsets.is_meta:  # only names and shapes are checked
        return DraftVocabulary(torch.arange(offsets.numel()), config.vocab_size)
    vocabulary = DraftVocabulary.from_offsets(offsets, config.vocab_size)
    if mask is not None and not torch.equal(mask.bool(), vocabulary.mask()):
        raise ModelLoadError(f"'{MASK}' and '{OFFSETS}' contradict each other: the map is damaged")
    return vocabulary


def maps_of(vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """Return the maps of a reduced vocabulary, on the host; none for a full one."""
    if vocabulary.is_full:
        return {}
    return {OFFSETS: vocabulary.offsets().cpu(), MASK: vocabulary.mask().cpu()}


def widest_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype that holds all weights; float32 without weights."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32
