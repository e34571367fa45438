"""Fields that responses of several APIs share: usage, statistics and the record of the speculation."""

from __future__ import annotations

import hashlib
import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from draftree.core.types import SequenceRecord
from draftree.outputs import Completion, CompletionStats
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.logprobs import TokenTexts
from draftree.serve.pool import ServedModel
from draftree.serve.schema import SamplingBody
from draftree.version import __version__

PREDICTION = "prediction"


def usage_json(job: Job) -> dict[str, Any]:
    """Return `usage` of all texts so far; each prompt counts once."""
    stats = job.stats()
    prompts = sum(len(submission.prompt_ids) for submission in job.submissions)
    written = 0 if job.drops_text else sum(each.completion_tokens for each in stats)
    usage: dict[str, Any] = {
        "prompt_tokens": prompts,
        "completion_tokens": written,
        "total_tokens": prompts + written,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in stats[:: job.options.n])},
    }
    details: dict[str, int] = {}
    reasoning = job.reasoning
    sequences = [sequence for submission in job.submissions for sequence in submission.sequences]
    if reasoning is not None and all(sequence.is_finished for sequence in sequences):
        outputs = (sequence.history.output.tolist() for sequence in sequences)
        details["reasoning_tokens"] = sum(reasoning.num_tokens(ids, job.served.texts) for ids in outputs)
    if job.options.prediction is not None:
        accepted = sum(_of_prediction(each.accepted_by_source, each.accepted_tokens) for each in stats)
        drafted = sum(_of_prediction(each.drafted_by_source, each.draft_tokens) for each in stats)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {**usage, "completion_tokens_details": details} if details else usage


def _of_prediction(by_source: Mapping[str, int], total: int) -> int:
    """Return the tokens of the drafter that reads predictions; trees of a single drafter name no sources."""
    if not by_source:
        return total
    return sum(count for source, count in by_source.items() if source.partition(",")[0] == PREDICTION)


def metrics_json(job: Job) -> dict[str, Any]:
    """Return the field `metrics` with the speculation of all texts; nothing for texts without a drafter."""
    return {} if job.is_plain else {"metrics": {"speculative_decoding": speculation_json(job.stats())}}


def speculation_json(stats: Sequence[CompletionStats]) -> dict[str, Any]:
    """Return the statistics with vLLM's names."""
    rounds = sum(each.rounds for each in stats)
    drafted = sum(each.draft_tokens for each in stats)
    accepted = sum(each.accepted_tokens for each in stats)
    depth = max((len(each.drafted_by_depth) for each in stats), default=0)
    by_depth = itertools.zip_longest(range(depth), *(each.accepted_by_depth[:depth] for each in stats), fillvalue=0)
    reached = [rounds, *(sum(counts) for _, *counts in by_depth), 0]
    histogram = [more - less for more, less in itertools.pairwise(reached)]
    return {
        "mean_acceptance_length": 1 + accepted / rounds if rounds else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": depth,
    }


def round_json(index: int, record: SequenceRecord, texts: TokenTexts, *, draft: str) -> dict[str, Any]:
    """Return one round of a text: the scored tree, its accepted nodes, the bonus, and the target tokens.

    `target_tokens` has one token for each row: the root's first, then each node's.
    """

    def shown(token: int) -> dict[str, Any]:
        return {"id": token, "text": texts.text_of(token)}

    tree, accepted = record.tree, set(record.path)
    sources = tree.sources or ((draft,),) * len(tree)
    nodes = [
        {
            **shown(token),
            "parent": parent,
            "accepted": place in accepted,
            "sources": list(sources[place]),
        }
        for place, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True))
    ]
    return {
        "index": index,
        "position": record.prefix_length,
        "nodes": nodes,
        "bonus": None if record.bonus is None else shown(record.bonus),
        "target_tokens": [shown(token) for token in record.picks],
    }


def closing_json(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the end of the `draftree` object: the planner's reason and the statistics of each choice."""
    stats = [completion.to_json()["stats"] for completion in completions]
    explain = next((each["explain"] for each in stats if each["explain"]), "")
    return {"explain": explain, "stats": stats}


@dataclass(frozen=True, slots=True)
class Head:
    id: str
    model: ServedModel
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, prefix: str, body: SamplingBody, model: ServedModel) -> Head:
        """Return the head of the response to a body; its `request_id` becomes a part of the id."""
        joint = "-" if prefix.endswith("cmpl") else "_"  # as in OpenAI's API
        return cls(f"{prefix}{joint}{body.request_id or uuid.uuid4().hex}", model)

    def fields(self, kind: str) -> dict[str, Any]:
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
    """The `draftree` object of a response: pieces with their origin, rounds, and the statistics at the end."""

    def __init__(self, job: Job, body: SamplingBody) -> None:
        self._job, self._wanted = job, body.reports
        self._parts: list[dict[str, Any]] = []

    def add(self, choice: ChoiceUpdate) -> None:
        self._parts.append(self.part(choice))

    def part(self, choice: ChoiceUpdate) -> dict[str, Any]:
        job, report = self._job, dict[str, Any]()
        if self._wanted.pieces:
            report["pieces"] = [
                {
                    "index": choice.index,
                    "text": piece.text,
                    "origin": "plain" if job.is_plain else "drafted" if piece.drafted else "target",
                }
                for piece in choice.update.pieces
            ]
        if self._wanted.rounds:
            texts = job.served.texts
            rounds = choice.update.rounds
            report["rounds"] = [round_json(choice.index, record, texts, draft=job.draft) for record in rounds]
        return report

    def fields(self, completions: Sequence[Completion]) -> dict[str, Any]:
        if not self.is_wanted:
            return {}
        names = [name for name in ("pieces", "rounds") if getattr(self._wanted, name)]
        parts = {name: [row for part in self._parts for row in part[name]] for name in names}
        return {"draftree": {**parts, **closing_json(completions)}}

    @property
    def is_wanted(self) -> bool:
        return self._wanted.pieces or self._wanted.rounds


def last_chunk(job: Job, body: SamplingBody) -> dict[str, Any] | None:
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    wants_report = Report(job, body).is_wanted
    if not wants_usage and not wants_report:
        return None
    chunk: dict[str, Any] = {"choices": []}
    if wants_usage:
        chunk |= closing_fields(job)
    if wants_report:
        chunk["draftree"] = closing_json(job.completions())
    return chunk


def closing_fields(job: Job) -> dict[str, Any]:
    return {"usage": usage_json(job), **metrics_json(job)}


def usage_so_far(job: Job, body: SamplingBody, num_sent: int) -> dict[str, Any]:
    """Return the `usage` field of a chunk with text, as `stream_options` request it."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return {}
    if not options.continuous_usage_stats:
        return {"usage": None}
    usage = usage_json(job)
    written = 0 if job.drops_text else num_sent
    return {"usage": usage | {"completion_tokens": written, "total_tokens": usage["prompt_tokens"] + written}}
