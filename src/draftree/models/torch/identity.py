"""Identity of a model by architecture and samples of weights, independent of name, folder, dtype and kernels."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLES = 16
"""Number of sampled values of each parameter; fine-tuned models differ in some of them."""


@torch.inference_mode()
def fingerprint(model: Any) -> str:
    """Return a hash of a model, sixteen hexadecimal digits; empty if some of its weights are not in memory.

    Args:
        model: a transformers model with its weights. Values are compared in bfloat16, so that the dtype makes no
            difference.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return ""
    found = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        values = flat[::step][:SAMPLES].to("cpu", torch.bfloat16).view(torch.int16)
        found.update(f"{name} {tuple(parameter.shape)}".encode())
        found.update(values.numpy().tobytes())
    return found.hexdigest()[:16]
