"""What transformers drops on the way to a `custom_generate` callable is fetched back.

`GenerationMixin.generate` takes `streamer`, `assistant_model`, `synced_gpus`, `tokenizer` and `assistant_tokenizer`,
and where `custom_generate` is a callable it lets go of all five without a word (transformers 5.16 to 5.23): the
callable gets only those keyword arguments that `generate` itself does not know. The first two are still parameters
of the running `generate`. The two tokenizers are not; they are put back among its keyword arguments at the one moment
when transformers asks for the callable's signature, behind which it hands them over, to stop strings as well.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from draftree.core.errors import ConfigurationError

NO_SYNC = (
    "synced_gpus=True (given, or set for sharded weights) cannot be honoured: each process writes at its own pace; "
    "leave custom_generate out for this call"
)
_TOKENIZERS = ("tokenizer", "assistant_tokenizer")
_PARAMETERS = ("streamer", "assistant_model")


class AskedSignature(inspect.Signature):
    """A signature that hands the tokenizers over when `generate` reads it. Elsewhere it is like any other."""

    __slots__ = ()

    @property
    def parameters(self) -> Any:
        """The parameters, by name."""
        _put_tokenizers_back()
        return super().parameters


def dropped_arguments(model: Any) -> dict[str, Any]:
    """What the running `model.generate` was given and did not hand over; empty where none is running."""
    frame, _ = _running_generate()
    if frame is None or frame.f_locals.get("self") is not model:
        return {}
    return {name: frame.f_locals.get(name) for name in _PARAMETERS if frame.f_locals.get(name) is not None}


def _put_tokenizers_back() -> None:
    frame, popped = _running_generate()
    if frame is None:
        return
    if popped.get("synced_gpus"):  # given, or found out by transformers: nothing of it reaches the call
        raise ConfigurationError(NO_SYNC)
    keywords = frame.f_locals["kwargs"]
    for name in _TOKENIZERS:
        if popped.get(name) is not None:
            keywords.setdefault(name, popped[name])


def _running_generate() -> tuple[FrameType | None, Mapping[str, Any]]:
    """The innermost running `generate`, and the arguments that it has taken out of its keyword arguments just now."""
    from transformers import GenerationMixin

    code = inspect.unwrap(GenerationMixin.generate).__code__
    popped: Mapping[str, Any] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        popped = frame.f_locals.get("generation_mode_kwargs") or popped
        frame = frame.f_back
    return frame, popped
