"""Draftree: fast lossless generation with Hugging Face causal language models by speculative decoding."""

from __future__ import annotations

from importlib import import_module

from draftree.version import __version__

TYPE_CHECKING = False  # typing takes longer to import than all else here, and Ctrl-C cannot be handled before
if TYPE_CHECKING:
    from typing import Any

    from draftree.async_llm import AsyncLLM
    from draftree.beam.params import BeamSearchParams
    from draftree.beam.result import BeamResult, Hypothesis
    from draftree.beam.trie import TokenTrie
    from draftree.dropin.generate import generate
    from draftree.llm import LLM
    from draftree.outputs import Completion, CompletionStats
    from draftree.sampling.params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamResult",
    "BeamSearchParams",
    "Completion",
    "CompletionStats",
    "Hypothesis",
    "SamplingParams",
    "TokenTrie",
    "__version__",
    "generate",
]

_HOMES = {
    "AsyncLLM": "draftree.async_llm",
    "BeamResult": "draftree.beam.result",
    "BeamSearchParams": "draftree.beam.params",
    "Hypothesis": "draftree.beam.result",
    "TokenTrie": "draftree.beam.trie",
    "LLM": "draftree.llm",
    "Completion": "draftree.outputs",
    "CompletionStats": "draftree.outputs",
    "SamplingParams": "draftree.sampling.params",
    "generate": "draftree.dropin.generate",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and the command line's help must not wait for it
    if name in _HOMES:
        from draftree.core.host import without_collection

        with without_collection():
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'draftree' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
