"""Prompts that a chat model writes: `magpie_prompts` and `draftree train prompts`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench_samples import write_model
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.cli.prompt import read_prompts
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.loading.loaded import LoadedModel
from draftree.train.data.prompts import MIN_TOKENS, MessageSettings, magpie_prompts, user_turn
from draftree.train.data.shards import TrainingData
from text_backends import CHAT_TEMPLATE, byte_level

END = "<|im_end|>"
RUN = ["--dtype", "float32", "--kernels", "torch"]


def chat_model(folder: Path, *, end_logit: float = 4.0) -> Path:
    """A chat model whose next token is uniform, but for the end of a message, whose logit is higher."""
    write_model(folder, chat_template=CHAT_TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        # the first number of each normalized state is the root of the width, all others are 0
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 0] = 1
        model.lm_head.weight.zero_()
        width = model.config.hidden_size
        model.lm_head.weight[byte_level().convert_tokens_to_ids(END), 0] = end_logit / width**0.5
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("magpie") / "model")


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), "none", dtype="float32", kernels="torch")


def templated(llm: LLM, template: str | None) -> LLM:
    return LLM(LoadedModel(llm.model, None, (), "tiny"), "none", tokenizer=byte_level(template))


def test_the_message_of_the_user_is_located_in_the_template(llm: LLM) -> None:
    backend = byte_level()
    turn = user_turn(llm)
    assert backend.decode(turn.before) == "<s><|im_start|>user\n"
    assert turn.end == backend.convert_tokens_to_ids(END)


def test_a_system_prompt_of_the_template_is_part_of_what_comes_before(llm: LLM) -> None:
    template = "<|im_start|>system\nBe brief.<|im_end|>\n" + CHAT_TEMPLATE
    before = byte_level().decode(user_turn(templated(llm, template)).before)
    assert before == "<|im_start|>system\nBe brief.<|im_end|>\n<s><|im_start|>user\n"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "the model has no chat template"),
        ("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}", "does not end a user's message"),
        ("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}", "writes nothing before a user's message"),
    ],
    ids=["none", "no special token", "nothing before"],
)
def test_unusable_templates_are_refused(llm: LLM, template: str | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        magpie_prompts(templated(llm, template), MessageSettings(number=1))


def test_messages_are_different_complete_and_independent_of_the_batch(llm: LLM) -> None:
    done: list[int] = []
    found = magpie_prompts(llm, MessageSettings(number=12, max_tokens=40, batch=5), on_progress=done.append)
    assert len(found) == len(set(found)) == 12
    assert done == sorted(done)
    assert done[-1] == 12
    assert all(text == text.strip() and text for text in found)
    assert not any(token in text for text in found for token in (END, "<|im_start|>", "<s>"))
    assert magpie_prompts(llm, MessageSettings(number=12, max_tokens=40, batch=32)) == found
    assert magpie_prompts(llm, MessageSettings(number=6, max_tokens=40)) == found[:6]
    assert magpie_prompts(llm, MessageSettings(number=12, max_tokens=40, seed=1000)) != found


def test_messages_without_an_end_short_ones_and_repeated_ones_are_dropped(llm: LLM) -> None:
    limit = 12
    turn = user_turn(llm)
    drawn = [
        llm.generate(
            [list(turn.before)],
            SamplingParams(temperature=1.0, top_p=0.95, seed=seed, max_tokens=limit, stop_token_ids=[turn.end]),
        )[0]
        for seed in range(40)
    ]
    kept = [one for one in drawn if one.token_ids[-1] == turn.end and len(one.token_ids) > MIN_TOKENS]
    assert {one.finish_reason for one in drawn} == {"stop", "length"}
    assert any(len(one.token_ids) <= MIN_TOKENS for one in drawn)
    found = magpie_prompts(llm, MessageSettings(number=8, max_tokens=limit, batch=8))
    assert found == list(dict.fromkeys(one.text.strip() for one in kept if one.text.strip()))[:8]


def test_a_model_that_never_ends_a_message_is_refused(tmp_path: Path) -> None:
    llm = LLM(str(chat_model(tmp_path / "endless", end_logit=-40.0)), "none", dtype="float32", kernels="torch")
    with pytest.raises(ConfigurationError, match="wrote 0 different messages in 16 attempts: ask for fewer"):
        magpie_prompts(llm, MessageSettings(number=2, max_tokens=6, batch=8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"number": 0}, "number is 0: it must be at least 1"),
        ({"batch": 0}, "batch is 0: it must be at least 1"),
        ({"max_tokens": 4}, "max_tokens is 4: it must be at least 5"),
        ({"temperature": 0.0}, "temperature is 0.0: it must be above 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MessageSettings(**{"number": 1, **settings})


def test_settings_that_sampling_does_not_allow_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        MessageSettings(number=1, top_p=2.0)


def test_the_command_writes_prompts_that_training_data_are_made_from(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.jsonl"
    command = ["train", "prompts", str(model), "--number", "5", "--max-tokens", "40", "--seed", "3", *RUN]
    assert run([*command, "--output", str(file)]) == 0
    assert capfd.readouterr().out == f"{file}: 5 messages\n"
    prompts = read_prompts(str(file))
    llm = LLM(str(model), "none", dtype="float32", kernels="torch")
    assert [one.prompt for one in prompts] == magpie_prompts(llm, MessageSettings(number=5, max_tokens=40, seed=3))
    assert [one.labels for one in prompts] == [{"id": f"magpie-{n}", "category": "magpie"} for n in range(1, 6)]
    data = tmp_path / "data"
    capture = ["train", "data", str(model), "--prompts", str(file), "--output", str(data), "--max-tokens", "8", *RUN]
    assert run(capture) == 0
    assert TrainingData(data).recipe.prompts[0].count == 5


def test_the_command_never_overwrites_a_file(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("mine")
    assert run(["train", "prompts", str(model), "--output", str(file)]) == 1
    assert f"'{file}' exists: name a new file" in capfd.readouterr().err
    assert file.read_text() == "mine"


def test_bad_options_are_refused_before_the_model_is_loaded(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.cli.runs.fetch_and_load", lambda setup: pytest.fail("the model is loaded"))
    for options, message in (
        (["--output", str(tmp_path / "missing" / "own.jsonl")], "missing' does not exist"),
        (["--output", str(tmp_path / "own.jsonl"), "--number", "0"], "number is 0"),
        (["--output", str(tmp_path / "own.jsonl"), "--temperature", "0"], "temperature is 0.0"),
    ):
        assert run(["train", "prompts", str(model), *options]) == 1
        assert message in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []
