"""Record of a search: every text that was a beam, when it was live, and which texts finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from draftree.beam.result import Hypothesis
    from draftree.beam.state import TextSearch

ROOT = -1
"""Parent of the first tokens."""


class Status(StrEnum):
    """State of a token of a beam."""

    COMMITTED = "committed"
    """Common to all live beams."""
    LIVE = "live"
    RETURNED = "returned"
    """Part of a finished text that is returned."""
    FINISHED = "finished"
    """Part of a finished text that is not returned."""
    DEAD = "dead"
    """Part of no live beam and of no finished text."""


@dataclass(slots=True)
class TraceNode:
    """One token of one or more beams.

    Attributes:
        token: token id.
        parent: index of the node before; `ROOT` for none.
        depth: number of generated tokens up to this one.
        group: group of the beams; 0 if beams of all groups share their nodes.
        logprob: what the token added to the score.
        total: cumulative log-probability.
        born: step that chose it.
        last_live: last step after which it was part of a live beam; 0 for none.
        ended: step in which a text finished here; None for none.
    """

    token: int
    parent: int
    depth: int
    group: int
    logprob: float
    total: float
    born: int
    last_live: int = 0
    ended: int | None = None


@final
@dataclass(slots=True)
class BeamTrace:
    """Observer of one search: give it as `on_step`.

    Attributes:
        nodes: in the order in which they were chosen; parents precede children.
        num_steps: steps so far.
        num_groups: groups of beams that have trees of their own.
        ends: for each finished text that is kept so far its node and its hypothesis, best first.
    """

    nodes: list[TraceNode] = field(default_factory=list)
    num_steps: int = 0
    num_groups: int = 1
    ends: list[tuple[int, Hypothesis]] = field(default_factory=list)
    num_returned: int = 1
    _places: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)

    def __call__(self, text: TextSearch) -> None:
        """Record the state after a step."""
        self.num_steps = step = text.num_steps
        has_groups = text.params.num_beam_groups > 1
        self.num_groups = len(text.groups) if has_groups else 1
        self.num_returned, self.ends = text.params.num_return_sequences, []
        for number, group in enumerate(text.groups):
            place = number if has_groups else 0
            for beam in group.beams:
                for node in self._path(place, beam.tokens, beam.logprobs, step):
                    self.nodes[node].last_live = step
            for hypothesis in group.pool.hypotheses:
                end = self._path(place, hypothesis.tokens, hypothesis.token_logprobs, step)[-1]
                if self.nodes[end].ended is None:
                    self.nodes[end].ended = step
                self.ends.append((end, hypothesis))
        self.ends.sort(key=lambda pair: (not pair[1].constraints_met, -pair[1].score))

    def _path(self, group: int, tokens: tuple[int, ...], logprobs: Sequence[float], step: int) -> list[int]:
        """Return the nodes of a text; new ones are added."""
        parent, total, path = ROOT, 0.0, []
        for depth, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True), 1):
            key, total = (group, tokens[:depth]), total + logprob
            if key not in self._places:
                self._places[key] = len(self.nodes)
                self.nodes.append(TraceNode(token, parent, depth, group, logprob, total, step))
            parent = self._places[key]
            path.append(parent)
        return path

    def shown(self, step: int | None = None) -> dict[int, Status]:
        """Return the nodes that exist after a step, and what they are then.

        Args:
            step: the step; None for the end, where no beam is live.
        """
        now = self.num_steps if step is None else min(step, self.num_steps)
        found = {
            place: Status.LIVE if node.last_live >= now else Status.DEAD
            for place, node in enumerate(self.nodes)
            if node.born <= now
        }
        ends = [place for place in found if (ended := self.nodes[place].ended) is not None and ended <= now]
        if now == self.num_steps:
            ends = [end for end, _ in self.ends]
        returned = {end for end, _ in self.ends[: self.num_returned]} if now == self.num_steps else set()
        for end in sorted(ends, key=lambda place: place in returned):
            status, node = Status.RETURNED if end in returned else Status.FINISHED, end
            while node != ROOT:
                if found[node] is not Status.LIVE:
                    found[node] = status
                node = self.nodes[node].parent
        for place in self._common(found):
            found[place] = Status.COMMITTED
        return found

    def _common(self, found: dict[int, Status]) -> list[int]:
        """Return the nodes that all live beams share."""
        by_depth: dict[int, list[int]] = {}
        for place, status in found.items():
            if status is Status.LIVE:
                by_depth.setdefault(self.nodes[place].depth, []).append(place)
        deepest, common = max(by_depth, default=0), []
        for depth in sorted(by_depth):
            if len(by_depth[depth]) > 1 or depth == deepest:
                break
            common.append(by_depth[depth][0])
        return common
