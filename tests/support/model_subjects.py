"""Models of every kind, and the logits that each must give after any tokens. Not a test itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.core.tree import path
from draftree.models.base import LanguageModel
from draftree.models.native.model import NativeModel
from draftree.models.table import TableLM, hashed
from draftree.models.torch.hf import HFModel
from draftree.models.torch.static import Shapes
from families import VOCAB_SIZE, fresh, peer, target
from native_samples import DTYPES, QUANTIZED, SIZES, in_c, lower
from sequential import SequentialModel

PREFIX = [5, 9, 33, 9, 60, 61, 62, 63, 64, 65, 66]
"""Longer than the window of the families that have one."""
TREE = [7, 8, 9, 7, 30, 31, 32]
PARENTS = [-1, 0, 0, -1, 2, 4, 3]
CHAIN = [-1, 0, 1, 2, 3, 4, 5]
IN_C = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
LAYERS = 4
DEEP: dict[str, Any] = {**SIZES, "num_hidden_layers": LAYERS}
"""Sizes of models that run through PyTorch and natively, for tests of single layers."""


@functools.cache
def through_torch(kind: str = "float32") -> HFModel:
    return HFModel(fresh("qwen3", dtype=DTYPES[kind], **DEEP))


@functools.cache
def through_c(kind: str = "float32") -> NativeModel:
    model = HFModel(fresh("qwen3", dtype=DTYPES[kind], **DEEP))
    return lower(model, quantization=kind if kind in QUANTIZED else None)


both_kernels = pytest.mark.parametrize("build", [through_torch, pytest.param(through_c, marks=in_c)])


@dataclass(frozen=True)
class Subject:
    """A model and the logits that it must give after any tokens."""

    model: LanguageModel
    rows: Callable[[Sequence[int]], Tensor]

    @property
    def parents(self) -> list[int]:
        return PARENTS if self.model.supports_trees else CHAIN


@functools.cache
def table() -> TableLM:
    return TableLM(hashed(VOCAB_SIZE, seed=4))


@torch.inference_mode()
def rows_of_peer(family: str, tokens: Sequence[int]) -> Tensor:
    found: Tensor = peer(family)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return found


@functools.cache
def native_peer() -> Any:
    return fresh("qwen3", **IN_C)


@torch.inference_mode()
def rows_of_native_peer(tokens: Sequence[int]) -> Tensor:
    found: Tensor = native_peer()(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return found


def rows_of_table(tokens: Sequence[int]) -> Tensor:
    return torch.stack([table().logits(tokens[: end + 1]) for end in range(len(tokens))])


@functools.cache
def subject(name: str) -> Subject:
    if name == "table":
        return Subject(table(), rows_of_table)
    if name.startswith("leaf by leaf"):
        return Subject(
            SequentialModel(target("llama"), batched="row" in name), functools.partial(rows_of_peer, "llama")
        )
    if name.startswith("static "):
        family = name.removeprefix("static ")
        model = HFModel(fresh(family), shapes=Shapes())
        return Subject(model, functools.partial(rows_of_peer, family))
    if name == "in C":
        return Subject(lower(HFModel(fresh("qwen3", **IN_C))), rows_of_native_peer)
    return Subject(target(name), functools.partial(rows_of_peer, name))


FAMILIES = ["llama", "gemma2", "gpt_oss", "mistral", "deepseek_v3", "bloom", "mpt"]
STATIC = ["static llama", "static gemma2", "static gpt_oss", "static deepseek_v3"]
NAMES = ["table", *STATIC, "in C", "leaf by leaf, one row each", "leaf by leaf, one pass each", *FAMILIES]
CHAINS_ONLY = ("bloom", "mpt")
MARKS = {"in C": in_c}


def each_of(names: Sequence[str]) -> pytest.MarkDecorator:
    """A test for each of these models that can be had here."""
    return pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in names])


any_model = each_of(NAMES)

tree_models = each_of([name for name in NAMES if name not in CHAINS_ONLY])


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found.double(), wanted.double(), atol=2e-4)


def wanted_rows(one: Subject, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
    """Every node scored alone: its own path after the prefix."""
    return torch.stack([one.rows([*prefix, *(tokens[n] for n in path(parents, i))])[-1] for i in range(len(tokens))])
