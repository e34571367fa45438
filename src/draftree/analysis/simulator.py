"""Simulation of a recorded run under another planner: no model, no drafter, the same text.

Under a verifier that preserves the text, the target's pick after any token of the text is the next token of the text.
So a trace determines for every drafted node whether it would have been accepted. If another planner reaches a position
at which the recorded one did not stop, its draft is the rest of the last recorded tree at that position, or empty;
`--plan watch` records a draft at every position, so nothing is missing. Seconds are the recorded ones if a round equals
the recorded round, otherwise those of a cost model.

Costs microseconds per round. It cannot reproduce drafts deeper than the recorded ones, nor the state that a drafter
learns from verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftree.analysis.held import cut_to, depth_of
from draftree.analysis.trace import Step, Trace, TracedRound
from draftree.analysis.trace_costs import CostModel
from draftree.core.node_map import NodeMap, prune
from draftree.core.tree import EMPTY, TokenTree, depths, follow
from draftree.core.types import MAX_NODES, Budget, RoundRecord, SequenceRecord
from draftree.planners.base import Planner


@dataclass(frozen=True, slots=True)
class Simulated:
    """Totals of a simulated run.

    Attributes:
        rounds: rounds of the whole batch.
        steps: rounds, counted per sequence.
        tokens: tokens written.
        seconds: seconds of the rounds, without each sequence's first, which includes its prefill.
        tokens_after_first: tokens written in those rounds.
        drafted: nodes that were scored.
        accepted: scored nodes that were written.
        missing: steps at which the planner requested a draft and the trace had none.
    """

    rounds: int
    steps: int
    tokens: int
    seconds: float
    tokens_after_first: int
    drafted: int
    accepted: int
    missing: int

    @property
    def acceptance_length(self) -> float:
        """Tokens written per round and sequence."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode tokens per second, first rounds excluded."""
        return self.tokens_after_first / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Script:
    """One recorded sequence: its text, and the drafts by position. The simulation advances `place`."""

    name: str
    start: int
    limit: int
    text: list[int]
    steps: dict[int, Step]
    first_round: int
    place: int = 0
    state: Any = None
    overhang: tuple[int, ...] = ()
    """Accepted tokens after the end of the text, which a stop cut off."""

    @property
    def is_done(self) -> bool:
        """Whether all of the text is written."""
        return self.place - self.start >= len(self.text)

    def coming(self) -> list[int]:
        """Return the remaining text and the tokens that were picked after its end."""
        return [*self.text[self.place - self.start :], *self.overhang]

    def drafted(self) -> TokenTree | None:
        """Return the draft at this position; None if the trace has none."""
        step = self.steps.get(self.place)
        if step is not None:
            return step.tree
        for position in range(self.place - 1, self.start - 1, -1):
            if position in self.steps:
                written = self.text[position - self.start : self.place - self.start]
                return below(self.steps[position].tree, written)
        return None


def below(tree: TokenTree, tokens: Sequence[int]) -> TokenTree | None:
    """Return the subtree after these tokens; None if the tree does not contain them."""
    way = follow(tree, tokens)
    if len(way) < len(tokens):
        return None
    root = way[-1]
    rest = NodeMap.below(tree.parents, root).cut(tree)
    return replace(rest, scores=tuple(score - tree.scores[root] for score in rest.scores))


def scripts_of(trace: Trace) -> list[Script]:
    """Return the sequences of a trace, in order of admission."""
    found: dict[str, Script] = {}
    for number, one in enumerate(trace.rounds):
        for step in one.steps:
            script = found.get(step.sequence)
            if script is None:
                limit = step.prefix + step.room
                script = found[step.sequence] = Script(step.sequence, step.prefix, limit, [], {}, number, step.prefix)
            script.steps[step.prefix] = step
            script.text += step.tokens[: step.num_written]
            script.overhang = step.tokens[step.num_written :]
    return list(found.values())


@dataclass(slots=True)
class Simulation:
    """One planner over one trace. Mutated by `run`.

    Attributes:
        trace: the recorded run.
        planner: a fresh planner.
        costs: cost model of rounds that were not recorded.
    """

    trace: Trace
    planner: Planner[Any]
    costs: CostModel
    counts: dict[str, float] = field(default_factory=dict)

    def run(self) -> Simulated:
        """Run all sequences to their ends, with the recorded concurrency."""
        self.counts = dict.fromkeys(Simulated.__dataclass_fields__, 0)
        if self.planner.wants_costs:
            self.planner.learn_costs(self.trace.header.pass_seconds)
        recorded = {tuple((s.sequence, s.prefix) for s in one.steps): one for one in self.trace.rounds}
        waiting, running = scripts_of(self.trace), list[Script]()
        number = 0
        while waiting or running:
            if not running:
                number = max(number, waiting[0].first_round)
            while waiting and waiting[0].first_round <= number:
                waiting[0].state = self.planner.open()
                running.append(waiting.pop(0))
            self._round(running, recorded)
            running = [script for script in running if not script.is_done]
            number += 1
        return Simulated(**self.counts)  # type: ignore[arg-type]

    def _round(self, running: Sequence[Script], recorded: Mapping[Any, TracedRound]) -> None:
        states = [script.state for script in running]
        held = [
            budget.within(MAX_NODES, script.limit - script.place - 1)
            for budget, script in zip(self.planner.budgets(states), running, strict=True)
        ]
        offered = [self._drafted(script, budget) for script, budget in zip(running, held, strict=True)]
        one = recorded.get(tuple((script.name, script.place) for script in running))
        same_draft = one is not None and all(tree == step.tree for tree, step in zip(offered, one.steps, strict=True))
        drafting = self._part_seconds(held, offered, one if same_draft else None)
        kept: list[Sequence[int] | None] = [None] * len(running)
        if any(map(len, offered)):
            kept = self.planner.trim(
                states, offered, draft_seconds=one.seconds["draft"] if one is not None and same_draft else sum(drafting)
            )
        trees = [tree if nodes is None else prune(tree, nodes) for tree, nodes in zip(offered, kept, strict=True)]
        same = (
            same_draft
            and one is not None
            and all(
                (None if nodes is None else tuple(nodes)) == step.kept
                for nodes, step in zip(kept, one.steps, strict=True)
            )
        )
        rows = tuple(self._walk(*given) for given in zip(running, trees, offered, strict=True))
        record = self._record(rows, drafting, one if same else None)
        firsts = [script.place == script.start for script in running]
        self._count(record, is_first=any(firsts))
        self.planner.observe(states, record)
        for script, row in zip(running, rows, strict=True):
            script.place += row.num_written

    def _drafted(self, script: Script, budget: Budget) -> TokenTree:
        if not budget.num_nodes or not budget.depth:
            return EMPTY
        tree = script.drafted()
        self.counts["missing"] += tree is None
        return EMPTY if tree is None else cut_to(tree, budget, self.trace.header.parts)

    def _part_seconds(
        self, budgets: Sequence[Budget], trees: Sequence[TokenTree], one: TracedRound | None
    ) -> tuple[float, ...]:
        if one is not None:
            return one.part_seconds or (one.seconds["draft"],)
        names = [part.name for part in self.trace.header.parts]
        parts = range(len(names))
        planned = [max((b.of_part(p).depth if b.num_nodes else 0) for b in budgets) for p in parts]
        return tuple(
            self.costs.draft_seconds(part, min(depth, max(depth_of(tree, names[part]) for tree in trees)))
            if depth
            else 0.0
            for part, depth in zip(parts, planned, strict=True)
        )

    @staticmethod
    def _walk(script: Script, tree: TokenTree, offered: TokenTree) -> SequenceRecord:
        coming = script.coming()
        # after the end of the known text nothing is known: the last token is always a pick
        path = follow(tree, coming[:-1])
        written = min(len(path) + 1, len(coming) - len(script.overhang))
        return SequenceRecord(
            script.name,
            script.place,
            len(tree),
            max(depths(tree.parents), default=0),
            min(written, len(path)),
            written,
            len(path),
            drafted=offered,
            tree=tree,
            path=tuple(path),
            bonus=coming[len(path)],
            room=script.limit - script.place,
        )

    def _record(
        self, rows: tuple[SequenceRecord, ...], drafting: tuple[float, ...], one: TracedRound | None
    ) -> RoundRecord:
        part_seconds = drafting if len(drafting) > 1 and any(len(row.drafted) for row in rows) else ()
        if one is not None:
            seconds = {f"{name}_seconds": value for name, value in one.seconds.items()}
            return RoundRecord(**seconds, num_rows=one.num_rows, sequences=rows, part_seconds=part_seconds)  # type: ignore[arg-type]
        num_rows = len(rows) + sum(row.num_drafted for row in rows)
        prefix = sum(row.prefix_length for row in rows) // len(rows)
        score = self.costs.pass_seconds(num_rows, batch=len(rows), prefix=prefix)
        draft = sum(drafting)
        return RoundRecord(0.0, draft, score, 0.0, 0.0, draft + score, num_rows, rows, part_seconds)

    def _count(self, record: RoundRecord, *, is_first: bool) -> None:
        counts, rows = self.counts, record.sequences
        counts["rounds"] += 1
        counts["steps"] += len(rows)
        counts["tokens"] += sum(row.num_written for row in rows)
        counts["drafted"] += sum(row.num_drafted for row in rows)
        counts["accepted"] += sum(row.num_accepted for row in rows)
        if not is_first:
            counts["seconds"] += record.total_seconds
            counts["tokens_after_first"] += sum(row.num_written for row in rows)
