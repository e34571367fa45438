"""Small heads with random weights, and parts of a target for them."""

from __future__ import annotations

from typing import Any

import torch

from draftree.heads.base import BlockHead, BlockRows, Head, TargetParts
from draftree.heads.block_passes import BlockPasses, BlockResult, TorchBlockPasses
from draftree.heads.config import HeadConfig
from draftree.heads.folders import head_class
from draftree.heads.vocabulary import DraftVocabulary
from draftree.models.base import EmbeddingFacts

WIDTH, VOCABULARY, DRAFTED, LAYERS = 16, 48, 24, 6
SIZES: dict[str, Any] = {
    "target_hidden": WIDTH,
    "hidden": WIDTH,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": DRAFTED,
    "depth": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate": 24,
}
EAGLE_3: dict[str, Any] = {**SIZES, "kind": "eagle3", "features": (2, 3, 5)}
PARALLEL: dict[str, Any] = {**EAGLE_3, "kind": "peagle", "mask_token_id": 47}
FLASH: dict[str, Any] = {
    **SIZES, "kind": "dflash", "features": (2, 3, 5), "num_layers": 2, "qk_norm": True, "block_size": 4,
    "mask_token_id": 47, "anchor_predicts": False, "own_output": False, "draft_vocab_size": VOCABULARY,
}  # fmt: skip
SPARK: dict[str, Any] = {
    **FLASH, "kind": "dspark", "anchor_predicts": True, "own_output": True, "draft_vocab_size": DRAFTED,
    "markov_rank": 6, "has_confidence": True, "confidence_with_markov": True, "depth": 4,
}  # fmt: skip
SECOND: dict[str, Any] = {
    **FLASH, "kind": "dflash2", "conv_taps": 2, "conv_group": 4, "markov_rank": 6, "num_candidates": 5,
}  # fmt: skip
PRESS: dict[str, Any] = {**FLASH, "kind": "xpress", "markov_rank": 6, "refiner_width": 12}
MEDUSA: dict[str, Any] = {
    "kind": "medusa", "features": (-1,), "target_hidden": WIDTH, "hidden": WIDTH, "vocab_size": VOCABULARY,
    "draft_vocab_size": VOCABULARY, "depth": 3, "num_layers": 0, "block_size": 3, "head_layers": 2,
}  # fmt: skip
EAGLE_1: dict[str, Any] = {
    **SIZES, "kind": "eagle", "features": (-1,), "draft_vocab_size": VOCABULARY, "own_output": False, "fc_bias": True,
}  # fmt: skip
ALL = {
    "eagle": EAGLE_1, "eagle3": EAGLE_3, "peagle": PARALLEL, "dflash": FLASH, "dspark": SPARK, "medusa": MEDUSA,
    "dflash2": SECOND, "xpress": PRESS,
}  # fmt: skip


def config_of(values: dict[str, Any], **others: Any) -> HeadConfig:
    """A configuration of the table above, with other values."""
    return HeadConfig(**{**values, **others})


def vocabulary_of(config: HeadConfig) -> DraftVocabulary:
    """Tokens at equal distances, or all of them."""
    step = config.vocab_size / config.draft_vocab_size
    ids = [int(step * row) for row in range(config.draft_vocab_size)]
    return DraftVocabulary(torch.tensor(ids), config.vocab_size)


def random_head(config: HeadConfig, seed: int = 0) -> Head:
    """A head whose parameters are all random: norms and biases too, so that each of them counts."""
    head = head_class(config.kind)(config, vocabulary_of(config)).eval().requires_grad_(False)
    noise = torch.Generator().manual_seed(seed)
    for name, part in head.named_parameters():
        scale = 0.3 if part.dim() > 1 else 0.1
        part.copy_(torch.randn(part.shape, generator=noise) * scale + (1.0 if "norm" in name else 0.0))
    return head


class BlockTexts:
    """Texts in slots of a head that drafts all levels in one pass."""

    def __init__(self, head: BlockHead, count: int = 1) -> None:
        self.passes: BlockPasses = TorchBlockPasses(head, torch.device("cpu"))
        self.slots = [self.passes.pool.open() for _ in range(count)]

    def run(self, rows: BlockRows) -> BlockResult:
        """Read rows, and draft after the last ones of all texts."""
        return self.passes.read(self.slots, rows, range(len(self.slots)))


def random_parts(config: HeadConfig, seed: int = 1) -> TargetParts:
    """Embedding, output and final norm of a target without a model."""
    noise = torch.Generator().manual_seed(seed)
    embedding = torch.randn(config.vocab_size, config.target_hidden, generator=noise) * 0.3
    output = torch.randn(config.vocab_size, config.target_hidden, generator=noise) * 0.3
    gain = 1 + 0.1 * torch.randn(config.target_hidden, generator=noise)

    def finish(states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(states, gain.shape, gain.to(states.dtype), 1e-6)

    return TargetParts(embedding, output, EmbeddingFacts(1.0, 1.0), finish, LAYERS)
