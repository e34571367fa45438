"""Draft models in processes of their own, with their tokenizers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftree.drafters.base import LoadedDraftModel
from draftree.loading.apart import load_apart
from draftree.loading.resolve import resolve_model
from draftree.loading.tokenizers import load_tokenizer


def apart_reader(quantization: str | None, *, trust_remote_code: bool) -> Callable[[str], LoadedDraftModel]:
    """Return a function that loads a drafter's model in a process of its own, on the CPU."""

    def read(name: str) -> LoadedDraftModel:
        folder = resolve_model(name)
        threads = torch.get_num_threads()
        model = load_apart(name, threads=threads, quantization=quantization, trust_remote_code=trust_remote_code)
        return LoadedDraftModel(model, load_tokenizer(folder, trust_remote_code=trust_remote_code), name)

    return read
