"""Engines under test: their interface to the benchmark, our own engine, and transformers.

transformers does the same jobs by `model.generate`: plain, with prompt lookup, an assistant model, or early exit. A
streamer records tokens and their times; it does nothing else.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.core.files import kernel_refusal
from draftree.core.types import RoundRecord
from draftree.lab.bench.methods import Method, OurMethod, PeerMethod
from draftree.llm import LLM
from draftree.loading.loaded import LoadedModel
from draftree.loading.resolve import resolve_model
from draftree.models.torch.inspection import quiet
from draftree.planners.base import Planner
from draftree.sampling.params import SamplingParams
from draftree.text.retokenize import compare_vocabularies
from draftree.text.tokenizer import Tokenizer

OnRound = Callable[[RoundRecord], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunParams:
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Writer(ABC):
    @abstractmethod
    def write(self, method: Method, prompts: Sequence[Sequence[int]], run_params: RunParams) -> list[Outcome]: ...


@final
class OurWriter(Writer):
    """Draftree: one `LLM` per method, all on one loaded model."""

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
        self._llms = {}
        for method in methods:
            assert isinstance(method.how, OurMethod)
            self._llms[method.name] = LLM(
                target,
                method.how.draft,
                verify=method.how.verify,
                plan=method.how.plan,
                tokenizer=tokenizer,
                max_batch_size=batch,
                trust_remote_code=target.runs_code,
                generation_config="none",
                on_round=None if on_round is None else on_round(method.name),
            )

    @property
    def planners(self) -> dict[str, Planner[Any]]:
        return {name: llm.planner for name, llm in self._llms.items()}

    def write(self, method: Method, prompts: Sequence[Sequence[int]], run_params: RunParams) -> list[Outcome]:
        llm = self._llms[method.name]
        llm.forget()
        params = SamplingParams(**dataclasses.asdict(run_params))
        return [
            Outcome(done.token_ids, done.text, done.finish_reason, done.to_json()["stats"])
            for done in llm.generate([list(prompt) for prompt in prompts], params)
        ]


@final
class PeerWriter(Writer):
    """transformers with its own copy of the model, as loaded by `from_pretrained`; each assistant is loaded once."""

    def __init__(
        self, target: LoadedModel, tokenizer: Tokenizer, *, methods: Sequence[Method], eos_ids: Sequence[int]
    ) -> None:
        assert target.folder is not None
        self._tokenizer = tokenizer
        self._eos_ids = list(eos_ids)
        self._model = _load(target.folder, target)
        names = {m.how.assistant for m in methods if isinstance(m.how, PeerMethod) and m.how.assistant is not None}
        self._assistants: dict[str, tuple[Any, dict[str, Any]]] = {}
        """Model and tokenizers of each assistant."""
        for name in sorted(names):
            folder = resolve_model(name)
            tokenizers = _tokenizers(tokenizer, folder, trust_remote_code=target.runs_code)
            self._assistants[name] = (_load(folder, target), tokenizers)

    def write(self, method: Method, prompts: Sequence[Sequence[int]], run_params: RunParams) -> list[Outcome]:
        assert isinstance(method.how, PeerMethod)
        clock = TokenClock()
        longest = max(len(prompt) for prompt in prompts)
        ids = [[self._pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        inputs, attention = (torch.tensor(rows, device=self._model.device) for rows in (ids, mask))
        torch.manual_seed(run_params.seed)
        config = self._config(method.how, run_params)
        how: dict[str, Any] = {}
        if method.how.exit_layers is not None:
            self._model.generation_config = _draft_length(method.how)
        if method.how.assistant is not None:
            assistant, tokenizers = self._assistants[method.how.assistant]
            assistant.generation_config = _draft_length(method.how)
            how = {"assistant_model": assistant, **tokenizers}
        with quiet():
            clock.start()
            self._model.generate(inputs, attention_mask=attention, generation_config=config, streamer=clock, **how)
        return [self._outcome(row, len(prompt), clock) for row, prompt in enumerate(prompts)]

    @property
    def _pad_id(self) -> int:
        return self._eos_ids[0] if self._eos_ids else 0

    def _config(self, how: PeerMethod, run_params: RunParams) -> Any:
        from transformers import GenerationConfig

        sampling: dict[str, Any] = {"do_sample": False}
        if run_params.temperature > 0:
            sampling = {"do_sample": True, "temperature": run_params.temperature, "top_k": 0, "top_p": 1.0}
        if how.exit_layers is not None:
            sampling["assistant_early_exit"] = how.exit_layers
        if how.lookup_tokens is not None:
            sampling["prompt_lookup_num_tokens"] = how.lookup_tokens
        return GenerationConfig(
            max_new_tokens=run_params.max_tokens,
            eos_token_id=self._eos_ids or None,
            pad_token_id=self._pad_id,
            **sampling,
        )

    def _outcome(self, row: int, prompt_tokens: int, clock: TokenClock) -> Outcome:
        steps = [step[row] for step in clock.steps]
        written = [token for step in steps for token in step]
        end = next((place + 1 for place, token in enumerate(written) if token in self._eos_ids), None)
        ids = written[:end]
        prefill = clock.times[0]
        decode = clock.times[-1] - prefill
        after_first = len(ids) - len(steps[0])
        stats = {
            "rounds": len(steps),
            "acceptance_length": len(ids) / len(steps),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(ids),
            "prefill_seconds": prefill,
            "decode_seconds": decode,
            "tokens_per_second": after_first / decode if decode > 0 else len(ids) / prefill,
        }
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        return Outcome(tuple(ids), text, "length" if end is None else "stop", stats)


def _draft_length(how: PeerMethod) -> Any:
    """Return the assistant's settings, from which transformers reads the draft length and in which it adapts it."""
    from transformers import GenerationConfig

    if how.assistant_tokens is None:
        return GenerationConfig()
    return GenerationConfig(
        num_assistant_tokens=how.assistant_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


class TokenClock:
    """A streamer that records tokens and their times.

    Attributes:
        steps: for each round, for each sequence, its new tokens.
        times: seconds from `start` to each round's end.
    """

    def __init__(self) -> None:
        self.steps: list[list[list[int]]] = []
        self.times: list[float] = []
        self._start = 0.0
        self._prompt_seen = False

    def start(self) -> None:
        self._start = time.perf_counter()

    def put(self, tokens: Tensor) -> None:
        """Receive tokens from transformers: the prompt first, then (sequences,) or (1, tokens) per round."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter() - self._start)
        self.steps.append([[token] for token in tokens.tolist()] if tokens.dim() == 1 else tokens.tolist())

    def end(self) -> None:
        """Do nothing; transformers calls it after the last round."""


def _load(folder: Path, target: LoadedModel) -> Any:
    """Return a model for the device of the target, in its dtype."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    trusts = target.runs_code
    if not trusts and (why := kernel_refusal(folder)):
        raise ModelLoadError(f"model {why}")
    try:
        with quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=target.model.dtype, local_files_only=True, trust_remote_code=trusts, weights_only=True
            )
    except Exception as error:  # the libraries raise various exceptions for damaged files
        raise ModelLoadError(f"transformers could not read '{folder}': {error}".split("\n", 1)[0]) from error
    model.generation_config = GenerationConfig()  # a model's own sampling defaults must not apply
    return model.to(target.model.device).eval().requires_grad_(False)


def _tokenizers(tokenizer: Tokenizer, folder: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the tokenizers that `generate` needs for an assistant with another tokenizer, and refuses otherwise."""
    other = Tokenizer.load(folder, trust_remote_code=trust_remote_code)
    if other is None or compare_vocabularies(tokenizer.vocabulary(), other.vocabulary()).same:
        return {}
    return {"tokenizer": tokenizer.backend, "assistant_tokenizer": other.backend}
