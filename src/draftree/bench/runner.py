"""The order of measurements: every prompt with every method, interleaved in a rotating order; then the records.

Methods alternate within each repeat of each prompt, so that background load affects all of them, and no method
always follows the same other one. A warm-up round is not counted; the garbage collector is off. Later turns of a
conversation follow its first one; the answers in it are those of our plain decoding, for all methods.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from draftree.bench.conversations import Prompt
from draftree.bench.engines import Outcome, RunParams, Writer
from draftree.bench.methods import Method
from draftree.bench.records import OURS, Divergence, Record, sha256_of

WARM_UP_TOKENS = 32

Explain = Callable[[Sequence[int], Sequence[int], Sequence[int]], Divergence | None]
"""Function of (prompt, plain text, other text) that returns place and gap of their first difference."""

Follow = Callable[[Prompt, str], Prompt | None]
"""Function of (prompt, answer) that returns the next turn of the conversation; None after the last one."""


def no_turns(prompt: Prompt, answer: str) -> None:
    """Return None: the conversation ends with its first answer."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: a method's texts for a group of prompts in one repeat."""

    method: Method
    repeat: int
    place: int
    seconds: float
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs methods over groups of prompts.

    Attributes:
        methods: methods of all engines, each engine's plain method included.
        writers: the engines by name.
        run_params: generation parameters of every text.
        repeats: number of repetitions of each text.
        explain: examines a text that differs from the plain one.
        follow: returns the next turn after an answer.
    """

    methods: Sequence[Method]
    writers: Mapping[str, Writer]
    run_params: RunParams
    repeats: int
    explain: Explain
    follow: Follow = no_turns

    def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Run every method once on few tokens."""
        short = RunParams(
            min(WARM_UP_TOKENS, self.run_params.max_tokens), self.run_params.temperature, self.run_params.seed
        )
        for method in self.methods:
            self.writers[method.engine].write(method, [prompt.ids for prompt in prompts], short)

    def run(self, groups: Sequence[Sequence[Prompt]], *, numbers: Sequence[int] = ()) -> Iterator[list[Record]]:
        """Yield all records of each group and of its later turns; prompts of a group run concurrently.

        Args:
            groups: groups of prompts.
            numbers: number of each group, which the order of methods and the records depend on; 0, 1, … if empty.
        """
        for number, group in zip(numbers or range(len(groups)), groups, strict=True):
            records: list[Record] = []
            current, later = list(group), 0
            while current:
                with collector_off():
                    turns = [
                        self._turn(current, method, repeat, place)
                        for repeat in range(self.repeats)
                        for place, method in enumerate(rotated(self.methods, (number + later) * self.repeats + repeat))
                    ]
                records += self._records(number, current, turns)
                current, later = self._next(current, turns), later + 1
            yield records

    def _next(self, group: Sequence[Prompt], turns: Sequence[Turn]) -> list[Prompt]:
        """Return the next turns of the group's conversations, after our plain answers."""
        plain = next(t for t in turns if t.method.is_plain and t.method.engine == OURS and t.repeat == 0)
        found = [self.follow(prompt, one.text) for prompt, one in zip(group, plain.outcomes, strict=True)]
        return [prompt for prompt in found if prompt is not None]

    def _turn(self, group: Sequence[Prompt], method: Method, repeat: int, place: int) -> Turn:
        prompts = [prompt.ids for prompt in group]
        start = time.perf_counter()
        outcomes = self.writers[method.engine].write(method, prompts, self.run_params)
        return Turn(method, repeat, place, time.perf_counter() - start, tuple(outcomes))

    def _records(self, number: int, group: Sequence[Prompt], turns: Sequence[Turn]) -> list[Record]:
        plain = {turn.method.engine: turn for turn in turns if turn.method.is_plain and turn.repeat == 0}
        return [
            self._record(number, prompt, index, turn, plain) for index, prompt in enumerate(group) for turn in turns
        ]

    def _record(self, number: int, prompt: Prompt, index: int, turn: Turn, plain: Mapping[str, Turn]) -> Record:
        outcome = turn.outcomes[index]
        same = {name: outcome.token_ids == of.outcomes[index].token_ids for name, of in plain.items()}
        engine = turn.method.engine
        greedy = self.run_params.temperature == 0
        divergence = None
        if not same[engine] and (greedy or engine == OURS):
            divergence = self.explain(prompt.ids, plain[engine].outcomes[index].token_ids, outcome.token_ids)
        other = next((is_same for name, is_same in same.items() if name != engine), None)
        return Record(
            task=prompt.task.id,
            category=prompt.task.category,
            form=prompt.form,
            method=turn.method.name,
            repeat=turn.repeat,
            place=turn.place,
            group=number,
            seconds=turn.seconds,
            finish_reason=outcome.finish_reason,
            text_sha256=sha256_of(outcome.text),
            tokens_sha256=sha256_of(outcome.token_ids),
            equal_to_plain=same[engine] if greedy or engine == OURS else None,
            equal_to_other_plain=other if greedy else None,
            divergence=divergence,
            stats=outcome.stats,
            first_turn=prompt.task.first_turn,
        )


def grouped(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Return groups of at most `size` prompts of one category each, in order."""
    groups: list[list[Prompt]] = []
    open_groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        group = open_groups.get(prompt.task.category)
        if group is None or len(group) == size:
            group = open_groups[prompt.task.category] = []
            groups.append(group)
        group.append(prompt)
    return groups


def rotated(methods: Sequence[Method], turns: int) -> list[Method]:
    """Return the methods in their order, rotated by `turns`."""
    start = turns % len(methods)
    return [*methods[start:], *methods[:start]]


@contextmanager
def collector_off() -> Iterator[None]:
    """Turn garbage collection off inside the block, after one collection."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
