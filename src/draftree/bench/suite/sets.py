"""Prompt sets of a suite: the shipped prompts, Spec-Bench and HumanEval, as one workload.

A set is read from a file of the user. Ids and categories get the set's name before them, as in `spec-bench/writing`.
Questions of Spec-Bench may have several turns; later ones are run after the model's own answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftree.bench.workload import SHIPPED, Task, Workload, read_workload
from draftree.core.errors import ConfigurationError
from draftree.core.json_files import parse_json

__all__ = ["HUMANEVAL", "SETS", "SHIPPED_SET", "SPEC_BENCH", "PromptSet", "digest_of", "read_sets"]

SHIPPED_SET, SPEC_BENCH, HUMANEVAL = "shipped", "spec-bench", "humaneval"
SETS = (SHIPPED_SET, SPEC_BENCH, HUMANEVAL)
FIELDS = {SPEC_BENCH: ("question_id", "turns"), HUMANEVAL: ("task_id", "prompt")}
"""Fields that every line of a file in this format has."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """One set of a suite.

    Attributes:
        name: "shipped", "spec-bench" or "humaneval".
        file: its file; None for the shipped prompts.
    """

    name: str
    file: Path | None = None


def read_sets(sets: Sequence[PromptSet]) -> tuple[Workload, list[dict[str, Any]]]:
    """Return the prompts of all sets as one workload, and the facts of each set for submissions.

    Raises:
        ConfigurationError: no set, a file that cannot be read, or one in another format.
    """
    if not sets:
        raise ConfigurationError("there is no prompt set: leave --no-shipped out, or name --spec-bench or --humaneval")
    tasks: list[Task] = []
    facts: list[dict[str, Any]] = []
    for one in sets:
        path = one.file or SHIPPED
        if one.name in FIELDS:
            require_format(path, one.name)
        workload = read_workload(path)
        tasks += [
            replace(task, id=f"{one.name}/{task.id}", category=f"{one.name}/{task.category}") for task in workload.tasks
        ]
        facts.append({"name": one.name, "file": workload.name, "sha256": workload.sha256})
    whole = hashlib.sha256("".join(str(fact["sha256"]) for fact in facts).encode()).hexdigest()
    return Workload("+".join(one.name for one in sets), whole, tuple(tasks)), facts


def require_format(path: Path, name: str) -> None:
    """Check that every line of a file has the fields of a format.

    Raises:
        ConfigurationError: one has not; the message gives its number.
    """
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return  # `read_workload` reports it
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError:
            return  # likewise
        missing = [field for field in FIELDS[name] if not isinstance(entry, dict) or field not in entry]
        if missing:
            raise ConfigurationError(
                f"prompts file {path.name}, line {number} has no '{missing[0]}', so it is not in the format of {name}: "
                f"every line has {' and '.join(FIELDS[name])}"
            )


def digest_of(tasks: Iterable[Task]) -> str:
    """Return the sha256 of ids, categories and texts: equal for the same prompts, whatever the tokenizer."""
    digest = hashlib.sha256()
    for task in tasks:
        content: list[Any] = [task.id, task.category, task.prompt]
        content += [None if task.messages is None else list(task.messages), *([list(task.turns)] if task.turns else [])]
        digest.update((json.dumps(content, ensure_ascii=False, sort_keys=True) + "\n").encode())
    return digest.hexdigest()
