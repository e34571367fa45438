"""Runs as plain values for --json."""

from __future__ import annotations

import json
import math
from typing import Any

from draftree.cli.writing import Run
from draftree.drafters import NO_DRAFT
from draftree.models.base import LanguageModel

__all__ = ["dump", "report"]


def report(run: Run, model: LanguageModel) -> dict[str, Any]:
    """Return configuration and results: one text inline, several in a list."""
    setup = run.setup
    texts = [completion.to_json() for completion in run.completions]
    return {
        "model": setup.model,
        "draft": NO_DRAFT if setup.is_plain else setup.draft,
        "verify": setup.verify,
        "plan": None if setup.is_plain else setup.methods().plan,
        "chat": run.task.chat,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": run.completions[0].stats.kernels,
        "kernels_reason": run.completions[0].stats.kernels_reason,
        "lossless": run.completions[0].lossless,
        "promise": str(run.completions[0].stats.promise),
        "prompt_tokens": run.completions[0].stats.prompt_tokens,
        "seconds": run.seconds,
        **(texts[0] if len(texts) == 1 else {"completions": texts}),
    }


def dump(values: dict[str, Any]) -> str:
    """Return strictly valid JSON: a logarithm of zero becomes null."""
    return json.dumps(finite(values), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
