"""Runs of a suite: its prompt sets, default methods, and continuation of a run that was interrupted.

A set is read from a file of the user. Ids and categories get the set's name before them, as in `spec-bench/writing`.
Questions of Spec-Bench may have several turns; later ones are run after the model's own answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftree.build import load_for
from draftree.core.errors import ConfigurationError
from draftree.core.files import JsonError, read_json_lines
from draftree.lab.bench.benchmark import Benchmark, BenchSettings, prepare
from draftree.lab.bench.records import Record, RecordFile, read_results
from draftree.lab.bench.workload import SHIPPED, Task, Workload, read_workload
from draftree.loading.auto_draft import auto_candidates
from draftree.loading.resolve import prepared_folder

SHIPPED_SET, SPEC_BENCH, HUMANEVAL = "shipped", "spec-bench", "humaneval"
SETS = (SHIPPED_SET, SPEC_BENCH, HUMANEVAL)
FIELDS = {SPEC_BENCH: ("question_id", "turns"), HUMANEVAL: ("task_id", "prompt")}
"""Fields that every line of a file in this format has."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """One set of a suite, and its file; without a file the shipped prompts."""

    name: str
    file: Path | None = None


def read_sets(sets: Sequence[PromptSet]) -> tuple[Workload, list[dict[str, Any]]]:
    """Return the prompts of all sets as one workload, and the facts of each set for submissions."""
    if not sets:
        raise ConfigurationError("there is no prompt set: omit --no-shipped, or name --spec-bench or --humaneval")
    tasks: list[Task] = []
    facts: list[dict[str, Any]] = []
    for prompt_set in sets:
        path = prompt_set.file or SHIPPED
        if prompt_set.name in FIELDS:
            require_format(path, prompt_set.name)
        workload = read_workload(path)
        tasks += [
            replace(task, id=f"{prompt_set.name}/{task.id}", category=f"{prompt_set.name}/{task.category}")
            for task in workload.tasks
        ]
        facts.append({"name": prompt_set.name, "file": workload.name, "sha256": workload.sha256})
    whole = hashlib.sha256("".join(str(fact["sha256"]) for fact in facts).encode()).hexdigest()
    return Workload("+".join(prompt_set.name for prompt_set in sets), whole, tuple(tasks)), facts


def require_format(path: Path, name: str) -> None:
    try:
        entries = read_json_lines(path)
    except (OSError, JsonError):
        return  # `read_workload` reports it
    for number, entry in enumerate(entries, start=1):
        if missing := [field for field in FIELDS[name] if field not in entry]:
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


WITHOUT_TRAINING = ("ngram", "suffix", "lookahead")
CHAINS = ("ngram", "suffix,width=1")
"""For targets that score chains only."""
SAME = (
    *("model", "draft_models", "dtype", "device", "kernels", "quantization", "threads", "processes", "methods"),
    *("max_tokens", "temperature", "seed", "repeats", "suite", "machine", "versions"),
)
"""Fields of the header that a continued run shares with its beginning."""


@dataclass(frozen=True, slots=True)
class SuiteSettings(BenchSettings):
    """A benchmark whose prompts are these sets, in this order; `prompts` is not used."""

    sets: tuple[PromptSet, ...] = ()


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """A suite that is ready to run, or to be continued: `done` has earlier records by the number of their group."""

    benchmark: Benchmark
    done: Mapping[int, list[Record]]

    @property
    def left(self) -> list[int]:
        return [number for number in range(len(self.benchmark.groups)) if number not in self.done]

    def run(self) -> Iterator[list[Record]]:
        """Yield the records of each group that is left."""
        groups = self.benchmark.groups
        return self.benchmark.runner.run([groups[number] for number in self.left], numbers=self.left)

    def begin(self, lines: RecordFile) -> None:
        """Write the header and the records of the earlier run."""
        lines.add("header", self.benchmark.header)
        for number in sorted(self.done):
            for record in self.done[number]:
                lines.add("record", record)


def prepare_suite(settings: SuiteSettings, *, fetch: Callable[[str], object] = prepared_folder) -> Benchmark:
    """Prepare a suite; without named drafters those are lookups, and the trained head of the package if it has one."""
    if settings.batch != 1:
        raise ConfigurationError("a suite runs one prompt at a time: speeds of prompts in one batch are not separate")
    workload, facts = read_sets(settings.sets)
    chosen = workload.choose(settings.categories, settings.limit)
    target = None
    if not settings.drafts:
        fetch(settings.options.model)
        target = load_for(settings.options)
        trained = [
            candidate.draft
            for candidate in auto_candidates(target)[0]
            if candidate.draft.startswith("head:") and candidate.found is None
        ]
        lookups = WITHOUT_TRAINING if target.model.supports_trees else CHAINS
        settings = replace(settings, drafts=(*lookups, *reversed(trained)))
    ready = prepare(settings, fetch=fetch, workload=chosen, target=target)
    tasks = [prompt.task for group in ready.groups for prompt in group]
    ready.header["suite"] = {
        "sets": facts,
        "categories": list(settings.categories),
        "prompts_sha256": digest_of(tasks),
    }
    return ready


def resumed(ready: Benchmark, journal: Path) -> SuiteRun:
    """Return the run with what an earlier one has in its journal; groups that were not completed are run again."""
    if not journal.exists():
        return SuiteRun(ready, {})
    earlier = read_results(journal)
    other = [name for name in SAME if as_json(earlier.header.get(name)) != as_json(ready.header.get(name))]
    if other:
        raise ConfigurationError(
            f"'{journal}' is of a run with another {other[0]}: run it with the same arguments, on the same machine and "
            "with the same versions, or choose another path"
        )
    if earlier.is_complete:
        raise ConfigurationError(f"'{journal}' is complete, and files are never overwritten: choose another path")
    groups: dict[int, list[Record]] = {}
    for record in earlier.records:
        groups.setdefault(record.group, []).append(record)
    each = len(ready.runner.methods) * ready.runner.repeats
    wanted = [each * sum(len(prompt.task.ids) for prompt in group) for group in ready.groups]
    return SuiteRun(ready, {number: records for number, records in groups.items() if len(records) == wanted[number]})


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))
