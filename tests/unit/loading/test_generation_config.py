"""Sampling defaults of a model: the library, the command line and the server take them where nothing is given."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cli_samples import Generate, generating, save_tiny_model
from draftree import LLM, AsyncLLM, SamplingParams
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.serve.pool import ServedModel
from serving import HTTP, NAME, running_server

FILE = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.3}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
ASKED: dict[str, Any] = {"max_tokens": 30, "seed": 5, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_model(tmp_path_factory.mktemp("defaults") / "tiny", chat=True)
    # do_sample is not read, as in vLLM
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "do_sample": False, **FILE}))
    return path


def text(llm: LLM, **given: Any) -> str:
    return llm.generate("abc", SamplingParams(**ASKED, **given))[0].text


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, str]:
    """Texts of the library with the file's values, without defaults, and with a temperature given."""
    plain = LLM(folder, draft="none", dtype="float32", generation_config="none")
    found = {"file": text(plain, **FILE), "neutral": text(plain), "given": text(plain, **FILE | {"temperature": 0.3})}
    assert found["neutral"] == text(plain, **NEUTRAL)
    assert len(set(found.values())) == 3
    return found


@pytest.mark.parametrize("draft", ["none", "suffix"])
def test_parameters_that_are_not_given_are_those_of_the_file(folder: Path, draft: str, texts: dict[str, str]) -> None:
    llm = LLM(folder, draft=draft, dtype="float32")
    assert text(llm) == texts["file"]
    assert text(llm, temperature=0.3) == texts["given"]
    assert text(llm, **NEUTRAL) == texts["neutral"]
    assert "".join(llm.stream("abc", SamplingParams(**ASKED))) == texts["file"]
    chats = [llm.chat(MESSAGES, SamplingParams(**ASKED, **given))[0].text for given in ({}, FILE, NEUTRAL)]
    assert chats[0] == chats[1] != chats[2]


def test_the_asynchronous_library_has_the_same_defaults(folder: Path, texts: dict[str, str]) -> None:
    async def written() -> str:
        async with AsyncLLM(folder, dtype="float32") as llm:
            return (await llm.generate("abc", SamplingParams(**ASKED)))[0].text

    assert asyncio.run(written()) == texts["file"]


def test_a_loaded_model_has_the_defaults_of_its_configuration(folder: Path, texts: dict[str, str]) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert text(LLM(model, tokenizer=tokenizer)) == texts["file"]
    model.generation_config = GenerationConfig(eos_token_id=0)
    assert text(LLM(model, tokenizer=tokenizer)) == texts["neutral"]


def test_the_defaults_are_said_once(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "draftree"):
        llm = LLM(folder, dtype="float32")
        for _ in range(2):
            text(llm)
        said = [one.getMessage() for one in caplog.records if "sampling defaults" in one.getMessage()]
        assert len(said) == 1
        assert all(f"{name}={value:g}" in said[0] for name, value in FILE.items())
        caplog.clear()
        LLM(folder, dtype="float32", generation_config="none")
        LLM(save_tiny_model(tmp_path / "plain", chat=False), dtype="float32")
    assert "sampling" not in caplog.text


def test_other_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown generation_config 'vllm'"):
        LLM("no/such/model", generation_config="vllm")
    folder = save_tiny_model(tmp_path / "tiny", chat=False)
    (folder / "generation_config.json").write_text('{"top_p": 3}')
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: top_p=3 is refused.*--generation-config none"):
        LLM(folder)
    assert LLM(folder, generation_config="none").generate("a", SamplingParams(max_tokens=1))[0].token_ids


@pytest.fixture
def generate(capfd: pytest.CaptureFixture[str]) -> Generate:
    return generating(capfd)


def test_commands_have_the_same_defaults(folder: Path, generate: Generate, texts: dict[str, str]) -> None:
    line = [str(folder), "abc", "--no-chat", "--dtype", "float32", "--seed", "5", "--max-tokens", "30", "--ignore-eos"]
    status, out, err = generate(*line)
    assert (status, out.rstrip("\n")) == (0, texts["file"].rstrip("\n"))
    assert err.count("sampling defaults of the model: temperature=0.8") == 1
    assert generate(*line, "--temperature", "0.3")[1].rstrip("\n") == texts["given"].rstrip("\n")
    status, out, err = generate(*line, "--generation-config", "none")
    assert out.rstrip("\n") == texts["neutral"].rstrip("\n")
    assert "sampling defaults" not in err


@pytest.mark.parametrize(("options", "values"), [([], FILE), (["--generation-config", "none"], NEUTRAL)])
def test_chats_have_the_same_defaults(
    folder: Path,
    options: list[str],
    values: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc\n")))
    line = ["chat", str(folder), "--dtype", "float32", "--seed", "5", "--max-tokens", "30", "--ignore-eos", "--json"]
    assert run([*line, *options]) == 0
    written = json.loads(capfd.readouterr().out)["text"]
    plain = LLM(folder, dtype="float32", generation_config="none")
    assert written == plain.chat(MESSAGES, SamplingParams(**ASKED, **values))[0].text


def test_the_server_has_the_same_defaults(folder: Path, texts: dict[str, str]) -> None:
    with running_server([ServedModel(NAME, AsyncLLM(folder, dtype="float32"))]) as running:
        for given, name in (({}, "file"), ({"temperature": 0.3}, "given"), (NEUTRAL, "neutral")):
            body = {"model": NAME, "prompt": "abc", **ASKED, **given}
            answer = HTTP.post(f"{running.url}/v1/completions", json=body).raise_for_status().json()
            assert answer["choices"][0]["text"] == texts[name]
        response = HTTP.post(f"{running.url}/v1/responses", json={"model": NAME, "input": "abc", "top_p": 0.5}).json()
        assert (response["temperature"], response["top_p"]) == (0.8, 0.5)
        (status,) = HTTP.get(f"{running.url}/draftree/status").json()["models"]
        assert status["sampling"] == FILE


def test_defaults_that_contradict_a_request_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", chat=False)
    (folder / "generation_config.json").write_text('{"temperature": 0}')
    llm = LLM(folder)
    assert llm.requests.defaults == dataclasses.replace(llm.requests.defaults, temperature=0.0)
    with pytest.raises(ValueError, match="n=2 texts at temperature=0"):
        llm.generate("a", SamplingParams(n=2))
