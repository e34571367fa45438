"""Prompts files: the built-in one, foreign formats, and all kinds of malformed lines."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from draftree.core.errors import ConfigurationError
from draftree.lab.bench.workload import Task, encode, read_workload
from draftree.text.tokenizer import Tokenizer
from text_backends import CHAT_TEMPLATE, byte_level


def written(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def test_the_shipped_set_has_every_category_and_texts_worth_summarising():
    workload = read_workload()
    assert Counter(task.category for task in workload.tasks) == {
        "story": 5,
        "chat": 5,
        "summarise": 5,
        "rewrite-code": 5,
        "rag": 4,
    }
    for task in workload.tasks:
        assert (task.prompt is None) != (task.messages is None)
        if task.category == "summarise":
            assert 150 <= len(task.text.split()) <= 270


def test_foreign_formats_are_read(tmp_path):
    path = written(
        tmp_path,
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Again."]},
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
        "",
        {"prompt": "Once"},
    )
    assert read_workload(path).tasks == (
        Task("81", "writing", messages=({"role": "user", "content": "Compose a post."},), turns=("Again.",)),
        Task("HumanEval/0", "code-completion", prompt="def f():\n"),
        Task("4", "prompts", prompt="Once"),
    )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "holds no prompts"),
        (['{"prompt": "a"}', "{oops"], "line 2: it is not JSON"),
        (["[1]"], "line 1: it does not hold a JSON object"),
        (['{"id": "a"}'], "line 1 has no prompt"),
        (['{"prompt": "a", "turns": ["b"]}'], "line 1 has prompt and turns"),
        (['{"prompt": " "}'], "line 1: 'prompt' must be a non-empty text"),
        (['{"prompt": 3}'], "line 1: 'prompt' must be a non-empty text"),
        (['{"turns": []}'], "line 1: 'turns' must be a list"),
        (['{"turns": ["a", " "]}'], "line 1: turn 2 must be a non-empty text"),
        (['{"id": "x", "turns": ["a", "b"]}', '{"id": "x/2", "prompt": "b"}'], "2 prompts with the id 'x/2'"),
        (['{"messages": [{"role": "user"}]}'], "line 1: a message has only"),
        (['{"messages": "hello"}'], "line 1: 'messages' must be a list"),
        (['{"prompt": "a", "category": 3}'], "line 1: 'category' must be a name"),
        (['{"id": "x", "prompt": "a"}', '{"id": "x", "prompt": "b"}'], "2 prompts with the id 'x'"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, said):
    with pytest.raises(ConfigurationError, match=said):
        read_workload(written(tmp_path, *lines))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="does not exist"):
        read_workload(tmp_path / "none.jsonl")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_workload(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigurationError, match="not UTF-8"):
        read_workload(tmp_path / "latin.jsonl")


def test_categories_and_a_limit_choose_the_first_prompts(tmp_path):
    lines = [{"id": f"{kind}{n}", "category": kind, "prompt": "x"} for n in range(3) for kind in ("one", "two")]
    workload = read_workload(written(tmp_path, *lines))
    assert [task.id for task in workload.choose(limit=2).tasks] == ["one0", "two0", "one1", "two1"]
    assert [task.id for task in workload.choose(["two"], 1).tasks] == ["two0"]
    with pytest.raises(ConfigurationError, match="did you mean 'two'"):
        workload.choose(["tow"])


def test_messages_take_the_template_where_there_is_one():
    task = Task("a", "chat", messages=({"role": "user", "content": "Hello"},))
    with_template, without = Tokenizer(byte_level(CHAT_TEMPLATE)), Tokenizer(byte_level(None))
    assert encode(task, with_template) == (with_template.apply_chat_template(list(task.messages or ())), "chat")
    assert encode(task, without) == (without.encode("Hello"), "plain")
    assert encode(Task("b", "story", prompt="Hello"), with_template) == (with_template.encode("Hello"), "plain")


def test_a_prompt_may_hold_other_separators_than_line_breaks(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\n'.encode())
    assert [task.prompt for task in read_workload(path).tasks] == ["a\u2028b\x85c", "d"]
