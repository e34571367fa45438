"""A benchmark: all checks first, then loading, then every prompt with every method, interleaved in a rotating order.

Methods alternate within each repeat of each prompt, so that background load affects all of them, and no method
always follows the same other one. A warm-up round is not counted; the garbage collector is off. Later turns of a
conversation follow its first one; the answers in it are those of our plain decoding, for all methods. Where a text
differs from the plain one, the target scores the common prefix once more to measure the gap there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.build import choose_methods, load_for, require_positive
from draftree.core.errors import ConfigurationError
from draftree.core.host import usable_cores
from draftree.core.noise import Noise
from draftree.lab.bench.methods import (
    Method,
    OurMethod,
    PeerMethod,
    jobs_without_peer,
    lossy_notes,
    our_methods,
    peer_methods,
)
from draftree.lab.bench.records import FORMAT, OURS, PEER, Divergence, Record, sha256_of
from draftree.lab.bench.workload import SHIPPED, Prompt, Workload, encode, following, read_workload, with_room
from draftree.lab.bench.writers import OnRound, OurWriter, Outcome, PeerWriter, RunParams, Writer
from draftree.loading.loaded import LoadedModel, eos_ids_of, load_tokenizer
from draftree.loading.provenance import load_average, machine, model_facts, now, versions
from draftree.loading.resolve import prepared_folder
from draftree.models.base import Extend, LanguageModel, Pass, PassResult, Slot
from draftree.options import ModelOptions
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer

WARM_UP_TOKENS = 32

Explain = Callable[[Sequence[int], Sequence[int], Sequence[int]], Divergence | None]
"""Function of (prompt, plain text, other text) that returns place and gap of their first difference."""

Follow = Callable[[Prompt, str], Prompt | None]
"""Function of (prompt, answer) that returns the next turn of the conversation; None after the last one."""


@dataclass(frozen=True, slots=True)
class MethodCall:
    method: Method
    repeat: int
    place: int
    seconds: float
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs the methods of all engines, each engine's plain one included, over groups of prompts.

    `explain` examines a text that differs from the plain one; `follow` returns the next turn after an answer.
    """

    methods: Sequence[Method]
    writers: Mapping[str, Writer]
    run_params: RunParams
    repeats: int
    explain: Explain
    follow: Follow | None = None

    def warm_up(self, prompts: Sequence[Prompt]) -> None:
        short = replace(self.run_params, max_tokens=min(WARM_UP_TOKENS, self.run_params.max_tokens))
        for method in self.methods:
            self.writers[method.engine].write(method, [prompt.ids for prompt in prompts], short)

    def run(self, groups: Sequence[Sequence[Prompt]], *, numbers: Sequence[int] = ()) -> Iterator[list[Record]]:
        """Yield all records of each group and of its later turns; prompts of a group run concurrently.

        The order of methods and the records depend on the `numbers` of groups, which are 0, 1, … if empty.
        """
        for number, group in zip(numbers or range(len(groups)), groups, strict=True):
            records: list[Record] = []
            turn = 0
            while group:
                with without_collector():
                    calls = [
                        self._call(group, method, repeat, place)
                        for repeat in range(self.repeats)
                        for place, method in enumerate(self._rotated((number + turn) * self.repeats + repeat))
                    ]
                plain = {
                    call.method.engine: call.outcomes for call in calls if call.method.is_plain and not call.repeat
                }
                records += [
                    self._record(number, prompt, index, call, plain)
                    for index, prompt in enumerate(group)
                    for call in calls
                ]
                group = self._next(group, plain)
                turn += 1
            yield records

    def _rotated(self, turns: int) -> list[Method]:
        start = turns % len(self.methods)
        return [*self.methods[start:], *self.methods[:start]]

    def _next(self, group: Sequence[Prompt], plain: Mapping[str, Sequence[Outcome]]) -> list[Prompt]:
        """Return the next turns of the group's conversations, after our plain answers."""
        if self.follow is None:
            return []
        answers = zip(group, plain[OURS], strict=True)
        return [turn for prompt, answer in answers if (turn := self.follow(prompt, answer.text)) is not None]

    def _call(self, group: Sequence[Prompt], method: Method, repeat: int, place: int) -> MethodCall:
        prompts = [prompt.ids for prompt in group]
        start = time.perf_counter()
        outcomes = self.writers[method.engine].write(method, prompts, self.run_params)
        return MethodCall(method, repeat, place, time.perf_counter() - start, outcomes)

    def _record(
        self, number: int, prompt: Prompt, index: int, call: MethodCall, plain: Mapping[str, Sequence[Outcome]]
    ) -> Record:
        outcome = call.outcomes[index]
        engine = call.method.engine
        same = {name: outcome.token_ids == texts[index].token_ids for name, texts in plain.items()}
        greedy = self.run_params.temperature == 0
        is_comparable = greedy or engine == OURS
        divergence = None
        if not same[engine] and is_comparable:
            divergence = self.explain(prompt.ids, plain[engine][index].token_ids, outcome.token_ids)
        return Record(
            task=prompt.task.id,
            category=prompt.task.category,
            form=prompt.form,
            method=call.method.name,
            repeat=call.repeat,
            place=call.place,
            group=number,
            seconds=call.seconds,
            finish_reason=outcome.finish_reason,
            text_sha256=sha256_of(outcome.text),
            tokens_sha256=sha256_of(outcome.token_ids),
            equal_to_plain=same[engine] if is_comparable else None,
            equal_to_other_plain=next((same[name] for name in same if name != engine), None) if greedy else None,
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


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn garbage collection off inside the block, after one collection."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


CHUNK_ROWS = 512


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    differing = (
        place
        for place, (plain_token, other_token) in enumerate(zip(plain, other, strict=False))
        if plain_token != other_token
    )
    return next(differing, None if len(plain) == len(other) else min(len(plain), len(other)))


def explain(
    model: LanguageModel, run_params: RunParams, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Divergence | None:
    """Find the first difference and score the common prefix once more, in one pass, to measure the gap."""
    index = first_difference(plain, other)
    if index is None:
        return None
    if index >= min(len(plain), len(other)):
        return Divergence(index, None, None)
    prefix = [*prompt, *plain[:index]]
    scores = last_logits(model, prefix)
    if run_params.temperature > 0:
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores / run_params.temperature + Noise(run_params.seed).gumbel(len(prefix), tokens)
    best = scores.topk(2).values
    return Divergence(index, float(best[0] - best[1]), float(scores[plain[index]] - scores[other[index]]))


def last_logits(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Return the logits after the last of these tokens, shape (vocab,)."""
    model.reserve(1, len(tokens))
    slot = model.open()
    try:
        for rows, result in read_tokens(model, slot, tokens, logits_at=range(len(tokens) - 1, len(tokens))):
            if rows:
                logits = result.logits.tensor()[0]
        return logits
    finally:
        model.close(slot)


def read_tokens(
    model: LanguageModel,
    slot: Slot,
    tokens: Sequence[int],
    *,
    logits_at: Container[int] = (),
    capture: tuple[int, ...] = (),
    size: int = CHUNK_ROWS,
) -> Iterator[tuple[list[int], PassResult]]:
    """Commit tokens in passes over at most `size` rows; yield the places with logits of each pass, and its result.

    A result is valid until the next one.
    """
    for start in range(0, len(tokens), size):
        chunk = list(tokens[start : start + size])
        rows = [row for row in range(len(chunk)) if start + row in logits_at]
        job = Extend(slot, chunk, range(-1, len(chunk) - 1), logits_at=rows, settled=len(chunk))
        yield [start + row for row in rows], model.run(Pass([job], capture=capture))
        model.commit(slot, range(len(chunk)))


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The methods and prompts of a benchmark.

    Attributes:
        drafts: methods besides plain decoding, `DRAFT[@PLAN][@VERIFY]`.
        plans: planners for drafts without their own; several planners give several methods.
    """

    options: ModelOptions
    drafts: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    verify: str = "coupled"
    prompts: Path | None = None
    categories: tuple[str, ...] = ()
    limit: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 3
    batch: int = 1
    peer: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "limit", "repeats", "batch")
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark that is ready to run.

    Attributes:
        header: of the results file; its notes are for readers of the table: omitted prompts, jobs without a peer.
        warnings: the notes that must be shown before the run.
    """

    header: dict[str, Any]
    groups: tuple[tuple[Prompt, ...], ...]
    runner: Runner
    warnings: tuple[str, ...] = ()

    def warm_up(self) -> None:
        self.runner.warm_up(self.groups[0])

    def run(self) -> Iterator[list[Record]]:
        """Yield the records of each group of prompts."""
        return self.runner.run(self.groups)


def end_line(*, complete: bool) -> dict[str, Any]:
    return {"complete": complete, "date": now(), "load_average": load_average()}


def prepare(
    settings: BenchSettings,
    *,
    fetch: Callable[[str], object] = prepared_folder,
    on_round: Callable[[str], OnRound | None] | None = None,
    workload: Workload | None = None,
    target: LoadedModel | None = None,
) -> Benchmark:
    """Check everything, then load everything.

    `fetch` is called with the name of every model before any is loaded; `on_round` returns the round callback of a
    method by name; `workload` and `target` take the place of those that the settings name.
    """
    ours = our_methods(settings.drafts, plans=settings.plans, verify=settings.verify)
    peers = peer_methods(ours, batch=settings.batch) if settings.peer else []
    if settings.peer and settings.options.is_parallel:
        raise ConfigurationError(
            f"{settings.options.division} cannot be combined with --peer: transformers runs in one process"
        )
    if workload is None:
        workload = read_workload(settings.prompts or SHIPPED).choose(settings.categories, settings.limit)
    for name in (settings.options.model, *_draft_models([*ours, *peers])):
        fetch(name)
    target = target or load_for(settings.options)
    tokenizer = tokenizer_of(target)
    room = target.model.max_length - settings.max_tokens
    prompts, notes = prompts_of(workload, tokenizer, room)
    prompts, too_long = with_room(prompts, tokenizer, room=room, answer=settings.max_tokens)
    notes += too_long
    if settings.peer and (alone := jobs_without_peer(ours, peers)):
        why = "it drafts for one prompt at a time only" if settings.batch > 1 else "it has no such method"
        notes += (f"transformers does not do the job of {', '.join(alone)}: {why}",)
    run_params = RunParams(settings.max_tokens, settings.temperature, settings.seed)
    warnings = (*lossy_notes(ours, settings.temperature), *busy_notes(load_average(), usable_cores()))
    notes += warnings
    writers: dict[str, Writer] = {
        OURS: OurWriter(target, tokenizer, methods=ours, batch=settings.batch, on_round=on_round)
    }
    if peers:
        writers[PEER] = PeerWriter(target, tokenizer, methods=peers, eos_ids=eos_ids_of(target, tokenizer))
    runner = Runner(
        methods=[*ours, *peers],
        writers=writers,
        run_params=run_params,
        repeats=settings.repeats,
        explain=partial(explain, target.model, run_params),
        follow=partial(following, tokenizer),
    )
    groups = tuple(tuple(group) for group in grouped(prompts, settings.batch))
    header = _header(settings, target, workload, runner=runner, prompts=prompts)
    return Benchmark(header | {"notes": list(notes)}, groups, runner, warnings)


def busy_notes(load: Sequence[float] | None, cores: int | None) -> tuple[str, ...]:
    """Return a warning if more processes wanted to run in the last minute than there are cores."""
    if load is None or cores is None or load[0] <= cores:
        return ()
    return (f"the machine is busy (load {load[0]:g} on {cores} cores): rates are too low and ratios uncertain",)


def tokenizer_of(target: LoadedModel) -> Tokenizer:
    trusts = target.runs_code
    tokenizer = None if target.folder is None else load_tokenizer(target.folder, trust_remote_code=trusts)
    if tokenizer is None:
        raise ConfigurationError(
            f"model '{target.name}' has no tokenizer, and the prompts are texts: add its tokenizer"
        )
    return tokenizer


def prompts_of(workload: Workload, tokenizer: Tokenizer, room: int) -> tuple[list[Prompt], tuple[str, ...]]:
    """Return the prompts of at most `room` tokens, and a note on the others."""
    prompts, too_long = [], []
    for task in workload.tasks:
        ids, form = encode(task, tokenizer)
        if len(ids) > room:
            too_long.append(task.id)
        else:
            prompts.append(Prompt(task, tuple(ids), form))
    if not prompts:
        raise ConfigurationError(
            f"none of {len(too_long)} prompts leaves room for the requested tokens in the model's context: "
            "lower --max-tokens, or give shorter prompts"
        )
    if not too_long:
        return prompts, ()
    return prompts, (f"{len(too_long)} prompts left out, longer than the context: {', '.join(too_long)}",)


def run_header(job: str, loaded: LoadedModel, name: str) -> dict[str, Any]:
    """Return the fields that the headers of all results files share; `name` is the user's name of the model."""
    assert loaded.folder is not None
    return {
        "format": FORMAT,
        "job": job,
        "date": now(),
        "machine": machine(loaded.model.device),
        "versions": versions(),
        "model": model_facts(name, loaded.folder),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": loaded.model.device.type,
        "kernels": loaded.kernels,
        "fallback_reason": loaded.fallback_reason,
        "quantization": loaded.quantization,
        "threads": torch.get_num_threads(),
        "load_average": load_average(),
    }


def _header(
    settings: BenchSettings, target: LoadedModel, workload: Workload, *, runner: Runner, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "seed", "repeats", "batch")
    return {
        **run_header("texts", target, settings.options.model),
        "draft_models": [model_facts(name, prepared_folder(name)) for name in _draft_models(runner.methods)],
        "exact": target.model.is_exact,
        "processes": {"tp": settings.options.tp, "pp": settings.options.pp},
        "prompts": {
            "name": workload.name,
            "sha256": workload.sha256,
            "shipped": settings.prompts is None,
            "written": sum(len(prompt.task.ids) for prompt in prompts),
            "limit": settings.limit,
            "categories": list(dict.fromkeys(prompt.task.category for prompt in prompts)),
        },
        "methods": [method.to_json() for method in runner.methods],
        **{name: getattr(settings, name) for name in names},
        "warm_up": {"rounds": 1, "max_tokens": min(WARM_UP_TOKENS, settings.max_tokens)},
    }


def _draft_models(methods: Sequence[Method]) -> list[str]:
    ours = [m.how for m in methods if isinstance(m.how, OurMethod)]
    named = [name for how in ours for name in choose_methods(how.draft, how.verify, how.plan).draft_models]
    assistants = [m.how.assistant for m in methods if isinstance(m.how, PeerMethod) and m.how.assistant is not None]
    return list(dict.fromkeys([*named, *assistants]))
