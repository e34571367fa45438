"""Which model this is, whatever its name, folder, dtype or kernels: its architecture and samples of its weights."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLES = 16
"""Values looked at of each parameter: a fine-tuned model differs somewhere in them."""


@torch.inference_mode()
def fingerprint(model: Any) -> str:
    """Sixteen hexadecimal digits.

    Args:
        model: a module of transformers that holds its weights. Values are compared in bfloat16, so that a model loaded
            in another dtype stays the same model.
    """
    found = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // SAMPLES)
        values = flat[::step][:SAMPLES].to("cpu", torch.bfloat16).view(torch.int16)
        found.update(f"{name} {tuple(parameter.shape)}".encode())
        found.update(values.numpy().tobytes())
    return found.hexdigest()[:16]
