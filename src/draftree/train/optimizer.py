"""Optimizers in float32 for weights of any dtype, with a learning rate that depends on the used share of the budget.

In bfloat16, an update is smaller than the distance of two numbers for most weights. Updates are therefore made on
float32 copies, and the rounded result is used by the passes.

Sources: AdamW, arXiv 1711.05101; Muon, arXiv 2502.16982, whose updates are scaled to the size of those of AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from draftree.core.errors import ConfigurationError
from draftree.train.settings import ADAMW, TrainSettings

__all__ = ["MasterOptimizer", "learning_rate"]

BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT = "weight"
TABLES = ("lm_head", "embed", "markov")
"""Parts of the names of matrices with one row or column for each token."""


def learning_rate(settings: TrainSettings, step: int, progress: float) -> float:
    """Return the learning rate of an update: a linear warm-up, then a cosine to 0."""
    rising = min(1.0, (step + 1) / settings.warm_up) if settings.warm_up else 1.0
    return settings.learning_rate * rising * 0.5 * (1 + math.cos(math.pi * progress))


class MasterOptimizer:
    """AdamW or Muon on float32 copies of the trainable weights.

    Muon updates the matrices of layers. Gains, embeddings and output heads are updated by AdamW in any case.

    Args:
        module: its parameters with `requires_grad` are trained.
        settings: rates and limits.

    Raises:
        ConfigurationError: this torch does not have the optimizer.
    """

    def __init__(self, module: nn.Module, settings: TrainSettings) -> None:
        self._settings = settings
        self._used = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._master = {name: p.detach().float().clone() for name, p in self._used.items()}
        orthogonal = [] if settings.optimizer == ADAMW else [n for n in self._master if self._is_layer_matrix(n)]
        others = [master for name, master in self._master.items() if name not in orthogonal]
        decayed, plain = [one for one in others if one.dim() > 1], [one for one in others if one.dim() <= 1]
        rate, decay = settings.learning_rate, settings.weight_decay
        groups = [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self._optimizers: list[torch.optim.Optimizer] = []
        if groups:
            self._optimizers.append(torch.optim.AdamW(groups, lr=rate, betas=BETAS, eps=EPSILON))
        if orthogonal:
            if not hasattr(torch.optim, "Muon"):
                raise ConfigurationError("optimizer 'muon' needs torch 2.9 or later: choose 'adamw'")
            matrices = [self._master[name] for name in orthogonal]
            self._optimizers.append(
                torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            )

    def _is_layer_matrix(self, name: str) -> bool:
        return self._master[name].dim() == 2 and not any(part in name for part in TABLES)

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
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
            self._spread()
        for master in self._master.values():
            master.grad = None
        self.clear()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Return the float32 weights and the moments, by name; tensors are shared."""
        found = {f"{WEIGHT}/{name}": master for name, master in self._master.items()}
        for name, master in self._master.items():
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(master, {}).items():
                    found[f"{key}/{name}"] = value
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Set weights and moments from `state`.

        Raises:
            KeyError: a weight is missing.
        """
        moments: dict[str, dict[str, Tensor]] = {}
        for path, value in state.items():
            key, _, name = path.partition("/")
            if key != WEIGHT:
                moments.setdefault(name, {})[key] = value
        names = {id(master): name for name, master in self._master.items()}
        for name, master in self._master.items():
            master.copy_(state[f"{WEIGHT}/{name}"])
        for optimizer in self._optimizers:
            for master in (one for group in optimizer.param_groups for one in group["params"]):
                # the counter stays on the host, moments are on the weight's device
                found = moments.get(names[id(master)], {}).items()
                if found:
                    optimizer.state[master] = {
                        key: value.to("cpu" if key == "step" else master.device).clone() for key, value in found
                    }
        self._spread()

    @torch.no_grad()
    def _spread(self) -> None:
        for name, parameter in self._used.items():
            parameter.copy_(self._master[name])
