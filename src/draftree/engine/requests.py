"""Requests to sequences: checked token ids and parameters, with the model's defaults and limits."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Unpack

from draftree.core.errors import (
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedModelError,
    VocabularyMismatchError,
    blaming,
)
from draftree.core.noise import Noise
from draftree.drafters.base import NO_DRAFTS
from draftree.engine.parts import EngineParts
from draftree.engine.sequence import ClientDrafts, DecoderInput, SourceOrTokens, WritingSequence, decoder_input
from draftree.models.base import SlotRequest
from draftree.models.images import ImagePrompt, ImageReader
from draftree.models.source import EncoderDecoder, FeatureSource
from draftree.options import AUTO_DRAFT, NO_DRAFT, RequestKeywords, RequestOptions, shown_value
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.grammar.compiler import Grammars
from draftree.sampling.params import NEUTRAL, Sampling, SamplingParams
from draftree.text.detokenize import Detokenizer
from draftree.text.retokenize import lexicon_of
from draftree.text.tokenizer import Tokenizer

SEED_BITS = 32


@dataclass(eq=False)
class SequenceFactory:
    """Factory of sequences for one set of parts."""

    parts: EngineParts
    tokenizer: Tokenizer | None  # the target's; None if it has none
    _: KW_ONLY
    eos_ids: Sequence[int]  # the model's tokens that end a text
    # tokens for which one slot has memory, those of a source included; None for no limit
    slot_room: Callable[[], int | None]
    defaults: Sampling = NEUTRAL  # the model's sampling, for parameters that a request does not give
    kernels: str = ""
    fallback_reason: str | None = None
    images: ImageReader | None = None  # opens slots on prompts with images; None if the model reads none
    auto_draft: str | None = None  # the drafter that `auto` stands for; None if `auto` was not among the drafters
    records_picks: bool = False  # whether records of rounds hold the target's picks, for traces of a whole run

    def __post_init__(self) -> None:
        self.eos_ids = tuple(self.eos_ids)
        self._context = self.parts.target.max_length
        self._numbers = itertools.count(1)
        self._grammars: Grammars | None = None

    def sequences(
        self, ids: SourceOrTokens, params: SamplingParams, **keywords: Unpack[RequestKeywords]
    ) -> list[WritingSequence]:
        """Create the n sequences of a request.

        Args:
            ids: token ids of the prompt, which is the source of an encoder-decoder model, or features.
            params: sampling parameters, or all options; `decoder_prompt` is token ids, as for `decoder_input`.
        """
        options = RequestOptions.of(params, **keywords).resolved(self.defaults)
        chosen = self._choice(options.draft)
        images = self._with_images(ids, options) if isinstance(ids, ImagePrompt) else None
        if not isinstance(ids, FeatureSource | ImagePrompt):
            ids = self.truncated(ids, options)
        assert not isinstance(options.decoder_prompt, str), "`PromptEncoder.with_start` encodes a text"
        opening = decoder_input(self.parts.target, ids, options.decoder_prompt)
        limit = self._limit(opening, options)
        traits = self.parts.traits_of(chosen)
        if options.prediction is not None and not traits.reads_predictions:
            lack = "there is no drafter that uses it" if traits is NO_DRAFTS else "the drafter does not use it"
            raise InvalidRequestError(
                f"a prediction was given, but {lack}: use draft='prediction', alone or merged with another "
                "('prediction+suffix'), or leave the prediction out",
                param="prediction",
            )
        seed = secrets.randbits(SEED_BITS) if options.seed is None else options.seed
        name = options.request_id or f"request-{next(self._numbers)}"
        sequences = []
        for index in range(options.n):
            own_seed = seed if index == 0 else Noise(seed).stream("n", index).seed
            sequence = WritingSequence(
                name,
                index,
                opening.tokens,
                controls=self._controls(options, opening, limit, seed=own_seed),
                limit=limit,
                detokenizer=self._detokenizer(options, opening.tokens),
                priority=options.priority,
                draft=chosen,
                owner=options.owner,
                promise=self.parts.promise(options.sampling.temperature, chosen),
                source=opening.source,
                source_length=opening.source_length,
            )
            request = SlotRequest(sequence.history, sequence.controls, limit, traits is NO_DRAFTS)
            sequence.opens = self.parts.target.opener(request) if images is None else None
            if images is not None:
                sequence.images, sequence.image_reader = images, self.images
            sequence.kernels = self.kernels
            sequence.fallback_reason = self.fallback_reason
            sequence.rounds = [] if options.trace else None
            sequence.client_drafts = ClientDrafts() if options.drafted_by_client else None
            sequence.records_picks = self.records_picks
            if options.written:
                sequence.write(options.written, 0)
            sequences.append(sequence)
        return sequences

    def _with_images(self, prompt: ImagePrompt, params: SamplingParams) -> ImagePrompt:
        """Return a prompt with images that slots can be opened on."""
        if self.images is None:
            raise InvalidRequestError("the prompt has images, but this model reads no images: remove them")
        for name in ("prompt_logprobs", "truncate_prompt_tokens"):
            if getattr(params, name) is not None:
                raise InvalidRequestError(f"{name} is for prompts without images: remove it", param=name)
        try:
            return self.images.prepared(prompt)
        except UnsupportedModelError as error:
            raise InvalidRequestError(f"this model reads no images here: {error}") from error

    def _controls(self, params: SamplingParams, opening: DecoderInput, limit: int, *, seed: int) -> Controls:
        controls = build_controls(
            params,
            vocab_size=self.parts.target.vocab_size,
            eos_ids=self.eos_ids,
            encode=None if self.tokenizer is None else self._encode_plainly,
            grammars=None if self.tokenizer is None else self._spelled_grammars,
            seed=seed,
        )
        if opening.rules is None or opening.source is None:
            return controls
        added = opening.rules.processors(
            params, opening.source.tokens, prompt=opening.tokens, limit=limit, ends=sorted(self.eos_ids)
        )
        return replace(controls, processors=(*controls.processors, *added))

    def resolved(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the model's defaults in place of those that are not given."""
        return params.resolved(self.defaults)

    def truncated(self, ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """Return the last prompt tokens that `truncate_prompt_tokens` keeps; all if it is None."""
        count = params.truncate_prompt_tokens
        if count == -1:
            target = self.parts.target
            if isinstance(target, EncoderDecoder):
                return ids[-target.max_source_length :]
            count = max(1, self._context - (params.max_tokens or 1))
        return ids if count is None else ids[-count:]

    def longest_prompt(self, params: SamplingParams) -> int | None:
        """Return the most tokens that a prompt may have; None if it is truncated."""
        target = self.parts.target
        if params.truncate_prompt_tokens is not None:
            return None
        return target.max_source_length if isinstance(target, EncoderDecoder) else self._context - 1

    def _limit(self, opening: DecoderInput, params: SamplingParams) -> int:
        context, ids = self._context, opening.tokens
        if opening.source is not None and params.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs are for causal models, and this model's encoder predicts no tokens: leave them out",
                param="prompt_logprobs",
            )
        if len(ids) >= context:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, but the model's context holds {context}, the output included: "
                "shorten the prompt",
                param="prompt",
            )
        if params.max_tokens is None:
            # as many as fit; the engine refuses a prompt for which there is no memory
            configured = None if opening.rules is None else opening.rules.max_length
            # a source takes memory, but no place in the decoder's context
            room = self.slot_room()
            most = context if room is None else min(context, room - opening.source_length)
            return max(most if configured is None else min(most, configured), len(ids) + 1)
        if len(ids) + params.max_tokens > context:
            kind = "prompt" if opening.source is None else "decoder prompt"
            raise InvalidRequestError(
                f"a {kind} of {len(ids)} tokens and max_tokens={params.max_tokens} do not fit into the model's context "
                f"of {context}: set max_tokens to {context - len(ids)} at most",
                param="max_tokens",
            )
        return len(ids) + params.max_tokens

    def named_draft(self, draft: str | None) -> str | None:
        """Return a name of a drafter, with what stands for `auto` in its place if `auto` was loaded."""
        return self.auto_draft if draft == AUTO_DRAFT and self.auto_draft is not None else draft

    def _choice(self, draft: str | None) -> str:
        """Return the name of the chosen drafter; empty for the default."""
        if draft is None:
            return ""
        known = list(dict.fromkeys((*self.parts.choices, NO_DRAFT)))
        named = self.named_draft(draft)
        if named in known:
            return named
        raise InvalidRequestError(
            f"draft is {shown_value(draft)}, which is not loaded: give {' or '.join(map(repr, known))}, or load it "
            "with the model",
            param="draft",
        )

    def _detokenizer(self, params: SamplingParams, prompt: Sequence[int]) -> Detokenizer | None:
        if self.tokenizer is None:
            if params.stop_strings:
                raise InvalidRequestError(
                    "stop strings need a tokenizer, and this model has none: use stop_token_ids", param="stop"
                )
            return None
        if not params.detokenize:
            return None
        return Detokenizer(
            self.tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            prompt_ids=prompt,
        )

    def has_grammar(self, params: SamplingParams) -> bool:
        """Return whether a future request has no grammar, or a compiled one."""
        if params.constraint is None:
            return True
        return self._grammars is not None and self._grammars.is_compiled(params)

    def compile_grammar(self, params: SamplingParams) -> None:
        """Compile the grammar of a future request, which may take long: call it on a thread that delays no request."""
        if self.tokenizer is None or params.constraint is None:
            return
        grammars = self._spelled_grammars()
        with blaming(params.constraint[0]):
            grammars.compile(params)

    def _spelled_grammars(self) -> Grammars:
        """Return the grammar compiler; built for the first grammar, since it needs every token's bytes."""
        if self._grammars is None:
            assert self.tokenizer is not None
            try:
                spelling = lexicon_of(self.tokenizer).bytes_of
            except VocabularyMismatchError as error:
                raise InvalidRequestError(
                    f"a grammar was given, but {self.tokenizer.name} cannot use one: the text of its tokens "
                    "depends on the tokens around them; leave the grammar out, or use another model"
                ) from error
            self._grammars = Grammars(spelling, vocab_size=self.parts.target.vocab_size)
        return self._grammars

    def _encode_plainly(self, text: str) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(text, add_special_tokens=False)
