"""`draftree generate` with an encoder-decoder model: the prompt is the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import whispers
from cli_samples import Generate
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.serve.audio import read_sound
from seq2seq_samples import sample, written_model
from serving import tiny_tokenizer
from translators import CODES, saved, translated

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--dtype", "float32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("t5")
    written_model(tiny_tokenizer()).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


def test_the_text_of_a_source(generate: Generate, folder: Path) -> None:
    (wanted,) = LLM(folder, "none", dtype="float32").generate(
        "translate: fox", SamplingParams(temperature=0, max_tokens=12)
    )
    status, out, _ = generate(str(folder), "translate: fox", "--no-chat", "--json", *GREEDY)
    found = json.loads(out)
    assert status == 0
    assert found["text"] == wanted.text
    assert found["token_ids"] == list(wanted.token_ids)


def test_a_drafter_with_a_part_of_the_model_is_refused(generate: Generate, folder: Path) -> None:
    status, _, errors = generate(str(folder), "x", "--draft", "early-exit,layers=1", *GREEDY)
    assert status != 0
    assert "encoder-decoder" in errors


def test_a_model_of_sound_is_refused_with_the_way_to_use_it(generate: Generate, tmp_path: Path) -> None:
    sample("whisper").save_pretrained(tmp_path)
    status, _, errors = generate(str(tmp_path), "x", *GREEDY)
    assert status != 0
    assert "transcribe" in errors


def test_the_decoder_prompt_of_one_prompt_and_of_a_file(generate: Generate, folder: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    wanted = LLM(folder, "none", dtype="float32").generate(["a fox", "b"], params, decoder_prompt="The ")
    status, out, _ = generate(str(folder), "a fox", "--no-chat", "--json", "--decoder-prompt", "The ", *GREEDY)
    assert status == 0
    assert json.loads(out)["token_ids"] == list(wanted[0].token_ids)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a fox\nb\n")
    given = ["--prompts", str(prompts), "--no-chat", "--json", "--decoder-prompt", "The ", *GREEDY]
    status, out, _ = generate(str(folder), *given)
    assert status == 0
    assert [json.loads(line)["token_ids"] for line in out.splitlines()] == [list(one.token_ids) for one in wanted]


def test_languages_of_a_translation(generate: Generate, tmp_path: Path) -> None:
    source, target = CODES["nllb"]
    made = saved("nllb", tmp_path)
    wanted = translated("nllb", "the fox", source=target, target=source, length=12)
    given = ["the fox", "--json", "--source-lang", target, "--target-lang", source, *GREEDY]
    status, out, _ = generate(str(made), *given)
    assert status == 0
    assert json.loads(out)["token_ids"] == wanted
    status, _, errors = generate(str(made), "the fox", "--target-lang", "de", *GREEDY)
    assert status != 0
    assert "target_lang" in errors


def test_the_context_of_the_decoder_limits_the_default_length(generate: Generate, tmp_path: Path) -> None:
    made = saved("nllb", tmp_path)
    status, out, _ = generate(str(made), "a" * 50, "--json", "--temperature", "0", "--dtype", "float32", "--ignore-eos")
    assert status == 0
    assert len(json.loads(out)["token_ids"]) == 63


def test_sound_files_are_transcribed(generate: Generate, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = whispers.saved(tmp_path / "whisper")
    for name, seconds in (("one.wav", 0.5), ("two.wav", 0.8)):
        (tmp_path / name).write_bytes(whispers.wav(whispers.samples(seconds)))
    files = [str(tmp_path / "one.wav"), str(tmp_path / "two.wav")]
    llm = LLM(folder, "none", dtype="float32")
    sounds = [read_sound(Path(file).read_bytes(), 16000) for file in files]
    params = SamplingParams(temperature=0, max_tokens=20)
    common = ["--language", "de", "--max-tokens", "20", "--dtype", "float32", "--draft", "suffix"]
    status = run(["transcribe", str(folder), *files, *common])
    out = capfd.readouterr().out
    wanted = [llm.transcriber.text(one.token_ids).strip() for one in llm.transcribe(sounds, params, language="de")]
    assert (status, out) == (0, "".join(f"{text}\n" for text in wanted))
    status = run(["transcribe", str(folder), files[0], *common, "--translate", "--format", "json"])
    found = json.loads(capfd.readouterr().out)
    (done,) = llm.transcribe(sounds[0], params, language="de", task="translate", timestamps=True)
    assert (status, found["duration"]) == (0, 0.5)
    assert [one["text"] for one in found["segments"]] == [one.text for one in llm.segments(done, seconds=0.5)]
    assert run(["transcribe", str(folder), files[0], *common, "--format", "srt"]) == 0
    assert capfd.readouterr().out.startswith("1\n00:00:0")
    assert run(["transcribe", str(folder), str(tmp_path / "none.wav")]) == 1
    assert "is no file" in capfd.readouterr().err


def test_long_sounds_are_transcribed_beside_short_ones(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = whispers.saved(tmp_path / "whisper")
    for name, seconds in (("long.wav", 2.4), ("short.wav", 0.8)):
        (tmp_path / name).write_bytes(whispers.wav(whispers.samples(seconds)))
    files = [str(tmp_path / "long.wav"), str(tmp_path / "short.wav")]
    llm = LLM(folder, "none", dtype="float32")
    long, short = (read_sound(Path(file).read_bytes(), 16000) for file in files)
    params = SamplingParams(temperature=0, max_tokens=20)
    common = ["--language", "de", "--max-tokens", "20", "--dtype", "float32", "--draft", "suffix"]
    assert run(["transcribe", str(folder), *files, *common]) == 0
    (whole,), (done,) = llm.transcribe_long(long, params, language="de"), llm.transcribe(short, params, language="de")
    wanted = [llm.transcriber.text(one.token_ids).strip() for one in (whole, done)]
    assert capfd.readouterr().out == "".join(f"{text}\n" for text in wanted)
    line = ["transcribe", str(folder), files[0], *common, "--condition-on-previous", "--format", "json"]
    assert run(line) == 0
    found = json.loads(capfd.readouterr().out)
    (carried,) = llm.transcribe_long(long, params, language="de", condition_on_previous=True)
    assert (found["text"], len(found["windows"])) == (carried.text, len(carried.windows))
    assert [(one["start"], one["text"]) for one in found["segments"]] == [
        (round(one.start, 3), one.text) for one in carried.segments
    ]
