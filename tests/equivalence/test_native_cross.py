"""Native kernels on other processors, by cross-compilers and an emulator: the logits of this one, in any batch.

The programs read the structures, weights and arguments of passes that ran here, so that layouts are compared as well.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from block_kinds import HeadWeights, head_alone, random_rows, row_blocks
from cross_builds import (
    CROSS,
    PACK,
    PACK_BLOCKS,
    QUANTIZE,
    UNPACK,
    Cross,
    Outcome,
    RecordedLibrary,
    Recording,
    compiled,
)
from draftree.models.base import Extend, Pass
from draftree.models.kv.slots import KVSlot, LayerRange
from draftree.models.native.decoder import NativeDecoder, plan_rows
from draftree.models.native.library import FORMATS, CSearch, library, table_of
from draftree.models.native.model import NativeModel
from draftree.models.native.structures import STRUCTURES, CLinear, require_same_layout
from draftree.weights.gguf_file import KINDS
from native_samples import lowered, text

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")

MODELS = {
    "float32": ("llama", "float32", None),
    "bfloat16": ("llama", "bfloat16", None),
    "int8": ("llama", "int8", None),
    "int4": ("llama", "int4", None),
    "keys of 8 bits": ("llama", "bfloat16", "int8"),
    "caps, windows, norms of heads": ("gemma3_text", "bfloat16", None),
    "experts, sinks": ("gpt_oss", "bfloat16", None),
    "norms with means": ("gpt2", "float32", None),
}
TREE = [-1, 0, 0, 2, -1, 4, 3, 6]
PROMPT = 21
LONG = {"Q4_K": 256, "Q5_K": 256, "Q6_K": 256, "IQ4_XS": 256}
"""Inputs of kinds with blocks of 256; 96 of the others."""
VOCAB = 80


@pytest.fixture(scope="module", params=CROSS)
def build(request: pytest.FixtureRequest) -> Cross:
    found = CROSS[request.param]
    if found.missing:
        pytest.skip(f"{found.missing} not found: install gcc-aarch64-linux-gnu and qemu-user")
    return found


@pytest.fixture(autouse=True)
def weights_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arm processors read no others."""
    monkeypatch.setattr(library(), "keeps_compact", False)


@pytest.fixture(scope="module")
def run(build: Cross, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Recording], Outcome]:
    folder = tmp_path_factory.mktemp("cross")
    return partial(_run, compiled(build, folder), build, folder)


def _run(program: Path, build: Cross, folder: Path, recording: Recording) -> Outcome:
    return recording.run(program, build, folder)


def recorded(name: str) -> tuple[RecordedLibrary, NativeModel]:
    """Passes over a prompt and a tree, and over the same tokens one by one in other slots."""
    family, kind, kv_dtype = MODELS[name]
    lm = lowered(family, kind)
    if kv_dtype is not None:
        lm.use_kv_dtype(kv_dtype)
    lm.reserve(2, 64)
    noted = RecordedLibrary(lm.decoder, [tensor for pair in lm._pool.memory._stores for tensor in pair])
    tokens, nodes = text(PROMPT), text(len(TREE))
    whole, single = lm.open(), lm.open()
    lm.run(Pass([Extend(whole, tokens, range(-1, PROMPT - 1))]))
    lm.commit(whole, range(PROMPT))
    lm.run(Pass([Extend(whole, nodes, TREE)]))
    for token in (*tokens, *(nodes[node] for node in (0, 2, 3, 6, 7))):
        lm.run(Pass([Extend(single, [token], [-1])]))
        lm.commit(single, [0])
    return noted, lm


@pytest.mark.parametrize("name", MODELS)
def test_passes(name: str, run: Callable[[Recording], Outcome]) -> None:
    noted, _ = recorded(name)
    outcome = run(noted.recording)
    prompt, tree, *rows = (outcome.tensor(place, logits) for place, logits in noted.passes)
    require_same_rows(prompt, tree, rows)
    require_same_rows(*(logits for _, logits in noted.passes[:2]), [logits for _, logits in noted.passes[2:]])
    wanted = torch.cat([logits for _, logits in noted.passes])
    found, spread = torch.cat([prompt, tree, *rows]), wanted.max() - wanted.min()
    if MODELS[name][1] == "float32":
        assert (found - wanted).abs().max() < 2e-5 * spread
    else:  # results next to the middle between two rounded numbers
        assert (found - wanted).pow(2).mean().sqrt() < 0.01 * spread


def require_same_rows(prompt: Tensor, tree: Tensor, rows: Sequence[Tensor]) -> None:
    """Tokens of a text and of a path of the tree have the same bits in passes of their own."""
    single = torch.cat(list(rows))
    assert torch.equal(single[:PROMPT], prompt)
    assert torch.equal(single[PROMPT:], tree[[0, 2, 3, 6, 7]])


@pytest.mark.parametrize("kind", [*KINDS, "float32", "bfloat16"])
def test_products(kind: str, run: Callable[[Recording], Outcome]) -> None:
    hidden = LONG.get(kind, 96)
    if kind in KINDS:
        head, quantization = row_blocks(kind, random_rows(kind, VOCAB, hidden)), "gguf"
    else:
        head, quantization = torch.randn(VOCAB, hidden, generator=torch.Generator().manual_seed(4)), None  # type: ignore[assignment]
    plan = head_alone(hidden, VOCAB)
    decoder = NativeDecoder(plan, HeadWeights(hidden, head), quantization=quantization)
    noted = RecordedLibrary(decoder, [])
    inputs = torch.randn(37, hidden, generator=torch.Generator().manual_seed(1))
    for count in (37, 1, 2, 3, 5, 8, 16):
        slot = KVSlot(0)
        slot.append(range(-1, count - 1))
        rows = plan_rows([slot], [[0] * count], [range(count)], rows_of_chunk=8)
        decoder.run(None, rows, range(count), layer_range=LayerRange(0, 0, hidden=inputs[:count].contiguous()))
    outcome = run(noted.recording)
    first, *others = (outcome.tensor(place, logits) for place, logits in noted.passes)
    wanted = noted.passes[0][1]
    assert (first - wanted).abs().max() < 1e-5 * wanted.abs().max()
    for found in others:
        assert torch.equal(found, first[: len(found)])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_packing(kind: str, run: Callable[[Recording], Outcome]) -> None:
    outputs, inputs = 48, 160
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(2))
    packed = torch.zeros(outputs // 16 * library().block_bytes(inputs, FORMATS[kind]), dtype=torch.uint8)
    scales, sums = torch.zeros(outputs), torch.zeros(outputs, dtype=torch.int32)
    recording = Recording()
    places = [recording.add_tensor(tensor) for tensor in (weight, packed, scales, sums)]
    recording.call(
        PACK, places[0], FORMATS["float32"], outputs, inputs, places[1], FORMATS[kind], 0, 1, *places[2:],
        pointers=(0, 4, 8, 9),
    )  # fmt: skip
    library().pack(weight, packed=packed, kind=FORMATS[kind], first=0, step=1, scales=scales, sums=sums)
    outcome = run(recording)
    for place, tensor in zip(places[1:], (packed, scales, sums), strict=True):
        assert torch.equal(outcome.tensor(place, tensor), tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_of_blocks(kind: str, run: Callable[[Recording], Outcome]) -> None:
    outputs, inputs = 32, LONG.get(kind, 96)
    source, groups = row_blocks(kind, random_rows(kind, outputs, inputs)), library().groups
    size = groups.block_bytes(inputs, kind)
    table, packed = table_of([kind] * 2, [size] * 2), torch.zeros(2 * size, dtype=torch.uint8)
    recording, order = Recording(), source.order.contiguous()
    places = [recording.add_tensor(tensor) for tensor in (source.rows, order, packed, table)]
    width = source.rows.shape[1]
    arguments = (places[0], width, places[1], outputs, inputs, places[2], places[3])
    recording.call(PACK_BLOCKS, *arguments, pointers=(0, 2, 5, 6))
    groups.pack(source, inputs, packed, table)
    assert torch.equal(run(recording).tensor(places[2], packed), packed)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_quantization(kind: str, run: Callable[[Recording], Outcome]) -> None:
    outputs, inputs, groups = 32, 256, library().groups
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3))
    size = groups.block_bytes(inputs, kind)
    table, packed, values = table_of([kind] * 2, [size] * 2), torch.zeros(2 * size, dtype=torch.uint8), weight.clone()
    recording = Recording()
    places = [recording.add_tensor(tensor) for tensor in (weight, packed, table, values)]
    linear = CLinear(packed.data_ptr(), None, None, None, table.data_ptr(), inputs, outputs, FORMATS["grouped"], 0)
    own = recording.add_structure(linear)
    recording.call(QUANTIZE, places[0], 0, outputs, inputs, places[1], places[2], pointers=(0, 4, 5))
    recording.call(UNPACK, own, 0, outputs, places[3], pointers=(0, 3))
    groups.pack(weight, inputs, packed, table)
    wanted, found = library().unpack(linear, outputs), run(recording).tensor(places[3], values)
    errors = [(one - weight).pow(2).mean() for one in (found, wanted)]
    assert errors[0] < 1.001 * errors[1]  # of two roundings that are equally good, either may be chosen
    assert (found != wanted).float().mean() < 0.05


def test_layout(build: Cross, run: Callable[[Recording], Outcome]) -> None:
    outcome = run(Recording())
    constants = {name: size for (kind, name), (_, size) in outcome.layout.items() if kind == "-"}
    require_same_layout(outcome.layout, (*STRUCTURES, CSearch), constants)
    assert constants["GROUPED"] == FORMATS["grouped"]
    assert outcome.instructions == ("plain vectors" if "-U__ARM_NEON" in build.flags else "NEON")
