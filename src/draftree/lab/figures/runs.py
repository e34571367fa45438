"""Runs of a model that figures need, and their recording as traces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from draftree.build import choose_methods
from draftree.core.errors import ConfigurationError
from draftree.core.files import shown_name
from draftree.drafters import DRAFTERS
from draftree.engine.trace import Trace, TraceHeader, TraceWriter, read_trace
from draftree.lab.figures.base import RUN
from draftree.llm import LLM
from draftree.loading.loaded import LoadedModel
from draftree.options import NO_DRAFT
from draftree.sampling.params import SamplingParams
from draftree.text.retokenize import pieces_of

LENGTHS = (1, 2, 3, 4, 5, 6)
BATCHES = (1, 2, 4, 8)
BATCH_LENGTHS = (0, 1, 3, 5)
TEMPERATURES = (0.4, 0.8, 1.2)
RULES = ("coupled", "match", "token", "block", "multistep", "recursive", "traversal", "typical", "soft")
RULE_LENGTH = 4
GRAMS = (3, 5, 7)
CANDIDATES = (1, 5, 10, 20)
SOFT_TEMPERATURE = 0.8
"""Above 0: at 0 the target's distribution has one token, and soft matching is exact."""
SOFT = ("coupled", "soft,tolerance=0.1", "soft,tolerance=0.3", "soft,tolerance=0.6")
BEST_NODES = 64
MERGED = ("suffix", "ngram", "lookahead", "model:stories15m")
"""Drafters that are merged with the named one."""


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """What the user asked for.

    Attributes:
        tree: shape of the wide tree of drafters that have one.
        temperature: of all runs without a temperature of their own.
    """

    model: str
    draft: str
    tree: str = "8-2-2-1-1"
    merged: tuple[str, ...] = MERGED
    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 48


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run over all prompts.

    Attributes:
        temperature: None for that of the user.
    """

    run: str
    draft: str
    plan: str | None = None
    verify: str = "coupled"
    temperature: float | None = None
    batch: int = 1
    max_texts: int | None = None


def specs_of(names: Iterable[str], asked: RecordingOptions) -> tuple[list[RunSpec], dict[str, str]]:
    """Return the runs of these names, and the reason for each name that the drafter cannot take part in."""
    choose_methods(_named(asked.draft), "coupled", None)
    specs: list[RunSpec] = []
    refused: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            found = list(runs_of(name, asked))
            for spec in found:
                choose_methods(_named(spec.draft), spec.verify, spec.plan)
            specs += found
        except ConfigurationError as error:
            refused[name] = str(error)
    return specs, refused


def with_tree(draft: str, shape: str) -> str:
    """Return a drafter with the shape of its tree; as it is if it has no shape, or one already."""
    (spec,) = DRAFTERS.parse(draft)
    _, config = DRAFTERS.configure(spec)
    if "tree" not in {field.name for field in fields(config)} or "tree" in dict(spec.options):
        return draft
    return f"{draft},tree={shape}"


def _lengths(asked: RecordingOptions, wanted: Iterable[int]) -> list[int]:
    """Return the lengths that the drafter can draft; always the longest one up to the last wanted."""
    most = choose_methods(_named(asked.draft), "coupled", None).traits.depth
    return sorted({min(length, most) for length in wanted})


def _named(draft: str) -> str | None:
    return None if draft == NO_DRAFT else draft


def _fixed_plan(asked: RecordingOptions) -> str:
    return f"fixed:{_lengths(asked, [RULE_LENGTH])[0]}"


def runs_of(name: str, asked: RecordingOptions) -> Iterator[RunSpec]:
    draft = asked.draft
    match name:
        case "watch":
            yield RunSpec(name, with_tree(draft, asked.tree), "watch")
        case "best":
            yield RunSpec(name, with_tree(draft, f"best-{BEST_NODES}"), "watch")
        case "merged":
            yield RunSpec(name, "+".join(dict.fromkeys((*draft.split("+"), *asked.merged))), "watch")
        case "plain":
            yield RunSpec(name, NO_DRAFT)
        case "fixed":
            yield RunSpec(name, draft, _fixed_plan(asked))
        case "adaptive":
            yield RunSpec(name, draft, "adaptive")
        case "length":
            for length in _lengths(asked, LENGTHS):
                yield RunSpec(name, draft, f"fixed:{length}")
        case "batch":
            for length in _lengths(asked, BATCH_LENGTHS):
                for batch in BATCHES:
                    if length:
                        yield RunSpec(name, draft, f"fixed:{length}", batch=batch)
                    else:
                        yield RunSpec(name, NO_DRAFT, batch=batch)
        case "rule":
            for temperature in TEMPERATURES:
                for rule in RULES:
                    yield RunSpec(name, draft, _fixed_plan(asked), rule, temperature, max_texts=8)
        case "soft":
            for rule in SOFT:
                yield RunSpec(name, draft, _fixed_plan(asked), rule, SOFT_TEMPERATURE)
        case "pair":  # the drafter, and those of the merged ones that run a model
            for one in (draft, *(other for other in asked.merged if other.startswith(("model:", "head:")))):
                yield RunSpec(name, one, _fixed_plan(replace(asked, draft=one)))
        case "lookahead":
            for n in GRAMS:
                for kept in CANDIDATES:
                    yield RunSpec(name, f"lookahead,n={n},candidates={kept}", "fixed")
        case _:
            raise AssertionError(f"no figure has runs '{name}'")


@dataclass(slots=True)
class Recorder:
    """Records runs of one loaded model over prompts (token ids) as traces in a folder; `about` is for their headers."""

    asked: RecordingOptions
    loaded: LoadedModel
    prompts: Sequence[Sequence[int]]
    folder: Path
    about: dict[str, Any]
    tokenizer: Any = None

    def path_of(self, spec: RunSpec) -> Path:
        facts = [spec.run, spec.draft, spec.plan or "", spec.verify, f"t{self._temperature(spec):g}", f"b{spec.batch}"]
        return self.folder / (re.sub(r"[^\w.+=,-]+", "_", "-".join(filter(None, facts))) + ".jsonl")

    def record(self, spec: RunSpec) -> Trace:
        """Run all prompts, write the trace, and return it; a warm-up comes first and is not recorded."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path_of(spec)
        if path.exists():
            raise ConfigurationError(f"'{path}' already exists: choose another folder with --output")
        with path.open("x", encoding="utf-8") as stream:
            writer = TraceWriter(stream)
            llm = LLM(
                self.loaded, _named(spec.draft), verify=spec.verify, plan=spec.plan, tokenizer=self.tokenizer,
                max_batch_size=spec.batch, trust_remote_code=self.loaded.runs_code, on_round=writer,
                generation_config="none",
            )  # fmt: skip
            params = SamplingParams(
                max_tokens=self.asked.max_tokens, temperature=self._temperature(spec), seed=self.asked.seed
            )
            prompts = [list(prompt) for prompt in self.prompts[: spec.max_texts]]
            llm.generate(prompts[:1], replace(params, max_tokens=min(8, params.max_tokens or 8)), progress=False)
            llm.forget()
            llm.requests.records_picks = spec.plan == "watch"
            writer.begin(self._header(spec, llm, params))
            llm.generate(prompts, params, progress=False)
            writer.end(pieces_of(llm.tokenizer))
        return read_trace(path)

    def _temperature(self, spec: RunSpec) -> float:
        return self.asked.temperature if spec.temperature is None else spec.temperature

    def _header(self, spec: RunSpec, llm: LLM, params: SamplingParams) -> TraceHeader:
        plan = choose_methods(_named(spec.draft), spec.verify, spec.plan).plan
        sampling = {"temperature": params.temperature, "seed": params.seed, "max_tokens": params.max_tokens}
        about = self.about | sampling | {"batch": spec.batch, RUN: spec.run}
        planner = llm.planner
        parts = planner.parts
        seconds = planner.pass_seconds
        return TraceHeader(shown_name(self.asked.model), spec.draft, spec.verify, plan, parts, seconds, about)
