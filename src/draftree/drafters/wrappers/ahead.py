"""Drafting ahead: the wrapped drafter continues while the target verifies.

After a tree was handed to the target, the nodes where the walk may stop are ranked by their probability under the
drafter. At the best ones a further tree is drafted in a thread. Its first level are guesses of the bonus, ranked with
the request's noise like the target tokens; what is below the right guess is the next draft. A wrong guess costs the
work of an idle device. Only the verdict decides about the text. A measurement at start tells whether it saves time.

Source: PEARL, arXiv 2408.11850; SSD (Saguaro), arXiv 2603.03251, which guesses the bonus without shared noise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, final

from draftree.core.host import Clock
from draftree.core.node_map import NodeMap, prune
from draftree.core.tree import EMPTY, TokenTree, depths, follow
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.memory import Footprint
from draftree.models.process import ProcessEndedError
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams


def likely_stops(tree: TokenTree, count: int, *, leaves_only: bool) -> list[int]:
    """Return the nodes at which the walk most probably ends, best first.

    The walk ends at a node if it reaches it and none of its children is the target's pick. The root is left out: a tree
    after it begins with the children that it has already.

    Args:
        tree: a drafted tree, with cumulative scores; without them all leaves are equal.
        leaves_only: leave out nodes with children, for drafters that give one child, which is there already.
    """
    children = tree.children()
    reached = [min(1.0, math.exp(score)) for score in tree.scores] or [1.0] * len(tree)
    chances = {
        node: reached[node] - sum(reached[child] for child in children[node + 1])
        for node in range(len(tree))
        if not (leaves_only and children[node + 1])
    }
    return sorted(chances, key=lambda node: (-chances[node], node))[:count]


def below(tree: TokenTree, token: int) -> TokenTree:
    """Return what a tree has after one of its first tokens; empty if it has not this token."""
    way = follow(tree, [token])
    if not way:
        return EMPTY
    rest = NodeMap.below(tree.parents, way[0]).cut(tree)
    return replace(rest, scores=tuple(score - tree.scores[way[0]] for score in rest.scores))


def within(tree: TokenTree, budget: Budget) -> TokenTree:
    """Return the best nodes of a tree that a budget allows."""
    levels = depths(tree.parents)
    fitting = [node for node in range(len(tree)) if levels[node] <= budget.depth]
    if len(fitting) > budget.num_nodes and tree.scores:
        fitting.sort(key=lambda node: (-tree.scores[node], node))  # scores fall from parent to child
    kept = sorted(fitting[: budget.num_nodes])
    return tree if len(kept) == len(tree) else prune(tree, kept)


logger = logging.getLogger(__name__)

JUDGED_ROUNDS = 32
"""Rounds after which the share of hits that was assumed is replaced by the counted one."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A place where the walk through a tree may end: the tokens from the root, and the length of the text up to it.

    `own` is a forked state of the wrapped drafter.
    """

    path: tuple[int, ...]
    length: int
    own: Any


@dataclass(slots=True)
class AheadSequence:
    """State of a sequence. Mutated by `AheadDrafter` only."""

    own: Any
    """State of the wrapped drafter; None once its process has ended."""
    view: SequenceView
    held: TokenTree = EMPTY
    """Tree that was drafted ahead for the text of `held_length` tokens; empty if there is none."""
    held_length: int = 0
    stops: list[Stop] = field(default_factory=list)
    """Places after the last tree for which the thread drafts."""
    ready: list[tuple[Stop, TokenTree]] = field(default_factory=list)
    """Those for which it is done, with their trees."""


@dataclass(slots=True)
class AheadCounts:
    """Counters of drafting ahead.

    Attributes:
        hits: rounds whose draft was there before they began.
        misses: rounds in which trees were drafted ahead and none fitted.
        stops: rounds of both kinds whose walk ended at one of the predicted places.
        drafted: nodes that were drafted ahead.
        wasted: those of them that were not used.
    """

    hits: int = 0
    misses: int = 0
    stops: int = 0
    drafted: int = 0
    wasted: int = 0


@final
class AheadDrafter(Drafter[AheadSequence]):
    """Wraps a drafter that runs a model on a device or in a process of its own.

    Args:
        stops: maximum number of places of a tree after which it drafts ahead.
        branches: whether the drafter gives several first tokens, so that it can guess the bonus at inner nodes.
        is_on: whether it does; otherwise this is the wrapped drafter, and `reason` is the note.
        judge: returns, for the counted share of hits, why drafting ahead does not pay, or None if it does. It is asked
            once, and what it returns ends drafting ahead.
    """

    def __init__(
        self,
        drafter: Drafter[Any],
        *,
        stops: int,
        branches: bool,
        is_on: bool = True,
        reason: str = "",
        judge: Callable[[float], str | None] | None = None,
    ) -> None:
        self._drafter, self._stops, self._branches, self._reason = drafter, stops, branches, reason
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="draftree-ahead") if is_on else None
        self._job: Future[list[TokenTree]] | None = None
        self._waiting: list[AheadSequence] = []
        """Sequences with stops, in the order of the job's trees."""
        self._ended = False
        self._judge = judge
        self.counts = AheadCounts()

    @classmethod
    def describe(cls, config: DraftTraits) -> DraftTraits:
        return config

    @property
    def note(self) -> str:
        return "; ".join(filter(None, (self._drafter.note, self._reason)))

    @property
    def footprint(self) -> Footprint:
        return self._drafter.footprint

    def reserve(self, num_sequences: int, length: int) -> None:
        each = 1 if self._pool is None else 1 + self._stops
        self._settled(self._drafter.reserve, each * num_sequences, length + 1)

    def open(self, sequence: SequenceView) -> AheadSequence:
        return AheadSequence(self._settled(self._drafter.open, sequence), sequence)

    def draft(self, states: Sequence[AheadSequence], budgets: Sequence[Budget]) -> list[TokenTree]:
        self._settle()
        for state in states:
            self._drop(state)  # of a round that was not observed
        trees = []
        for state, budget in zip(states, budgets, strict=True):
            trees.append(within(state.held, budget) if state.held_length == len(state.view.history) else EMPTY)
            state.held = EMPTY
        missing = [i for i, tree in enumerate(trees) if not len(tree)]
        if missing:
            owns, missing_budgets = [states[i].own for i in missing], [budgets[i] for i in missing]
            drafted = self._alive(self._drafter.draft, owns, missing_budgets)
            for i, tree in zip(missing, drafted or [EMPTY] * len(missing), strict=True):
                trees[i] = tree
        if self._pool is not None:
            self._alive(self._begin, states, trees, budgets)
        return trees

    def _begin(self, states: Sequence[AheadSequence], trees: Sequence[TokenTree], budgets: Sequence[Budget]) -> None:
        """Fork the wrapped states at the likeliest stops, and draft after them in the thread."""
        stop_budgets: list[Budget] = []
        for state, tree, budget in zip(states, trees, budgets, strict=True):
            if state.view.controls.processors or state.view.controls.guide is not None:
                continue  # processors keep state of the text, which one thread reads
            paths = tree.token_paths()
            for node in likely_stops(tree, self._stops, leaves_only=not self._branches):
                path = paths[node + 1]
                tokens = [*state.view.history.tokens.tolist(), *path]
                view = replace(state.view, history=History(tokens), slot=None)
                wrapped_state = self._drafter.fork(state.own, view, len(state.view.history))
                state.stops.append(Stop(path, len(tokens), wrapped_state))
                room = max(0, budget.room - len(path))
                stop_budgets.append(replace(budget, depth=min(budget.depth + 1, room), room=room))
        self._waiting = [state for state in states if state.stops]
        if stop_budgets:
            owns = [stop.own for state in self._waiting for stop in state.stops]
            assert self._pool is not None, "drafting ahead has a thread"
            self._job = self._pool.submit(self._drafter.draft, owns, stop_budgets)

    def _settle(self) -> None:
        """Wait for the thread; its trees become ready. Nothing else uses the wrapped drafter while it runs."""
        job, waiting = self._job, self._waiting
        self._job, self._waiting = None, []
        trees = iter((None if job is None else self._alive(job.result)) or ())
        for state in waiting:
            state.ready += [(stop, next(trees, EMPTY)) for stop in state.stops]
            state.stops = []

    def _drop(self, state: AheadSequence) -> None:
        """Close the states of stops that the text did not take."""
        for stop, tree in state.ready:
            self.counts.drafted += len(tree)
            self.counts.wasted += len(tree)
            self._alive(self._drafter.close, stop.own)
        state.ready = []

    def observe(self, observations: Sequence[Observation[AheadSequence]]) -> None:
        owns = [replace(observation, state=observation.state.own) for observation in observations]
        self._settled(self._drafter.observe, owns)
        for observation in observations:
            state = observation.state
            tree = observation.tree
            verdict = observation.verdict
            if verdict is not None and state.ready:
                self._adopt(state, tuple(tree.tokens[node] for node in verdict.path))
                self._drop(state)
        ended = self.counts.hits + self.counts.misses
        if self._judge is not None and ended >= JUDGED_ROUNDS:
            reason, self._judge = self._judge(self.counts.hits / ended), None
            if reason is not None and self._pool is not None:
                self._pool.shutdown()
                self._pool = None
                self._reason = reason

    def _adopt(self, state: AheadSequence, path: tuple[int, ...]) -> None:
        """Continue from the stop that the walk took, if its bonus was guessed."""
        length = len(state.view.history)
        for place, (stop, tree) in enumerate(state.ready):
            if stop.path != path or stop.length + 1 != length:
                continue
            self.counts.stops += 1
            rest = below(tree, int(state.view.history.tokens[-1]))
            if len(rest):
                del state.ready[place]
                state.held, state.held_length = rest, length
                self.counts.hits += 1
                self.counts.drafted += len(tree)
                self.counts.wasted += len(tree) - len(rest) - 1
                self._alive(self._exchange, state, stop)
                return
        self.counts.misses += 1

    def _exchange(self, state: AheadSequence, stop: Stop) -> None:
        """Take the state at a stop, which has read more of the text, for the sequence's own."""
        kept = self._drafter.detach(stop.own, stop.length)
        if kept is None:
            return
        before, state.own = state.own, self._drafter.attach(kept, state.view, stop.length)
        self._drafter.close(before)

    def fork(self, state: AheadSequence, sequence: SequenceView, length: int) -> AheadSequence:
        return AheadSequence(self._settled(self._drafter.fork, state.own, sequence, length), sequence)

    def detach(self, state: AheadSequence, length: int) -> AheadSequence | None:
        self._settle()
        self._drop(state)
        wrapped_state = self._alive(self._drafter.detach, state.own, length)
        return None if wrapped_state is None else AheadSequence(wrapped_state, state.view)

    def attach(self, state: AheadSequence, sequence: SequenceView, length: int) -> AheadSequence:
        return AheadSequence(self._settled(self._drafter.attach, state.own, sequence, length), sequence)

    def close(self, state: AheadSequence) -> None:
        self._settle()
        self._drop(state)
        self._alive(self._drafter.close, state.own)

    def check_integrity(self, states: Sequence[AheadSequence]) -> None:
        self._settle()
        owns = [state.own for state in states] + [stop.own for state in states for stop, _ in state.ready]
        self._alive(self._drafter.check_integrity, owns)

    def forget(self) -> None:
        self._settled(self._drafter.forget)

    def _settled(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do something with the wrapped drafter after the thread's work."""
        self._settle()
        return self._alive(act, *arguments)

    def _alive(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do something with the wrapped drafter unless its process has ended; drafts nothing from then on."""
        if self._ended:
            return None
        try:
            return act(*arguments)
        except ProcessEndedError as error:
            self._ended = True
            self._reason = f"drafting has ended: {error}"
            logger.warning("%s; texts are continued without drafts", self._reason)
            return None


PREFIX = 16
"""Tokens of the text after which both are measured."""
REPEATS = 3
EXPECTED_HITS = 1 / 3
"""Share of the rounds whose draft was made ahead, before any was counted: chains had 24% and trees 44% in
docs/lab/offload.md."""
LEAST_GAIN = 0.08
"""Share of a round's time that drafting ahead must save. A tree that was drafted ahead has fewer nodes, because guesses
of the bonus are among them: rounds wrote 3% (chains) and 8% (trees) fewer tokens there."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of a pass, of a draft, and of both at once; each is the fastest of several."""

    target: float
    draft: float
    both: float

    def gain(self, hits: float) -> float:
        """Return the share of a round's time that drafting ahead saves, negative if it costs time.

        In turn a round is a pass and a draft; ahead it is both at once, and another draft unless it was guessed.
        """
        in_turn = self.target + self.draft
        return (hits * self.draft - (self.both - self.target)) / in_turn if in_turn > 0 else 0.0

    def pays(self, hits: float = EXPECTED_HITS) -> bool:
        """Return whether drafting ahead is worth the time that it takes from the target."""
        return self.gain(hits) >= LEAST_GAIN

    def note(self, hits: float = EXPECTED_HITS) -> str:
        """Return a message: whether it pays, with what was measured."""
        times = f"pass {self.target * 1e3:.1f} ms, draft {self.draft * 1e3:.1f} ms, both {self.both * 1e3:.1f} ms"
        saves = f"saves {self.gain(hits):.0%}" if self.gain(hits) >= 0 else f"costs {-self.gain(hits):.0%}"
        return (
            f"drafting ahead is {'on' if self.pays(hits) else 'off'}: with {hits:.0%} of the drafts guessed it {saves} "
            f"of a round ({times})"
        )


def measure_overlap(run_target: Callable[[], None], run_draft: Callable[[], None], clock: Clock) -> Overlap:
    """Measure passes and drafts, alone and at once, with drafts in another thread."""
    run_target()
    run_draft()
    with ThreadPoolExecutor(1) as pool:

        def run_both() -> None:
            drafting = pool.submit(run_draft)
            run_target()
            drafting.result()

        def fastest(act: Callable[[], None]) -> float:
            times = []
            for _ in range(REPEATS):
                start = clock()
                act()
                times.append(clock() - start)
            return min(times)

        return Overlap(fastest(run_target), fastest(run_draft), fastest(run_both))


def ahead_of(drafter: Drafter[Any], traits: DraftTraits, target: LanguageModel, clock: Clock) -> AheadDrafter:
    """Wrap a drafter with a model on another device or in another process; it drafts ahead if that pays here."""
    controls = build_controls(SamplingParams(temperature=0.0), vocab_size=target.vocab_size, seed=0)
    view = SequenceView(History([0] * PREFIX), controls)
    budget = Budget(traits.nodes, traits.depth)
    drafter.reserve(1, PREFIX + traits.nodes + 1)
    target.reserve(target.num_open + 1, PREFIX + traits.nodes + 1)
    slot, state = target.open_probe(), drafter.open(view)

    def run_target() -> None:
        target.run(Pass([Extend(slot, [0] * (1 + traits.nodes), range(-1, traits.nodes))]))
        target.synchronize()
        target.commit(slot, ())

    def run_draft() -> None:
        drafter.draft([state], [budget])

    try:
        overlap = measure_overlap(run_target, run_draft, clock)
    finally:
        target.close(slot)
        drafter.close(state)
    return AheadDrafter(
        drafter,
        stops=traits.ahead,
        branches=traits.branches,
        is_on=overlap.pays(),
        reason=overlap.note(),
        judge=lambda hits: None if overlap.pays(hits) else overlap.note(hits),
    )
