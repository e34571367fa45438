"""Passes of heads that draft all levels at once, over slots with the keys and values of the text's rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.core.tensors import rows_of
from draftree.heads.base import BlockHead, BlockRows
from draftree.models.base import Commit, Extend
from draftree.models.kv.slots import KVMemory, KVSlot, LayerShape, Leftovers, SlotPool
from draftree.models.memory import LOGIT_BYTES, Footprint
from draftree.sampling.logits import Logits, SubsetLogits, TensorLogits, TokenSubset


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Result of a pass for some sequences.

    Attributes:
        states: states of the slots of each block, shape (sequences, slots, hidden).
        logits: logits of the levels without bias, shape (sequences, levels, draft vocabulary).
    """

    states: Tensor
    logits: Tensor


class BlockPasses(ABC):
    """Slots of a block head that is bound to its target, and forward passes over them, without gradients."""

    num_stored = 0
    """Rows of a block that are stored after the context until the end of a pass."""

    def __init__(self, head: BlockHead, device: torch.device) -> None:
        self.head = head
        self.device = device
        self.dtype = next(head.parameters()).dtype
        config, vocabulary = head.config, head.vocabulary
        self.tokens = None if vocabulary.is_full else TokenSubset(vocabulary.ids.to(device), vocabulary.vocab_size)
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        shapes = dict.fromkeys(range(config.num_layers), shape)
        self.pool = SlotPool(shapes, dtype=self.dtype, device=device, leftovers=Leftovers.UNREAD)

    @property
    def weight_bytes(self) -> int:
        """Size of all weights of its own in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.head.state_dict().values())

    @property
    def footprint(self) -> Footprint:
        """Memory of weights, of a row in a slot, of logits and of activations in bytes."""
        config = self.head.config
        return Footprint(
            weights=self.weight_bytes,
            token=self.pool.memory.token_bytes,
            logits=config.block_size * config.draft_vocab_size * LOGIT_BYTES,
            row=(8 * config.hidden + 3 * config.intermediate) * self.dtype.itemsize,
        )

    @abstractmethod
    def run(self, slots: Sequence[KVSlot], rows: BlockRows, drafting: Sequence[int]) -> BlockResult:
        """Store keys and values of context rows, and return levels after the last ones of the `drafting` sequences.

        Args:
            slots: of the sequences, whose tentative nodes are their rows, and `num_stored` more if they draft.
            drafting: indices of sequences, ascending.
        """

    @torch.inference_mode()
    def read(self, slots: Sequence[KVSlot], rows: BlockRows, drafting: Sequence[int]) -> BlockResult:
        """Append context rows to the prefixes; arguments and results as in `run`."""
        counts = [count + self.num_stored * (index in drafting) for index, count in enumerate(rows.counts)]
        chains = [Extend(slot, (), range(-1, count - 1)) for slot, count in zip(slots, counts, strict=True)]
        self.pool.append(slots, chains)
        result = self.run(slots, rows, drafting)
        self.pool.commit([Commit(slot, range(count)) for slot, count in zip(slots, rows.counts, strict=True)])
        return result

    def logits(self, columns: Tensor) -> Logits:
        """Return logits of the draft vocabulary, shape (rows, draft vocabulary), as those of the target's."""
        return TensorLogits(columns) if self.tokens is None else SubsetLogits(columns, self.tokens)


@final
class TorchBlockPasses(BlockPasses):
    """Passes that call the head's module."""

    def run(self, slots: Sequence[KVSlot], rows: BlockRows, drafting: Sequence[int]) -> BlockResult:
        states = rows_of(self.head.run(rows, SlotAttention(self.pool.memory, slots, rows.counts)), drafting)
        return BlockResult(states, self.head.logits(states)[:, self.head.first_slot :])


@final
class SlotAttention:
    """Attention of one pass over slots, as in `BlockAttend`; new rows are after the prefixes."""

    def __init__(self, memory: KVMemory, slots: Sequence[KVSlot], counts: Sequence[int]) -> None:
        self._memory, self._slots, self._counts = memory, slots, counts

    def _rows(self, layer: int, slot: KVSlot, count: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of all rows of a slot, shape (kv_heads, rows, head_dim); views."""
        end = slot.length + count
        return self._memory.keys[layer][slot.index][:, :end], self._memory.values[layer][slot.index][:, :end]

    def context(
        self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, *, window: int = 0
    ) -> Tensor | None:
        """Keep rows; attend to them causally."""
        mixed, first = [], 0
        for slot, count in zip(self._slots, self._counts, strict=True):
            part = slice(first, first + count)
            first += count
            keys, values = self._rows(layer, slot, count)
            keys[:, slot.length :], values[:, slot.length :] = key[part].transpose(0, 1), value[part].transpose(0, 1)
            if query is not None:
                places = torch.arange(slot.length, keys.shape[1], device=key.device)
                mask = _visible(places, keys.shape[1], is_causal=True, window=window)
                mixed.append(_attend(query[part], keys, values, mask))
        return torch.cat(mixed) if mixed else None

    def block(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int = 0
    ) -> Tensor:
        """Attend from blocks to the rows of their text and to themselves."""
        mixed = []
        for text, (slot, count) in enumerate(zip(self._slots, self._counts, strict=True)):
            keys, values = self._rows(layer, slot, count)
            total = keys.shape[1] + query.shape[1]
            places = torch.arange(keys.shape[1], total, device=key.device)
            mask = _visible(places, total, is_causal=is_causal, window=window) if is_causal or window else None
            both = torch.cat((keys, key[text].transpose(0, 1)), 1), torch.cat((values, value[text].transpose(0, 1)), 1)
            mixed.append(_attend(query[text], *both, mask))
        return torch.stack(mixed)


def _visible(places: Tensor, length: int, *, is_causal: bool, window: int) -> Tensor:
    """Return which keys rows see, shape (rows, keys), bool; row and key i are at place i of the text."""
    ahead = torch.arange(length, device=places.device)[None] - places[:, None]
    seen = ahead <= 0 if is_causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if not window else seen & (ahead.abs() < window)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Return shape (rows, heads, head_dim), from queries of that shape and keys (kv_heads, length, head_dim)."""
    mixed = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)
