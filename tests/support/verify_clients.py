"""Devices for tests of the verify server: texts of a remote target beside texts of one process. Not a test itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from draftree import LLM, SamplingParams
from draftree.loading.loaded import LoadedModel
from draftree.remote.address import RemoteAddress
from draftree.remote.link import Connector, Link, Patience
from draftree.remote.target import RemoteModel
from draftree.serve.verify.service import VerifyService
from operated import wait_for
from serving import Running, plain_llm, tiny_tokenizer

PROMPTS = [
    "The quick brown fox jumps over the lazy dog; the quick brown",
    "def add(first, second):\n",
    "café",
    "the dog",
]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=24, temperature=0.8, seed=3),
    SamplingParams(max_tokens=20, temperature=1.1, seed=4, top_p=0.9, presence_penalty=0.5, logit_bias={40: 1.5}),
    SamplingParams(max_tokens=30, temperature=0.7, seed=5, repetition_penalty=1.1, stop=["e"], min_tokens=3),
]
IMPATIENT = Patience(reply=300.0, total=300.0, first_pause=0.001, longest_pause=0.01)


def texts_of(llm: LLM, prompts: Sequence[Any] = PROMPTS, params: Sequence[SamplingParams] = PARAMS) -> list[list[int]]:
    return [list(one.token_ids) for one in llm.generate(list(prompts), list(params))]


def plain_texts(prompts: Sequence[Any] = PROMPTS, params: Sequence[SamplingParams] = PARAMS) -> list[list[int]]:
    """The same texts by plain decoding in this process, one by one."""
    llm = plain_llm()
    return [list(llm.generate([prompt], one)[0].token_ids) for prompt, one in zip(prompts, params, strict=True)]


@contextmanager
def device(
    server: Running | str,
    draft: Any = "suffix,min=1",
    *,
    connector: Connector | None = None,
    key: str | None = None,
    patience: Patience = IMPATIENT,
    **options: Any,
) -> Iterator[LLM]:
    """An `LLM` whose target is on the server."""
    url = server if isinstance(server, str) else server.url
    link = Link(RemoteAddress.parse(f"remote:{url}"), key, patience=patience, connector=connector)
    model = RemoteModel(link, torch.device("cpu"), torch.float32)
    loaded = LoadedModel(model, None, link.welcome.eos_ids, "remote", tokenizer_sha=link.welcome.tokenizer)
    try:
        yield LLM(loaded, draft, tokenizer=tiny_tokenizer(), **options)
    finally:
        model.disconnect()


def service_of(server: Running) -> VerifyService:
    service = server.server.verify
    assert isinstance(service, VerifyService)
    return service


def drop_sessions(server: Running) -> None:
    service = service_of(server)
    for session in list(service.sessions.values()):
        asyncio.run_coroutine_threadsafe(service._drop(session), server.loop).result()


def check_empty(server: Running) -> None:
    """No session, text or sequence is left, and the engine's bookkeeping is sound."""
    service = service_of(server)
    wait_for(lambda: not service.sessions and server.llm.num_running == server.llm.num_waiting == 0)
    server.llm._driver.call(server.llm.llm.engine.check_integrity).result()


def connector(server: Running, kind: type[Any]) -> Any:
    address = RemoteAddress.parse(f"remote:{server.url}")
    return lambda: kind(address, None, timeout=300.0)
