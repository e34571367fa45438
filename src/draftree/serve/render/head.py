"""Fields that all objects of one response share."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from draftree.completion import Completion
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.pool import ServedModel
from draftree.serve.render.report import closing_json, metrics_json, pieces_json, round_json, usage_json
from draftree.serve.schema.common import SamplingBody
from draftree.version import __version__


@dataclass(frozen=True, slots=True)
class Head:
    """Identity of one response.

    Attributes:
        id: of the response.
        model: the served model.
        created: seconds since 1970.
    """

    id: str
    model: ServedModel
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, prefix: str, body: SamplingBody, model: ServedModel) -> Head:
        """Return the head of the response to a body; its `request_id` becomes a part of the id."""
        joint = "-" if prefix.endswith("cmpl") else "_"  # as in OpenAI's API
        return cls(f"{prefix}{joint}{body.request_id or uuid.uuid4().hex}", model)

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields of an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": fingerprint(self.model),
        }


@cache
def fingerprint(model: ServedModel) -> str:
    """Return a name of what determines a text besides the request: the version, the model, its dtype and kernels."""
    llm = model.llm.llm
    parts = (
        __version__,
        model.name,
        str(llm.model.dtype),
        llm.kernels,
        str(llm.quantization),
        str(llm.model.vocab_size),
    )
    return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


class Report:
    """The `draftree` object of a response: pieces with their origin, rounds, and the statistics at the end.

    Args:
        job: the texts.
        body: its `draftree` field says what is wanted.
    """

    def __init__(self, job: Job, body: SamplingBody) -> None:
        self._job, self._wanted = job, body.reports
        self._found: list[dict[str, Any]] = []

    def add(self, found: ChoiceUpdate) -> None:
        """Keep the part of an update for a response that is not streamed."""
        self._found.append(self.part(found))

    def part(self, found: ChoiceUpdate) -> dict[str, Any]:
        """Return the object of one update; empty if nothing was requested."""
        job, report = self._job, dict[str, Any]()
        if self._wanted.pieces:
            report["pieces"] = pieces_json(found.index, found.update, is_plain=job.is_plain)
        if self._wanted.rounds:
            texts, rounds = job.served.texts, found.update.rounds
            report["rounds"] = [round_json(found.index, record, texts, draft=job.draft) for record in rounds]
        return report

    def fields(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the `draftree` field of a whole response; empty if nothing was requested."""
        if not self.is_wanted:
            return {}
        names = [name for name in ("pieces", "rounds") if getattr(self._wanted, name)]
        parts = {name: [row for part in self._found for row in part[name]] for name in names}
        return {"draftree": {**parts, **closing_json(completions)}}

    @property
    def is_wanted(self) -> bool:
        """Whether the request asked for any of it."""
        return self._wanted.pieces or self._wanted.rounds


def last_chunk(job: Job, body: SamplingBody) -> dict[str, Any] | None:
    """Return the own fields of the chunk after all text: usage and statistics; None if neither was requested."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    wants_report = Report(job, body).is_wanted
    if not wants_usage and not wants_report:
        return None
    chunk: dict[str, Any] = {"choices": []}
    if wants_usage:
        chunk["usage"] = usage_json(job)
        metrics = metrics_json(job)
        if metrics is not None:
            chunk["metrics"] = metrics
    if wants_report:
        chunk["draftree"] = closing_json(job.completions())
    return chunk


def closing_fields(job: Job) -> dict[str, Any]:
    """Return usage and statistics of a whole response."""
    metrics = metrics_json(job)
    return {"usage": usage_json(job), **({} if metrics is None else {"metrics": metrics})}


def usage_so_far(job: Job, body: SamplingBody, num_sent: int) -> dict[str, Any]:
    """Return the `usage` field of a chunk with text, as `stream_options` request it.

    Args:
        job: the texts, which may be longer than what is sent.
        body: of the request.
        num_sent: tokens of all choices in the chunks so far, this one included.
    """
    options = body.stream_options
    if options is None or not options.include_usage:
        return {}
    if not options.continuous_usage_stats:
        return {"usage": None}
    usage = usage_json(job)
    written = 0 if job.options.drops_text else num_sent
    return {"usage": usage | {"completion_tokens": written, "total_tokens": usage["prompt_tokens"] + written}}
