"""Comparison of a drafter's distributions with the target's, at every position of texts of the target.

The target generates plain texts. Then both models read them once, each through its own slots, which gives both
processed distributions at every position: the rank of the target's pick among the drafter's first guesses is counted
with many noise seeds, and the acceptance of each verifier follows from the distributions alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.build import require_positive
from draftree.core.errors import ConfigurationError
from draftree.core.host import apply_threads
from draftree.core.noise import Noise
from draftree.lab.bench.benchmark import prompts_of, read_tokens, run_header, tokenizer_of
from draftree.lab.bench.methods import our_methods
from draftree.lab.bench.records import DistributionRecord
from draftree.lab.bench.workload import SHIPPED, Prompt, read_workload
from draftree.lab.bench.writers import OurWriter, RunParams
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.provenance import model_facts
from draftree.loading.resolve import require_extras, resolve_model
from draftree.models.base import LanguageModel
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits, leading
from draftree.sampling.params import SamplingParams
from draftree.text.retokenize import compare_vocabularies
from draftree.text.tokenizer import Tokenizer

NUM_RANKS = 8

Reduce = Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray]], Mapping[str, Sequence[float]]]
"""(target's distribution, drafter's distribution, draws without replacement from it) to the acceptance of verifiers,
each for growing numbers of children."""


@dataclass(frozen=True, slots=True)
class DistributionSettings:
    """The models and prompts of a comparison.

    Attributes:
        model: the target, in any supported form.
        draft_model: the drafter's model, with the same vocabulary.
        temperatures: temperatures of texts and distributions.
        prompts: a prompts file; None uses the built-in set.
        categories: only these; empty uses all.
        limit: maximum prompts per category.
        max_tokens: maximum tokens per text.
        seed: seed of every text.
        draws: number of noise seeds to average over; the first is the text's own.
        dtype: dtype of both models.
        device: device of both models.
        threads: CPU threads; None keeps torch's own choice.
        trust_remote_code: whether Python code in the folders of the models may run.
    """

    model: str
    draft_model: str
    temperatures: tuple[float, ...] = (0.0, 0.5, 0.8, 1.0, 1.25, 1.5)
    prompts: Path | None = None
    categories: tuple[str, ...] = ()
    limit: int | None = None
    max_tokens: int = 48
    seed: int = 0
    draws: int = 8
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "limit", "draws", "threads")
        if not self.temperatures:
            raise ConfigurationError("no temperature is given: give one at least, such as 0.8")
        for temperature in self.temperatures:
            SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=self.seed)


@dataclass(frozen=True, slots=True)
class DistributionJob:
    """A comparison that is ready to run."""

    header: dict[str, Any]
    settings: DistributionSettings
    target: LoadedModel
    drafter: LanguageModel
    tokenizer: Tokenizer
    prompts: tuple[Prompt, ...]

    def run(self, reduce: Reduce) -> Iterator[list[DistributionRecord]]:
        """The records of one temperature after the other."""
        (plain,) = our_methods(())
        writer = OurWriter(self.target, self.tokenizer, methods=[plain], batch=len(self.prompts))
        for temperature in self.settings.temperatures:
            run_params = RunParams(self.settings.max_tokens, temperature, self.settings.seed)
            texts = writer.write(plain, [prompt.ids for prompt in self.prompts], run_params)
            yield [
                self._record(prompt, text.token_ids, run_params, reduce)
                for prompt, text in zip(self.prompts, texts, strict=True)
            ]

    def _record(self, prompt: Prompt, text: Sequence[int], run_params: RunParams, reduce: Reduce) -> DistributionRecord:
        params = SamplingParams(
            max_tokens=run_params.max_tokens, temperature=run_params.temperature, seed=run_params.seed
        )
        vocab_size = self.target.model.vocab_size
        controls = build_controls(params, vocab_size=vocab_size, seed=run_params.seed)
        distributions_of = partial(
            read_distributions, prompt=prompt.ids, text=text, controls=controls, vocab_size=vocab_size
        )
        target, draft = distributions_of(self.target.model), distributions_of(self.drafter)
        noises = [
            Noise(run_params.seed),
            *(Noise(run_params.seed).stream("distributions", i) for i in range(1, self.settings.draws)),
        ]
        ranks = [shared_ranks(target, draft, noise) for noise in noises]
        kept = _kept(target, draft, noises, reduce)
        return DistributionRecord(
            task=prompt.task.id,
            category=prompt.task.category,
            temperature=run_params.temperature,
            num_positions=len(text),
            own_ranks=tuple(ranks[0]),
            shared_hits=_hits([rank for row in ranks for rank in row], share=len(noises)),
            kept=kept,
        )


def prepare(settings: DistributionSettings, *, fetch: Callable[[str], object] = resolve_model) -> DistributionJob:
    """Check everything, then load both models.

    Raises:
        ConfigurationError: a bad prompts file, no prompt that fits, another vocabulary.
        ModelError: a model cannot be found or used.
    """
    workload = read_workload(settings.prompts or SHIPPED).choose(settings.categories, settings.limit)
    names = (settings.model, settings.draft_model)
    for name in names:
        require_extras(name)
    for name in names:
        fetch(name)
    apply_threads(settings.threads)
    target, drafter = (
        load_model(name, dtype=settings.dtype, device=settings.device, trust_remote_code=settings.trust_remote_code)
        for name in names
    )
    assert drafter.folder is not None
    tokenizer, own = tokenizer_of(target), tokenizer_of(drafter)
    if not compare_vocabularies(tokenizer.vocabulary(), own.vocabulary()).same:
        raise SystemExit(
            f"the vocabularies of '{target.name}' and '{drafter.name}' differ: choose models with the same one"
        )
    room = min(target.model.max_length, drafter.model.max_length) - settings.max_tokens
    prompts, notes = prompts_of(workload, tokenizer, room)
    header = {
        **run_header("distributions", target, settings.model),
        "draft_models": [model_facts(settings.draft_model, drafter.folder)],
        "prompts": {
            "name": workload.name,
            "sha256": workload.sha256,
            "shipped": settings.prompts is None,
            "written": len(prompts),
        },
        "temperatures": list(settings.temperatures),
        "max_tokens": settings.max_tokens,
        "seed": settings.seed,
        "draws": settings.draws,
        "notes": list(notes),
    }
    return DistributionJob(header, settings, target, drafter.model, tokenizer, tuple(prompts))


def read_distributions(
    model: LanguageModel, *, prompt: Sequence[int], text: Sequence[int], controls: Controls, vocab_size: int
) -> Distributions:
    """Compute a model's distributions at every position of a text in one reading.

    Args:
        model: the model.
        prompt: token ids before the text.
        text: token ids; one distribution is returned for each of them.
        controls: conversion of logits to distributions.
        vocab_size: width of the distributions; missing tokens of a narrower model get probability 0.
    """
    tokens = [token if token < model.vocab_size else 0 for token in (*prompt, *text[:-1])]
    slot = model.open()
    try:
        places = range(len(prompt) - 1, len(tokens))
        results = read_tokens(model, slot, tokens, logits_at=places)
        logits = [result.logits.tensor() for rows, result in results if rows]
    finally:
        model.close(slot)
    rows = torch.cat(logits)[:, :vocab_size]
    missing = vocab_size - rows.shape[-1]
    rows = torch.nn.functional.pad(rows, (0, missing), value=float("-inf"))
    paths = [tuple(text[:length]) for length in range(len(text))]
    return Distributions(TensorLogits(rows), [DistributionRows(History(prompt), controls, paths)])


def shared_ranks(target: Distributions, draft: Distributions, noise: Noise) -> list[int]:
    """Return for every position the rank of the target's pick among the drafter's first guesses; 0 if it is absent."""
    picks, _ = leading(target.perturbed([noise]), 1)
    guesses, _ = leading(draft.perturbed([noise]), min(NUM_RANKS, draft.logits.shape[-1]))
    return [
        row.index(pick) + 1 if pick in row else 0 for (pick,), row in zip(picks.tolist(), guesses.tolist(), strict=True)
    ]


def _kept(
    target: Distributions, draft: Distributions, noises: Sequence[Noise], reduce: Reduce
) -> dict[str, list[list[float]]]:
    """Return the acceptance of each verifier, position by position."""
    target_probs = target.of(0).probs().double().cpu().numpy()
    draft_probs = draft.of(0).probs().double().cpu().numpy()
    streams = [noise.stream("draft") for noise in noises]
    drawn = [leading(draft.perturbed([stream]), min(4, draft_probs.shape[-1]))[0].cpu().numpy() for stream in streams]
    found: dict[str, list[list[float]]] = {}
    for position in range(len(target_probs)):
        draws = [rows[position] for rows in drawn]
        for rule, values in reduce(target_probs[position], draft_probs[position], draws).items():
            found.setdefault(rule, []).append([round(float(value), 5) for value in values])
    return found


def _hits(ranks: Sequence[int], *, share: int) -> tuple[float, ...]:
    counts = Counter(ranks)
    return tuple(counts[rank] / share for rank in range(1, NUM_RANKS + 1))
