"""Traces of command-line runs: of one text, or of every drafting method of a benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from draftree.assembly import choose_methods
from draftree.cli.writing import Setup
from draftree.core.files import shown_name
from draftree.core.host import cpu_name, usable_cores
from draftree.llm import LLM
from draftree.loading.load import LoadedModel
from draftree.sampling.params import SamplingParams
from draftree.text.retokenize import pieces_of
from draftree.text.tokenizer import Tokenizer
from draftree.version import __version__

if TYPE_CHECKING:
    from draftree.engine.trace import TraceWriter
    from draftree.lab.bench.benchmark import Benchmark

__all__ = ["Recordings", "recorded", "run_facts", "sampling_facts"]


@contextmanager
def recorded(
    path: Path | None, setup: Setup, loaded: LoadedModel, params: SamplingParams | None = None
) -> Iterator[LLM]:
    """Yield the configured methods; every round is recorded as a line of the file."""
    if path is None:
        yield setup.over(loaded)
        return
    from draftree.engine.trace import TraceHeader, TraceWriter

    with path.open("x", encoding="utf-8") as stream:
        writer = TraceWriter(stream)
        llm = setup.over(loaded, on_round=writer)
        llm.requests.records_picks = True
        planner, plan = llm.planner, setup.methods().plan
        about = run_facts(loaded) | ({} if params is None else sampling_facts(llm.requests.resolved(params)))
        parts, seconds = planner.parts, planner.pass_seconds
        writer.begin(TraceHeader(shown_name(setup.model), str(setup.draft), setup.verify, plan, parts, seconds, about))
        yield llm
        writer.end(pieces_of(llm.tokenizer))


def run_facts(loaded: LoadedModel) -> dict[str, Any]:
    """Return facts about a run for the first line of its trace."""
    return {
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "kernels": loaded.kernels,
        "quantization": loaded.quantization,
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
        "draftree": __version__,
    }


def sampling_facts(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that a reader of a trace needs."""
    return {"temperature": params.sampling.temperature, "seed": params.seed, "max_tokens": params.max_tokens}


class Recordings:
    """A folder with a trace of every drafting method; nothing without a folder. Mutated by `of`.

    Args:
        folder: the folder; created with the first trace.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._writers: dict[str, TraceWriter] = {}
        self._tokenizer: Tokenizer | None = None

    def __enter__(self) -> Recordings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writers:
            text_of = pieces_of(self._tokenizer)
            for writer in self._writers.values():
                writer.end(text_of)
        self._files.close()

    def of(self, method: str) -> TraceWriter | None:
        """Return the round callback of a method."""
        from draftree.engine.trace import TraceWriter
        from draftree.lab.bench.methods import PLAIN

        if self._folder is None or method == PLAIN:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.+@,=-]+", "_", method)
        stream = self._files.enter_context((self._folder / f"{name}.jsonl").open("x", encoding="utf-8"))
        self._writers[method] = TraceWriter(stream)
        return self._writers[method]

    def begin(self, ready: Benchmark, model: str) -> None:
        """Write the header lines; called after loading, before the first run."""
        from draftree.engine.trace import TraceHeader
        from draftree.lab.bench.methods import OurMethod
        from draftree.lab.bench.records import OURS
        from draftree.lab.bench.writers import OurWriter

        if not self._writers:
            return
        writer = ready.runner.writers[OURS]
        assert isinstance(writer, OurWriter)
        self._tokenizer, header_of = writer.tokenizer, ready.header
        named = ("dtype", "device", "kernels", "quantization", "temperature", "seed", "max_tokens", "batch", "repeats")
        about = {name: header_of[name] for name in named if name in header_of}
        about |= {"cpu": header_of["machine"]["cpu"], "cores": header_of["machine"]["usable_cores"]}
        about |= {"date": header_of["date"][:10], "draftree": header_of["versions"]["draftree"]}
        for method in ready.runner.methods:
            if method.name in self._writers and isinstance(method.how, OurMethod):
                planner, how = writer.planners[method.name], method.how
                plan = choose_methods(how.draft, how.verify, how.plan).plan
                sizes = (planner.parts, planner.pass_seconds)
                header = TraceHeader(shown_name(model), how.draft, how.verify, plan, *sizes, about)
                self._writers[method.name].begin(header)
