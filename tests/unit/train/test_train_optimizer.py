"""Optimizers, the learning rate, and settings of a run that are out of range."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftree.core.errors import ConfigurationError
from draftree.train.loop import MasterOptimizer, learning_rate
from draftree.train.settings import Limits
from train_samples import settings


def test_weights_in_bfloat16_are_updated_in_float32() -> None:
    """Updates below the resolution of bfloat16 add up."""
    module = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        module.weight.fill_(1.0)
    optimizer = MasterOptimizer(module, settings(learning_rate=1e-4, optimizer="adamw"))
    for _ in range(100):
        module.weight.grad = torch.ones_like(module.weight)
        assert optimizer.update(1e-4, lambda gradient: gradient) == pytest.approx(4.0)
    assert module.weight.dtype == torch.bfloat16
    assert optimizer.state()["weight/weight"].allclose(torch.full((4, 4), 0.99), atol=1e-4)
    assert module.weight.float().allclose(torch.full((4, 4), 0.99), atol=4e-3)


def test_muon_updates_matrices_of_layers_by_orthogonal_steps() -> None:
    """All singular values of an update are near each other, whatever the gradient's."""
    module = torch.nn.ModuleDict({"fc": torch.nn.Linear(8, 4), "lm_head": torch.nn.Linear(8, 4, bias=False)})
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = MasterOptimizer(module, settings(optimizer="muon"))
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        module["fc"].weight.grad[0] *= 20
    optimizer.update(0.01, lambda gradient: gradient)
    change = {name: p.detach() - before[name] for name, p in module.named_parameters()}
    values = torch.linalg.svdvals(change["fc.weight"])
    assert values.max() < 2 * values.min()
    for name in ("fc.bias", "lm_head.weight"):
        assert change[name].abs().allclose(torch.full_like(change[name], 0.01), atol=1e-4), "AdamW's first step"
    keys = set(optimizer.state())
    assert {"momentum_buffer/fc.weight", "exp_avg/lm_head.weight", "exp_avg_sq/fc.bias"} < keys


def test_the_learning_rate_rises_and_falls() -> None:
    chosen = settings(learning_rate=1.0, warm_up=10)
    assert learning_rate(chosen, 0, 0.0) == pytest.approx(0.1)
    assert learning_rate(chosen, 9, 0.0) == 1.0
    assert learning_rate(chosen, 50, 0.5) == pytest.approx(0.5)
    assert learning_rate(chosen, 99, 1.0) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": {}}, "a run needs a limit"),
        ({"limits": {"minutes": -1.0}}, "minutes is -1.0: it must be positive"),
        ({"loss": "kll"}, "did you mean 'kl'"),
        ({"levels": 0}, "levels is 0"),
        ({"first_share": 1.5}, "first_share is 1.5: it must be from 0 to 1"),
        ({"temperature": 0.0}, "temperature is 0.0: it must be positive"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    limits = changes.pop("limits", {"steps": 1})
    with pytest.raises(ConfigurationError, match=message):
        settings(limits=Limits(**limits), **changes)
