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

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.core.node_map import NodeMap, first_levels, prune
from draftree.core.tree import EMPTY, ROOT, TokenTree, depths, follow
from draftree.core.types import MAX_NODES, Budget, DraftPart, RoundRecord, SequenceRecord
from draftree.engine.trace import Step, Trace, TracedRound
from draftree.planners import PLANNERS
from draftree.planners.base import Planner, require_effect
from draftree.planners.estimates.costs import DraftCosts, PassCosts


def cut_to(tree: TokenTree, budget: Budget, parts: Sequence[DraftPart]) -> TokenTree:
    """Limit a recorded tree to a budget, with the part of each merged drafter limited to its own."""
    named = tree.sources or [[part.name for part in parts]] * len(tree)
    makers = [[part for part in parts if is_by(names, part.name)] for names in named]
    limits = _limits(tree, budget, parts, makers)
    kept: list[int] = []
    whole = {ROOT}
    for node, level in enumerate(depths(tree.parents)):
        if tree.parents[node] in whole and level <= max((limits[part.name] for part in makers[node]), default=0):
            kept.append(node)
            # the limit on survival applies to drafters with calibrated scores
            is_calibrated = bool(tree.scores) and all(part.is_calibrated for part in makers[node])
            survives = not is_calibrated or math.exp(tree.scores[node]) >= budget.min_survival
            if survives and _confidence(tree, node) >= budget.min_confidence:
                whole.add(node)
    held = NodeMap.keeping(tree.parents, kept).cut(tree)
    held = first_levels(held.parents, budget.num_nodes).cut(held)
    # the names of drafters that were skipped go
    skipped = [name for name, limit in limits.items() if not limit]
    sources = [tuple([s for s in names if not any(is_by([s], name) for name in skipped)]) for names in held.sources]
    return replace(held, sources=tuple(sources))


def _limits(
    tree: TokenTree, budget: Budget, parts: Sequence[DraftPart], makers: Sequence[Sequence[DraftPart]]
) -> dict[str, int]:
    """Return the levels of each drafter; 0 for one whose condition is not met."""
    limits = {part.name: budget.of_part(index).depth for index, part in enumerate(parts)}
    if tree.sources:
        earlier = [node for node in range(len(tree)) if any(not part.runs_model for part in makers[node])]
        others = NodeMap.keeping(tree.parents, earlier).cut(tree)
        for part, condition in zip(parts, budget.conditions, strict=False):
            if condition is not None and not condition.is_met([others]):
                limits[part.name] = 0
    return limits


def _confidence(tree: TokenTree, node: int) -> float:
    """Return the drafter's own probability of a node given its parent; 1 if the tree has no scores."""
    if not tree.scores:
        return 1.0
    parent = tree.parents[node]
    return math.exp(tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent]))


def depth_of(tree: TokenTree, name: str) -> int:
    levels = zip(depths(tree.parents), tree.sources or [(name,)] * len(tree), strict=True)
    return max((level for level, names in levels if is_by(names, name)), default=0)


def is_by(names: Sequence[str], part: str) -> bool:
    return any(name == part or name.startswith(f"{part}/") for name in names)


@final
class TraceCosts:
    """Costs from a trace: the measured curve of passes, scaled to the recorded rounds without prefill."""

    def __init__(self, trace: Trace) -> None:
        self._passes = PassCosts()
        self._passes.learn(trace.header.pass_seconds)
        self._drafts = [DraftCosts() for _ in trace.header.parts]
        met: set[str] = set()
        for traced_round in trace.rounds:
            names = {step.sequence for step in traced_round.steps}
            if names <= met:
                self._learn(traced_round)
            met |= names

    def _learn(self, traced_round: TracedRound) -> None:
        drafted = sum(len(s.tree) if s.kept is None else len(s.kept) for s in traced_round.steps)
        batch = len(traced_round.steps)
        draft = traced_round.seconds["draft"]
        if traced_round.num_rows == batch + drafted:
            prefix = sum(step.prefix for step in traced_round.steps) // batch
            seconds = traced_round.seconds["total"] - draft
            self._passes.observe(traced_round.num_rows, batch, prefix, seconds=seconds, is_plain=not draft)
        if deepest := max(max(depths(step.tree.parents), default=0) for step in traced_round.steps):
            for costs, seconds in zip(self._drafts, traced_round.part_seconds or (draft,), strict=False):
                costs.observe(seconds, deepest, unread=0)

    def pass_seconds(self, rows: int, *, batch: int, prefix: int) -> float:
        """Return the seconds of a round without its draft, by the cell of this batch and prefix."""
        if rows == batch:
            return self._passes.plain(batch)
        return self._passes.curve(batch, rows - batch)[-1]

    def draft_seconds(self, part: int, depth: int) -> float:
        """Return the seconds of a draft of `depth` levels by one of the drafters, at the mean cost of a level."""
        return self._drafts[part].of(depth)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Totals of a simulated run; first rounds are those with a prefill.

    Attributes:
        steps: rounds, counted per sequence.
        seconds: seconds of the rounds, without each sequence's first, which includes its prefill.
        drafted: nodes that were scored.
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
        return self.place - self.start >= len(self.text)

    def coming(self) -> list[int]:
        """Return the remaining text and the target tokens after its end."""
        return [*self.text[self.place - self.start :], *self.overhang]

    def drafted(self) -> TokenTree | None:
        """Return the draft at this position; None if the trace has none."""
        position = next((place for place in range(self.place, self.start - 1, -1) if place in self.steps), None)
        if position is None or position == self.place:
            return None if position is None else self.steps[position].tree
        return below(self.steps[position].tree, self.text[position - self.start : self.place - self.start])


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
    scripts: dict[str, Script] = {}
    for number, traced_round in enumerate(trace.rounds):
        for step in traced_round.steps:
            script = scripts.get(step.sequence)
            if script is None:
                limit = step.prefix + step.room
                script = scripts[step.sequence] = Script(step.sequence, step.prefix, limit, [], {}, number, step.prefix)
            script.steps[step.prefix] = step
            script.text += step.tokens[: step.num_written]
            script.overhang = step.tokens[step.num_written :]
    return list(scripts.values())


@dataclass(slots=True)
class Simulation:
    """A fresh planner over one trace, with costs for rounds that were not recorded. Mutated by `run`."""

    trace: Trace
    planner: Planner[Any]
    costs: TraceCosts
    counts: dict[str, float] = field(default_factory=dict)

    def run(self) -> Simulated:
        """Run all sequences to their ends, with the recorded concurrency."""
        self.counts = dict.fromkeys(Simulated.__dataclass_fields__, 0)
        if self.planner.wants_costs:
            self.planner.learn_costs(self.trace.header.pass_seconds)
        recorded = {
            tuple((s.sequence, s.prefix) for s in traced_round.steps): traced_round
            for traced_round in self.trace.rounds
        }
        waiting = scripts_of(self.trace)
        running = list[Script]()
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
        traced_round = recorded.get(tuple((script.name, script.place) for script in running))
        if traced_round is not None and offered != [step.tree for step in traced_round.steps]:
            traced_round = None
        drafting = self._part_seconds(held, offered, traced_round)
        kept: list[Sequence[int] | None] = [None] * len(running)
        if any(map(len, offered)):
            draft_seconds = sum(drafting) if traced_round is None else traced_round.seconds["draft"]
            kept = self.planner.trim(states, offered, draft_seconds=draft_seconds)
        trees = [tree if nodes is None else prune(tree, nodes) for tree, nodes in zip(offered, kept, strict=True)]
        if traced_round is not None and [None if nodes is None else tuple(nodes) for nodes in kept] != [
            step.kept for step in traced_round.steps
        ]:
            traced_round = None
        rows = tuple(map(self._walk, running, trees, offered))
        record = self._record(rows, drafting, traced_round)
        self._count(record, is_first=any(script.place == script.start for script in running))
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
        self, budgets: Sequence[Budget], trees: Sequence[TokenTree], traced_round: TracedRound | None
    ) -> tuple[float, ...]:
        if traced_round is not None:
            return traced_round.part_seconds or (traced_round.seconds["draft"],)
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
        # after the end of the known text nothing is known: the last token is always the bonus
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
        self, rows: tuple[SequenceRecord, ...], drafting: tuple[float, ...], traced_round: TracedRound | None
    ) -> RoundRecord:
        part_seconds = drafting if len(drafting) > 1 and any(len(row.drafted) for row in rows) else ()
        if traced_round is not None:
            seconds = {f"{name}_seconds": value for name, value in traced_round.seconds.items()}
            return RoundRecord(**seconds, num_rows=traced_round.num_rows, sequences=rows, part_seconds=part_seconds)  # type: ignore[arg-type]
        num_rows = len(rows) + sum(row.num_drafted for row in rows)
        prefix = sum(row.prefix_length for row in rows) // len(rows)
        score = self.costs.pass_seconds(num_rows, batch=len(rows), prefix=prefix)
        draft = sum(drafting)
        return RoundRecord(0.0, draft, score, 0.0, 0.0, draft + score, num_rows, rows, part_seconds)

    def _count(self, record: RoundRecord, *, is_first: bool) -> None:
        counts = self.counts
        rows = record.sequences
        counts["rounds"] += 1
        counts["steps"] += len(rows)
        counts["tokens"] += sum(row.num_written for row in rows)
        counts["drafted"] += sum(row.num_drafted for row in rows)
        counts["accepted"] += sum(row.num_accepted for row in rows)
        if not is_first:
            counts["seconds"] += record.total_seconds
            counts["tokens_after_first"] += sum(row.num_written for row in rows)


@dataclass(frozen=True, slots=True)
class Bound:
    """The upper bound for at most `num_nodes` nodes per sequence; speed by the cost model, with free drafts."""

    num_nodes: int
    acceptance_length: float
    tokens_per_second: float


def bounds(trace: Trace, costs: TraceCosts, sizes: Sequence[int]) -> list[Bound]:
    """Return a bound for every size; 0 is plain decoding."""
    upper = []
    for size in sizes:
        rounds = tokens = 0
        seconds = 0.0
        for script in scripts_of(trace):
            while not script.is_done:
                coming = script.coming()
                right = len(follow(script.drafted() or EMPTY, coming[:-1]))
                accepted = min(size, right, len(coming) - 1)
                rounds += 1
                tokens += accepted + 1
                seconds += costs.pass_seconds(1 + accepted, batch=1, prefix=script.place)
                script.place += accepted + 1
        upper.append(Bound(size, tokens / rounds if rounds else 0.0, tokens / seconds if seconds else 0.0))
    return upper


@dataclass(frozen=True, slots=True)
class RankHits:
    """Positions whose next token is the first guess, the second, … among the children of the root."""

    num_positions: int
    num_drafted: int
    hits: tuple[int, ...]

    @property
    def cumulated(self) -> tuple[float, ...]:
        """Share of all positions whose token is among the first 1, 2, … guesses."""
        return tuple(hits / max(1, self.num_positions) for hits in accumulate(self.hits))


def rank_hits(trace: Trace) -> RankHits:
    """Count the hits of a trace by rank; a failed sequence has no next token and is left out."""
    ranks = Counter[int]()
    positions = drafted = width = 0
    for step in (step for traced_round in trace.rounds for step in traced_round.steps if step.tokens):
        guesses = [t for t, parent in zip(step.tree.tokens, step.tree.parents, strict=True) if parent == ROOT]
        ranks[guesses.index(step.tokens[0]) + 1 if step.tokens[0] in guesses else 0] += 1
        positions += 1
        drafted += bool(guesses)
        width = max(width, len(guesses))
    return RankHits(positions, drafted, tuple(ranks[rank] for rank in range(1, width + 1)))


PLAIN = "fixed:0"
BOUND_SIZES = (1, 2, 4, 8, 16)
"""Nodes per round of the bounds, which assume a planner that knows the text."""
RULES = ("coupled", "match")
HEAD = f"{'plan':<20}{'tokens/round':>16}{'scored':>10}{'accepted':>10}{'tokens/s':>10}{'x plain':>9}{'missing':>9}"


def planner_of(trace: Trace, plan: str) -> Planner:
    specs = PLANNERS.parse(plan)
    if len(specs) != 1:
        raise ConfigurationError(f"planner '{plan}' names {len(specs)} methods: name one")
    cls, config = PLANNERS.configure(specs[0])
    parts = trace.header.parts
    depth = max(part.depth for part in parts)
    nodes = sum(part.nodes for part in parts)
    planner = cls(config, default_depth=depth, default_nodes=nodes, parts=parts)
    require_effect(planner, plan=plan, draft=trace.header.draft)
    return planner


def replays(trace: Trace, plans: Sequence[str]) -> str:
    header = trace.header
    if header.verify.split(",")[0] not in RULES:
        raise ConfigurationError(
            f"the trace was verified by '{header.verify}', whose text depends on the draft: "
            f"other plans can be simulated for {' and '.join(RULES)} only"
        )
    costs = TraceCosts(trace)
    runs = {plan: Simulation(trace, planner_of(trace, plan), costs).run() for plan in dict.fromkeys((PLAIN, *plans))}
    plain = runs[PLAIN].tokens_per_second
    lines = [f"{header.model}, {header.draft}, recorded under {header.plan}; seconds from the trace", "", HEAD]
    for plan, run in runs.items():
        ratio = run.tokens_per_second / plain if plain else 0.0
        lines.append(
            f"{'plain' if plan == PLAIN else plan:<20}{run.acceptance_length:>16.2f}{run.drafted:>10}{run.accepted:>10}"
            f"{run.tokens_per_second:>10.1f}{ratio:>9.2f}{run.missing:>9}"
        )
    lines += ["", "bounds: only nodes that will be accepted, free drafts, one sequence at a time"]
    lines += [
        f"{f'{bound.num_nodes} nodes':<20}{bound.acceptance_length:>16.2f}{bound.tokens_per_second:>30.1f}"
        for bound in bounds(trace, costs, BOUND_SIZES)
    ]
    hits = rank_hits(trace)
    counts = f"{hits.num_positions} positions ({hits.num_drafted} drafted)"
    lines += ["", f"the target's next token among the first guesses, of {counts}"]
    return "\n".join(
        [*lines, *(f"{f'first {rank}':<20}{share:>16.3f}" for rank, share in enumerate(hits.cumulated, 1))]
    )
