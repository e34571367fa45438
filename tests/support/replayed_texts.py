"""Recorded texts under the planner `adaptive`, on a machine whose cores something else takes in bursts; no model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftree.core.node_map import prune
from draftree.core.tree import EMPTY, depths, follow
from draftree.core.types import DraftPart, RoundRecord, SequenceRecord
from draftree.engine.trace import Trace
from draftree.lab.analysis.simulation import Script, cut_to, depth_of, scripts_of
from draftree.planners.adaptive import AdaptivePlanner


@dataclass
class Machine:
    """Seconds of passes and drafts. In a burst passes take `slow` times, drafts `draft_slow` times."""

    passes: dict[int, float]
    """Seconds of an undisturbed pass by rows, straight between."""
    levels: dict[int, tuple[float, float]]
    """Seconds of a draft by drafter: the first level, and each further one."""
    after_draft: float = 1.08
    after_lookup: float = 1.02
    draft_slow: float = 1.5
    planning: float = 0.00008
    burst: float = 0.0
    """Mean seconds of a burst; 0 for an idle machine."""
    pause: float = 0.0
    slow: float = 2.0
    noise: float = 0.03
    seed: int = 0
    clock: float = 0.0
    work: float = 0.0
    """Seconds that all of it would have taken undisturbed."""
    dice: random.Random = field(init=False)
    switches: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def take(self, seconds: float, slow: float) -> float:
        """Let work pass; return the seconds that it took."""
        start, step = self.clock, 0.0005
        seconds *= 1 + abs(self.dice.gauss(0, self.noise))
        self.work += seconds
        while seconds > 0:
            speed = 1 / slow if self._busy() else 1.0
            took = min(step, seconds / speed)
            self.clock += took
            seconds -= took * speed
        return self.clock - start

    def _busy(self) -> bool:
        if not self.burst:
            return False
        while not self.switches or self.switches[-1] <= self.clock:
            last = self.switches[-1] if self.switches else 0.0
            mean = self.burst if len(self.switches) % 2 else self.pause
            self.switches.append(last + self.dice.expovariate(1 / mean))
        return len(self.switches) % 2 == 0

    def pass_seconds(self, rows: int) -> float:
        known = sorted(self.passes)
        low = max((n for n in known if n <= rows), default=known[0])
        high = min((n for n in known if n >= rows), default=known[-1])
        share = 0.0 if high == low else (rows - low) / (high - low)
        return (1 - share) * self.passes[low] + share * self.passes[high]


@dataclass
class Replay:
    """One planner over texts in turn; each text's seconds beside those of plain decoding at the same moments."""

    trace: Trace
    machine: Machine
    disturbed: Sequence[int] = ()
    """Rows whose passes were measured in a burst before the first text."""
    planner: Any = None
    log: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = self.trace.header.parts
        depth, nodes = max(part.depth for part in parts), sum(part.nodes for part in parts)
        config = AdaptivePlanner.Config()
        self.planner = AdaptivePlanner(config, default_depth=depth, default_nodes=nodes, parts=parts)
        machine = self.machine
        self.planner.learn_costs(
            {
                rows: machine.pass_seconds(rows) * (machine.slow if rows in self.disturbed else 1)
                for rows in machine.passes
            }
        )

    def texts(self, order: Sequence[int] | None = None) -> list[float]:
        """Return plain decoding's seconds divided by these of every text, both undisturbed."""
        scripts = scripts_of(self.trace)
        return [self.text(scripts[place]) for place in (order or range(len(scripts)))]

    def text(self, script: Script) -> float:
        script.place, state = script.start, self.planner.open()
        machine = self.machine
        self._round(script, state, is_prefill=True)
        start, written = machine.work, script.place
        while not script.is_done:
            self._round(script, state)
        return (script.place - written) * machine.pass_seconds(1) * (1 + 0.8 * machine.noise) / (machine.work - start)

    def _round(self, script: Script, state: Any, *, is_prefill: bool = False) -> None:
        parts, machine = self.trace.header.parts, self.machine
        budget = self.planner.budgets([state])[0].within(1024, script.limit - script.place - 1)
        planned = any(budget.of_part(index).depth for index in range(len(parts))) and budget.num_nodes > 0
        offered = script.drafted() if planned else EMPTY
        offered = EMPTY if offered is None else cut_to(offered, budget, parts)
        seconds = tuple(self._draft(index, part, budget, offered) for index, part in enumerate(parts))
        tree = offered
        if len(offered):
            (kept,) = self.planner.trim([state], [offered], draft_seconds=sum(seconds))
            tree = tree if kept is None else prune(tree, kept)
        row = self._walk(script, tree, offered)
        rows = 1 + len(tree)
        models = any(spent for spent, part in zip(seconds, parts, strict=True) if part.runs_model)
        after = machine.after_draft if models else machine.after_lookup if sum(seconds) else 1.0
        work = machine.pass_seconds(rows) * after
        planning = machine.take(machine.planning, 1.0) if planned else 0.0
        score = machine.take(work, machine.slow)
        total = score + sum(seconds) + planning
        shares = seconds if len(parts) > 1 and len(offered) else ()
        rows += 50 * is_prefill
        record = RoundRecord(planning, sum(seconds), score, 0, 0, total, rows, (row,), shares)
        self.planner.observe([state], record)
        self.log.append((script.place, row.num_drafted, row.num_written, self.planner.explain()))
        script.place += row.num_written
        if planned:
            machine.take(machine.planning, 1.0)

    def _draft(self, index: int, part: DraftPart, budget: Any, offered: Any) -> float:
        depth = budget.of_part(index).depth if budget.num_nodes else 0
        if not depth:
            return 0.0
        if part.runs_model:
            depth = depth_of(offered, part.name)
            if not depth:
                return 0.0
        first, further = self.machine.levels[index]
        return self.machine.take(first + (depth - 1) * further * part.runs_model, self.machine.draft_slow)

    @staticmethod
    def _walk(script: Script, tree: Any, offered: Any) -> SequenceRecord:
        coming = script.coming()
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
