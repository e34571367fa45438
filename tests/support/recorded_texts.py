"""Recorded texts of a real model, and replays of drafters on them without the model. Not a test itself.

    python tests/support/recorded_texts.py

writes the texts and the tokens per pass again, after a change that is meant to alter them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftree import LLM, SamplingParams
from draftree.lab.bench.workload import encode, read_workload
from draftree.lab.tune.replays import MeasuredCosts, record_text
from draftree.models.replay import RecordedText, ReplayClock, ReplayModel
from draftree.models.table import TableLM, hashed

FILE = Path(__file__).parents[1] / "speed" / "recorded_texts.json"
MODEL = "smollm2-135m-instruct"
LIMIT, MAX_TOKENS, LONGEST = 2, 64, 400
TEMPERATURES = (0.0, 0.8)
METHODS = (
    ("ngram", "fixed"),
    ("ngram,k=4", "heuristic"),
    ("suffix", "fixed"),
    ("suffix", "additive"),
    ("lookahead", "fixed"),
    ("ngram+suffix", "fixed"),
)
COSTS = MeasuredCosts({1: 1.0})


def write() -> None:
    """Record texts of the model on shipped prompts, and what each method does with them."""
    llm = LLM(MODEL, "none", dtype="float32", max_batch_size=1)
    assert llm.tokenizer is not None
    lines: list[dict[str, Any]] = []
    for task in read_workload().choose((), LIMIT).tasks:
        ids, _ = encode(task, llm.tokenizer)
        for temperature in TEMPERATURES if len(ids) <= LONGEST else ():
            llm.forget()
            text = record_text(llm, ids, params_at(temperature))
            lines.append({"task": task.id, "temperature": temperature, "prompt": ids, "tokens": list(text.tokens)})
    texts = [text_of(line) for line in lines]
    found = {f"{draft}@{plan}": rounds_of(texts, draft, plan, llm.model.vocab_size) for draft, plan in METHODS}
    content = {"model": MODEL, "vocab_size": llm.model.vocab_size, "rounds": found, "texts": lines}
    FILE.write_text(json.dumps(content) + "\n", encoding="utf-8")


def params_at(temperature: float) -> SamplingParams:
    """Parameters of the recorded texts."""
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=1, ignore_eos=True)


def text_of(line: dict[str, Any]) -> RecordedText:
    """One line of the file."""
    return RecordedText(tuple(line["prompt"]), tuple(line["tokens"]), params_at(line["temperature"]), seed=1)


def rounds_of(texts: Sequence[RecordedText], draft: str, plan: str, vocab_size: int) -> list[int]:
    """Rounds of each text with a method, without the recorded model."""
    clock = ReplayClock(lambda: 0.0)
    model = ReplayModel(TableLM(hashed(2, seed=0)), COSTS, clock)
    model.vocab_size, model.max_length = vocab_size, 4096
    llm = LLM(model, draft, plan=plan, max_batch_size=1, clock=clock)
    found = []
    for text in texts:
        model.text = text
        llm.forget()
        (done,) = llm.generate([list(text.prompt)], text.params, progress=False)
        assert done.token_ids == text.tokens
        found.append(done.stats.rounds)
    return found


if __name__ == "__main__":
    write()
