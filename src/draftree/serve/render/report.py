"""Usage, statistics and the record of the speculation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from draftree.completion import Completion, CompletionStats
from draftree.core.types import SequenceRecord
from draftree.serve.job import Job
from draftree.serve.render.tokens import TokenTexts

PREDICTION = "prediction"
"""The drafter that reads predictions."""


def usage_json(job: Job) -> dict[str, Any]:
    """Return `usage` of all texts so far; each prompt counts once."""
    stats = job.stats()
    prompts = sum(len(submission.prompt_ids) for submission in job.submissions)
    written = 0 if job.options.drops_text else sum(each.completion_tokens for each in stats)
    usage: dict[str, Any] = {
        "prompt_tokens": prompts,
        "completion_tokens": written,
        "total_tokens": prompts + written,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in stats[:: job.params.n])},
    }
    details: dict[str, int] = {}
    reasoning = job.options.reasoning
    sequences = [sequence for submission in job.submissions for sequence in submission.sequences]
    if reasoning is not None and all(sequence.is_finished for sequence in sequences):
        outputs = (sequence.history.output.tolist() for sequence in sequences)
        details["reasoning_tokens"] = sum(reasoning.num_tokens(ids, job.served.texts) for ids in outputs)
    if job.params.prediction is not None:
        accepted = sum(_of_prediction(each.accepted_by_source, each.accepted_tokens) for each in stats)
        drafted = sum(_of_prediction(each.drafted_by_source, each.draft_tokens) for each in stats)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {**usage, "completion_tokens_details": details} if details else usage


def _of_prediction(by_source: Mapping[str, int], total: int) -> int:
    """Return the tokens of the drafter that reads predictions; trees of a single drafter name no sources."""
    return by_source.get(PREDICTION, 0) if by_source else total


def metrics_json(job: Job) -> dict[str, Any] | None:
    """Return `metrics` with the speculation of all texts; None for texts without a drafter."""
    return None if job.is_plain else {"speculative_decoding": speculation_json(job.stats())}


def speculation_json(stats: Sequence[CompletionStats]) -> dict[str, Any]:
    """Return the statistics with vLLM's names."""
    rounds = sum(each.rounds for each in stats)
    drafted = sum(each.draft_tokens for each in stats)
    accepted = sum(each.accepted_tokens for each in stats)
    depth = max((len(each.drafted_by_depth) for each in stats), default=0)
    reached = [rounds] + [sum(_at(each.accepted_by_depth, level) for each in stats) for level in range(depth)] + [0]
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


def _at(counts: Sequence[int], place: int) -> int:
    return counts[place] if place < len(counts) else 0


def pieces_json(index: int, update: Any, *, is_plain: bool) -> list[dict[str, Any]]:
    """Return the pieces of an update with their origin."""
    return [
        {
            "index": index,
            "text": piece.text,
            "origin": "plain" if is_plain else "drafted" if piece.drafted else "target",
        }
        for piece in update.pieces
    ]


def round_json(index: int, record: SequenceRecord, texts: TokenTexts, *, draft: str) -> dict[str, Any]:
    """Return one round of a text: the scored tree, its accepted nodes, the bonus, and the target tokens.

    `target_tokens` has one token for each row: the root's first, then each node's.

    Args:
        index: of the choice.
        record: the round.
        texts: of the model.
        draft: the drafter, the source of nodes without any other.
    """
    tree, accepted = record.tree, set(record.path)
    sources = tree.sources or ((draft,),) * len(tree)
    nodes = [
        {
            "id": token,
            "text": texts.text_of(token),
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
        "bonus": None if record.bonus is None else _token(record.bonus, texts),
        "target_tokens": [_token(token, texts) for token in record.picks],
    }


def _token(token: int, texts: TokenTexts) -> dict[str, Any]:
    return {"id": token, "text": texts.text_of(token)}


def closing_json(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the end of the `draftree` object: the planner's reason and the statistics of each choice."""
    stats = [completion.to_json()["stats"] for completion in completions]
    explain = next((each["explain"] for each in stats if each["explain"]), "")
    return {"explain": explain, "stats": stats}
