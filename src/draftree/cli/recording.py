"""Traces of command-line runs: of one text, or of every drafting method of a benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from draftree.analysis.trace import TraceHeader, TraceWriter
from draftree.assembly import choose_methods
from draftree.bench.benchmark import Benchmark
from draftree.bench.engines import OurWriter
from draftree.bench.methods import PLAIN, OurMethod
from draftree.bench.records import OURS
from draftree.cli.writing import Setup
from draftree.llm import LLM
from draftree.loading.load import LoadedModel

__all__ = ["Recordings", "recorded"]


@contextmanager
def recorded(path: Path | None, setup: Setup, loaded: LoadedModel) -> Iterator[LLM]:
    """Yield the configured methods; every round is recorded as a line of the file."""
    if path is None:
        yield setup.over(loaded)
        return
    with path.open("x", encoding="utf-8") as stream:
        writer = TraceWriter(stream)
        llm = setup.over(loaded, on_round=writer)
        planner, plan = llm.planner, setup.methods().plan
        writer.begin(
            TraceHeader(setup.model, str(setup.draft), setup.verify, plan, planner.parts, planner.pass_seconds)
        )
        yield llm


class Recordings:
    """A folder with a trace of every drafting method; nothing without a folder. Mutated by `of`.

    Args:
        folder: the folder; created with the first trace.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._writers: dict[str, TraceWriter] = {}

    def __enter__(self) -> Recordings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def of(self, method: str) -> TraceWriter | None:
        """Return the round callback of a method."""
        if self._folder is None or method == PLAIN:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.+@,=-]+", "_", method)
        stream = self._files.enter_context((self._folder / f"{name}.jsonl").open("x", encoding="utf-8"))
        self._writers[method] = TraceWriter(stream)
        return self._writers[method]

    def begin(self, ready: Benchmark, model: str) -> None:
        """Write the header lines; called after loading, before the first run."""
        if not self._writers:
            return
        writer = ready.runner.writers[OURS]
        assert isinstance(writer, OurWriter)
        for method in ready.runner.methods:
            if method.name in self._writers and isinstance(method.how, OurMethod):
                planner, how = writer.planners[method.name], method.how
                plan = choose_methods(how.draft, how.verify, how.plan).plan
                header = TraceHeader(model, how.draft, how.verify, plan, planner.parts, planner.pass_seconds)
                self._writers[method.name].begin(header)
