"""Traces of a server: one file for every served model, written by the engines' threads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, final

from draftree.core.types import RoundRecord
from draftree.engine.trace import TraceHeader, TraceWriter
from draftree.serve.settings import ServerSettings
from draftree.text.retokenize import pieces_of
from draftree.version import __version__

if TYPE_CHECKING:
    from draftree.serve.pool import ServedModel

__all__ = ["ServerTraces", "trace_paths"]


def trace_paths(settings: ServerSettings) -> list[Path]:
    """Return the files of the traces, one for each model in their order; none unless traces are requested."""
    if settings.record is None:
        return []
    path = Path(settings.record)
    if len(settings.models) == 1:
        return [path]
    names = [re.sub(r"[^\w.+-]+", "_", choice.name) for choice in settings.models]
    return [path.with_stem(f"{path.stem}-{name}") for name in names]


@final
class ServerTraces:
    """The open traces of a server; does nothing unless the settings request traces.

    Args:
        settings: of the server.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        names = [choice.name for choice in settings.models]
        self._paths = dict(zip(names, trace_paths(settings), strict=False))
        self._open: list[tuple[TraceWriter, IO[str], ServedModel]] = []

    def begin(self, model: ServedModel) -> Callable[[RoundRecord], None] | None:
        """Write the first line of a model's trace; returns the listener of its rounds, None without a trace."""
        path = self._paths.get(model.name)
        if path is None:
            return None
        llm, settings = model.llm.llm, self._settings
        stream = path.open("x", encoding="utf-8", buffering=1)  # complete lines, also of a server that is killed
        writer = TraceWriter(stream)
        draft = (llm.drafts or ("none",))[0]
        about = {"drafts": list(llm.drafts), "kernels": llm.kernels, "dtype": settings.dtype, "draftree": __version__}
        plan = settings.plan or "auto"
        parts, seconds = llm.planner.parts, llm.planner.pass_seconds
        writer.begin(TraceHeader(model.name, draft, settings.verify, plan, parts, seconds, about))
        llm.requests.records_picks = True
        self._open.append((writer, stream, model))
        return writer

    def close(self) -> None:
        """Write the texts of the tokens, and close the files; the engines have ended."""
        for writer, stream, model in self._open:
            writer.end(pieces_of(model.tokenizer))
            stream.close()
        self._open = []
