"""`draftree generate --prompts`: a file of prompts, run as one batch, printed in its order."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cli_samples import CONTEXT
from draftree import LLM, SamplingParams
from draftree.cli import runs
from draftree.cli.main import run
from draftree.cli.prompt import FilePrompt, read_prompts
from draftree.core.errors import InvalidRequestError

OPTIONS = ["--temperature", "0.8", "--seed", "3", "--max-tokens", "12"]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12)
PROMPTS = ["ab", "a longer prompt than the others", "b"]
MESSAGES = [{"role": "system", "content": "hm"}, {"role": "user", "content": "ab"}]

Save = Callable[[str | bytes], str]


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Save:
    monkeypatch.chdir(tmp_path)

    def write(content: str | bytes) -> str:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "file").write_bytes(raw)
        return "file"

    return write


def objects(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_lines_of_text_are_prompts_and_blank_ones_are_left_out(save: Save) -> None:
    assert read_prompts(save("ab\n\n  c d \r\n\t\ne\x0bf\u2028g")) == [
        FilePrompt("file:1", 1, prompt="ab"),
        FilePrompt("file:3", 3, prompt="  c d "),
        FilePrompt("file:5", 5, prompt="e\x0bf\u2028g"),
    ]
    assert [one.prompt for one in read_prompts(save(b"\xef\xbb\xbfab\n{c"))] == ["ab", "{c"]


def test_json_lines_are_prompts_or_conversations_with_labels(save: Save) -> None:
    lines = [{"prompt": "a\nb", "id": "first"}, {"messages": MESSAGES, "category": "chat", "id": 7}, {"prompt": "c"}]
    assert read_prompts(save("\n".join(["", *map(json.dumps, lines), " "]))) == [
        FilePrompt("file:2", 2, prompt="a\nb", labels={"id": "first"}),
        FilePrompt("file:3", 3, messages=MESSAGES, labels={"id": 7, "category": "chat"}),
        FilePrompt("file:4", 4, prompt="c"),
    ]


WRONG: list[tuple[str | bytes, str]] = [
    ("", "'file' holds no prompt: write one per line"),
    ("\n \n", "'file' holds no prompt"),
    (b"ab\ncd\xff", r"file:2: not UTF-8 text \(byte 2 is invalid\)"),
    ('{"prompt": "a"}\n{"prompt": ', r"file:2: not a valid JSON object"),
    ('{"prompt": "a"}\nab', r"file:2: not a valid JSON object: every line must be one, since line 1 is"),
    ('{"prompt": "a"}\n[1]', r"file:2: not a valid JSON object"),
    ('\nab\n{"prompt": "a"}', r"file:3: a JSON object, but line 2 is text: use one form"),
    ('{"id": 1}', r"file:1: neither 'prompt' nor 'messages'"),
    ('{"prompt": "a", "messages": []}', r"file:1: both 'prompt' and 'messages': keep one"),
    ('{"promt": "a"}', r"file:1: unknown key 'promt': did you mean 'prompt'\?"),
    ('{"prompt": 5}', r"file:1: 'prompt' is 5: it must be a non-empty text"),
    ('{"prompt": ""}', r"file:1: 'prompt' is '': it must be a non-empty text"),
    ('{"prompt": "\\ud800"}', r"file:1: 'prompt' is not valid Unicode"),
    ('{"prompt": "a", "id": [1]}', r"file:1: 'id' is \[1\]: it must be a text or a whole number"),
    ('{"prompt": "a", "id": true}', r"file:1: 'id' is True"),
    ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', r"file:2: 'id' is 1, as in line 1: ids are unique"),
    ('{"messages": []}', r"file:1: .*at least one message"),
    ('{"messages": "ab"}', r"file:1: .*must be a list of messages"),
    ('{"messages": [{"role": "user"}]}', r'file:1: "content" of message 0'),
    ('{"prompt": NaN}', r"file:1: 'prompt' is nan"),
    ("{" * 100_000, r"file:1: not a valid JSON object"),
    ('{"prompt": ' + "[" * 100_000, r"file:1: not a valid JSON object"),
]


@pytest.mark.parametrize(("content", "why"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_line_is_named(content: str | bytes, why: str, save: Save) -> None:
    with pytest.raises(InvalidRequestError, match=why) as error:
        read_prompts(save(content))
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, why in (("nowhere", "No such file"), (".", "Is a directory")):
        with pytest.raises(InvalidRequestError, match=rf"prompts file '{name}' cannot be read: {why}"):
            read_prompts(name)


def test_each_prompt_gives_the_text_that_it_gives_alone(generate: Any, base: str, save: Save) -> None:
    file = save("\n".join(PROMPTS))
    status, out, err = generate(base, "--prompts", file, *OPTIONS, "--draft", "ngram", "--json")
    assert (status, err) == (0, "")
    found = objects(out)
    assert [one["text"] for one in found] == [done.text for done in LLM(base, "none").generate(PROMPTS, PARAMS)]
    assert [one["line"] for one in found] == [1, 2, 3]
    alone = json.loads(generate(base, "ab", *OPTIONS, "--draft", "ngram", "--json")[1])
    assert set(found[0]) == {*alone, "line"}
    assert all(one["draft"] == "ngram" for one in found)


def test_prompts_run_as_one_batch(generate: Any, base: str, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    running = []
    from draftree.engine.engine import Engine

    step = Engine.step

    def watched(engine: Engine) -> Any:
        done = step(engine)
        running.append(len(engine.running))
        return done

    monkeypatch.setattr(Engine, "step", watched)
    generate(base, "--prompts", save("\n".join(PROMPTS)), *OPTIONS, "--json")
    assert max(running) == len(PROMPTS)


def test_labels_and_several_texts_of_each_prompt(generate: Any, base: str, save: Save) -> None:
    file = save('{"prompt": "ab", "id": "one", "category": "short"}\n\n{"prompt": "b"}\n')
    found = objects(generate(base, "--prompts", file, *OPTIONS, "--n", "2", "--json")[1])
    assert [(one.get("id"), one.get("category"), one["line"]) for one in found] == [
        ("one", "short", 1),
        (None, None, 3),
    ]
    wanted = LLM(base, "none").generate(["ab", "b"], SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=12))
    assert [text["text"] for one in found for text in one["completions"]] == [done.text for done in wanted]


def test_texts_have_headings(generate: Any, base: str, save: Save) -> None:
    status, out, err = generate(base, "--prompts", save("ab\n\nb\n"), *OPTIONS)
    first, second = (done.text for done in LLM(base, "none").generate(["ab", "b"], PARAMS))
    assert status == 0
    assert out == f"=== file:1 ===\n{first}\n=== file:3 ===\n{second}\n"
    assert err.startswith("draft auto: suffix (")
    assert "\n2 prompts, 24 tokens in " in err
    named = generate(base, "--prompts", save('{"prompt": "ab", "id": "one"}'), *OPTIONS)[1]
    assert named == f"=== one ===\n{first}\n"


def test_conversations_and_prompts_of_one_file(generate: Any, chat: str, base: str, save: Save) -> None:
    file = save("\n".join(json.dumps(line) for line in ({"messages": MESSAGES}, {"prompt": "ab"})))
    found = objects(generate(chat, "--prompts", file, *OPTIONS, "--json")[1])
    wanted = LLM(chat, "none").chat([MESSAGES, MESSAGES[1:]], PARAMS)
    assert [one["text"] for one in found] == [done.text for done in wanted]
    assert [one["chat"] for one in found] == [True, True]
    file = save("ab\nb")
    found = objects(generate(chat, "--prompts", file, *OPTIONS, "--json", "--system", "hm")[1])
    assert found[0]["text"] == wanted[0].text
    assert not objects(generate(chat, "--prompts", file, *OPTIONS, "--json", "--no-chat")[1])[0]["chat"]


def test_standard_input_holds_the_prompts(
    generate: Any, base: str, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = generate(base, "--prompts", save("ab\nb"), *OPTIONS, "--json")[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\nb"), encoding="utf-8"))
    found = objects(generate(base, "--prompts", "-", *OPTIONS, "--json")[1])
    assert [one["text"] for one in found] == [one["text"] for one in objects(wanted)]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}"), encoding="utf-8"))
    assert "standard input:1: neither 'prompt' nor" in generate(base, "--prompts", "-")[2]
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed" in generate(base, "--prompts", "-")[2]


def test_the_default_length_ends_with_the_context_of_each(generate: Any, base: str, save: Save) -> None:
    found = objects(generate(base, "--prompts", save("ab\n" + "a" * 150), "--temperature", "0", "--json")[1])
    assert [one["prompt_tokens"] + one["stats"]["completion_tokens"] for one in found] == [CONTEXT, CONTEXT]


CLASHES = [
    (["ab", "--prompts", "FILE"], "both a prompt and --prompts"),
    (["-", "--prompts", "FILE"], "both a prompt and --prompts"),
    (["--prompts", "FILE", "--stream"], "leave --stream out"),
    (["--prompts", "FILE", "--compare", "--draft", "ngram"], "leave --compare out"),
]


@pytest.mark.parametrize(("arguments", "words"), CLASHES, ids=[" ".join(arguments) for arguments, _ in CLASHES])
def test_incompatible_options_are_refused(
    arguments: list[str], words: str, generate: Any, base: str, save: Save
) -> None:
    file = save("ab")
    status, out, err = generate(base, *(file if word == "FILE" else word for word in arguments))
    assert (status, out) == (2, "")
    assert words in err


def test_conversations_refuse_options_about_prompts(generate: Any, chat: str, base: str, save: Save) -> None:
    file = save(json.dumps({"prompt": "ab"}) + "\n" + json.dumps({"messages": MESSAGES}))
    for option in (["--system", "x"], ["--no-chat"]):
        status, out, err = generate(chat, "--prompts", file, *option)
        assert (status, out) == (1, "")
        assert f"error: file:2: holds messages, and {option[0]} applies to prompts only" in err
    status, out, err = generate(base, "--prompts", file)
    assert (status, out) == (1, "")
    assert "error: file:2: " in err
    assert "no chat template" in err


def test_wrong_lines_are_refused_before_the_model_is_loaded(
    save: Save, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "fetch_and_load", None)
    assert run(["generate", "stories15m", "--prompts", save('{"prompt": 5}')]) == 1
    assert capfd.readouterr().err.startswith("error: file:1: 'prompt' is 5")


def test_a_prompt_too_long_is_named_and_nothing_is_written(generate: Any, base: str, save: Save) -> None:
    status, out, err = generate(base, "--prompts", save("ab\n" + "a" * CONTEXT), *OPTIONS)
    assert (status, out) == (1, "")
    assert f"error: file:2: the prompt has {CONTEXT} tokens" in err


def test_a_prompt_that_fails_leaves_the_others(generate: Any, tmp_path: Path, base: str, save: Save) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer("~").input_ids[0]] = float("nan")
    broken = tmp_path / "broken"
    model.save_pretrained(broken)
    tokenizer.save_pretrained(broken)
    options = ["--temperature", "0", "--max-tokens", "8", "--logit-bias", f"{tokenizer('~').input_ids[0]}=-inf"]
    status, out, err = generate(str(broken), "--prompts", save("ab\na~\nb"), *options, "--json")
    assert status == 1
    found = objects(out)
    assert [one["line"] for one in found] == [1, 2, 3]
    assert ["error" in one for one in found] == [False, True, False]
    assert "logits" in found[1]["error"]
    assert err.startswith("error: 1 of 3 prompts failed; the first, file:2: ")
    status, out, err = generate(str(broken), "--prompts", save("ab\na~\nb"), *options)
    assert status == 1
    assert out.count("===\n") == 3
    assert "=== file:2 ===\n=== file:3 ===" in out
