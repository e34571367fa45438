"""From a model of transformers to one whose passes run in C."""

from __future__ import annotations

from draftree.models.native.blueprint import Blueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.describing import read
from draftree.models.torch.hf import HFModel

DTYPES = ("float32", "bfloat16")


def plan_lowering(model: HFModel) -> Blueprint:
    """How a model is built, if it is built as most decoders are.

    Raises:
        NativeUnavailableError: it is built otherwise, or computes elsewhere.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if model.device.type != "cpu" or dtype not in DTYPES:
        raise NativeUnavailableError(f"passes in C are for float32 and bfloat16 on CPUs, not {dtype} on {model.device}")
    return read(model)
