"""Later turns of conversations: their prompts, their room, and the answers before them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from draftree.bench.conversations import MARGIN, Prompt, following, with_room
from draftree.bench.engines import Outcome, RunParams, Writer
from draftree.bench.methods import Method, OurMethod
from draftree.bench.records import OURS
from draftree.bench.runner import Runner
from draftree.bench.suite.submission import read_submission
from draftree.bench.workload import Task, encode
from draftree.text.tokenizer import Tokenizer
from suite_files import suite, suite_home
from text_backends import CHAT_TEMPLATE, byte_level

QUESTION = Task("81", "writing", messages=({"role": "user", "content": "one two"},), turns=("three", "four"))
PLAIN = Method("plain", "plain", OurMethod("none", "coupled", None, draft_is_pass=False))
SOFT = Method("soft", "soft", OurMethod("ngram", "soft", None, draft_is_pass=False))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(chat_template=CHAT_TEMPLATE))


@pytest.fixture
def prompt(tokenizer: Tokenizer) -> Prompt:
    ids, form = encode(QUESTION, tokenizer)
    return Prompt(QUESTION, tuple(ids), form)


def test_a_later_turn_has_the_answers_before_it(tokenizer: Tokenizer, prompt: Prompt) -> None:
    second = following(tokenizer, prompt, "an answer")
    assert second is not None
    roles = [(message["role"], message["content"]) for message in second.task.messages or ()]
    assert roles == [("user", "one two"), ("assistant", "an answer"), ("user", "three")]
    assert (second.task.id, second.task.first_turn, second.task.turns) == ("81/2", "81", ("four",))
    assert list(second.ids) == tokenizer.apply_chat_template(second.task.messages or ())
    third = following(tokenizer, second, "")
    assert third is not None
    assert (third.task.id, third.task.first_turn) == ("81/3", "81")
    assert [message["content"] for message in third.task.messages or ()][-3:] == ["three", "", "four"]
    assert following(tokenizer, third, "the end") is None
    assert QUESTION.ids == ("81", "81/2", "81/3")


def test_turns_that_may_not_fit_are_left_out_with_a_note(tokenizer: Tokenizer, prompt: Prompt) -> None:
    second = following(tokenizer, prompt, ".")
    assert second is not None
    room = len(second.ids) + 8 + MARGIN
    (kept,), notes = with_room([prompt], tokenizer, room=room, answer=8)
    assert (kept.task.turns, kept.ids) == (("three",), prompt.ids)
    assert notes == ("1 later turns left out, longer than the context: 81/3",)
    (none,), notes = with_room([prompt], tokenizer, room=room - 1, answer=8)
    assert none.task.turns == ()
    assert "81/2, 81/3" in notes[0]
    assert with_room([prompt], tokenizer, room=10_000, answer=8) == ([prompt], ())


class Echo(Writer):
    """Answers with the method's name, and keeps the prompts."""

    def __init__(self) -> None:
        self.read: list[tuple[str, tuple[int, ...]]] = []

    def write(self, method: Method, prompts: Sequence[Sequence[int]], run_params: RunParams) -> list[Outcome]:
        self.read += [(method.name, tuple(ids)) for ids in prompts]
        return [Outcome((1,), method.name, "stop", 0, {"rounds": 1}) for _ in prompts]


def test_all_methods_continue_the_plain_answer(tokenizer: Tokenizer, prompt: Prompt) -> None:
    writer = Echo()
    runner = Runner([PLAIN, SOFT], {OURS: writer}, RunParams(8), 1, lambda *texts: None, partial(following, tokenizer))
    single = Prompt(Task("82", "writing", prompt="x"), (5,), "plain")
    (records,) = runner.run([[prompt, single]])
    assert [(one.task, one.first_turn) for one in records[::2]] == [
        ("81", None),
        ("82", None),
        ("81/2", "81"),
        ("81/3", "81"),
    ]
    assert [one.method for one in records] == ["plain", "soft", "plain", "soft", "soft", "plain", "plain", "soft"]
    second, third = (next(ids for _, ids in writer.read[start:]) for start in (4, 6))
    assert "plain" in tokenizer.decode(second, skip_special_tokens=False)
    assert all("soft" not in tokenizer.decode(ids, skip_special_tokens=False) for _, ids in writer.read)
    assert {ids for _, ids in writer.read[4:6]} == {second}
    assert {ids for _, ids in writer.read[6:]} == {third}


def test_a_turn_without_room_is_named_in_the_submission(tmp_path: Path) -> None:
    home = suite_home(tmp_path)
    path = tmp_path / "long.json"
    assert suite(home, "--draft", "ngram@fixed", "--category", "spec-bench/writing", "--output", path) == 0
    found = read_submission(path)
    assert [prompt["id"] for prompt in found["prompts"]] == ["spec-bench/81", "spec-bench/81/2", "spec-bench/82"]
    questions = home / "questions.jsonl"
    questions.write_text(questions.read_text().replace("and again", "and again " * 2000))
    path = tmp_path / "short.json"
    assert suite(home, "--draft", "ngram@fixed", "--category", "spec-bench/writing", "--output", path) == 0
    found = read_submission(path)
    assert [prompt["id"] for prompt in found["prompts"]] == ["spec-bench/81", "spec-bench/82"]
    assert any("spec-bench/81/2" in note for note in found["notes"])
