"""Arms that write texts in turns; for the benchmarks beside this file.

A run appends a line to a results file for each prompt (or batch of prompts) of each arm, and goes on where an earlier
run with the same file ended. `text_sums.py` sums such files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord


class Arm(Protocol):
    """One of the configurations that are compared."""

    @property
    def name(self) -> str: ...


class TimedLLM:
    """An engine without cached prefixes whose rounds are timed.

    Args:
        target: a model, as for `LLM`.
        draft: spec of the drafter; None decodes plainly.
        plan: of `LLM`.

    Attributes:
        llm: the engine.
    """

    def __init__(self, target: Any, draft: str | None, *, plan: str | None) -> None:
        self._rounds: list[tuple[float, RoundRecord]] = []
        self.llm = LLM(target, draft, plan=plan, on_round=self._note, prefix_cache_size=0)

    def _note(self, record: RoundRecord) -> None:
        self._rounds.append((time.perf_counter(), record))

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
        """Generate texts; `seconds` include their prompts, `first_seconds` are those of the first round.

        Seconds of drafts and passes are those after the first round. `rounds_of_sequences` counts a round of n texts n
        times.
        """
        self._rounds.clear()
        start = time.perf_counter()
        texts = [list(text.token_ids) for text in self.llm.generate(prompts, params)]
        seconds = time.perf_counter() - start
        records = [record for _, record in self._rounds]
        rows = [row for record in records for row in record.sequences]
        return {
            "rounds": len(records),
            "rounds_of_sequences": len(rows),
            "tokens": sum(map(len, texts)),
            "nodes": sum(row.num_drafted for row in rows),
            "seconds": round(seconds, 4),
            "first_seconds": round(self._rounds[0][0] - start, 4),
            "first_tokens": sum(row.num_written for row in records[0].sequences),
            "draft_seconds": round(sum(record.draft_seconds for record in records[1:]), 4),
            "score_seconds": round(sum(record.score_seconds for record in records[1:]), 4),
            "token_ids": texts,
        }


class ResultsFile:
    """A file with a line for each prompt of each arm.

    Args:
        path: where it is; it may not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._done = {(line["arm"], line["prompt"]) for line in map(json.loads, lines)}

    def lacks(self, arm: str, prompt: str) -> bool:
        """Return whether there is no line of this arm and prompt."""
        return (arm, prompt) not in self._done

    def take_turns(
        self, arms: Sequence[Arm], prompts: Sequence[str], line_of: Callable[[Any, str], dict[str, Any]], *, end: float
    ) -> None:
        """Append the missing lines, prompt by prompt; another arm is the first at each prompt.

        Args:
            arms: all arms.
            prompts: names of the prompts.
            line_of: measures an arm on a prompt, and returns the rest of the line.
            end: on the clock `time.monotonic`; no prompt begins that would end later, if it takes as long as the
                slowest one before.
        """
        slowest = 0.0
        with self._path.open("a", encoding="utf-8") as out:
            for turn, prompt in enumerate(prompts):
                start = time.monotonic()
                if start + slowest > end:
                    return
                for place in range(len(arms)):
                    arm = arms[(turn + place) % len(arms)]
                    if self.lacks(arm.name, prompt):
                        out.write(json.dumps({"arm": arm.name, "prompt": prompt, **line_of(arm, prompt)}) + "\n")
                        out.flush()
                slowest = max(slowest, time.monotonic() - start)
