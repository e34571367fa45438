"""Conversion of prompts and parameters to sequences; invalid requests are refused here, before generation."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from draftree.arguments import Messages, Prompt, is_id, is_row, require_one_prompt, shown_value
from draftree.core.errors import InvalidRequestError, VocabularyMismatchError, blaming
from draftree.core.noise import Noise
from draftree.drafters import NO_DRAFT
from draftree.drafters.base import NO_DRAFTS
from draftree.engine.parts import Parts
from draftree.engine.sequence import WritingSequence
from draftree.sampling.controls import build_controls
from draftree.sampling.grammar.processor import Grammars
from draftree.sampling.params import SamplingParams
from draftree.text.detokenize import Detokenizer
from draftree.text.retokenize.lexicon import lexicon_of
from draftree.text.tokenizer import Tokenizer

SEED_BITS = 32


class Requests:
    """Factory of sequences for one set of parts.

    Args:
        parts: the parts of the engine.
        tokenizer: the target's tokenizer, None if it has none.
        eos_ids: tokens that end a text.
        longest: longest text in tokens for which there is memory.
        kernels: kernels of the target's passes, for statistics.
        kernels_reason: why torch is used although native kernels were possible.
        allow_control_tokens: whether control tokens in messages are encoded as such.
    """

    def __init__(
        self,
        parts: Parts,
        tokenizer: Tokenizer | None,
        *,
        eos_ids: Sequence[int],
        longest: int,
        kernels: str = "",
        kernels_reason: str | None = None,
        allow_control_tokens: bool = False,
    ) -> None:
        self._parts = parts
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._context = parts.target.max_length
        self._kernels, self._kernels_reason = kernels, kernels_reason
        self._longest = min(longest, self._context)
        self._numbers = itertools.count(1)
        self.allow_control_tokens = allow_control_tokens
        self._grammars: Grammars | None = None

    def sequences(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        draft: str | None = None,
        priority: int = 0,
        request_id: str | None = None,
        trace: bool = False,
    ) -> list[WritingSequence]:
        """Create the n sequences of a request.

        Args:
            ids: token ids of the prompt.
            params: sampling parameters.
            draft: the drafter; None for the default.
            priority: lower numbers are served first.
            request_id: name of the request; None for a new one.
            trace: whether its updates hold a record of every round.

        Raises:
            InvalidRequestError: an invalid prompt or parameter.
        """
        chosen = self._choice(draft)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(
                f"priority is {shown_value(priority)}: it must be a whole number, lower goes first", param="priority"
            )
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidRequestError(
                f"request_id is {shown_value(request_id)}: give a text that is not empty", param="request_id"
            )
        ids = self.truncated(ids, params)
        limit = self._limit(ids, params)
        self._check_prediction(params, chosen)
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        name = request_id or f"request-{next(self._numbers)}"
        made = [
            WritingSequence(
                name,
                index,
                ids,
                controls=build_controls(
                    params,
                    vocab_size=self._parts.target.vocab_size,
                    eos_ids=self._eos_ids,
                    encode=None if self._tokenizer is None else self._encode_plainly,
                    grammars=None if self._tokenizer is None else self._spelled_grammars,
                    seed=seed if index == 0 else Noise(seed).stream("n", index).seed,
                ),
                limit=limit,
                detokenizer=self._detokenizer(params, ids),
                priority=priority,
                draft=chosen,
                promise=self._parts.promise(params.temperature, chosen),
            )
            for index in range(params.n)
        ]
        for sequence in made:
            sequence.kernels, sequence.kernels_reason = self._kernels, self._kernels_reason
            sequence.rounds = [] if trace else None
        return made

    def truncated(self, ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """Return the last prompt tokens that `truncate_prompt_tokens` keeps; all if it is None."""
        count = params.truncate_prompt_tokens
        if count == -1:
            count = max(1, self._context - (params.max_tokens or 1))
        return ids if count is None else ids[-count:]

    def _limit(self, ids: Sequence[int], params: SamplingParams) -> int:
        context = self._context
        if len(ids) >= context:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens, but the model's context holds {context}, the output included: "
                "shorten the prompt",
                param="prompt",
            )
        if params.max_tokens is None:
            # as many as fit; the engine refuses a prompt for which there is no memory
            return max(self._longest, len(ids) + 1)
        if len(ids) + params.max_tokens > context:
            raise InvalidRequestError(
                f"a prompt of {len(ids)} tokens and max_tokens={params.max_tokens} do not fit into the model's context "
                f"of {context}: set max_tokens to {context - len(ids)} at most, or to None for all that fits",
                param="max_tokens",
            )
        return len(ids) + params.max_tokens

    def _choice(self, draft: str | None) -> str:
        """Return the name of the chosen drafter; empty for the default."""
        if draft is None:
            return ""
        known = list(dict.fromkeys((*self._parts.choices, NO_DRAFT)))
        if draft in known:
            return draft
        raise InvalidRequestError(
            f"draft is {shown_value(draft)}, which is not loaded: give {' or '.join(map(repr, known))}, or load it "
            "with the model",
            param="draft",
        )

    def _check_prediction(self, params: SamplingParams, draft: str) -> None:
        traits = self._parts.traits_of(draft)
        if params.prediction is not None and not traits.reads_predictions:
            raise InvalidRequestError(
                f"a prediction was given, but {'there is no drafter' if traits is NO_DRAFTS else 'the drafter'} "
                "that uses it: use draft='prediction', alone or merged with another ('prediction+suffix'), "
                "or leave the prediction out",
                param="prediction",
            )

    def _detokenizer(self, params: SamplingParams, prompt: Sequence[int]) -> Detokenizer | None:
        if self._tokenizer is None:
            if params.stop_strings:
                raise InvalidRequestError(
                    "stop strings need a tokenizer, and this model has none: use stop_token_ids", param="stop"
                )
            return None
        if not params.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            prompt_ids=prompt,
        )

    def has_grammar(self, params: SamplingParams) -> bool:
        """Return whether a future request has no grammar, or a compiled one."""
        if params.constraint is None:
            return True
        return self._grammars is not None and self._grammars.is_compiled(params)

    def compile_grammar(self, params: SamplingParams, encoding: AbstractContextManager[Any]) -> None:
        """Compile the grammar of a future request, which may take long: call it on a thread that delays no request.

        Args:
            params: sampling parameters with a grammar.
            encoding: held while the tokenizer is used.

        Raises:
            InvalidRequestError: the grammar is invalid, or takes too long to compile.
            QueueFullError: other grammars are still compiling.
        """
        if self._tokenizer is None or params.constraint is None:
            return
        with encoding:
            grammars = self._spelled_grammars()
        with blaming(params.constraint[0]):
            grammars.compile(params)

    def _spelled_grammars(self) -> Grammars:
        """Return the grammar compiler; built for the first grammar, since it needs every token's bytes."""
        if self._grammars is None:
            assert self._tokenizer is not None
            try:
                spelling = lexicon_of(self._tokenizer).bytes_of
            except VocabularyMismatchError as error:
                raise InvalidRequestError(
                    f"a grammar was given, but {self._tokenizer.name} cannot use one: the text of its tokens "
                    "depends on the tokens around them; leave the grammar out, or use another model"
                ) from error
            self._grammars = Grammars(spelling, vocab_size=self._parts.target.vocab_size)
        return self._grammars

    def _encode_plainly(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=False)

    def encode(self, prompt: Prompt | Messages) -> list[int]:
        """Encode a text, a list of token ids, or the messages of a conversation.

        Raises:
            InvalidRequestError: an empty or malformed prompt.
        """
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            return self.encode_chat(prompt)  # type: ignore[arg-type]
        require_one_prompt(prompt)
        return self.encode_prompt(prompt)  # type: ignore[arg-type]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("token ids cannot be decoded: this model has no tokenizer", param="ids")
        return self._tokenizer.decode(self._checked_ids(ids, "ids"), skip_special_tokens)

    def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Encode a conversation with the model's chat template; the other arguments as `Tokenizer.apply_chat_template`.

        Raises:
            InvalidRequestError: malformed messages, no template, or control tokens in a message that cannot be spelled.
        """
        with blaming("messages"):
            return self._chat_tokenizer.apply_chat_template(
                messages,
                tools=tools,
                template_kwargs=template_kwargs,
                add_generation_prompt=add_generation_prompt,
                allow_control_tokens=self.allow_control_tokens,
            )

    def encode_open_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encode a conversation whose last message, one of the assistant, is to be continued.

        Raises:
            InvalidRequestError: as `encode_chat`; a last message of another kind, or one that the template changes.
        """
        with blaming("continue_final_message"):
            *before, last = messages
            content = last.get("content")
            if not before or last.get("role") != "assistant" or not isinstance(content, str) or last.get("tool_calls"):
                raise InvalidRequestError(
                    "continue_final_message needs a last message of the role assistant with a text, after another "
                    "message: add it, or leave continue_final_message out"
                )
            given: dict[str, Any] = {"tools": tools, "template_kwargs": template_kwargs}
            start = self.encode_chat(before, **given)
            tokenizer = self._chat_tokenizer
            if self.allow_control_tokens:
                ids = start + tokenizer.encode(content, add_special_tokens=False)
            else:
                ids = start + tokenizer.encode_literally(content)
            whole = self.encode_chat(messages, **given, add_generation_prompt=False)
            if not tokenizer.decode(whole, False).startswith(tokenizer.decode(ids, False)):
                raise InvalidRequestError(
                    f"the chat template of {tokenizer.name} writes the last message in another form, so it cannot be "
                    "continued: leave continue_final_message out"
                )
            return ids

    @property
    def _chat_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError("a conversation needs a tokenizer, and this model has none: give token ids")
        return self._tokenizer

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Encode a text, or check a list of token ids.

        Raises:
            InvalidRequestError: an empty prompt, or ids outside the vocabulary.
        """
        with blaming("prompt"):
            if isinstance(prompt, str):
                if self._tokenizer is None:
                    raise InvalidRequestError("the prompt is a text, but this model has no tokenizer: give token ids")
                ids = self._tokenizer.encode(prompt) if prompt else []
            elif is_row(prompt):
                ids = list(prompt)
            else:
                raise InvalidRequestError(f"the prompt is {shown_value(prompt)}: give a text, or a list of token ids")
            if not ids:
                raise InvalidRequestError("the prompt is empty: give at least one character or token")
            return self._checked_ids(ids, "prompt")

    def _checked_ids(self, ids: Sequence[Any], param: str) -> list[int]:
        vocab_size = self._parts.target.vocab_size
        for token in ids:
            if isinstance(token, bool) or not is_id(token):
                raise InvalidRequestError(
                    f"a {param} of token ids must hold whole numbers, got {shown_value(token)}", param=param
                )
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"the {param} holds token {token}, but the vocabulary ends at {vocab_size - 1}", param=param
                )
        return [int(token) for token in ids]
