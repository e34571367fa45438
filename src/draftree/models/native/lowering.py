"""Planning of the conversion of a transformers model to native kernels."""

from __future__ import annotations

from draftree.models.native.blueprint import Blueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.describing import read
from draftree.models.torch.hf import HFModel

DTYPES = ("float32", "bfloat16")


def plan_lowering(model: HFModel) -> Blueprint:
    """Return the blueprint of a model.

    Raises:
        NativeUnavailableError: its architecture, dtype or device is not supported.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if model.device.type != "cpu" or dtype not in DTYPES:
        raise NativeUnavailableError(f"passes in C are for float32 and bfloat16 on CPUs, not {dtype} on {model.device}")
    return read(model)
