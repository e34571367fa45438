"""The front end: `LLM` combines a model, a drafter, a verifier and a planner, and generates texts.

Example:
    >>> from draftree import LLM, SamplingParams
    >>> llm = LLM("smollm2-135m-instruct", draft="ngram")  # doctest: +SKIP
    >>> llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0))[0].text  # doctest: +SKIP
    ', there was a young woman named Lily'
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

import numpy as np

from draftree.beam.result import BeamResult
from draftree.beam.searcher import AnyPrompt, BeamParams, BeamSearcher
from draftree.build import build_parts, choose_each, decide_each, learning_of, store_of
from draftree.core.host import apply_threads
from draftree.engine.engine import Engine
from draftree.engine.prefix_cache import PrefixStats
from draftree.engine.prompts import PromptEncoder, encoder_of
from draftree.engine.race import Race
from draftree.engine.requests import SequenceFactory
from draftree.engine.sequence import SourceOrTokens, Update, WritingSequence
from draftree.loading.images import image_processor_of, image_reader_of
from draftree.loading.loaded import (
    eos_ids_of,
    sampling_in,
    sampling_note,
    tokenizer_of,
)
from draftree.models.base import LanguageModel
from draftree.options import (
    NO_DRAFT,
    DecoderOptions,
    Messages,
    ModelOptions,
    Params,
    Prompt,
    RequestKeywords,
    RequestOptions,
    options_for,
    prompt_list,
    takes_arguments_of,
)
from draftree.outputs import Completion, completion_of, completions_of
from draftree.parallel.entry import load_divided
from draftree.planners.base import Planner
from draftree.sampling.params import NEUTRAL, SamplingParams
from draftree.speech.transcriber import Segment, Speech, Transcriber
from draftree.speech.windows import Transcript, long_speech
from draftree.text.tokenizer import Tokenizer
from draftree.verifiers.base import Guarantee

if TYPE_CHECKING:
    from draftree.beam.sequence import OnStep

logger = logging.getLogger(__name__)


class ProgressBar:
    """Bar on standard error with the number of finished texts and of tokens.

    Args:
        total: number of texts.
        shown: True or False; None shows it on a terminal if there are several texts.
    """

    def __init__(self, total: int, *, shown: bool | None) -> None:
        self._total = total
        self._progress: Any = None
        self._is_shown = total > 1 and sys.stderr.isatty() if shown is None else shown

    def __enter__(self) -> Self:
        if self._is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
            self._progress = Progress(
                TextColumn("writing"), *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
            )
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total, tokens=0)
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, sequences: Sequence[WritingSequence]) -> None:
        """Show how many of all sequences are finished, and their tokens."""
        if self._progress is not None:
            done = sum(sequence.is_finished for sequence in sequences)
            tokens = sum(sequence.history.num_output_tokens for sequence in sequences)
            self._progress.update(self._task, completed=done, tokens=tokens)


def write_all(
    engine: Engine,
    batch: Sequence[Sequence[WritingSequence]],
    *,
    on_update: Callable[[Update], None] | None,
    progress: bool | None,
) -> None:
    """Queue requests and step the engine until all of them are finished; aborts them if a step raises.

    Args:
        engine: the engine; its other sequences advance as well, and keep their updates.
        batch: the new sequences of each request.
        on_update: called with every update of these sequences.
        progress: whether to show a progress bar; None shows one on a terminal, for several texts without `on_update`.
    """
    sequences = [sequence for request in batch for sequence in request]

    def observe() -> tuple[list[Update | None], list[WritingSequence]]:
        updates = [] if on_update is None else [sequence.take_update() for sequence in going]
        return updates, [sequence for sequence in going if not sequence.is_finished]

    with ProgressBar(len(sequences), shown=False if progress is None and on_update else progress) as bar:
        engine.add(*sequences)
        going = list(sequences)
        for sequence in sequences:
            sequence.is_collected = on_update is None
        try:
            while going:
                if not all(sequence.is_finished for sequence in going):  # steps of other threads finish them too
                    engine.step()
                updates, going = engine.lock.between(observe)
                for update in updates:
                    if on_update is not None and update is not None:
                        on_update(update)
                bar.show(sequences)
        finally:
            engine.abort(sequences)


class LLM:
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
        download_drafter: whether `auto` may download a drafter that is known for the model, if none is here.
        dtype: "auto" (bfloat16 where the device computes in it, else float16 on a GPU, float32 on a CPU), or the
            name of a torch dtype.
        device: "auto" (CUDA if there is such a GPU, else the CPU), "cpu", "cuda", "cuda:N", "xpu" or "mps".
        kernels: "native" for native kernels, "torch" for PyTorch, "graphs" for compiled PyTorch layers in passes of
            static shapes, as CUDA graphs on a GPU; "auto" for native ones on a CPU and graphs on a GPU, if available.
        quantization: "int8" or "int4" for 8-bit or 4-bit weights, which make a different, faster model; None for none.
        tp: processes that share each layer; the script is started by torchrun, and only rank 0 returns from this
            constructor: the other ranks run its passes, and exit when it ends.
        pp: stages of layers, with `tp` processes each.
        strict_sums: add the partial sums of processes in one order, whatever else is in a pass.
        exact: raise unless logits are bit-identical in every batch and tree (see `is_exact`); on a GPU, by
            slower kernels.
        trust_remote_code: whether Python code in the folders of the model and of the drafter's model may run.
        tokenizer: the transformers tokenizer of a loaded model; None for a model that is loaded from files.
        max_batch_size: maximum number of running sequences; None for as many as memory allows, up to 32.
        prefill_chunk_size: prompt tokens per pass while other sequences decode; per prompt, up to 512 in all, while
            more wait than decode. A larger value lowers the time to first token and raises the inter-token latency.
        prefix_cache_size: maximum number of finished sequences whose keys and values are kept for later prompts.
        sequence_memory: bytes for keys, values and logits of all sequences; None for half of the memory that is free
            when the model is loaded. A request that cannot fit is refused.
        allow_control_tokens: whether control tokens in messages, such as <|im_end|>, are encoded as such; else as text.
        max_waiting: maximum number of waiting sequences, beyond which QueueFullError is raised; None for no limit.
        generation_config: "auto" for the sampling defaults in the model's generation_config.json, where a request gives
            no temperature, top_p, top_k, min_p or repetition_penalty; "none" for those of `Sampling`.
        learn: whose verified texts drafters learn from, "server" or "key", options after commas; None for none.
        offload: memory for the target's weights, such as "8GB"; layers that do not fit are read from a file in every
            pass. None keeps all weights in memory.
        kv_dtype: "int8" for 8-bit keys and values with native kernels: half the memory of bfloat16, and other texts;
            None for the model's dtype.
        threads: CPU threads of the process; None for fewer than torch's own number where the machine has fewer fast
            cores in a memory node, or a quota (see `core.host.apply_threads`).
        affinity: processors of all threads of the process: "auto", "none" or a list such as "0-3,8".
        on_round: called with the record of every round.
        clock: returns seconds for the planner and the records; a simulated clock makes plans reproducible.

    Raises:
        ConfigurationError: unknown methods or options, or methods that do not fit together; before weights are loaded.
        ModelError: the model cannot be found or used.
    """

    @takes_arguments_of(ModelOptions)
    def __init__(self, options: ModelOptions) -> None:
        apply_threads(options.threads, options.affinity)
        methods = choose_each(options)
        trusts = options.trust_remote_code
        learning = learning_of(options.learn, methods)
        loaded = load_divided(options)
        alone = loaded.model.lock.run  # others may share the model, and it is measured here
        methods, auto = alone(lambda: decide_each(methods, loaded, options))
        self._planner = methods[0].planner
        self._auto_note = auto.note if auto else ""
        self._tokenizer = tokenizer_of(loaded, options.tokenizer, trust_remote_code=trusts)
        self.learned = store_of(learning, loaded.model, user=self)
        build = partial(build_parts, methods, loaded, self._tokenizer, trust_remote_code=trusts)
        self._parts = alone(lambda: build(clock=options.clock, learning=self.learned))
        self._engine = engine = Engine(self._parts, options, on_round=options.on_round)
        raced = self._parts.choice(auto.draft) if auto else None
        self._race = Race(raced, auto.published) if auto and raced is not None else None
        if self._race is not None:
            self._engine.on_round(self._race.observe)
        self.kernels = loaded.kernels
        self.fallback_reason = loaded.fallback_reason
        self.is_exact = loaded.model.is_exact
        self.quantization = loaded.quantization
        defaults = NEUTRAL
        if options.generation_config == "auto":
            defaults = loaded.sampling if loaded.folder is None else sampling_in(loaded.folder)
        self.sampling_note = sampling_note(defaults)
        self._requests = SequenceFactory(
            self._parts,
            self._tokenizer,
            eos_ids=eos_ids_of(loaded, self._tokenizer),
            slot_room=lambda: engine.slot_room,
            defaults=defaults,
            kernels=loaded.kernels,
            fallback_reason=loaded.fallback_reason,
            images=image_reader_of(loaded, trust_remote_code=trusts),
        )
        self._requests.auto_draft = auto.draft if auto else None
        self._prompts = encoder_of(
            loaded.model,
            self._tokenizer,
            allow_control_tokens=options.allow_control_tokens,
            images=image_processor_of(loaded, options.tokenizer, trust_remote_code=trusts),
        )
        self._beams = BeamSearcher(
            loaded.model, self._prompts, self._tokenizer, end_ids=self._requests.eos_ids, kernels=loaded.kernels
        )
        self._transcriber = Transcriber(self._engine, self._requests, self._prompts, loaded.folder)
        self.is_lossless = all(self._parts.promise(1.0, name) is not Guarantee.LOSSY for name in self._parts.choices)
        if loaded.kernels_note is not None and loaded is not options.model:
            logger.warning("'%s': %s", loaded.name, loaded.kernels_note)
        if self.sampling_note and loaded is not options.model:
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
    def requests(self) -> SequenceFactory:
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
        for choice in self._parts.drafters if learned else ():
            choice.drafter.forget()
        if learned and self.learned is not None:
            self.learned.forget()

    @property
    def draft_note(self) -> str:
        """What `auto` stands for and why, decisions during construction and in the race of drafters; may be empty."""
        found = () if self._race is None else self._race.notes
        notes = (self._auto_note, *(choice.drafter.note for choice in self._parts.drafters), *found)
        return "; ".join(filter(None, notes))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        on_update: Callable[[Update], None] | None = None,
        progress: bool | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Completion]:
        """Generate completions for prompts, as one batch.

        Args:
            prompts: texts or lists of token ids, one or several; the sources of an encoder-decoder model.
            params: sampling parameters, for all or one for each prompt.
            on_update: called with every piece of text as it is verified.
            progress: whether to show a progress bar; None: on a terminal, for several texts without `on_update`.
            **options: of all prompts. `draft`: one of `drafts`, or "none" for plain decoding; None for the default.
                `priority`: lower numbers are served first. `request_id`: their name in records and errors. `trace`:
                whether updates hold a record of every round. `owner`: whose texts they are, for drafters that learn;
                None to leave them out. Of encoder-decoder models: `decoder_prompt`, what the decoder continues, a text
                or token ids; `source_lang`, `target_lang`, languages of source and text, codes of the model's
                multilingual tokenizer. The target language's token comes before `decoder_prompt`.

        Returns:
            The n completions of every prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: an invalid prompt or parameter; nothing has been generated then.
            GenerationError: requests failed during generation; its `completions` holds the others.
        """
        texts = prompt_list(prompts)
        each = options_for(params, len(texts), **options)
        encode = self._prompts.encode_prompt
        ids = [
            encode(text, source_lang=request_options.source_lang)
            for text, request_options in zip(texts, each, strict=True)
        ]
        return self._written(ids, each, on_update=on_update, progress=progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        *,
        on_update: Callable[[Update], None] | None = None,
        progress: bool | None = None,
        **options: Unpack[RequestKeywords],
    ) -> list[Completion]:
        """Answer one conversation, or several as one batch, with the model's chat template.

        Args:
            messages: dictionaries with "role" and "content".
            params: as for `generate`.
            on_update: as for `generate`.
            progress: as for `generate`.
            **options: as for `generate`, without `source_lang`; the conversation is the source.

        Raises:
            InvalidRequestError: malformed messages, or a model without a chat template.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        each = options_for(params, len(conversations), **options)
        encode: Any = self._prompts.encode_chat
        ids = [
            encode(chat, source_lang=request_options.source_lang)
            for chat, request_options in zip(conversations, each, strict=True)
        ]
        return self._written(ids, each, on_update=on_update, progress=progress)

    def _written(self, ids: Sequence[SourceOrTokens], each: Sequence[RequestOptions], **show: Any) -> list[Completion]:
        make = self._requests.sequences
        with_start = self._prompts.with_start
        batch = [make(prompt, with_start(options)) for prompt, options in zip(ids, each, strict=True)]
        write_all(self._engine, batch, **show)
        return completions_of(batch)

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Generator[str, None, Completion]:
        """Generate one text and yield its pieces as they are verified; close the generator to stop early.

        Streams that are read alternately are decoded as one batch.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
            params: sampling parameters, n=1, with `detokenize`.
            **options: as for `generate`.

        Returns:
            The completion, as the value of the finished generator.
        """
        request = RequestOptions.of(params, **options)
        request.require_text()
        with closing(self.stream_updates(prompt, request)) as updates:
            while True:
                try:
                    update = next(updates)
                except StopIteration as end:
                    return end.value
                for piece in update.pieces:
                    yield piece.text

    def stream_updates(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Generator[Update, None, Completion]:
        """Stream as `stream`, with token ids, and with accepted text and target tokens distinguished."""
        request = RequestOptions.of(params, **options)
        request.require_single()
        ids = self._prompts.encode(prompt, source_lang=request.source_lang)
        (sequence,) = self._requests.sequences(ids, self._prompts.with_start(request))
        yield from self._engine.stream(sequence)
        if sequence.error is not None:
            raise sequence.error
        return completion_of(sequence, prompt_index=0)

    def beam_search(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        params: BeamParams = None,
        *,
        draft: Any = None,
        on_step: OnStep | None = None,
        **decoder: Unpack[DecoderOptions],
    ) -> list[BeamResult]:
        """Search the most likely texts of prompts, as one batch.

        Args:
            prompts: texts, lists of token ids or conversations, one or several; the sources of an encoder-decoder
                model. For models of speech, features as float arrays of shape (channels, frames).
            params: parameters, for all or one for each prompt.
            draft: drafter of the next beams, which changes the number of passes and not the result: `ngram`, `suffix`,
                `runners-up`, `model:NAME`, several joined by "+", or a loaded model; None for none. A model that a spec
                names is loaded once.
            on_step: called with the search of a prompt after each of its steps, such as a `BeamTrace` for one prompt.
            **decoder: of encoder-decoder models, as for `generate`: `decoder_prompt`, `source_lang`, `target_lang`.
                What the decoder continues is no part of the hypotheses.

        Returns:
            The best hypotheses of each prompt, in the order of the prompts.

        Raises:
            InvalidRequestError: an invalid prompt or parameter; nothing has been computed then.
            NonFiniteLogitsError: the model gave NaN.
            UnsatisfiableError: no token is allowed, or required phrases are missing with `strict`.
        """
        search = self._beams.search
        return search(prompts, params, draft=draft, on_step=on_step, decoder=decoder)

    def companion(self, name: str) -> LanguageModel:
        """Load another model of a search in the target's dtype, or return the one that was loaded before.

        Args:
            name: a model of the catalogue, or a folder.

        Raises:
            DraftreeError: there is no such model, or it cannot be loaded.
        """
        return self._beams.companion(name)

    @property
    def transcriber(self) -> Transcriber:
        """The parts of a transcription, for callers that submit requests themselves."""
        return self._transcriber

    def transcribe(
        self,
        audio: Any,
        params: Params = None,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        prompt: str | None = None,
        draft: str | None = None,
        on_update: Callable[[Update], None] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Transcribe speech with a model that reads features of sound, such as Whisper.

        Args:
            audio: samples of shape (samples,), float, at the model's sampling rate; or features of shape (channels,
                frames); or a list of either. At most what the model reads at once, 30 seconds for Whisper;
                `transcribe_long` takes longer audio.
            params: as for `generate`, but the temperature is 0 if it is not given; None is greedy to the end of the
                text, without a limit of tokens.
            language: code or English name of the spoken language, such as "en"; None detects it if the model knows
                several.
            task: "transcribe", or "translate" into English.
            timestamps: whether the text has timestamps; `segments` reads them.
            prompt: text before the audio, whose words and style the model continues.
            draft: as for `generate`.
            on_update: as for `generate`.
            progress: as for `generate`.

        Raises:
            ConfigurationError: the model reads tokens, or samples are given and its folder has no feature extractor.
            InvalidRequestError: audio of another shape or too long, or an unknown language or task, or timestamps or a
                prompt for a model that has no tokens for them.
        """
        work, speech = self._transcriber, Speech(language, task, timestamps, prompt)
        sources = [work.source(item) for item in _each(audio)]
        starts = [
            work.start(speech, work.detect(source) if work.needs_language(speech) else None) for source in sources
        ]
        each = [
            replace(options, decoder_prompt=start)
            for options, start in zip(_options(params, len(sources), draft), starts, strict=True)
        ]
        return self._written(sources, each, on_update=on_update, progress=progress)

    def transcribe_long(
        self,
        audio: Any,
        params: Params = None,
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str | None = None,
        condition_on_previous: bool = False,
        draft: str | None = None,
        on_update: Callable[[Update], None] | None = None,
        progress: bool | None = None,
    ) -> list[Transcript]:
        """Transcribe speech of any length, in windows of what the model reads at once, with timestamps.

        The text of a window ends at its last pair of timestamps, and the next window begins there. Windows of several
        audios form batches. Greedy texts equal those of `generate` of transformers for the same features.

        Args:
            audio: as for `transcribe`, of any length.
            params: as for `transcribe`; `max_tokens` holds for each window, and `n` is 1.
            language: as for `transcribe`; detected in the first window.
            task: as for `transcribe`.
            prompt: text before each window, or before the first one with `condition_on_previous`.
            condition_on_previous: whether a window continues the text of those before. Texts are more consistent, and
                a repetition is continued more often.
            draft: as for `generate`.
            on_update: as for `generate`.
            progress: as for `generate`.

        Raises:
            ConfigurationError: as for `transcribe`.
            InvalidRequestError: as for `transcribe`; or the model writes no timestamps.
        """
        work, speech = self._transcriber, Speech(language, task, timestamps=True, prompt=prompt)
        items = _each(audio)
        each_options = _options(params, len(items), draft)
        audios = [long_speech(work, work.features(item), speech, conditioned=condition_on_previous) for item in items]
        while going := [pair for pair in zip(audios, each_options, strict=True) if not pair[0].is_done]:
            sources, starts = zip(*(long_audio.window() for long_audio, _ in going), strict=True)
            each = [
                replace(long_audio.params(options, start), decoder_prompt=start)
                for (long_audio, options), start in zip(going, starts, strict=True)
            ]
            done = self._written(sources, each, on_update=on_update, progress=progress)
            for (long_audio, _), completion in zip(going, done, strict=True):
                long_audio.take(completion)
        return [long_audio.transcript() for long_audio in audios]

    def segments(self, completion: Completion, *, seconds: float | None = None) -> list[Segment]:
        """Return the parts of a text with timestamps.

        Args:
            completion: a text of `transcribe`.
            seconds: length of the audio, where a part without a timestamp at its end ends; None for the longest audio
                that the model reads at once.

        Raises:
            InvalidRequestError: the model has no tokens of timestamps.
        """
        return self._transcriber.segments(completion.token_ids, seconds=seconds)


def _options(params: Params, count: int, draft: str | None) -> list[RequestOptions]:
    """Return the options of each audio: greedy if none name a temperature, and without a limit if there are none."""
    each = options_for(SamplingParams(max_tokens=None) if params is None else params, count, draft=draft)
    return [
        replace(request_options, temperature=0.0) if request_options.temperature is None else request_options
        for request_options in each
    ]


def _each(audio: Any) -> list[Any]:
    """Return the items of a list of audios, or the audio as the only item."""
    several = isinstance(audio, (list, tuple)) and len(audio) > 0 and np.ndim(audio[0]) > 0
    return list(audio) if several else [audio]
