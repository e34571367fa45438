"""Tiny models whose packed weights are read from a file. Not a test itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftree.models.native.describe import plan_lowering
from draftree.models.native.library import library
from draftree.models.native.streaming.model import StreamedModel
from draftree.models.native.streaming.store import write_store
from draftree.models.native.weights import ModelWeights
from draftree.models.torch.hf import HFModel
from families import fresh
from native_samples import DTYPES, FAMILIES, QUANTIZED, SIZES

LAYERS = 6


def least_budget(folder: Path) -> int:
    """Bytes for two buffers and everything that is always in memory."""
    from draftree.models.native.streaming.store import open_store

    store = open_store(folder)
    small = sum(tensor.numel() * tensor.element_size() for tensor in store.small)
    return store.tail.size + small + 2 * max(extent.size for extent in store.extents)


def sizes(family: str, **others: Any) -> dict[str, Any]:
    found: dict[str, Any] = SIZES | FAMILIES[family] | {"num_hidden_layers": LAYERS} | others
    for name in ("layer_types", "no_rope_layers"):
        if name in found:
            found[name] = [found[name][layer % len(found[name])] for layer in range(LAYERS)]
    return found


def streamed(family: str, folder: Path, kind: str = "float32", *, resident: int = 0) -> StreamedModel:
    """Return a model of which `resident` layers stay in memory."""
    quantization = kind if kind in QUANTIZED else None
    model = HFModel(fresh(family, dtype=DTYPES[kind], **sizes(family)))
    plan = plan_lowering(model)
    folder.mkdir(exist_ok=True)
    store = write_store(folder, library(), plan, ModelWeights(model.model), quantization=quantization)
    budget = least_budget(folder) + resident * max(extent.size for extent in store.extents)
    return StreamedModel(plan, store, budget=budget, quantization=quantization)
