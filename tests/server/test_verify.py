"""Devices that draft for a model on a server: their texts are those of plain decoding in one process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.remote.transport import PostTransport, WebSocketTransport
from draftree.serve.app import create_app
from draftree.serve.pool import ModelPool, ServedModel
from draftree.serve.verify.settings import VerifySettings
from private_cache import private_cache
from serving import ALIAS, NAME, Running, _serving, running_server, settings, tiny_async_llm, tiny_model, tiny_tokenizer
from verify_clients import PARAMS, PROMPTS, device, plain_texts, texts_of


@pytest.fixture(scope="module")
def server() -> Any:
    with running_server(verify=VerifySettings()) as running:
        yield running


@pytest.mark.parametrize("draft", ["suffix,min=1", "ngram", "ngram,min=1+suffix", None])
def test_texts_equal_plain_decoding(server: Running, draft: str | None) -> None:
    with device(server, draft, **({} if draft is None else {"plan": "fixed"})) as llm:
        assert texts_of(llm) == plain_texts()
        alone = [texts_of(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        assert alone == plain_texts()
        llm.engine.check_integrity()
    assert server.app.state.server.verify.num_texts == 0


def test_a_plain_client_writes_more_texts_than_may_be_open(server: Running) -> None:
    expected = plain_texts(PROMPTS[:1], PARAMS[:1])
    with device(server, None) as llm:
        for _ in range(VerifySettings().max_texts + 2):
            assert texts_of(llm, PROMPTS[:1], PARAMS[:1]) == expected


def test_trees_of_several_devices_share_a_pass(server: Running) -> None:
    """Between rounds of two devices, another text waits in its round until both have sent their next trees."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    expected = plain_texts(PROMPTS[:2], [params] * 2)
    service, records, found, ended = server.server.verify, [], {}, threading.Event()
    num_served = [0]
    assert service is not None
    before, opened, pause = service.counts["asked"], service.counts["opened"], threading.Event()

    def wait(record: RoundRecord) -> None:
        if any(row.request_id.startswith("verify-") for row in record.sequences):
            records.append(record)
            num_served[0] += sum(row.request_id.startswith("verify-") for row in record.sequences)
            return
        if service.counts["opened"] < opened + 2:
            pause.wait(0.05)  # the devices open their texts between rounds
            return
        for _ in range(3000):
            if ended.is_set() or service.counts["asked"] - before > num_served[0] + 1:
                return
            pause.wait(0.01)

    def run(place: int) -> None:
        try:
            with device(server, "suffix,min=1", plan="fixed") as llm:
                found[place] = texts_of(llm, [PROMPTS[place]], [params])[0]
        finally:
            ended.set()

    remove = server.llm.on_round(wait)
    long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    other = asyncio.run_coroutine_threadsafe(server.llm.generate("the dog", long, draft="none"), server.loop)
    try:
        threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        ended.set()
        other.cancel()
        remove()
    assert [found[0], found[1]] == expected
    shared = [record for record in records if len(record.sequences) == 3]
    assert len(shared) > 3, "two devices and the other text in one pass"
    assert any(sum(row.num_drafted > 0 for row in record.sequences) == 2 for record in shared)


def test_devices_and_plain_requests_share_the_server(server: Running) -> None:
    import httpx

    body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    with device(server) as llm:
        found = []

        def ask(update: Any) -> None:
            if len(found) < 3:
                found.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0])

        texts = llm.generate(list(PROMPTS), list(PARAMS), on_update=ask)
        assert [list(one.token_ids) for one in texts] == plain_texts()
        assert {one["text"] for one in found} == {texts[0].text}
        shown = httpx.get(f"{server.url}/draftree/status").json()["verify"]
        assert shown["sessions"] == 1
        assert shown["accepted"] > 0


def test_post_is_used_where_there_is_no_websocket() -> None:
    pool = ModelPool([ServedModel(NAME, tiny_async_llm("ngram"), (ALIAS,))])
    app = create_app(settings(), pool, verify=VerifySettings())
    with _serving(app, "none") as (url, _), device(url) as llm:
        assert texts_of(llm) == plain_texts()
        assert isinstance(llm.model.link._transport, PostTransport)


def test_the_name_of_a_server_is_enough(server: Running, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments, `LLM` fetches the tokenizer, chats, streams and reports; several texts per prompt, too."""
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    llm = LLM(f"remote:{server.url}", "suffix,min=1", plan="fixed")
    try:
        assert isinstance(llm.model.link._transport, WebSocketTransport)
        assert texts_of(llm) == plain_texts()
        assert llm.tokenizer is not None
        assert llm.tokenizer.vocabulary() == server.llm.llm.tokenizer.vocabulary()
        local = LLM(tiny_model(), tokenizer=tiny_tokenizer())
        talk = [{"role": "user", "content": "the dog"}]
        params = SamplingParams(max_tokens=16, temperature=0.8, seed=9, n=3)
        assert [one.token_ids for one in llm.chat(talk, params)] == [one.token_ids for one in local.chat(talk, params)]
        greedy = SamplingParams(max_tokens=16, temperature=0)
        assert "".join(llm.stream(PROMPTS[0], greedy)) == local.generate(PROMPTS[0], greedy)[0].text
        stream = llm.stream(PROMPTS[0], greedy)
        next(stream)
        stream.close()
        llm.engine.check_integrity()
        assert llm.model.num_open == 0
        assert "round trip" in llm.model.note
    finally:
        llm.model.disconnect()


def test_a_drafter_is_chosen_for_a_remote_target(
    server: Running, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    llm = LLM(f"remote:{server.url}", "auto")
    try:
        assert "suffix" in llm.draft_note
        assert texts_of(llm) == plain_texts()
    finally:
        llm.model.disconnect()


def test_rounds_are_small(server: Running) -> None:
    with device(server, "suffix,min=1", plan="fixed") as llm:
        texts_of(llm, PROMPTS[:1], PARAMS[:1])
        latency = llm.model.link.latency
        assert latency.rounds > 5
        assert (latency.bytes_up + latency.bytes_down) / latency.rounds < 300
