"""`draftree generate` with an encoder-decoder model: the prompt is the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_samples import Generate, generating
from draftree import LLM, SamplingParams
from seq2seq_samples import sample, written_model
from serving import tiny_tokenizer

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--dtype", "float32"]


@pytest.fixture
def generate(capfd: pytest.CaptureFixture[str]) -> Generate:
    return generating(capfd)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("t5")
    written_model(tiny_tokenizer()).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


def test_the_text_of_a_source(generate: Generate, folder: Path) -> None:
    (wanted,) = LLM(folder, dtype="float32").generate("translate: fox", SamplingParams(temperature=0, max_tokens=12))
    status, out, _ = generate(str(folder), "translate: fox", "--no-chat", "--json", *GREEDY)
    found = json.loads(out)
    assert status == 0
    assert found["text"] == wanted.text
    assert found["token_ids"] == list(wanted.token_ids)


def test_a_drafter_with_a_model_is_refused(generate: Generate, folder: Path) -> None:
    status, _, errors = generate(str(folder), "x", "--draft", f"model:{folder}", *GREEDY)
    assert status != 0
    assert "encoder-decoder" in errors


def test_a_model_of_sound_is_refused_with_the_way_to_use_it(generate: Generate, tmp_path: Path) -> None:
    sample("whisper").save_pretrained(tmp_path)
    status, _, errors = generate(str(tmp_path), "x", *GREEDY)
    assert status != 0
    assert "transcribe" in errors
