"""Beam searches of /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request

from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beams import beam_opening
from draftree.core.errors import InvalidRequestError
from draftree.core.host import SYSTEM_CLOCK
from draftree.prompts import DecoderOptions
from draftree.serve.api.common import server_of
from draftree.serve.beam_params import BeamRequest
from draftree.serve.errors import invalid
from draftree.serve.params import named_error
from draftree.serve.pool import ServedModel
from draftree.serve.records import RequestRecord
from draftree.serve.render.beams import BeamTexts
from draftree.serve.token_limits import Encode, longest_prompt, within_limits


async def searched(
    request: Request,
    model: ServedModel,
    *,
    prompts: Sequence[Any],
    asked: BeamRequest,
    priority: int,
    response_id: str,
    decoder: DecoderOptions,
    encode: Encode | None = None,
) -> BeamTexts:
    """Admit a request, search all its prompts, and return the texts; cancelling the task ends the searches.

    A request takes a place at the gate for each beam.

    Args:
        request: of the client.
        model: the model.
        prompts: texts, token ids or messages.
        asked: parameters of all prompts.
        priority: lower numbers go first among the requests of the key.
        response_id: id of the response.
        decoder: options of encoder-decoder models.
        encode: encodes a prompt; None for `AsyncLLM.prompts.encode`.

    Raises:
        ApiError: refused by the server or the search.
    """
    server = server_of(request)
    record = server.record_of(request)
    record.response_id, record.draft = response_id, "none"
    async with server.admit(request, texts=len(prompts) * asked.width, priority=priority):
        try:
            spoken = decoder.get("source_lang")
            encode_text = partial(model.llm.prompts.encode_text, add_special_tokens=False)
            asked = replace(asked, params=await asked.options.encoded(asked.params, encode_text))
            ids = await _encoded(request, model, prompts, asked, _encoder(model, encode, spoken))
            rest = DecoderOptions(decoder_prompt=decoder.get("decoder_prompt"), target_lang=decoder.get("target_lang"))
            start = await model.llm.prompts.encode_start(rest)
            lengths = [len(beam_opening(model.llm.llm.model, one, start).tokens) for one in ids]
            jobs = [
                (one, asked.for_prompt(server.settings, length, model.max_context))
                for one, length in zip(ids, lengths, strict=True)
            ]
            record.prompt_tokens = sum(map(len, ids))
            results = await _results(model, jobs, rest)
        except InvalidRequestError as error:
            raise named_error(error, asked.names) from error
        if asked.has_logprobs:
            await model.prepare_texts()
        texts = BeamTexts(results, asked.params.num_return_sequences, asked.has_logprobs)
        _note(record, texts)
        if server.settings.log_prompts:
            record.prompt, record.texts = list(prompts), [found.text or "" for found in texts.hypotheses]
        return texts


def _encoder(model: ServedModel, encode: Encode | None, source_lang: str | None) -> Encode:
    """Return the function from a prompt to token ids.

    Raises:
        ApiError: a language with a conversation.
    """
    if source_lang is not None and encode is not None:
        raise invalid(
            "'source_lang' states the language of a text, and a chat template has no place for it: leave it out",
            "source_lang",
        )
    return encode or partial(model.llm.prompts.encode, source_lang=source_lang)


async def _encoded(
    request: Request,
    model: ServedModel,
    prompts: Sequence[Any],
    asked: BeamRequest,
    encode: Encode,
) -> list[Sequence[int]]:
    """Return the token ids of the prompts, within the limits of the server, and truncated as requested."""
    settings = server_of(request).settings
    most = longest_prompt(settings, model, asked.prompt)
    ids = [await encode(prompt, most=most) for prompt in prompts]
    limited, _ = await within_limits(settings, model, prompts=ids, params=asked.prompt)
    return [model.llm.llm.requests.truncated(one, limited) for one in ids]


async def _results(
    model: ServedModel, jobs: Sequence[tuple[Sequence[int], BeamSearchParams]], decoder: DecoderOptions
) -> list[BeamResult]:
    """Search all prompts at the same time; if one fails, the others end."""
    tasks = [asyncio.ensure_future(model.llm.beam_search(list(ids), params, **decoder)) for ids, params in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _note(record: RequestRecord, texts: BeamTexts) -> None:
    record.cached_tokens = record.accepted_tokens = 0
    record.completion_tokens = sum(len(found.tokens) for found in texts.hypotheses)
    record.rounds = sum(result.num_steps for result in texts.results)
    record.finish_reasons = [found.finish_reason for found in texts.hypotheses]
    record.note_first_token(SYSTEM_CLOCK())
