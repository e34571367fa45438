"""Fields that all objects of one response share."""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from draftree.serve.job import Job
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
        return cls(f"{prefix}-{body.request_id or uuid.uuid4().hex}", model)

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


def report_of_update(job: Job, body: SamplingBody, index: int, update: Any) -> dict[str, Any]:
    """Return the `draftree` field of a chunk; empty if it was not requested."""
    wanted = body.reports
    report: dict[str, Any] = {}
    if wanted.pieces:
        report["pieces"] = pieces_json(index, update, is_plain=job.is_plain)
    if wanted.rounds:
        texts = job.served.texts
        report["rounds"] = [round_json(index, record, texts, draft=job.draft) for record in update.rounds]
    return {"draftree": report} if report else {}


def last_chunk(job: Job, body: SamplingBody, fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return the chunk after all text, without choices: usage and statistics; None if neither was requested."""
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    wants_report = body.reports.pieces or body.reports.rounds
    if not wants_usage and not wants_report:
        return None
    chunk = {**fields, "choices": []}
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


def usage_so_far(job: Job, body: SamplingBody) -> dict[str, Any]:
    """Return the `usage` field of a chunk with text, as `stream_options` request it."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return {}
    return {"usage": usage_json(job) if options.continuous_usage_stats else None}
