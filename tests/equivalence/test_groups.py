"""Products of weights with a scale for each group: values, rounding of inputs, independence of the number of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from block_kinds import HeadWeights, head_alone, random_rows, rounded_inputs, row_blocks, values_of
from draftree.models.kv.slots import KVSlot, LayerRange
from draftree.models.native import decoder as decoders
from draftree.models.native.decoder import NativeDecoder, plan_rows
from draftree.models.native.library import RowBlocks, library, table_of
from draftree.models.native.structures import CLinear
from draftree.weights.gguf_file import KINDS
from native_builds import BUILDS, EACH_BUILD, built
from native_samples import in_c

pytestmark = in_c

VOCAB = 144
"""Nine blocks of 16: groups of four and a rest."""
LONG = {"Q4_K": 512, "Q5_K": 512, "Q6_K": 512, "IQ4_XS": 512}
"""Inputs of kinds with blocks of 256; 352 of the others, which is no multiple of 256."""


@pytest.fixture(params=EACH_BUILD)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    library = built(request.param)
    monkeypatch.setattr(decoders, "library", lambda: library)
    return str(request.param)


def decoder_of(head: RowBlocks | torch.Tensor, hidden: int, vocab: int = VOCAB) -> NativeDecoder:
    return NativeDecoder(head_alone(hidden, vocab), HeadWeights(hidden, head), quantization="gguf")


def product(decoder: NativeDecoder, rows: torch.Tensor) -> torch.Tensor:
    """Logits of rows that enter after the last layer."""
    slot = KVSlot(0)
    slot.append(range(-1, len(rows) - 1))
    plan = plan_rows([slot], [[0] * len(rows)], [range(len(rows))], rows_of_chunk=8)
    found = decoder.run(None, plan, range(len(rows)), layer_range=LayerRange(0, 0, hidden=rows.contiguous()))
    return found.logits.tensor().clone()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_file_are_used_as_they_are(build: str, kind: str) -> None:
    hidden = LONG.get(kind, 352)
    rows = random_rows(kind, VOCAB, hidden)
    decoder = decoder_of(row_blocks(kind, rows), hidden)
    wanted = torch.from_numpy(values_of(kind, rows))
    assert (decoder.output_head() - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert torch.equal(decoder.input_embedding(), decoder.output_head())
    inputs = torch.randn(100, hidden, generator=torch.Generator().manual_seed(1))
    exact = rounded_inputs(inputs) @ wanted.double().T
    found = product(decoder, inputs)
    assert (found - exact).abs().max() < 2e-5 * exact.abs().max()
    for count in (1, 2, 3, 4, 5, 7, 13, 49):
        assert torch.equal(product(decoder, inputs[:count]), found[:count]), count


@pytest.mark.kernels
def test_builds_agree_to_the_rounding_of_float32() -> None:
    rows = random_rows("Q4_K", VOCAB, 256)
    inputs = torch.randn(5, 256, generator=torch.Generator().manual_seed(2))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for name in BUILDS:
            library = built(name)
            patch.setattr(decoders, "library", lambda library=library: library)
            found.append(product(decoder_of(row_blocks("Q4_K", rows), 256), inputs))
    assert all((one - found[0]).abs().max() < 1e-5 * found[0].abs().max() for one in found)


def test_outputs_may_come_from_rows_in_any_order() -> None:
    rows = random_rows("Q5_0", VOCAB, 64)
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    blocks = replace(row_blocks("Q5_0", rows), order=order)
    wanted = torch.from_numpy(values_of("Q5_0", rows))[order]
    assert torch.allclose(decoder_of(blocks, 64).output_head(), wanted, atol=1e-6)


def test_inputs_that_are_not_finite_give_results_that_are_not() -> None:
    decoder = decoder_of(row_blocks("Q4_0", random_rows("Q4_0", VOCAB, 64)), 64)
    inputs = torch.randn(3, 64)
    inputs[1, 5] = float("nan")
    found = product(decoder, inputs)
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize("hidden", [64, 176, 576])
def test_six_bits_of_a_head_lose_little(build: str, hidden: int) -> None:
    weight = torch.randn(VOCAB, hidden, generator=torch.Generator().manual_seed(4))
    found = decoder_of(weight, hidden).output_head()
    assert found.shape == weight.shape
    assert (found - weight).pow(2).mean() < 4e-4 * weight.pow(2).mean()


def test_four_bits_are_chosen_by_their_error() -> None:

    weight = torch.randn(64, 576, generator=torch.Generator().manual_seed(5))
    functions = library().groups
    size = functions.block_bytes(576, "Q4_K")
    table = table_of(["Q4_K"] * 4, [size] * 4)
    packed = torch.empty(4 * size, dtype=torch.uint8)
    functions.pack(weight, 576, packed, table)
    linear = CLinear(weight=packed.data_ptr(), blocks=table.data_ptr(), inputs=576, outputs=64, format=3)
    found = library().unpack(linear, 64)
    groups = weight.view(64, -1, 32)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = (((groups - low) / step).round() * step + low).view(64, -1)
    error, of_plain = (found - weight).pow(2).mean(), (plain - weight).pow(2).mean()
    assert error < 0.9 * of_plain
    assert size * 4 / (64 * 576) < 4.75 / 8
