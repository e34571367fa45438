"""Native passes of heads that draft all levels in one pass compute what their modules do, alone and in batches."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

from block_samples import FLASH, MEDUSA, PARALLEL, PRESS, SECOND, SPARK, config_of, random_head, random_parts
from draftree.heads import native_passes
from draftree.heads.base import BlockHead, BlockNodes, BlockRows
from draftree.heads.block_passes import BlockPasses, TorchBlockPasses
from draftree.heads.native_passes import NativeBlockPasses
from draftree.heads.peagle import ParallelEagle, PEagleHead
from draftree.models.native import decoder
from draftree.models.native.build import NativeUnavailableError
from native_builds import EACH_BUILD, built

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")

SIZES: dict[str, Any] = {"target_hidden": 32, "hidden": 32}
LAYERS: dict[str, Any] = {"head_dim": 16, "intermediate": 64}
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {**FLASH, **SIZES, **LAYERS, "block_size": 5},
    "dflash-windows": {**FLASH, **SIZES, **LAYERS, "windows": (7, 0)},
    "dflash-narrow": {**FLASH, **SIZES, **LAYERS, "block_size": 6, "windows": (3, 5)},
    "dflash-causal": {**FLASH, **SIZES, **LAYERS, "windows": (6, 0), "causal_windows": True, "own_embedding": True},
    "dspark": {**SPARK, **SIZES, **LAYERS, "markov_rank": 16},
    "dspark-gated": {**SPARK, **SIZES, **LAYERS, "markov_rank": 16, "markov_type": "gated"},
    "dspark-rnn": {
        **SPARK, **SIZES, **LAYERS, "markov_rank": 16, "markov_type": "rnn", "anchor_predicts": False, "block_size": 5,
    },
    "dflash-scaled": {
        **FLASH, **SIZES, **LAYERS, "layer": {"embedding_scale": 3.0, "logit_scale": 0.5, "soft_cap": 4.0},
    },
    "jetspec": {**FLASH, **SIZES, **LAYERS, "causal": True},
    "xpress": {**PRESS, **SIZES, **LAYERS, "markov_rank": 16, "refiner_width": 32},
    "peagle": {**PARALLEL, **SIZES, **LAYERS, "depth": 4},
    "peagle-norms": {**PARALLEL, **SIZES, **LAYERS, "depth": 3, "num_layers": 2, "fc_norm": True},
    "peagle-one-level": {**PARALLEL, **SIZES, **LAYERS, "depth": 1},
    "medusa": {**MEDUSA, **SIZES, "block_size": 4, "depth": 4},
}  # fmt: skip
DFLASH2: dict[str, Any] = {**SECOND, **SIZES, **LAYERS}
LENGTHS = (3, 70, 130)


def bound(name: str, dtype: str = "float32", **others: Any) -> BlockHead:
    config = config_of(HEADS.get(name, DFLASH2), **others)
    head: Any = random_head(config).to(getattr(torch, dtype))
    head.bind(random_parts(config))
    return ParallelEagle(head) if isinstance(head, PEagleHead) else head


def native(name: str, kind: str = "float32", **others: Any) -> NativeBlockPasses:
    quantization = "int8" if kind == "int8" else None
    return NativeBlockPasses(bound(name, "float32" if quantization else kind, **others), quantization=quantization)


def rows_of(passes: BlockPasses, seed: int, first: int, last: int) -> BlockRows:
    """Rows of a text, from one place to another."""
    noise = torch.Generator().manual_seed(seed)
    config = passes.head.config
    features = torch.randn(200, len(config.features), config.target_hidden, generator=noise)
    tokens = torch.randint(0, 40, (200,), generator=noise)
    return BlockRows(features[first:last], tokens[first:last], torch.arange(first + 1, last + 1), [last - first])


def joined(parts: list[BlockRows]) -> BlockRows:
    features, tokens, positions = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("features", "tokens", "positions")
    )
    return BlockRows(features, tokens, positions, [part.counts[0] for part in parts])


def drafted(passes: BlockPasses, anchors: Tensor, result: Any) -> Tensor:
    """Logits of all levels, with the bias after a path of first choices, and estimates of acceptance."""
    head, logits = passes.head, result.logits.float()
    memory, tokens, levels = head.start(result.states, anchors, (anchors + 1) % 40), anchors, []
    for level in range(head.num_levels):
        states = result.states[:, head.first_slot + level]
        own = logits[:, level]
        if head.has_bias:
            own, memory = head.follow(BlockNodes(tokens, torch.full_like(tokens, level), states, own, memory))
        confidence = head.confidence(tokens, states)
        levels.append(own if confidence is None else torch.cat((own, confidence[:, None]), dim=1))
        tokens = (tokens * 7 + level) % 40
    return torch.stack(levels, dim=1)


def texts(passes: BlockPasses, lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    """What is drafted for texts of these lengths, of which most rows were read before, not all drafting."""
    slots = [passes.pool.open() for _ in lengths]
    with torch.inference_mode():
        earlier = joined([rows_of(passes, seed, 0, length - 2) for seed, length in enumerate(lengths)])
        passes.read(slots, earlier, [])
        middle = joined([rows_of(passes, seed, length - 2, length - 1) for seed, length in enumerate(lengths)])
        passes.read(slots, middle, [0])
        last = joined([rows_of(passes, seed, length - 1, length) for seed, length in enumerate(lengths)])
        found = drafted(passes, last.tokens, passes.read(slots, last, range(len(lengths))))
    assert [slot.length for slot in slots] == list(lengths)
    for slot in slots:
        passes.pool.close(slot)
    return found


@pytest.mark.parametrize("name", HEADS)
def test_levels_are_those_of_the_module(name: str) -> None:
    found, wanted = texts(native(name)), texts(TorchBlockPasses(bound(name), torch.device("cpu")))
    assert (found - wanted).abs().max() < 2e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.04), ("int8", 0.06)])
@pytest.mark.parametrize("name", HEADS)
def test_smaller_formats_stay_near_float32(name: str, kind: str, share: float) -> None:
    found, wanted = texts(native(name, kind)), texts(TorchBlockPasses(bound(name), torch.device("cpu")))
    assert (found - wanted).abs().max() < share * (wanted.max() - wanted.min())


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["dflash", "dflash-narrow", "dflash-causal", "dspark", "peagle", "medusa"])
def test_bits_are_the_same_alone_and_in_batches(name: str, kind: str) -> None:
    passes = native(name, kind, has_confidence=False, confidence_with_markov=False)  # both are left to torch
    together = texts(passes)
    for number, length in enumerate(LENGTHS):
        slot = passes.pool.open()
        with torch.inference_mode():
            passes.read([slot], rows_of(passes, number, 0, length - 1), [])
            rows = rows_of(passes, number, length - 1, length)
            alone = drafted(passes, rows.tokens, passes.read([slot], rows, [0]))
        assert torch.equal(alone[0], together[number])
        passes.pool.close(slot)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("build", EACH_BUILD)
def test_every_set_of_instructions_agrees(build: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = texts(native("dflash-narrow", kind))
    library = built(build)
    monkeypatch.setattr(decoder, "library", lambda: library)
    found = texts(native("dflash-narrow", kind))
    assert (found - wanted).abs().max() < 0.03 * (wanted.max() - wanted.min())


def test_long_blocks_take_several_chunks() -> None:
    values = {"block_size": 90, "num_heads": 8}
    found = texts(native("dflash", **values), (5, 40))
    wanted = texts(TorchBlockPasses(bound("dflash", **values), torch.device("cpu")), (5, 40))
    assert (found - wanted).abs().max() < 2e-5 * (wanted.max() - wanted.min())


def test_weights_are_taken_and_counted() -> None:
    for name in HEADS:
        head = bound(name)
        before = sum(part.numel() * 4 for part in head.state_dict().values())
        passes = NativeBlockPasses(head)
        left = sum(part.numel() * 4 for part in head.state_dict().values())
        assert left < before / 4
        assert before <= passes.footprint.weights


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("dflash", {"head_dim": 8}, "head_dim of 8 is no multiple of 16"),
        ("peagle", {"activation": "relu"}, "its activation is relu"),
        ("dspark", {"markov_rank": 6}, "'markov_w2' has 6 inputs, no multiple of 16"),
        ("dflash2", {}, "its layers have convolutions"),
    ],
)
def test_other_heads_are_refused_and_left_unchanged(name: str, values: dict[str, Any], words: str) -> None:
    head = bound(name, **values)
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    with pytest.raises(NativeUnavailableError, match=words):
        NativeBlockPasses(head)
    assert all(torch.equal(tensor, before[key]) for key, tensor in head.state_dict().items())


def test_torch_targets_keep_torch_heads() -> None:
    class Target:
        device = torch.device("cpu")

        @property
        def here(self) -> Target:
            return self

    assert isinstance(native_passes.block_passes_of(bound("dflash"), Target()), TorchBlockPasses)  # type: ignore[arg-type]
