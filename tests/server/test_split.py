"""Devices that run the first layers and send hidden states: texts, a part of the weights, and exits that learn."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from cli_samples import save_tiny_model
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, InvalidRequestError, ModelLoadError, UnsupportedModelError
from draftree.heads.folders import write_head
from draftree.loading.first_layers import load_first_layers, write_first_layers
from draftree.loading.load import load_model
from draftree.options import ModelOptions
from draftree.remote.address import RefusedError
from draftree.remote.split import exchange
from draftree.remote.transport import PostTransport, WebSocketTransport
from draftree.serve.verify import VerifySettings
from faulty import faulty
from head_samples import head_config, random_head
from operated import wait_for
from serving import Running, running_server, tiny_tokenizer
from split_devices import (
    HIDDEN,
    LAYERS,
    SPLIT,
    rounded_text,
    save_split_model,
    split_device,
    split_server,
    whole_llm,
    whole_texts,
)
from verify_clients import PARAMS, PROMPTS, check_empty, connector, drop_sessions, service_of, texts_of

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


@pytest.fixture
def folder(split_folder: Path) -> Path:
    return split_folder


@pytest.fixture
def server(layers_server: Running) -> Running:
    return layers_server


@pytest.fixture(scope="module")
def expected(split_folder: Path) -> list[list[int]]:
    return whole_texts(split_folder, PROMPTS, PARAMS)


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
        status = service_of(server).status()
        assert status["begun"] > 0
        assert status["rows"] > status["passes"] > 0
        if draft is not None:
            latency = llm.model.link.latency
            assert latency.tokens > 1.05 * latency.rounds, "drafts are accepted"


@pytest.mark.parametrize(
    ("family", "kernels"), [("qwen3_5_text", "native"), ("qwen3_5_text", "torch"), ("lfm2", "native")]
)
def test_recurrent_layers_of_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kernels: str
) -> None:
    """In batches, from cached prefixes, with trees, in several frames, and after the server lost its texts."""
    monkeypatch.setattr(exchange, "MAX_ROWS", 5)
    folder = save_split_model(tmp_path, family=family)
    wanted = whole_texts(folder, PROMPTS, PARAMS, kernels=kernels)
    with split_server(folder, kernels=kernels) as server:
        for draft in DRAFTS[1:]:
            with split_device(server, folder, draft, kernels=kernels, prefill_chunk_size=16, **planned(draft)) as llm:
                assert texts_of(llm) == wanted, "together"
                drops: list[Any] = []

                def drop(update: Any, drops: list[Any] = drops) -> None:
                    drops.append(update)
                    if len(drops) == 2:
                        drop_sessions(server)

                for prompt, one, text in zip(PROMPTS, PARAMS, wanted, strict=True):
                    assert list(llm.generate(prompt, one, on_update=drop)[0].token_ids) == text
                several = SamplingParams(max_tokens=8, temperature=0.9, seed=6, n=2)
                copies = whole_llm(folder, kernels).generate(PROMPTS[0], several)
                assert [one.token_ids for one in llm.generate(PROMPTS[0], several)] == [one.token_ids for one in copies]
                llm.engine.check_integrity()


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


@pytest.mark.parametrize(
    ("variant", "kernels"), [("eagle", "auto"), ("eagle3", "auto"), ("eagle3-full", "auto"), ("eagle3", "torch")]
)
def test_heads_read_states_of_both_sides(
    server: Running, folder: Path, tmp_path: Path, variant: str, kernels: str
) -> None:
    """The drafts, and not only the texts, are those of a head on the whole model."""
    vocab = len(tiny_tokenizer())
    sizes: dict[str, Any] = {"target_hidden": HIDDEN, "hidden": HIDDEN, "vocab_size": vocab, "max_length": 128}
    sizes["draft_vocab_size"] = 60 if variant == "eagle3" else vocab
    write_head(random_head(head_config(variant, **sizes), scale=0.2), tmp_path / "head")
    spec, params = f"head:{tmp_path / 'head'},tree=best-6", [SamplingParams(max_tokens=24, temperature=0)] * 4
    options: dict[str, Any] = {"plan": "fixed", "kernels": kernels}
    wanted = LLM(str(folder), spec, dtype="float32", **options).generate(list(PROMPTS), params)
    with (
        nullcontext(server) if kernels == "auto" else split_server(folder, kernels=kernels) as own,
        split_device(own, folder, spec, **options) as llm,
    ):
        found = llm.generate(list(PROMPTS), params)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
        if kernels == "auto":
            assert [one.drafted for one in found] == [one.drafted for one in wanted]
        llm.engine.check_integrity()


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_rounded_states_are_a_function_of_their_own(server: Running, folder: Path, kind: str) -> None:
    """Drafts, trees, batches and a restart do not change the text, and a loop without any of them gives the same."""
    params = [SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)] * len(PROMPTS)
    encode = tiny_tokenizer().encode
    wanted = [rounded_text(folder, kind, encode(prompt), 40) for prompt in PROMPTS]
    for draft in DRAFTS[1:]:
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
    for draft in DRAFTS[1:]:
        with split_device(server, folder, draft, states=kind, picks="server", **planned(draft)) as llm:
            texts.append(texts_of(llm, PROMPTS, sampled))
    assert texts == [texts[0]] * len(texts)


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


def test_devices_share_a_pass(server: Running, folder: Path, expected: list[list[int]]) -> None:
    """While the engine's thread is held, both devices send their rows; the next pass runs both."""
    service = service_of(server)
    found: dict[int, list[int]] = {}

    def run(place: int) -> None:
        with split_device(server, folder, plan="fixed") as llm:
            joined.wait()
            held.wait()
            found[place] = texts_of(llm, [PROMPTS[place]], [PARAMS[place]])[0]

    joined, held = threading.Barrier(3), threading.Barrier(3)
    threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    joined.wait()
    ((passes, _, _),) = service.layers._passes.values()
    free = threading.Event()
    holding = server.llm._driver.call(free.wait)
    held.wait()
    wait_for(lambda: len(passes._queue) == 2)
    before = passes.num_works - passes.num_passes
    free.set()
    holding.result()
    for thread in threads:
        thread.join()
    assert passes.num_works - passes.num_passes > before, "a pass had both texts"
    assert [found[0], found[1]] == expected[:2]


@pytest.mark.parametrize("kind", [WebSocketTransport, PostTransport])
@pytest.mark.parametrize("picks", ["device", "server"])
def test_lost_and_repeated_frames(server: Running, folder: Path, kind: type[Any], picks: str) -> None:
    wanted = whole_texts(folder, PROMPTS, FREE_PARAMS)
    flaky, counts = faulty(connector(server, kind), seed=7)
    with split_device(server, folder, picks=picks, connector=flaky, plan="fixed") as llm:
        assert texts_of(llm, PROMPTS, FREE_PARAMS) == wanted
        assert llm.model.link.latency.reopened == 0, "sessions resume"
    assert {"lost request", "lost reply", "cut"} < set(counts)


def test_parked_texts_go_on(server: Running, folder: Path, expected: list[list[int]]) -> None:
    service, count = service_of(server), [0]

    def park(update: Any) -> None:
        count[0] += 1
        if count[0] % 3 == 0:
            for session in list(service.sessions.values()):
                parking = service.layers.park(session, before=float("inf"))
                asyncio.run_coroutine_threadsafe(parking, server.loop).result()

    with split_device(server, folder, plan="fixed") as llm:
        found = llm.generate(list(PROMPTS), list(PARAMS), on_update=park)
        assert [list(one.token_ids) for one in found] == expected
        assert llm.model.link.latency.reopened


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


def test_what_does_not_fit_is_refused(server: Running, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="split=2"), split_device(server, folder, None, split=1):
        pass
    other = save_split_model(tmp_path / "other", 2)
    with pytest.raises(ModelLoadError, match="same weights"), split_device(server, other, None):
        pass
    with pytest.raises(ConfigurationError, match="1 to 3"):
        load_first_layers(ModelOptions(folder, dtype="float32", device="cpu"), LAYERS)
    with split_device(server, folder, None) as llm, pytest.raises(UnsupportedModelError, match="early-exit:2"):
        LLM(llm.model, "early-exit:1", tokenizer=tiny_tokenizer())
    with (
        running_server(verify=VerifySettings()) as tokens_only,
        pytest.raises(RefusedError, match="--split 2"),
        split_device(tokens_only, folder, None),
    ):
        pass


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


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def part(split_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("parts") / "part"
    assert run(["models", "part", str(split_folder), "--split", str(SPLIT), "--to", str(where)]) == 0
    return where


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_only_what_the_device_runs_is_written(folder: Path, part: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_out = {name for number in range(SPLIT, LAYERS) for name in names_in(folder) if f"layers.{number}." in name}
    assert left_out
    assert names_in(part) == names_in(folder) - left_out
    sizes = [(where / "model.safetensors").stat().st_size for where in (part, folder)]
    written = write_first_layers(folder, 1, part.parent / "one")
    assert written.num_layers == LAYERS
    assert written.num_bytes < sizes[0] < sizes[1] == written.whole_bytes
    again = write_first_layers(part, 1, part.parent / "part-of-part")
    assert (again.num_layers, again.num_bytes) == (LAYERS, written.num_bytes)
    with pytest.raises(ConfigurationError, match="1 to 3"):
        write_first_layers(folder, LAYERS, part.parent / "all")
    with pytest.raises(ConfigurationError, match="first 2 layers: give 1 to 2"):
        load_first_layers(ModelOptions(part, dtype="float32", device="cpu"), 3)
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        write_first_layers(folder, 1, part)
    assert run(["models", "part", str(folder), "--split", "9", "--to", str(part.parent / "nine")]) == 1
    assert "split=9, and the model has 4 layers" in capsys.readouterr().err
    assert not list(part.parent.glob(".*")), "nothing is left behind"


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_part_writes_the_texts_of_the_whole_model(server: Running, folder: Path, part: Path, kernels: str) -> None:
    with split_device(server, part, plan="fixed", kernels=kernels) as llm:
        if kernels == "auto":
            assert llm.model.is_same
        assert texts_of(llm) == whole_texts(folder, PROMPTS, PARAMS)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    whole = save_tiny_model(tmp_path / "whole", chat=False)
    config = load_model(whole, kernels="torch", dtype="float32").model
    part = write_first_layers(whole, 1, tmp_path / "part")
    local = load_first_layers(ModelOptions(part.folder, dtype="float32", device="cpu", kernels="torch"), 1)
    first = load_first_layers(ModelOptions(whole, dtype="float32", device="cpu", kernels="torch"), 1)
    assert torch.equal(local.output_head(), first.output_head())
    assert torch.equal(local.input_embedding(), config.input_embedding())


def test_a_part_writes_no_texts_of_its_own(part: Path, folder: Path) -> None:
    for load in (
        lambda: LLM(str(part), "none"),
        lambda: LLM(str(folder), f"model:{part}"),
        lambda: LLM(str(part), "none", tp=1),
    ):
        with pytest.raises(ModelLoadError, match=r"first layers of a model of 4 layers.*split=N&weights="):
            load()


def test_packed_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    packed = shutil.copytree(folder, tmp_path / "packed")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModelError, match="packed weights"):
        write_first_layers(packed, 1, tmp_path / "part")


ALWAYS = "rate=0.5,share=1"


@pytest.mark.parametrize(
    ("draft", "where"), [(DRAFTS[0], "split"), (DRAFTS[1], "split"), (DRAFTS[0], "torch"), (DRAFTS[1], "native")]
)
def test_texts_stay_the_same_while_an_exit_learns(server: Running, folder: Path, draft: str, where: str) -> None:
    wanted = whole_texts(folder, PROMPTS, PARAMS, kernels="torch" if where == "torch" else "auto")
    options: dict[str, Any] = {"plan": "fixed", "learn": f"server,{ALWAYS}"}
    if where == "split":
        with split_device(server, folder, draft, **options) as llm:
            check_learning(llm, wanted)
    else:
        check_learning(LLM(str(folder), draft, dtype="float32", kernels=where, **options), wanted)


def check_learning(llm: LLM, wanted: list[list[int]]) -> None:
    for _ in range(3):
        assert texts_of(llm) == wanted
    assert llm.learned is not None
    (stats,) = llm.learned.stats
    assert stats.tokens > 0
    assert stats.base_acceptance is not None
    llm.engine.check_integrity()
    llm.forget()
    assert llm.learned.stats[0].size == 0


def test_a_repeated_text_is_drafted_better(folder: Path) -> None:
    """The exit of a random model knows little of its last layers; after the same texts again and again it does."""
    params = [SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)] * len(PROMPTS)
    llm = LLM(str(folder), f"early-exit:{SPLIT}", dtype="float32", plan="fixed", learn=f"server,{ALWAYS}")
    texts = [texts_of(llm, PROMPTS, params) for _ in range(12)]
    assert texts == [texts[0]] * 12
    assert llm.learned is not None
    (stats,) = llm.learned.stats
    assert stats.active == 1
    assert stats.base_acceptance is not None
    assert stats.learned_acceptance is not None
    assert stats.learned_acceptance > stats.base_acceptance
