"""Small captures of training data. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from draftree import LLM
from draftree.loading.loaded import LoadedModel
from draftree.models.base import LanguageModel
from draftree.models.table import TableLM, hashed
from draftree.train.data.capture import Capture, CaptureSettings
from draftree.train.data.prompts import DataPrompt, PromptSet
from text_backends import byte_level

VOCAB = 430
WORDS = ("fox", "dog", "sleep", "run", "quick", "lazy", "jump", "over", "brown", "gone", "add", "first", "second")


@cache
def backend() -> Any:
    return byte_level()


def table(seed: int = 5) -> TableLM:
    # small logits: texts end at different lengths
    model = TableLM(hashed(VOCAB, seed=seed), order=2, num_features=3)
    model.num_layers, model.fingerprint = 2, f"table {seed}"
    return model


def prompts(count: int = 12) -> PromptSet:
    made = []
    for number in range(count):
        text = " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 3 + number % 5))
        made.append(DataPrompt.of_text(f"{number} {text}"))
    system = {"role": "system", "content": "Be brief."}
    made[1] = DataPrompt((system, {"role": "user", "content": "The quick fox?"}))
    return PromptSet("own", made, "MIT")


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def capture_of(
    model: LanguageModel | None = None,
    sets: Sequence[PromptSet] | None = None,
    *,
    draft: str | None = None,
    **settings: Any,
) -> Capture:
    loaded = LoadedModel(table() if model is None else model, None, (2, 4, *range(5, 30)), "table")
    llm = LLM(loaded, draft, tokenizer=backend(), plan=None if draft is None else "fixed:2")
    chosen = {"max_tokens": 12, "batch": 3, "features": "0,2,1", **settings}
    return Capture(llm, loaded, [prompts()] if sets is None else sets, CaptureSettings(**chosen))
