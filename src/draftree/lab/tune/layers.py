"""Search for the sublayers that a model skips when it drafts, by measured seconds per token, one set after another.

Every set is a point of {skip, keep}^(2 * layers). Optuna proposes the next one from earlier measurements (by Parzen
estimators); a set that is slower than most on its first prompts is abandoned early. All measurements are written to a
journal next to the cache, so that an interrupted search continues. Every fourth prompt is held out from the search;
plain decoding and the best set are measured on those at the end.

Source: Draft & Verify, arXiv 2309.08168, section 3.3 (which uses Gaussian processes).
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from draftree.build import load_for, require_positive
from draftree.core.errors import ConfigurationError, import_extra
from draftree.lab.bench.benchmark import prompts_of, tokenizer_of
from draftree.lab.bench.workload import read_workload
from draftree.llm import LLM
from draftree.loading.layer_sets import LayerSet, layer_spec, place_of
from draftree.loading.loaded import LoadedModel
from draftree.loading.resolve import resolve_model
from draftree.models.base import LayerSubset
from draftree.options import ModelOptions
from draftree.sampling.params import SamplingParams

UNSEEN_EVERY = 4
PROMPTS_BEFORE_GIVING_UP = 2
SIDES = ("attention", "mlp")


@dataclass(frozen=True, slots=True)
class LayerTuneSettings:
    """The settings of a search.

    Attributes:
        trials: number of sets to measure, including those of earlier runs.
    """

    options: ModelOptions
    prompts: Path
    trials: int = 60
    limit: int | None = None
    max_tokens: int = 48
    k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "trials", "limit", "k")
        if self.max_tokens < 2:
            raise ConfigurationError(f"max_tokens is {self.max_tokens}: it must be at least 2 to measure decoding")


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """One set of sublayers that were skipped; `seconds_per_token` is None if it was abandoned early."""

    number: int
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    seconds_per_token: float | None


class LayerSearch:
    """A search that can be continued. Loads the model and measures plain decoding."""

    def __init__(self, settings: LayerTuneSettings, *, fetch: Callable[[str], object] = resolve_model) -> None:
        self._optuna = _optuna()
        self._settings = settings
        workload = read_workload(settings.prompts).choose((), settings.limit)
        fetch(settings.options.model)
        self._loaded = load_for(settings.options)
        self._loaded.model.require_part(LayerSubset(attention=frozenset({0}), mlp=frozenset({0})))
        room = self._loaded.model.max_length - settings.max_tokens
        prompts = [list(p.ids) for p in prompts_of(workload, tokenizer_of(self._loaded), room)[0]]
        self.unseen = prompts[UNSEEN_EVERY - 1 :: UNSEEN_EVERY]
        self.seen = [prompt for place, prompt in enumerate(prompts) if place % UNSEEN_EVERY != UNSEEN_EVERY - 1]
        self.journal = place_of(self._loaded.model.fingerprint, ".journal")
        self._study = self._open_study(workload.sha256)
        self.plain_seconds = fmean(list(self._each_seconds(None, [self.seen[0], *self.seen]))[1:])

    @property
    def kernels_note(self) -> str | None:
        return self._loaded.kernels_note

    @property
    def num_done(self) -> int:
        states = self._optuna.trial.TrialState
        return len(self._study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED)))

    @property
    def best(self) -> LayerTrial | None:
        trials = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        return min(map(_tried, trials), key=lambda trial: trial.seconds_per_token or math.inf, default=None)

    def run(self) -> Iterator[LayerTrial]:
        """Measure the remaining sets; measurements are kept if the iteration stops early."""
        states = self._optuna.trial.TrialState
        while self.num_done < self._settings.trials:
            trial = self._study.ask()
            try:
                yield self._try(trial)
            except BaseException:
                if self._study.trials[trial.number].state is states.RUNNING:
                    self._study.tell(trial, state=states.FAIL)
                raise

    def _try(self, trial: Any) -> LayerTrial:
        model = self._loaded.model
        left_out = {
            side: tuple(i for i in range(model.num_layers) if trial.suggest_categorical(f"{side} {i}", [False, True]))
            for side in SIDES
        }
        seconds: list[float] = []
        # with nothing skipped the whole model would draft what it must compute anyway
        prompts = self.seen if any(left_out.values()) else []
        for prompt_seconds in self._each_seconds(self._spec(**left_out), prompts):
            seconds.append(prompt_seconds)
            trial.report(fmean(seconds), len(seconds))
            if trial.should_prune():
                break
        is_complete = len(seconds) == len(self.seen)
        if is_complete:
            self._study.tell(trial, fmean(seconds))
        else:
            self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
        return LayerTrial(trial.number, **left_out, seconds_per_token=fmean(seconds) if is_complete else None)

    def conclude(self, *, measures_unseen: bool = True) -> LayerSet | None:
        """Return the fastest set, measured on the held-out prompts; None if no set was measured."""
        best = self.best
        if best is None:
            return None
        unseen: list[float | None] = [None, None]
        if measures_unseen and self.unseen:
            unseen = [
                fmean(self._each_seconds(spec, self.unseen)) for spec in (self._spec(best.attention, best.mlp), None)
            ]
        assert best.seconds_per_token is not None, "the best one was measured to the end"
        return LayerSet(
            self._loaded.model.fingerprint,
            best.attention,
            best.mlp,
            num_layers=self._loaded.model.num_layers,
            seconds_per_token=best.seconds_per_token,
            plain_seconds_per_token=self.plain_seconds,
            unseen_seconds_per_token=unseen[0],
            unseen_plain_seconds_per_token=unseen[1],
            num_trials=self.num_done,
            computed_with=_computed_with(self._loaded),
        )

    def _spec(self, attention: Sequence[int], mlp: Sequence[int]) -> str:
        return layer_spec(attention, mlp) + ("" if self._settings.k is None else f",k={self._settings.k}")

    def _each_seconds(self, spec: str | None, prompts: Sequence[list[int]]) -> Iterator[float]:
        """Yield the seconds per token of a drafter for each prompt; prefill is excluded."""
        # every set drafts to the same depth: an adaptive planner would stop drafting, which would not rate the set
        llm = LLM(
            self._loaded,
            spec,
            plan=None if spec is None else "fixed",
            trust_remote_code=self._settings.options.trust_remote_code,
            generation_config="none",
        )
        params = SamplingParams(max_tokens=self._settings.max_tokens, temperature=0, seed=0, ignore_eos=True)
        for prompt in prompts:
            yield 1 / llm.generate([prompt], params)[0].stats.tokens_per_second

    def _open_study(self, prompts: str) -> Any:
        optuna, settings = self._optuna, self._settings
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        # measurements that are not comparable use different studies
        facts = (prompts, settings.limit, settings.max_tokens, settings.k, _computed_with(self._loaded))
        name = hashlib.sha256(repr((*facts, torch.get_num_threads())).encode()).hexdigest()[:12]
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(self.journal)))
        study = optuna.create_study(
            study_name=name,
            storage=storage,
            load_if_exists=True,
            sampler=optuna.samplers.TPESampler(seed=settings.seed),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=PROMPTS_BEFORE_GIVING_UP),
        )
        if not study.trials:
            for left_out in _first_guesses(self._loaded.model.num_layers):
                study.enqueue_trial(left_out)
        return study


def _first_guesses(num_layers: int) -> Iterator[dict[str, bool]]:
    """Yield initial sets: sublayers after the first layers and before the last ones matter least."""
    middle = range(num_layers // 4, num_layers - num_layers // 8)
    for attention, mlp in (
        (middle, ()),
        (middle[::2], ()),
        (middle[::2], middle[::2]),
        (middle, middle[::2]),
        (middle[::3], middle[::3]),
        (middle[-(num_layers // 4) :], middle[-(num_layers // 4) :]),
    ):
        chosen = {"attention": set(attention), "mlp": set(mlp)}
        yield {f"{side} {layer}": layer in chosen[side] for side in SIDES for layer in range(num_layers)}


def _tried(trial: Any) -> LayerTrial:
    layers = len(trial.params) // len(SIDES)
    left_out = {side: tuple(i for i in range(layers) if trial.params[f"{side} {i}"]) for side in SIDES}
    return LayerTrial(trial.number, **left_out, seconds_per_token=trial.value)


def _computed_with(loaded: LoadedModel) -> str:
    parts = (str(loaded.model.dtype).removeprefix("torch."), loaded.quantization, str(loaded.model.device))
    return ", ".join(part for part in (*parts, loaded.kernels) if part)


def _optuna() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries that optuna loads
        optuna = import_extra("tune", "the search for layers needs", error=ConfigurationError)
        import_module("optuna.storages.journal")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
