"""Cross-attention of stacked sources, decoders as functions, and packed weights: the logits of the modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftree.loading.transformers_model import wrap_encoder_decoder
from draftree.models.base import Extend, Pass
from draftree.models.source import TokenSource
from draftree.models.torch.packing import can_pack
from draftree.models.torch.seq2seq import passes
from draftree.models.torch.seq2seq.model import HFEncoderDecoder
from seq2seq_samples import FAMILIES, sample

LENGTHS = (3, 5, 40, 4, 50, 3)
ROWS = ([7, 8, 9], [11], [12, 13], [14], [15], [16, 17])


def opened(model: HFEncoderDecoder) -> list[Any]:
    return [
        model.open_on(TokenSource(tuple(3 + (5 * place + step) % 50 for step in range(length))))
        for place, length in enumerate(LENGTHS)
    ]


def scored(model: HFEncoderDecoder, slots: list[Any], rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of all slots in one pass; nothing is kept."""
    jobs = [Extend(slot, own, range(-1, len(own) - 1)) for slot, own in zip(slots, rows, strict=True)]
    found = model.run(Pass(jobs))
    parts = [found.of(place).tensor().clone() for place in range(len(jobs))]
    for slot in slots:
        model.commit(slot, ())
    return parts


@pytest.mark.parametrize("most", [0, 64 << 20])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_sources_of_a_batch_are_attended_to_as_alone(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MAX_STACKED_BYTES", most)
    model = wrap_encoder_decoder(sample(name), name)
    slots, rows = opened(model), [list(own) for own in ROWS]
    alone = [scored(model, [slot], [own])[0] for slot, own in zip(slots, rows, strict=True)]
    order = [0, 1, 2, 3, 4, 5]
    for chosen in (order, order, [5, 0, 3], [1, 2, 4, 5], [4], order):
        found = scored(model, [slots[place] for place in chosen], [rows[place] for place in chosen])
        for place, part in zip(chosen, found, strict=True):
            torch.testing.assert_close(part, alone[place], atol=2e-4, rtol=1e-4)
    stacked = [source.stack is not None for source in model._encoded.values()]
    assert all(stacked) if most else not any(stacked)
    model.check_integrity()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_function_of_a_decoder_gives_the_logits_of_its_modules(name: str) -> None:
    model = wrap_encoder_decoder(sample(name), name)
    assert model.function is not None
    tokens, parents = [8, 17, 23, 41, 12, 33], (-1, 0, 0, -1, 1, 3)

    def logits() -> torch.Tensor:
        slot = model.open_probe()
        model.run(Pass([Extend(slot, [5, 9, 11], range(-1, 2))]))
        model.commit(slot, range(3))
        found = model.run(Pass([Extend(slot, tokens, parents)])).logits.tensor().clone()
        model.close(slot)
        return found

    ours = logits()
    model.run_modules()
    torch.testing.assert_close(ours, logits(), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["t5-gated", "bart", "whisper"])
def test_packed_weights_give_the_same_logits(name: str) -> None:
    if not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("weights cannot be packed here")
    plain, packed = wrap_encoder_decoder(sample(name), name), wrap_encoder_decoder(sample(name), name, packed=True)
    parts = []
    for model in (plain, packed):
        slot = model.open_probe()
        parts.append(scored(model, [slot], [[7, 8, 9, 11]])[0])
    torch.testing.assert_close(parts[0], parts[1], atol=2e-4, rtol=1e-4)
    assert plain.footprint.weights == packed.footprint.weights


def test_a_decoder_that_differs_from_its_family_runs_its_modules() -> None:
    model = sample("bart")
    layer = model.get_decoder().layers[0]
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.5  # no family has this factor
    wrapped = wrap_encoder_decoder(model, "bart")
    assert wrapped.function is None
    assert wrapped.self_check.chains_ok
