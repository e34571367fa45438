"""Planning of the conversion of a transformers model to native kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from draftree.models.native.blueprint import Blueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.describing import read
from draftree.models.native.facts import ModelFacts

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16")
"""Dtypes of passes."""
PACKED_AS: Mapping[str, str] = MappingProxyType({"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"})
"""The dtype of passes by that of a model. Every number of float16 is one of float32."""


def plan_lowering(model: ModelFacts) -> Blueprint:
    """Return the blueprint of a model. The weights of a float16 model are packed as float32, with the same values.

    Raises:
        NativeUnavailableError: its architecture, dtype or device is not supported.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if model.device.type != "cpu" or dtype not in PACKED_AS:
        known = ", ".join(PACKED_AS)
        raise NativeUnavailableError(f"passes in C are for {known} on CPUs, not {dtype} on {model.device}")
    if PACKED_AS[dtype] != dtype:
        logger.info("%s: its %s weights are packed as %s, with the same values", model.kind, dtype, PACKED_AS[dtype])
    return replace(read(model), dtype=PACKED_AS[dtype])
