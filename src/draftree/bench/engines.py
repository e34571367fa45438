"""Engines under test: their interface to the runner, and our own engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from draftree.bench.methods import Method, OurMethod
from draftree.core.types import RoundRecord
from draftree.llm import LLM
from draftree.loading.load import LoadedModel
from draftree.planners.base import Planner
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer

OnRound = Callable[[RoundRecord], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One text.

    Attributes:
        token_ids: the generated tokens, including the one that ended the text.
        text: the text without special tokens.
        finish_reason: "stop" or "length".
        seed: seed of the text.
        stats: statistics named as in `CompletionStats`.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    seed: int
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunParams:
    """Generation parameters of every text.

    Attributes:
        max_tokens: maximum tokens.
        temperature: 0 selects the most likely token.
        seed: seed of every text.
    """

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Writer(ABC):
    """An engine with its model and all methods loaded."""

    @abstractmethod
    def write(self, method: Method, prompts: Sequence[Sequence[int]], run_params: RunParams) -> list[Outcome]:
        """Generate one text per prompt, concurrently; returns when the last is finished."""


@final
class OurWriter(Writer):
    """Draftree: one `LLM` per method, all on one loaded model.

    Args:
        target: the model.
        tokenizer: its tokenizer.
        methods: ours; drafters are loaded here, one for each.
        batch: maximum number of concurrent prompts.
        on_round: returns the round callback of a method, by name; None for no callback.
    """

    def __init__(
        self,
        target: LoadedModel,
        tokenizer: Tokenizer,
        *,
        methods: Sequence[Method],
        batch: int,
        on_round: Callable[[str], OnRound | None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        callback_of = on_round or (lambda name: None)
        self._llms = {
            method.name: _llm(target, tokenizer, method.how, batch=batch, on_round=callback_of(method.name))
            for method in methods
        }

    @property
    def planners(self) -> dict[str, Planner[Any]]:
        """The planner of every method, by name."""
        return {name: llm.planner for name, llm in self._llms.items()}

    def write(self, method: Method, prompts: Sequence[Sequence[int]], run_params: RunParams) -> list[Outcome]:
        """Call `LLM.generate` once, with a drafter that keeps nothing from earlier repeats."""
        llm = self._llms[method.name]
        llm.forget()
        params = SamplingParams(
            max_tokens=run_params.max_tokens,
            temperature=run_params.temperature,
            seed=run_params.seed,
        )
        return [
            Outcome(done.token_ids, done.text, done.finish_reason, done.seed, done.to_json()["stats"])
            for done in llm.generate([list(prompt) for prompt in prompts], params)
        ]


def _llm(target: LoadedModel, tokenizer: Tokenizer, how: Any, *, batch: int, on_round: OnRound | None) -> LLM:
    assert isinstance(how, OurMethod)
    return LLM(
        target,
        how.draft,
        verify=how.verify,
        plan=how.plan,
        tokenizer=tokenizer,
        max_batch_size=batch,
        trust_remote_code=target.runs_code,
        generation_config="none",
        on_round=on_round,
    )
