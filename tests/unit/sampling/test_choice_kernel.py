"""The Triton kernel that chooses tokens agrees with torch; without a GPU it runs in Triton's interpreter."""

from __future__ import annotations

import math
import os

import pytest
import torch

from draftree.core.noise import Noise
from draftree.sampling import logits as logits_module
from draftree.sampling.choice_kernel import BLOCK, choices
from draftree.sampling.logits import TensorLogits, perturbed

pytest.importorskip("triton")
DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
NOISE = [None, (Noise(1).keys(3), 0.8), (Noise(2).keys(9), 1.3), None]


def rows_of_logits(width: int) -> torch.Tensor:
    # bfloat16 has ties
    return (3 * torch.randn(len(NOISE), width, generator=torch.Generator().manual_seed(0))).bfloat16().float()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("width", [7, BLOCK, 2 * BLOCK + 100])
@pytest.mark.parametrize("step", [None, 3])
def test_choices_are_those_of_torch(width: int, step: int | None) -> None:
    ids = None if step is None else step * torch.arange(width, dtype=torch.int32)
    logits = rows_of_logits(width)
    scores = perturbed(logits, NOISE, token_ids=ids)
    chosen = choices(logits.to(DEVICE), NOISE, None if ids is None else ids.to(DEVICE))
    best = scores.topk(2)
    assert [choice.token for choice in chosen] == scores.argmax(dim=1).tolist()
    for field, wanted in (("score", best.values[:, 0]), ("second", best.values[:, 1]), ("total", scores.logsumexp(1))):
        values = torch.tensor([getattr(choice, field) for choice in chosen])
        assert torch.allclose(values, wanted, atol=1e-4), field


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_picks_of_rows_without_a_choice_are_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rows_of_logits(100)
    logits[1, 77] = math.nan
    logits[2] = -math.inf
    wanted = TensorLogits(logits).picks(NOISE)
    monkeypatch.setattr(logits_module, "_has_kernel", lambda tensor: True)
    chosen = TensorLogits(logits.to(DEVICE)).picks(NOISE)
    assert chosen.is_sound == wanted.is_sound == [True, False, False, True]
    assert [chosen.tokens[row] for row in (0, 3)] == [wanted.tokens[row] for row in (0, 3)]
