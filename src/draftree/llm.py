"""The front: `LLM` puts a model, a drafter, a verifier and a planner together and writes texts.

Example:
    >>> from draftree import LLM, SamplingParams
    >>> llm = LLM("smollm2-135m-instruct", draft="ngram")  # doctest: +SKIP
    >>> llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0))[0].text  # doctest: +SKIP
    ', there was a young woman named Lily'
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from draftree.assembly import build_parts, choose_methods
from draftree.completion import Completion, completion_of
from draftree.core.errors import ConfigurationError, DraftreeError, GenerationError, InvalidRequestError
from draftree.core.noise import Noise
from draftree.core.types import RoundRecord
from draftree.engine.engine import Engine, Update
from draftree.engine.sequence import FinishReason, WritingSequence
from draftree.models.base import LanguageModel
from draftree.models.loading import LoadedModel, load_model, require_known, wrap_model
from draftree.sampling.controls import build_controls
from draftree.sampling.params import SamplingParams
from draftree.text.detokenize import Detokenizer
from draftree.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, str]]
Params = SamplingParams | Sequence[SamplingParams] | None
SEED_BITS = 32


class LLM:
    """A model that writes, faster if it has a drafter. Not thread-safe.

    Args:
        model: a catalogue name, a folder, a GGUF file, a hub id, a loaded `…ForCausalLM` of transformers, any
            `LanguageModel`, or a `LoadedModel`, which several may share.
        draft: what guesses ahead (`none`, `ngram`, `model:NAME`, options behind commas); None is plain decoding.
        verify: the rule that keeps guesses; the default never changes the text.
        plan: how many tokens are guessed a round; None lets the drafter decide.
        dtype: "auto", "float32", "bfloat16", "float16" or "float64"; "auto" is bfloat16 where the device computes
            in it, else float32.
        device: "auto", "cpu", "cuda" or "cuda:N".
        kernels: "native" for passes in C, "torch" for passes through torch, "auto" for the first where it can be had.
        quantization: "int8" for weights of 8 bits, which makes another, faster model of it; None for as they come.
        exact: True to be refused unless drafts can not change a text by rounding either (see `is_exact`).
        tokenizer: for a loaded model the tokenizer of transformers that belongs to it; None where the model is
            loaded from files, which bring their own.
        max_batch_size: texts that are written at once at most.
        on_round: called with the record of every round.

    Raises:
        ConfigurationError: unknown methods or options, or methods that do not fit together; before weights are loaded.
        ModelError: the model can not be had or used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        draft: str | None = None,
        *,
        verify: str = "coupled",
        plan: str | None = None,
        dtype: Any = "auto",
        device: str = "auto",
        kernels: str = "auto",
        quantization: str | None = None,
        exact: bool = False,
        tokenizer: Any = None,
        max_batch_size: int = 16,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> None:
        if isinstance(max_batch_size, bool) or not isinstance(max_batch_size, int) or max_batch_size < 1:
            raise ConfigurationError(f"max_batch_size is {max_batch_size!r}: it must be a whole number of at least 1")
        methods = choose_methods(draft, verify, plan)
        loaded = _load(model, dtype, device, kernels=kernels, quantization=quantization)
        if exact and not loaded.model.is_exact:
            raise ConfigurationError(_why_inexact(loaded))
        self._tokenizer = _tokenizer(loaded, tokenizer)
        self._parts = build_parts(
            methods,
            loaded,
            self._tokenizer,
            dtype=loaded.model.dtype,
            device=str(loaded.model.device),
            kernels="torch" if loaded.kernels == "torch" and loaded.why_torch is None else "auto",
        )
        self._target = loaded.model
        self._eos_ids = loaded.eos_ids or _eos_of(self._tokenizer)
        self._max_batch_size = max_batch_size
        self._on_round = on_round
        self._num_requests = 0
        self.is_lossless = methods.verifier.lossless
        self.is_exact = loaded.model.is_exact
        self.kernels = loaded.kernels
        self.quantization = loaded.quantization

    @property
    def model(self) -> LanguageModel:
        """The target behind the model seam."""
        return self._target

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer, None if it has none."""
        return self._tokenizer

    def forget(self) -> None:
        """Drop what the drafter remembers of earlier requests. No text depends on it, only how fast it comes."""
        if self._parts.drafter is not None:
            self._parts.drafter.forget()

    @property
    def draft_note(self) -> str:
        """What the drafter decided when it was built, such as how another tokenizer is mapped; empty if nothing."""
        return "" if self._parts.drafter is None else self._parts.drafter.note

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        on_update: Callable[[Update], None] | None = None,
    ) -> list[Completion]:
        """Write texts for prompts, several at once.

        Args:
            prompts: texts or lists of token ids, one or several.
            params: sampling parameters, for all or one for each prompt.
            on_update: called with every piece of text as it is verified.

        Returns:
            For every prompt its n completions, in the order of the prompts.

        Raises:
            InvalidRequestError: a prompt or parameter that can not be honoured; nothing has been written then.
            GenerationError: requests failed while they were written; its `completions` holds the others.
        """
        return self._run([self._encode(prompt) for prompt in _prompt_list(prompts)], params, on_update)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        on_update: Callable[[Update], None] | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or several at once, by the model's chat template.

        Args:
            messages: dictionaries with "role" and "content".
            params: as for `generate`.
            on_update: as for `generate`.

        Raises:
            InvalidRequestError: malformed messages, or a model without a chat template.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        return self._run([self._encode_chat(c) for c in conversations], params, on_update)  # type: ignore[arg-type]

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None
    ) -> Generator[str, None, Completion]:
        """Write one text and yield its pieces as they are verified; close the generator to stop early.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
            params: sampling parameters, n=1.

        Returns:
            The completion, as the value of the finished generator.
        """
        with closing(self.stream_updates(prompt, params)) as updates:
            while True:
                try:
                    update = next(updates)
                except StopIteration as end:
                    done: Completion = end.value
                    return done
                for piece in update.pieces:
                    yield piece.text

    def stream_updates(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None
    ) -> Generator[Update, None, Completion]:
        """As `stream`, with what was drafted and what was picked told apart."""
        given = params or SamplingParams()
        if given.n != 1:
            raise InvalidRequestError(f"n={given.n} texts can not be streamed as one: set n=1, or use generate")
        is_chat = bool(prompt) and not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
        ids = self._encode_chat(prompt) if is_chat else self._encode(prompt)  # type: ignore[arg-type]
        sequence = self._sequences(ids, given)[0]
        engine = self._engine()
        engine.add(sequence)
        try:
            while not engine.is_idle:
                yield from engine.step()
        finally:
            engine.abort([sequence])
        if sequence.error is not None:
            raise sequence.error
        return completion_of(sequence, prompt_index=0)

    def _run(
        self, prompts: Sequence[list[int]], params: Params, on_update: Callable[[Update], None] | None
    ) -> list[Completion]:
        each = _params_for(params, len(prompts))
        batch = [self._sequences(ids, given) for ids, given in zip(prompts, each, strict=True)]
        everything = [sequence for sequences in batch for sequence in sequences]
        engine = self._engine()
        for sequence in everything:
            engine.add(sequence)
        try:
            while not engine.is_idle:
                for update in engine.step():
                    if on_update is not None:
                        on_update(update)
        finally:
            engine.abort(everything)
        done = [
            completion_of(sequence, prompt_index=index)
            for index, sequences in enumerate(batch)
            for sequence in sequences
            if sequence.finish_reason is not FinishReason.ERROR
        ]
        _raise_failures(everything, done)
        return done

    def _engine(self) -> Engine:
        return Engine(self._parts, max_batch_size=self._max_batch_size, on_round=self._on_round)

    def _sequences(self, ids: list[int], params: SamplingParams) -> list[WritingSequence]:
        limit = self._limit(ids, params)
        self._check_prediction(params)
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        self._num_requests += 1
        return [
            WritingSequence(
                f"request-{self._num_requests}",
                index,
                ids,
                controls=build_controls(
                    params,
                    vocab_size=self._target.vocab_size,
                    eos_ids=self._eos_ids,
                    encode=None if self._tokenizer is None else self._encode_plainly,
                    seed=seed if index == 0 else Noise(seed).stream("n", index).seed,
                ),
                limit=limit,
                detokenizer=self._detokenizer(params, ids),
            )
            for index in range(params.n)
        ]

    def _limit(self, ids: Sequence[int], params: SamplingParams) -> int:
        context = self._target.max_length
        if len(ids) >= context:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens, but the model's context holds {context}, the output included: "
                "shorten the prompt"
            )
        if params.max_tokens is None:
            return context
        if len(ids) + params.max_tokens > context:
            raise InvalidRequestError(
                f"a prompt of {len(ids)} tokens and max_tokens={params.max_tokens} do not fit into the model's context "
                f"of {context}: set max_tokens to {context - len(ids)} at most, or to None for all that fits"
            )
        return len(ids) + params.max_tokens

    def _check_prediction(self, params: SamplingParams) -> None:
        drafter = self._parts.drafter
        if params.prediction is not None and (drafter is None or not drafter.reads_predictions):
            raise InvalidRequestError(
                f"a prediction was given, but {'there is no drafter' if drafter is None else 'the drafter'} "
                "that reads it: use draft='prediction', alone or merged with another ('prediction+suffix'), "
                "or leave the prediction out"
            )

    def _detokenizer(self, params: SamplingParams, prompt: Sequence[int]) -> Detokenizer | None:
        if self._tokenizer is None:
            if params.stop_strings:
                raise InvalidRequestError("stop strings need a tokenizer, and this model has none: use stop_token_ids")
            return None
        return Detokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=prompt)

    def _encode_plainly(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_chat(self, messages: Messages) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError("a conversation needs a tokenizer, and this model has none: give token ids")
        return self._tokenizer.apply_chat_template(messages)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError("the prompt is a text, but this model has no tokenizer: give token ids")
            ids = self._tokenizer.encode(prompt) if prompt else []
        else:
            ids = list(prompt)
        if not ids:
            raise InvalidRequestError("the prompt is empty: give at least one character or token")
        for token in ids:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidRequestError(f"a prompt of token ids must hold whole numbers, got {token!r}")
            if not 0 <= token < self._target.vocab_size:
                raise InvalidRequestError(
                    f"the prompt holds token {token}, but the vocabulary ends at {self._target.vocab_size - 1}"
                )
        return [int(token) for token in ids]


def _load(model: Any, dtype: Any, device: str, *, kernels: str, quantization: str | None) -> LoadedModel:
    require_known(kernels, quantization)
    if isinstance(model, str | os.PathLike):
        return load_model(model, dtype=dtype, device=device, kernels=kernels, quantization=quantization)
    if kernels == "native" or quantization is not None:
        raise ConfigurationError(
            "kernels and quantization are chosen while a model is loaded, and this one is loaded already: "
            "give its name or its folder"
        )
    if dtype != "auto" or device != "auto":
        raise ConfigurationError("dtype and device belong to a loaded model already: leave them at 'auto'")
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, LanguageModel):
        return LoadedModel(model, None, (), type(model).__name__)
    if not hasattr(model, "config") or not callable(model):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: give a name, a path, a transformers model or a LanguageModel"
        )
    return wrap_model(model)


def _why_inexact(loaded: LoadedModel) -> str:
    reason = loaded.why_torch or "its passes run through torch"
    return (
        f"exact was asked for, but a pass of '{loaded.name}' over several rows may round differently from one over one "
        f"row: {reason}; leave exact out, or take a model, a device and a dtype that native kernels know"
    )


def _tokenizer(loaded: LoadedModel, given: Any) -> Tokenizer | None:
    if given is not None:
        return given if isinstance(given, Tokenizer) else Tokenizer(given)
    return None if loaded.folder is None else Tokenizer.load(Path(loaded.folder))


def _eos_of(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return () if eos is None else (eos,)


def _prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        if not isinstance(prompts, str):
            raise InvalidRequestError(f"prompts is {prompts!r}: give a text, token ids, or a list of either")
        return [prompts]
    listed = list(prompts)
    is_one_of_ids = bool(listed) and all(hasattr(item, "__index__") for item in listed)
    return [listed] if is_one_of_ids else listed


def _params_for(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{count} prompts came with {len(params)} sampling parameters: give one for each, or one"
        )
    return list(params)


def _raise_failures(sequences: Sequence[WritingSequence], done: list[Completion]) -> None:
    errors = [sequence.error for sequence in sequences if sequence.error is not None]
    if not errors:
        return
    first = errors[0]
    if len(sequences) == 1 and isinstance(first, DraftreeError):
        raise first
    raise GenerationError(f"{len(errors)} of {len(sequences)} requests failed; the first: {first}", done) from first
