"""`--image`: images before the prompt of `generate` and before the first message of `chat`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_samples import run
from draftree import LLM, SamplingParams
from vision_folders import picture, vision_folder

OPTIONS = ("--draft", "none", "--dtype", "float32", "--kernels", "torch", "--max-tokens", "6", "--temperature", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_folder("llava", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    where = tmp_path_factory.mktemp("images")
    paths = [where / f"{number}.png" for number in (1, 2)]
    for number, path in enumerate(paths):
        picture(number).save(path)
    return list(map(str, paths))


def expected(folder: Path, *messages: dict[str, Any]) -> str:
    llm = LLM(folder, "none", dtype="float32", kernels="torch")
    return llm.chat(list(messages), SamplingParams(max_tokens=6, temperature=0.0))[0].text


def asked(text: str, *paths: str) -> dict[str, Any]:
    parts = [{"type": "image", "image": path} for path in paths]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def test_generate_reads_images(folder: Path, images: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    pictures = [word for path in images for word in ("--image", path)]
    assert run(["generate", str(folder), "w5 w6", *OPTIONS, *pictures, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["text"] == expected(folder, asked("w5 w6", *images))


def test_generate_reads_a_plain_text_with_placeholders(
    folder: Path, images: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(folder), "w5 <image> w6", *OPTIONS, "--no-chat", "--image", images[0]]) == 0
    llm = LLM(folder, "none", dtype="float32", kernels="torch")
    params = SamplingParams(max_tokens=6, temperature=0.0)
    done = llm.generate({"text": "w5 <image> w6", "images": [images[0]]}, params)
    assert capfd.readouterr().out.strip() == done[0].text.strip()


def test_the_first_message_of_a_chat_has_the_images(
    folder: Path, images: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w5 w6\nw7\n")))
    assert run(["chat", str(folder), *OPTIONS, "--image", images[1]]) == 0
    first = expected(folder, asked("w5 w6", images[1]))
    answer = {"role": "assistant", "content": first}
    second = expected(folder, asked("w5 w6", images[1]), answer, {"role": "user", "content": "w7"})
    assert capfd.readouterr().out == f"{first}\n{second}\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("/nowhere/cat.png", "'/nowhere/cat.png' cannot be read: No such file"),
        ("", "the name is empty: give a file"),
        ("https://example.org/cat.png", "'https://example.org/cat.png' is a remote URL"),
        (__file__, "the image cannot be read"),
    ],
)
def test_what_is_no_image_is_refused_before_a_model_is_loaded(
    image: str, words: str, command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = ["w5"] if command == "generate" else []
    assert run([command, str(tmp_path / "none"), *prompt, "--image", image]) == 2
    error = capfd.readouterr().err
    assert words in error
    assert "--image" in error
