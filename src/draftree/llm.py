"""The front end: `LLM` combines a model, a drafter, a verifier and a planner, and generates texts.

Example:
    >>> from draftree import LLM, SamplingParams
    >>> llm = LLM("smollm2-135m-instruct", draft="ngram")  # doctest: +SKIP
    >>> llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0))[0].text  # doctest: +SKIP
    ', there was a young woman named Lily'
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, Unpack

from draftree.arguments import (
    Messages,
    Params,
    Prompt,
    params_for,
    prompt_list,
)
from draftree.beams import BeamSearching
from draftree.choices import build_each, choose_each, decide_each, learning_of, store_of
from draftree.completion import Completion, completions_of
from draftree.core.host import SYSTEM_CLOCK, Clock, apply_threads
from draftree.core.types import RoundRecord
from draftree.drafters import AUTO_DRAFT, NO_DRAFT
from draftree.engine.engine import PREFIX_CACHE_SIZE, Engine, Limits
from draftree.engine.prefill import PREFILL_TOKENS_BUSY
from draftree.engine.prefix_cache import PrefixStats
from draftree.engine.sequence import Update
from draftree.loading.generation_config import require_source, sampling_in, sampling_note
from draftree.loading.targets import eos_ids_of, kernels_of_drafter, load_target, require_exact, tokenizer_of
from draftree.models.base import LanguageModel
from draftree.parallel.entry import load_divided
from draftree.parallel.options import ParallelOptions
from draftree.planners.base import Planner
from draftree.progress import write_all
from draftree.prompts import DecoderOptions, PromptEncoder, encoder_of
from draftree.requests import Requests
from draftree.sampling.params import NEUTRAL
from draftree.streaming import Streams
from draftree.text.tokenizer import Tokenizer
from draftree.transcriber import Transcriber
from draftree.transcription import Transcribes
from draftree.verifiers.base import Guarantee

logger = logging.getLogger(__name__)


class LLM(BeamSearching, Streams, Transcribes):
    """A model for generation, accelerated by a drafter. Thread-safe: calls of several threads are decoded as one batch.

    Args:
        model: a catalogue name, a folder, a GGUF file, a hub id, a loaded `…ForCausalLM` of transformers, any
            `LanguageModel`, or a `LoadedModel`, which several may share.
        draft: the drafter (`ngram`, `model:NAME`, options after commas). `auto` is the best one that is known for the
            model, named in `draft_note`; "none" or None is plain decoding. Several drafters are loaded side by side,
            and each request chooses one of them; the first is the default.
        verify: the verifier; the default never changes the text.
        plan: the planner of draft sizes; None is `adaptive`, or the drafter's own length for a verifier whose text
            depends on the draft.
        dtype: "auto" (bfloat16 if the device computes in it, else float32), or the name of a torch dtype.
        device: "auto", "cpu", "cuda" or "cuda:N".
        kernels: "native" for passes in C, "torch" for passes through torch, "auto" for native if available;
            "graphs" for passes through torch in fixed shapes, as CUDA graphs on a GPU (never timed).
        quantization: "int8" or "int4" for weights of 8 or 4 bits, which make a different, faster model; None for none.
        tp: processes that share each layer; the script is started by torchrun, and only rank 0 returns from this
            constructor: the other ranks run its passes, and exit when it ends.
        pp: stages of layers, with `tp` processes each.
        strict_sums: add the partial sums of processes in one order, whatever else is in a pass.
        exact: raise unless logits are bit-identical in every batch and tree (see `is_exact`).
        trust_remote_code: whether Python code in the folders of the model and of the drafter's model may run.
        tokenizer: the transformers tokenizer of a loaded model; None for a model that is loaded from files.
        max_batch_size: maximum number of running sequences; None for as many as memory allows, up to 32.
        prefill_chunk_size: maximum prompt tokens per pass while other sequences are decoding. A larger value lowers
            the time to first token of new requests, and raises the inter-token latency of running ones.
        prefix_cache_size: maximum number of finished sequences whose keys and values are kept for later prompts.
        sequence_memory: bytes for keys, values and logits of all sequences; None for half of the memory that is free
            when the model is loaded. A request that cannot fit is refused.
        allow_control_tokens: whether control tokens in messages, such as <|im_end|>, are encoded as such; else as text.
        generation_config: "auto" for the sampling defaults in the model's generation_config.json, where a request gives
            no temperature, top_p, top_k, min_p or repetition_penalty; "none" for those of `Sampling`.
        learn: whose verified texts drafters learn from, "server" or "key", options after commas; None for none.
        offload: memory for the target's weights, such as "8GB"; layers that do not fit are read from a file in every
            pass. None keeps all weights in memory.
        kv_dtype: "int8" for keys and values of 8 bits in passes in C: half the memory of bfloat16, and other texts;
            None for the model's dtype.
        threads: CPU threads of the process; None for fewer than torch's own number where the machine has fewer fast
            cores in a memory node, or a quota (see `core.affinity.apply_threads`).
        affinity: processors of all threads of the process: "auto", "none" or a list such as "0-3,8".
        on_round: called with the record of every round.
        clock: returns seconds for the planner and the records; a simulated clock makes plans reproducible.

    Raises:
        ConfigurationError: unknown methods or options, or methods that do not fit together; before weights are loaded.
        ModelError: the model cannot be found or used.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        draft: str | Sequence[str] | None = AUTO_DRAFT,
        *,
        verify: str = "coupled",
        plan: str | None = None,
        dtype: Any = "auto",
        device: str = "auto",
        kernels: str = "auto",
        quantization: str | None = None,
        tp: int = 1,
        pp: int = 1,
        strict_sums: bool = False,
        exact: bool = False,
        trust_remote_code: bool = False,
        tokenizer: Any = None,
        max_batch_size: int | None = None,
        prefill_chunk_size: int = PREFILL_TOKENS_BUSY,
        prefix_cache_size: int = PREFIX_CACHE_SIZE,
        sequence_memory: int | None = None,
        allow_control_tokens: bool = False,
        generation_config: str = "auto",
        learn: str | None = None,
        offload: str | int | None = None,
        kv_dtype: str | None = None,
        threads: int | None = None,
        affinity: str | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        limits = Limits(
            max_batch_size,
            prefill_chunk_size=prefill_chunk_size,
            prefix_cache_size=prefix_cache_size,
            memory=sequence_memory,
        )
        require_source(generation_config)
        apply_threads(threads, affinity)
        division = ParallelOptions(tp=tp, pp=pp, strict_sums=strict_sums)
        methods, trusts = choose_each(draft, verify, plan, target=model), trust_remote_code
        learning = learning_of(learn, methods)
        given: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels, "quantization": quantization}
        given |= {"offload": offload, "kv_dtype": kv_dtype, "trust_remote_code": trusts}
        loaded = load_divided(load_target, model, division, given)
        require_exact(loaded, asked=exact)
        alone = loaded.model.lock.run  # others may share the model, and it is measured here
        methods, auto = alone(lambda: decide_each(methods, loaded, verify, plan, learn))
        self._planner, self._auto_note = next(iter(methods.values())).planner, auto.note if auto else ""
        self._tokenizer = tokenizer_of(loaded, tokenizer, trust_remote_code=trusts)
        self.learned, own = store_of(learning, loaded.model, user=self), kernels_of_drafter(loaded)
        build = partial(build_each, methods, loaded, self._tokenizer, kernels=own, trust_remote_code=trusts)
        self._parts = alone(lambda: build(clock=clock, learning=self.learned))
        self._engine = Engine(self._parts, limits, on_round=on_round)
        ends, on, why = eos_ids_of(loaded, self._tokenizer), loaded.kernels, loaded.why_torch
        defaults = NEUTRAL
        if generation_config == "auto":
            defaults = loaded.sampling if loaded.folder is None else sampling_in(loaded.folder)
        self.sampling_note = sampling_note(defaults)
        self._requests = Requests(
            self._parts,
            self._tokenizer,
            eos_ids=ends,
            slot_room=self._engine.slot_room,
            defaults=defaults,
            kernels=on,
            kernels_reason=why,
        )
        self._requests.auto_draft = auto.draft if auto else None
        self._prompts = encoder_of(loaded.model, self._tokenizer, allow_control_tokens=allow_control_tokens)
        self._transcriber = Transcriber(self._engine, self._requests, self._prompts, loaded.folder)
        self.is_lossless = all(self._parts.promise(1.0, name) is not Guarantee.LOSSY for name in methods)
        self.is_exact, self.quantization = loaded.model.is_exact, loaded.quantization
        self.kernels, self.kernels_reason = on, why
        if loaded.kernels_note is not None and loaded is not model:
            logger.warning("'%s': %s", loaded.name, loaded.kernels_note)
        if self.sampling_note and loaded is not model:
            logger.warning("'%s': %s", loaded.name, self.sampling_note)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to pickle or copy."""
        raise TypeError("an LLM can be neither pickled nor copied: create another one, or let threads share it")

    @property
    def model(self) -> LanguageModel:
        """The target model."""
        return self._parts.target

    @property
    def planner(self) -> Planner[Any]:
        """The default drafter's planner of draft sizes; `planner.explain()` gives the reason of its last decision."""
        return self._planner

    @property
    def drafts(self) -> tuple[str, ...]:
        """Names of the loaded drafters, the default first; a request chooses one of them, or "none"."""
        names = tuple(self._parts.choices)
        return () if names == (NO_DRAFT,) else names

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer, None if it has none."""
        return self._tokenizer

    @property
    def engine(self) -> Engine:
        """The engine, for callers that step it themselves."""
        return self._engine

    @property
    def prompts(self) -> PromptEncoder:
        """The encoder of prompts and conversations."""
        return self._prompts

    @property
    def requests(self) -> Requests:
        """The factory of sequences from token ids and parameters, for the engine."""
        return self._requests

    @property
    def prefix_stats(self) -> PrefixStats:
        """Prompt tokens that were not prefilled, because a cached prefix matched."""
        return self._engine.prefix_stats

    def promise(self, temperature: float) -> Guarantee:
        """Return the relation of texts at this temperature to plain decoding."""
        return self._parts.promise(temperature)

    def forget(self, *, learned: bool = True) -> None:
        """Drop cached prefixes, and with `learned` all that drafters learned and its files. Never affects a text."""
        self._engine.lock.between(lambda: self._forget(learned=learned))

    def _forget(self, *, learned: bool) -> None:
        self._engine.forget()
        if learned and self._parts.drafter is not None:
            self._parts.drafter.forget()
        if learned and self.learned is not None:
            self.learned.forget()

    @property
    def draft_note(self) -> str:
        """What `auto` stands for and why, and the drafter's decisions during construction; empty if there are none."""
        own = "" if self._parts.drafter is None else self._parts.drafter.note
        alternation = self._engine.alternation
        return "; ".join(filter(None, (self._auto_note, own, "" if alternation is None else alternation.note)))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        draft: str | None = None,
        on_update: Callable[[Update], None] | None = None,
        progress: bool | None = None,
        **decoder: Unpack[DecoderOptions],
    ) -> list[Completion]:
        """Generate completions for prompts, as one batch.

        Args:
            prompts: texts or lists of token ids, one or several; the sources of an encoder-decoder model.
            params: sampling parameters, for all or one for each prompt.
            draft: one of `drafts`, or "none" for plain decoding; None for the default.
            on_update: called with every piece of text as it is verified.
            progress: whether to show a progress bar; None: on a terminal, for several texts without `on_update`.
            **decoder: of encoder-decoder models, for all prompts. `decoder_prompt`: what the decoder continues, a text
                or token ids. `source_lang`, `target_lang`: languages of source and text, codes of the model's
                multilingual tokenizer; the target language's token comes before `decoder_prompt`.

        Returns:
            The n completions of every prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: an invalid prompt or parameter; nothing has been generated then.
            GenerationError: requests failed during generation; its `completions` holds the others.
        """
        given = {"draft": draft, "decoder_prompt": self._prompts.encode_start(decoder)}
        spoken = decoder.get("source_lang")
        ids = [self._prompts.encode_prompt(prompt, source_lang=spoken) for prompt in prompt_list(prompts)]
        return self._written(ids, params, given, on_update=on_update, progress=progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        draft: str | None = None,
        on_update: Callable[[Update], None] | None = None,
        progress: bool | None = None,
        **decoder: Unpack[DecoderOptions],
    ) -> list[Completion]:
        """Answer one conversation, or several as one batch, with the model's chat template.

        Args:
            messages: dictionaries with "role" and "content".
            params: as for `generate`.
            draft: as for `generate`.
            on_update: as for `generate`.
            progress: as for `generate`.
            **decoder: `decoder_prompt` and `target_lang` as for `generate`; the conversation is the source.

        Raises:
            InvalidRequestError: malformed messages, or a model without a chat template.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        given = {"draft": draft, "decoder_prompt": self._prompts.encode_start(decoder)}
        spoken = decoder.get("source_lang")
        ids = [self._prompts.encode_chat(one, source_lang=spoken) for one in conversations]  # type: ignore[arg-type]
        return self._written(ids, params, given, on_update=on_update, progress=progress)

    def _written(self, ids: list[list[int]], params: Params, given: dict[str, Any], **show: Any) -> list[Completion]:
        make, each = self._requests.sequences, params_for(params, len(ids))
        batch = [make(prompt, one, **given) for prompt, one in zip(ids, each, strict=True)]
        write_all(self._engine, batch, **show)
        return completions_of(batch)
