"""AdamW in float32 for weights of any dtype, with a learning rate that depends on the used share of the budget.

In bfloat16, an update is smaller than the distance of two numbers for most weights. Updates are therefore made on
float32 copies, and the rounded result is used by the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from draftree.train.settings import TrainSettings

__all__ = ["MasterAdamW", "learning_rate"]

BETAS = (0.9, 0.95)
EPSILON = 1e-8


def learning_rate(settings: TrainSettings, step: int, progress: float) -> float:
    """Return the learning rate of an update: a linear warm-up, then a cosine to 0."""
    rising = min(1.0, (step + 1) / settings.warm_up) if settings.warm_up else 1.0
    return settings.learning_rate * rising * 0.5 * (1 + math.cos(math.pi * progress))


class MasterAdamW:
    """AdamW on float32 copies of the trainable weights.

    Args:
        module: its parameters with `requires_grad` are trained.
        settings: rates and limits.
    """

    def __init__(self, module: nn.Module, settings: TrainSettings) -> None:
        self._settings = settings
        self._used = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._master = {name: p.detach().float().clone() for name, p in self._used.items()}
        decayed = [master for master in self._master.values() if master.dim() > 1]
        plain = [master for master in self._master.values() if master.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=settings.learning_rate, betas=BETAS, eps=EPSILON
        )

    @property
    def num_weights(self) -> int:
        """Number of trainable weights."""
        return sum(master.numel() for master in self._master.values())

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._used.values():
            parameter.grad = None

    def update(self, rate: float, reduce: Callable[[Tensor], Tensor]) -> float:
        """Update the weights by their gradients; return the norm of the gradients before clipping.

        Nothing is updated if the norm is not finite.

        Args:
            rate: the learning rate.
            reduce: sums a gradient over processes.
        """
        for name, parameter in self._used.items():
            gradient = torch.zeros_like(self._master[name]) if parameter.grad is None else parameter.grad.float()
            self._master[name].grad = reduce(gradient)
        norm = float(torch.nn.utils.clip_grad_norm_(self._master.values(), self._settings.clip))
        if math.isfinite(norm):
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._spread()
        for master in self._master.values():
            master.grad = None
        self.clear()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return the float32 weights and the moments, by name; tensors are shared."""
        found = {f"weight/{name}": master for name, master in self._master.items()}
        for name, master in self._master.items():
            for key, value in self._optimizer.state.get(master, {}).items():
                found[f"{key}/{name}"] = value
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Set weights and moments from `state`.

        Raises:
            KeyError: a weight is missing.
        """
        for name, master in self._master.items():
            master.copy_(state[f"weight/{name}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            if f"step/{name}" in state:
                # the counter stays on the host, moments are on the weight's device
                self._optimizer.state[master] = {
                    key: state[f"{key}/{name}"].to("cpu" if key == "step" else master.device).clone() for key in keys
                }
        self._spread()

    @torch.no_grad()
    def _spread(self) -> None:
        for name, parameter in self._used.items():
            parameter.copy_(self._master[name])
