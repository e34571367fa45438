"""P-EAGLE: an EAGLE-3 head that predicts all levels in one pass.

The row of the anchor is that of EAGLE-3. It is followed by rows of a mask token whose state before is the product of a
learned vector, `mask_hidden`. A row sees the sequence's rows and the mask rows before it.

Source: speculators, github.com/vllm-project/speculators (`peagle`).
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from draftree.core.tensors import to_device
from draftree.heads.base import BlockAttend, BlockHead, BlockRows, TargetParts
from draftree.heads.config import HeadConfig
from draftree.heads.eagle import Eagle3Head
from draftree.heads.vocabulary import DraftVocabulary


class PEagleHead(Eagle3Head):
    """Head of kind `peagle` for training, where rows are those of EAGLE-3 and of masks."""

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.features) * config.target_hidden))

    def masked(self, count: int) -> tuple[Tensor, Tensor]:
        """Return tokens, shape (count,), and states before of mask rows, shape (count, hidden)."""
        assert self.config.mask_token_id is not None, "tested by the configuration"
        features = self.mask_hidden[0].unflatten(-1, (-1, self.config.target_hidden))
        tokens = torch.full((count,), self.config.mask_token_id, device=self.mask_hidden.device)
        return tokens, self.project(features).expand(count, -1)


@final
class ParallelEagle(BlockHead):
    """P-EAGLE for decoding: all levels in one pass."""

    def __init__(self, head: PEagleHead) -> None:
        super().__init__(head.config, head.vocabulary)
        self.head = head

    @property
    def num_levels(self) -> int:
        return self.config.depth

    def bind(self, parts: TargetParts) -> None:
        """Set the parts that are shared with the target."""
        self.head.bind(parts)

    def run(self, rows: BlockRows, attend: BlockAttend) -> Tensor:
        num_sequences = len(rows.counts)
        masks = self.num_levels - 1
        tokens, before = self.head.masked(num_sequences * masks)
        anchors = to_device(rows.anchors, rows.positions.device)
        ahead = torch.arange(1, masks + 1, device=rows.positions.device)
        states = self.head.run(
            torch.cat((rows.tokens, tokens)),
            torch.cat((self.head.project(rows.features), before)),
            torch.cat((rows.positions, (rows.positions[anchors][:, None] + ahead).flatten())),
            _Split(attend, len(rows.tokens), num_sequences),
        )
        after = states[len(rows.tokens) :].reshape(num_sequences, masks, states.shape[-1])
        return torch.cat((states[anchors][:, None], after), dim=1)

    def logits(self, states: Tensor) -> Tensor:
        return self.head.logits(states)


class _Split:
    """Attention of context rows followed by the rows of blocks."""

    def __init__(self, attend: BlockAttend, num_context: int, num_texts: int) -> None:
        self._attend = attend
        self._first = num_context
        self._texts = num_texts

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first = self._first
        context = self._attend.context(layer, query[:first], key[:first], value[:first])
        assert context is not None, "queries were given"
        if first == len(query):
            return context
        blocks = [part[first:].unflatten(0, (self._texts, -1)) for part in (query, key, value)]
        return torch.cat((context, self._attend.block(layer, *blocks, is_causal=True).flatten(0, 1)))
