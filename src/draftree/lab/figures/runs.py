"""Runs of a model that figures need, and their recording as traces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
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


def specs_of(names: Iterable[str], options: RecordingOptions) -> tuple[list[RunSpec], dict[str, str]]:
    """Return the runs of these names, and the reason for each name that the drafter cannot take part in."""
    choose_methods(_named(options.draft), "coupled", None)
    specs: list[RunSpec] = []
    refused: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            runs = runs_of(name, options)
            for spec in runs:
                choose_methods(_named(spec.draft), spec.verify, spec.plan)
            specs += runs
        except ConfigurationError as error:
            refused[name] = str(error)
    return specs, refused


def with_tree(draft: str, shape: str) -> str:
    """Return a drafter with the shape of its tree; as it is if it has no shape, or one already."""
    (spec,) = DRAFTERS.parse(draft)
    _, config = DRAFTERS.configure(spec)
    has_shape = any(field.name == "tree" for field in fields(config)) and "tree" not in dict(spec.options)
    return f"{draft},tree={shape}" if has_shape else draft


def _lengths(draft: str, wanted: Iterable[int]) -> list[int]:
    """Return the lengths that the drafter can draft; always the longest one up to the last wanted."""
    most = choose_methods(_named(draft), "coupled", None).traits.depth
    return sorted({min(length, most) for length in wanted})


def _named(draft: str) -> str | None:
    return None if draft == NO_DRAFT else draft


def _fixed_plan(draft: str) -> str:
    return f"fixed:{_lengths(draft, [RULE_LENGTH])[0]}"


def runs_of(name: str, options: RecordingOptions) -> list[RunSpec]:
    draft = options.draft
    run = partial(RunSpec, name)
    match name:
        case "watch":
            return [run(with_tree(draft, options.tree), "watch")]
        case "best":
            return [run(with_tree(draft, f"best-{BEST_NODES}"), "watch")]
        case "merged":
            return [run("+".join(dict.fromkeys((*draft.split("+"), *options.merged))), "watch")]
        case "plain":
            return [run(NO_DRAFT)]
        case "fixed":
            return [run(draft, _fixed_plan(draft))]
        case "adaptive":
            return [run(draft, "adaptive")]
        case "length":
            return [run(draft, f"fixed:{length}") for length in _lengths(draft, LENGTHS)]
        case "batch":
            return [
                run(draft, f"fixed:{length}", batch=batch) if length else run(NO_DRAFT, batch=batch)
                for length in _lengths(draft, BATCH_LENGTHS)
                for batch in BATCHES
            ]
        case "rule":
            plan = _fixed_plan(draft)
            return [run(draft, plan, rule, t, max_texts=8) for t in TEMPERATURES for rule in RULES]
        case "soft":
            return [run(draft, _fixed_plan(draft), rule, SOFT_TEMPERATURE) for rule in SOFT]
        case "pair":  # the drafter, and those of the merged ones that run a model
            others = [other for other in options.merged if other.startswith(("model:", "head:"))]
            return [run(each, _fixed_plan(each)) for each in (draft, *others)]
        case "lookahead":
            return [run(f"lookahead,n={n},candidates={kept}", "fixed") for n in GRAMS for kept in CANDIDATES]
        case _:
            raise AssertionError(f"no figure has runs '{name}'")


@dataclass(slots=True)
class Recorder:
    """Records runs of one loaded model over prompts (token ids) as traces in a folder; `about` is for their headers."""

    options: RecordingOptions
    loaded: LoadedModel
    prompts: Sequence[Sequence[int]]
    folder: Path
    about: dict[str, Any]
    tokenizer: Any = None

    def record(self, spec: RunSpec) -> Trace:
        """Run all prompts, write the trace, and return it; a warm-up comes first and is not recorded."""
        options = self.options
        temperature = options.temperature if spec.temperature is None else spec.temperature
        facts = [spec.run, spec.draft, spec.plan or "", spec.verify, f"t{temperature:g}", f"b{spec.batch}"]
        path = self.folder / (re.sub(r"[^\w.+=,-]+", "_", "-".join(filter(None, facts))) + ".jsonl")
        self.folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise ConfigurationError(f"'{path}' already exists: choose another folder with --output")
        with path.open("x", encoding="utf-8") as stream:
            writer = TraceWriter(stream)
            llm = LLM(
                self.loaded,
                _named(spec.draft),
                verify=spec.verify,
                plan=spec.plan,
                tokenizer=self.tokenizer,
                max_batch_size=spec.batch,
                trust_remote_code=self.loaded.runs_code,
                on_round=writer,
                generation_config="none",
            )
            sampling: dict[str, Any] = {
                "temperature": temperature,
                "seed": options.seed,
                "max_tokens": options.max_tokens,
            }
            prompts = [list(prompt) for prompt in self.prompts[: spec.max_texts]]
            warm_up = SamplingParams(**sampling | {"max_tokens": min(8, options.max_tokens)})
            llm.generate(prompts[:1], warm_up, progress=False)
            llm.forget()
            llm.requests.records_picks = spec.plan == "watch"
            writer.begin(
                TraceHeader(
                    shown_name(options.model),
                    spec.draft,
                    spec.verify,
                    choose_methods(_named(spec.draft), spec.verify, spec.plan).plan,
                    llm.planner.parts,
                    llm.planner.pass_seconds,
                    self.about | sampling | {"batch": spec.batch, RUN: spec.run},
                )
            )
            llm.generate(prompts, SamplingParams(**sampling), progress=False)
            writer.end(pieces_of(llm.tokenizer))
        return read_trace(path)
