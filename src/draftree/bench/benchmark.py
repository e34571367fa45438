"""Construction of a benchmark from its settings: all checks first, then loading, then the run prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftree.assembly import choose_methods
from draftree.bench.conversations import Prompt, following, with_room
from draftree.bench.divergence import explain
from draftree.bench.engines import OnRound, OurWriter, RunParams, Writer
from draftree.bench.methods import (
    Method,
    OurMethod,
    PeerMethod,
    jobs_without_peer,
    lossy_notes,
    our_methods,
    peer_methods,
)
from draftree.bench.peer import PeerWriter
from draftree.bench.provenance import load_average, machine, model_facts, now, versions
from draftree.bench.records import FORMAT, OURS, PEER, Record
from draftree.bench.runner import WARM_UP_TOKENS, Runner, grouped
from draftree.bench.settings import ExecutionSettings, load_for, require_positive
from draftree.bench.workload import SHIPPED, Workload, encode, read_workload
from draftree.core.errors import ConfigurationError
from draftree.core.processor import usable_cores
from draftree.loading.load import LoadedModel
from draftree.loading.prepared import prepared_folder
from draftree.loading.targets import eos_ids_of
from draftree.loading.tokenizers import load_tokenizer
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BenchSettings(ExecutionSettings):
    """The methods and prompts of a benchmark.

    Attributes:
        model: the target, in any supported form.
        drafts: methods besides plain decoding, `DRAFT[@PLAN][@VERIFY]`.
        plans: planners for drafts without their own; several planners give several methods.
        verify: verifier of methods without their own.
        prompts: a prompts file; None uses the built-in set.
        categories: only these; empty uses all.
        limit: maximum prompts per category.
        max_tokens: maximum tokens per text.
        temperature: 0 selects the most likely token.
        seed: seed of every text.
        repeats: number of repetitions of each text.
        batch: number of concurrent prompts.
        peer: whether transformers runs the same jobs for comparison.
    """

    model: str
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
        require_positive(self, "limit", "repeats", "threads", "batch")
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark that is ready to run.

    Attributes:
        header: provenance.
        notes: notes for readers of the table: omitted prompts, jobs without a peer.
        groups: prompts that run concurrently.
        warnings: the notes that must be shown before the run.
    """

    header: dict[str, Any]
    notes: tuple[str, ...]
    groups: tuple[tuple[Prompt, ...], ...]
    runner: Runner
    warnings: tuple[str, ...] = ()

    def warm_up(self) -> None:
        """Run every method once on few tokens, unrecorded."""
        self.runner.warm_up(self.groups[0])

    def run(self) -> Iterator[list[Record]]:
        """Yield the records of each group of prompts."""
        return self.runner.run(self.groups)


def end_line(*, complete: bool) -> dict[str, Any]:
    """Return the last line of a results file."""
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

    Args:
        settings: the methods and prompts.
        fetch: called with the name of every model before any is loaded.
        on_round: returns the round callback of a method, by name.
        workload: chosen prompts; None for those that the settings name.
        target: the model that the settings name, if it is loaded already.

    Raises:
        ConfigurationError: unknown methods, a bad prompts file, no prompt that fits.
        ModelError: a model cannot be found or used.
    """
    ours = our_methods(settings.drafts, plans=settings.plans, verify=settings.verify)
    peers = peer_methods(ours, batch=settings.batch) if settings.peer else []
    if settings.peer and settings.parallel.is_parallel:
        raise ConfigurationError(f"{settings.parallel} is for our methods only: leave the peer out")
    if workload is None:
        workload = read_workload(settings.prompts or SHIPPED).choose(settings.categories, settings.limit)
    for name in (settings.model, *_draft_models([*ours, *peers])):
        fetch(name)
    target = target or load_for(settings)
    tokenizer = tokenizer_of(target)
    room = target.model.max_length - settings.max_tokens
    prompts, notes = prompts_of(workload, tokenizer, room)
    prompts, too_long = with_room(prompts, tokenizer, room=room, answer=settings.max_tokens)
    notes += too_long
    if settings.peer:
        notes += _peer_notes(ours, peers, settings.batch)
    run_params = RunParams(settings.max_tokens, settings.temperature, settings.seed)
    warnings = (*lossy_notes(ours, settings.temperature), *busy_notes(load_average(), usable_cores()))
    notes += warnings
    runner = Runner(
        methods=[*ours, *peers],
        writers=_writers(target, tokenizer, ours, peers=peers, batch=settings.batch, on_round=on_round),
        run_params=run_params,
        repeats=settings.repeats,
        explain=partial(_explain, target, run_params),
        follow=partial(following, tokenizer),
    )
    groups = tuple(tuple(group) for group in grouped(prompts, settings.batch))
    header = _header(settings, target, workload, runner=runner, prompts=prompts)
    return Benchmark(header | {"notes": list(notes)}, notes, groups, runner, warnings)


def busy_notes(load: Sequence[float] | None, cores: int | None) -> tuple[str, ...]:
    """Return a warning if more processes wanted to run in the last minute than there are cores."""
    if load is None or cores is None or load[0] <= cores:
        return ()
    return (f"the machine is busy (load {load[0]:g} on {cores} cores): rates are too low and ratios uncertain",)


def tokenizer_of(target: LoadedModel) -> Tokenizer:
    """Return a model's tokenizer.

    Raises:
        ConfigurationError: it has none.
    """
    trusts = target.runs_code
    tokenizer = None if target.folder is None else load_tokenizer(target.folder, trust_remote_code=trusts)
    if tokenizer is None:
        raise ConfigurationError(
            f"model '{target.name}' has no tokenizer, and the prompts are texts: add its tokenizer"
        )
    return tokenizer


def prompts_of(workload: Workload, tokenizer: Tokenizer, room: int) -> tuple[list[Prompt], tuple[str, ...]]:
    """Return the prompts of at most `room` tokens, and a note on the others.

    Raises:
        ConfigurationError: none fits.
    """
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


def _peer_notes(ours: Sequence[Method], peers: Sequence[Method], batch: int) -> tuple[str, ...]:
    alone = jobs_without_peer(ours, peers)
    if not alone:
        return ()
    why = "it drafts for one prompt at a time only" if batch > 1 else "it has no such method"
    return (f"transformers does not do the job of {', '.join(alone)}: {why}",)


def _writers(
    target: LoadedModel,
    tokenizer: Tokenizer,
    ours: Sequence[Method],
    *,
    peers: Sequence[Method],
    batch: int,
    on_round: Callable[[str], OnRound | None] | None,
) -> dict[str, Writer]:
    writers: dict[str, Writer] = {OURS: OurWriter(target, tokenizer, methods=ours, batch=batch, on_round=on_round)}
    if peers:
        assert target.folder is not None
        writers[PEER] = PeerWriter(
            target.folder,
            tokenizer,
            methods=peers,
            dtype=target.model.dtype,
            device=target.model.device,
            trust_remote_code=target.runs_code,
            eos_ids=eos_ids_of(target, tokenizer),
        )
    return writers


def _explain(target: LoadedModel, run_params: RunParams, prompt: Any, plain: Any, other: Any) -> Any:
    return explain(target.model, prompt, plain, other=other, run_params=run_params)


def _header(
    settings: BenchSettings, target: LoadedModel, workload: Workload, *, runner: Runner, prompts: Sequence[Prompt]
) -> dict[str, Any]:
    assert target.folder is not None
    return {
        "format": FORMAT,
        "job": "texts",
        "date": now(),
        "machine": machine(target.model.device),
        "versions": versions(),
        "model": model_facts(settings.model, target.folder),
        "draft_models": [model_facts(name, prepared_folder(name)) for name in _draft_models(runner.methods)],
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "device": target.model.device.type,
        "kernels": target.kernels,
        "kernels_reason": target.why_torch,
        "quantization": target.quantization,
        "exact": target.model.is_exact,
        "threads": torch.get_num_threads(),
        "processes": {"tp": settings.parallel.tp, "pp": settings.parallel.pp},
        "prompts": {
            "name": workload.name,
            "sha256": workload.sha256,
            "shipped": settings.prompts is None,
            "written": sum(len(prompt.task.ids) for prompt in prompts),
            "limit": settings.limit,
            "categories": list(dict.fromkeys(prompt.task.category for prompt in prompts)),
        },
        "methods": [method.to_json() for method in runner.methods],
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "repeats": settings.repeats,
        "batch": settings.batch,
        "warm_up": {"rounds": 1, "max_tokens": min(WARM_UP_TOKENS, settings.max_tokens)},
        "load_average": load_average(),
    }


def _draft_models(methods: Sequence[Method]) -> list[str]:
    ours = [m.how for m in methods if isinstance(m.how, OurMethod)]
    named = [name for how in ours for name in choose_methods(how.draft, how.verify, how.plan).draft_models]
    assistants = [m.how.assistant for m in methods if isinstance(m.how, PeerMethod) and m.how.assistant is not None]
    return list(dict.fromkeys([*named, *assistants]))
