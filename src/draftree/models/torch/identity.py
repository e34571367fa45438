"""Identity of a model by architecture and samples of weights, independent of name, folder, dtype and kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SAMPLES = 16
"""Number of sampled values of each parameter; fine-tuned models differ in some of them."""


def fingerprint(model: Any) -> str:
    """Return a hash of a model, sixteen hexadecimal digits; empty if some of its weights are not in memory.

    Args:
        model: a transformers model with its weights. Values are compared in bfloat16, so that the dtype makes no
            difference.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return ""
    return fingerprint_of(type(model).__name__, samples_of(model))


@torch.no_grad()
def samples_of(model: Any) -> dict[str, bytes]:
    """Return shape and samples of each parameter, by name; all processes that share the weights call it."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = whole_tensor(parameter)
        flat = whole.reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        values = flat[::step][:SAMPLES].to("cpu", torch.bfloat16).view(torch.int16)
        found[name] = f"{name} {tuple(whole.shape)}".encode() + values.numpy().tobytes()
    return found


def fingerprint_of(kind: str, samples: Mapping[str, bytes]) -> str:
    """Return the hash of a model of this class with these samples."""
    found = hashlib.sha256(kind.encode())
    for name in sorted(samples):
        found.update(samples[name])
    return found.hexdigest()[:16]


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that processes share as a whole, gathered by all of them; any other as it is. Detached."""
    gather = getattr(tensor, "full_tensor", None)
    if gather is None:
        return tensor.detach()
    with torch.inference_mode(False), torch.no_grad():  # a divided tensor of inference mode cannot be gathered
        found: Tensor = gather()
    return found.detach()
