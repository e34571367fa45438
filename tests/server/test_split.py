"""Devices that run the first layers and send hidden states: texts are those of the whole model in one process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_verify_faults import check_empty, connector, drop_sessions, service_of

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError, ModelLoadError, UnsupportedModelError
from draftree.heads.folders import write_head
from draftree.loading.first_layers import load_first_layers
from draftree.remote.errors import RefusedError
from draftree.remote.split import exchange
from draftree.remote.transport import PostTransport, WebSocketTransport
from draftree.serve.verify.service import VerifyService
from draftree.serve.verify.settings import VerifySettings
from faulty import faulty
from head_samples import head_config, random_head
from operated import wait_for
from serving import Running, running_server, tiny_tokenizer
from split_devices import HIDDEN, LAYERS, SPLIT, rounded_text, split_device, split_folder, split_server, whole_texts
from verify_clients import PARAMS, PROMPTS, texts_of

FREE_PARAMS = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=24, temperature=0.8, seed=3),
    SamplingParams(max_tokens=20, temperature=1.1, seed=4, top_p=0.9, top_k=30),
    SamplingParams(max_tokens=30, temperature=0.7, seed=5, min_p=0.05, stop=["e"]),
]
"""Parameters with which the server can pick."""
DRAFTS = [f"early-exit:{SPLIT}", f"early-exit:{SPLIT},tree=best-8", "suffix,min=1", None]


def planned(draft: str | None) -> dict[str, Any]:
    return {} if draft is None else {"plan": "fixed"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_folder(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return whole_texts(folder, PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def server(folder: Path) -> Any:
    with split_server(folder) as running:
        yield running


@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_equal_the_whole_model(server: Running, folder: Path, expected: list[list[int]], draft: Any) -> None:
    with split_device(server, folder, draft, **planned(draft)) as llm:
        assert llm.model.is_exact
        assert llm.model.is_same
        assert llm.model.is_lossless
        assert texts_of(llm) == expected, "together"
        alone = [texts_of(llm, [prompt], [one])[0] for prompt, one in zip(PROMPTS, PARAMS, strict=True)]
        assert alone == expected, "one by one, on cached prefixes"
        llm.engine.check_integrity()
        if draft is not None:
            latency = llm.model.link.latency
            assert latency.tokens > 1.05 * latency.rounds, "drafts are accepted"
    check_empty(server)


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_server_picks(server: Running, folder: Path, draft: Any) -> None:
    wanted = whole_texts(folder, PROMPTS, FREE_PARAMS)
    with split_device(server, folder, draft, picks="server", **planned(draft)) as llm:
        assert texts_of(llm, PROMPTS, FREE_PARAMS) == wanted
        several = SamplingParams(max_tokens=8, temperature=0.9, seed=6, n=2)
        whole = LLM(str(folder), None, dtype="float32").generate(PROMPTS[0], several)
        assert [one.token_ids for one in llm.generate(PROMPTS[0], several)] == [one.token_ids for one in whole]
        for refused in ({"repetition_penalty": 1.1}, {"logprobs": 1}, {"min_tokens": 2}, {"logit_bias": {3: 1.0}}):
            with pytest.raises(InvalidRequestError, match="picks=device"):
                llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, **refused))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedModelError, match="picks=device"):
            llm.model.open()
    check_empty(server)


def test_the_comparison_of_weights_counts_for_no_token(server: Running, folder: Path) -> None:
    with split_device(server, folder, None, picks="server") as llm:
        latency = llm.model.link.latency
        texts_of(llm, PROMPTS, FREE_PARAMS)
        assert latency.bytes_down < 64 * latency.rounds, "picks, and no states of the probe's tokens"


def test_log_probabilities_and_copies(server: Running, folder: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=2, n=3, logprobs=2, prompt_logprobs=1)
    whole = LLM(str(folder), None, dtype="float32").generate(PROMPTS[0], params)
    with split_device(server, folder, plan="fixed") as llm:
        found = llm.generate(PROMPTS[0], params)
        assert [one.token_ids for one in found] == [one.token_ids for one in whole]
        assert [one.logprobs for one in found] == [one.logprobs for one in whole]
        assert [one.prompt_logprobs for one in found] == [one.prompt_logprobs for one in whole]
        llm.engine.check_integrity()
    check_empty(server)


@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3-full"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_heads_read_states_of_both_sides(folder: Path, tmp_path: Path, variant: str, kernels: str) -> None:
    """The drafts, and not only the texts, are those of a head on the whole model."""
    vocab = len(tiny_tokenizer())
    sizes: dict[str, Any] = {"target_hidden": HIDDEN, "hidden": HIDDEN, "vocab_size": vocab, "max_length": 128}
    sizes["draft_vocab_size"] = 60 if variant == "eagle3" else vocab
    write_head(random_head(head_config(variant, **sizes), scale=0.2), tmp_path / "head")
    spec, params = f"head:{tmp_path / 'head'},tree=best-6", [SamplingParams(max_tokens=24, temperature=0)] * 4
    options: dict[str, Any] = {"plan": "fixed", "kernels": kernels}
    wanted = LLM(str(folder), spec, dtype="float32", **options).generate(list(PROMPTS), params)
    with split_server(folder, kernels=kernels) as own:
        with split_device(own, folder, spec, **options) as llm:
            found = llm.generate(list(PROMPTS), params)
            assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
            if kernels == "auto":
                assert [one.drafted for one in found] == [one.drafted for one in wanted]
            llm.engine.check_integrity()
        check_empty(own)


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_rounded_states_are_a_function_of_their_own(server: Running, folder: Path, kind: str) -> None:
    """Drafts, trees, batches and a restart do not change the text, and a loop without any of them gives the same."""
    params = [SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)] * len(PROMPTS)
    encode = tiny_tokenizer().encode
    wanted = [rounded_text(folder, kind, encode(prompt), 40) for prompt in PROMPTS]
    for draft in DRAFTS:
        with split_device(server, folder, draft, states=kind, **planned(draft)) as llm:
            assert not llm.model.is_lossless
            assert texts_of(llm, PROMPTS, params) == wanted
            dropped: list[Any] = []

            def drop(update: Any, dropped: list[Any] = dropped) -> None:
                dropped.append(update)
                if len(dropped) == 1:
                    drop_sessions(server)

            (text,) = llm.generate([PROMPTS[0]], params[:1], on_update=drop)
            assert list(text.token_ids) == wanted[0]
            assert llm.model.link.latency.reopened
    sampled = [SamplingParams(max_tokens=30, temperature=0.9, seed=8, ignore_eos=True)] * len(PROMPTS)
    texts = []
    for draft in DRAFTS:
        with split_device(server, folder, draft, states=kind, picks="server", **planned(draft)) as llm:
            texts.append(texts_of(llm, PROMPTS, sampled))
    assert texts == [texts[0]] * len(DRAFTS)


def test_long_prompts_take_several_frames(server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_ROWS", 7)
    prompt, params = " ".join(PROMPTS[:2] * 3), SamplingParams(max_tokens=20, temperature=0, prompt_logprobs=0)
    whole = LLM(str(folder), None, dtype="float32").generate(prompt, params)[0]
    with split_device(server, folder, "early-exit:2,tree=best-16", plan="fixed") as llm:
        sent: list[Any] = []

        def drop(update: Any) -> None:
            sent.append(update)
            if len(sent) == 2:
                drop_sessions(server)

        found = llm.generate(prompt, params, on_update=drop)[0]
        assert found.token_ids == whole.token_ids
        assert found.prompt_logprobs == whole.prompt_logprobs
    check_empty(server)


def test_devices_share_a_pass(server: Running, folder: Path, expected: list[list[int]]) -> None:
    """While the engine's thread is held, both devices send their rows; the next pass runs both."""
    service = service_of(server)
    found: dict[int, list[int]] = {}

    def run(place: int) -> None:
        with split_device(server, folder, plan="fixed") as llm:
            joined.wait(60)
            held.wait(60)
            found[place] = texts_of(llm, [PROMPTS[place]], [PARAMS[place]])[0]

    joined, held = threading.Barrier(3), threading.Barrier(3)
    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    joined.wait(60)
    ((passes, _, _),) = service.layers._passes.values()
    free = threading.Event()
    holding = server.llm._driver.call(lambda: free.wait(60))
    held.wait(60)
    wait_for(lambda: len(passes._queue) == 2)
    before = passes.num_works - passes.num_passes
    free.set()
    holding.result(60)
    for thread in threads:
        thread.join(120)
    assert passes.num_works - passes.num_passes > before, "a pass had both texts"
    assert [found[0], found[1]] == expected[:2]
    check_empty(server)


@pytest.mark.parametrize("kind", [WebSocketTransport, PostTransport])
@pytest.mark.parametrize("picks", ["device", "server"])
def test_lost_and_repeated_frames(server: Running, folder: Path, kind: type[Any], picks: str) -> None:
    wanted = whole_texts(folder, PROMPTS, FREE_PARAMS)
    flaky, counts = faulty(connector(server, kind), seed=7)
    with split_device(server, folder, picks=picks, connector=flaky, plan="fixed") as llm:
        assert texts_of(llm, PROMPTS, FREE_PARAMS) == wanted
        assert llm.model.link.latency.reopened == 0, "sessions resume"
    assert {"lost request", "lost reply", "cut"} < set(counts)
    check_empty(server)


def test_parked_texts_go_on(server: Running, folder: Path, expected: list[list[int]]) -> None:
    service, count = service_of(server), [0]

    def park(update: Any) -> None:
        count[0] += 1
        if count[0] % 3 == 0:
            for session in list(service.sessions.values()):
                parking = service.layers.park(session, before=float("inf"))
                asyncio.run_coroutine_threadsafe(parking, server.loop).result(30)

    with split_device(server, folder, plan="fixed") as llm:
        found = llm.generate(list(PROMPTS), list(PARAMS), on_update=park)
        assert [list(one.token_ids) for one in found] == expected
        assert llm.model.link.latency.reopened
    check_empty(server)


def test_a_pass_that_fails_for_one_device(
    server: Running, folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text fails with the server's error, and the next one is right."""
    model: Any = server.llm.llm.model
    with split_device(server, folder, None) as llm:
        monkeypatch.setattr(model, "run_rest", None)
        with pytest.raises(Exception, match="failed to process"):
            llm.generate(PROMPTS[0], PARAMS[0])
        monkeypatch.undo()
        assert texts_of(llm) == expected
    check_empty(server)


def test_what_does_not_fit_is_refused(server: Running, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="split=2"), split_device(server, folder, None, split=1):
        pass
    other = split_folder(tmp_path, 2)
    with pytest.raises(ModelLoadError, match="same weights"), split_device(server, other, None):
        pass
    with pytest.raises(ConfigurationError, match="1 to 3"):
        load_first_layers(folder, LAYERS, dtype=torch.float32, device=torch.device("cpu"))
    with split_device(server, folder, None) as llm, pytest.raises(UnsupportedModelError, match="early-exit:2"):
        LLM(llm.model, "early-exit:1", tokenizer=tiny_tokenizer())
    with (
        running_server(verify=VerifySettings()) as tokens_only,
        pytest.raises(RefusedError, match="--split 2"),
        split_device(tokens_only, folder, None),
    ):
        pass
    drop_sessions(server)
    check_empty(server)


def test_more_cached_prefixes_than_texts_of_a_session(folder: Path) -> None:
    """A device with more prefixes than the server takes texts ends the oldest ones there, and sends them again."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [f"{number} is the number of this long enough prompt" for number in range(6)] * 2
    wanted = whole_texts(folder, prompts[:6], [params] * 6) * 2
    with split_server(folder, settings=VerifySettings(split=SPLIT, max_texts=3)) as small:
        with split_device(small, folder, plan="fixed") as llm:
            found = [texts_of(llm, [prompt], [params])[0] for prompt in prompts]
            assert found == wanted
            assert len(llm.model._exchange.slots) > 3
            assert llm.prefix_stats.hits >= 6
        check_empty(small)


def test_services_count_what_they_did(server: Running) -> None:
    service = service_of(server)
    assert isinstance(service, VerifyService)
    status = service.status()
    assert status["begun"] > 0
    assert status["rows"] > status["passes"] > 0
