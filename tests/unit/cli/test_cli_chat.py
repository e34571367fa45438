"""`draftree chat` through a pipe."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chat_samples import COMMON, OPTIONS, answers, contents, saved
from cli_samples import save_tiny_model
from draftree.cli.main import run
from real_weights import folder_of

Chat = Callable[..., tuple[int, str, str]]
SMOLLM = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a context of a few messages."""
    return str(save_tiny_model(tmp_path_factory.mktemp("small"), chat=True, context=192))


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Chat:
    """Runs `draftree chat` with a text on standard input: exit status, standard output, standard error."""

    def call(text: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        status = run(["chat", *arguments])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return call


def test_lines_of_a_pipe_are_messages_of_one_conversation(chat: str, piped: Chat) -> None:
    status, out, err = piped("ab\n\nsecond\n/stats\n", chat, *OPTIONS)
    first, second = answers(chat, "ab", "second")
    assert (status, out) == (0, f"{first}\n{second}\n")
    prompt = f"[user] ab\n[assistant] {first}\n[user] second\n[assistant] "
    assert f"prompt: {len(prompt.encode())} tokens" in err


def test_continued_lines_and_blocks_are_one_message(chat: str, piped: Chat, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    text = f'a\\\nb\n"""\nc "quoted"\n\n/undo\n"""\n"""d"""\n//etc\n/save {path}\n'
    status, _, err = piped(text, chat, *OPTIONS, "--system", "Be brief.")
    assert status == 0, err
    messages = saved(path)
    assert [m["content"] for m in messages if m["role"] == "user"] == ["a\nb", 'c "quoted"\n\n/undo', "d", "/etc"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    expected = answers(chat, "a\nb", 'c "quoted"\n\n/undo', "d", "/etc", system="Be brief.")
    assert [m["content"] for m in messages if m["role"] == "assistant"] == expected


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("start", ["ngram", "none"])
def test_a_switched_drafter_gives_the_same_text(chat: str, piped: Chat, start: str, temperature: str) -> None:
    options = (chat, *OPTIONS, "--dtype", "float32", "--temperature", temperature)
    _, plain, _ = piped("ab\nsecond\nthird\nfourth\n", *options)
    text = "ab\n/draft suffix\nsecond\n/draft none\nthird\n/draft ngram\nfourth\n/stats\n"
    status, out, err = piped(text, *options, "--draft", start, "--json")
    assert status == 0, err
    answers = [json.loads(line) for line in out.splitlines()]
    assert "".join(f"{answer['text']}\n" for answer in answers) == plain
    assert [answer["draft"] for answer in answers] == [start, "suffix", "none", "ngram"]
    drafted = [answer["stats"]["draft_tokens"] for answer in answers]
    assert drafted[2] == 0
    assert drafted[1] or drafted[3]
    if temperature == "1":  # at 0 one round writes a whole answer, and its slot keeps what was committed before
        assert answers[2]["stats"]["cached_tokens"] > answers[1]["stats"]["prompt_tokens"]  # nothing was read again
    assert "drafter none\ndrafter ngram\n" in err


def test_json_prints_one_object_per_answer(chat: str, piped: Chat) -> None:
    status, out, _ = piped("ab\nsecond\n", chat, *OPTIONS, "--json", "--draft", "ngram")
    objects = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [one["text"] for one in objects] == answers(chat, "ab", "second")
    assert {one["draft"] for one in objects} == {"ngram"}


def test_undo_retry_and_clear_change_the_conversation(chat: str, piped: Chat, tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("1", "2", "3"))
    lines = ["ab", "second", "/undo", f"/save {one}", "/retry", f"/save {two}", "/clear", "third", f"/save {three}"]
    status, out, err = piped("\n".join(lines), chat, *OPTIONS)
    assert status == 0, err
    (first,) = answers(chat, "ab")
    assert contents(one) == contents(two) == ["ab", first]
    assert contents(three) == ["third", *answers(chat, "third")]
    assert "took back: second" in err
    assert len(out.splitlines()) >= 4


def test_settings_of_commands_apply_to_later_answers(chat: str, piped: Chat) -> None:
    text = "/seed 3\n/max-tokens 5\nab\n/max-tokens 9\n/clear\nab\n/temperature 0\n/temperature\n/seed none\n"
    status, out, err = piped(text, chat, *COMMON[2:])
    assert status == 0, err
    (long,) = answers(chat, "ab", max_tokens=9)
    (short,) = answers(chat, "ab", max_tokens=5)
    assert out == f"{short}\n{long}\n"
    assert "temperature 0.0\ntemperature 0.0\n" in err
    assert "seed none\n" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/drft ngram", "there is no command '/drft': did you mean '/draft'?"),
        ("/draft ngrm", "ngram"),
        ("/draft prediction", "a chat does not have"),
        ("/draft grammar", "nothing to draft from"),
        ("/temperature warm", "temperature is 'warm': it must be a number"),
        ("/temperature -1", "temperature=-1.0"),
        ("/max-tokens 1.5", "max_tokens is '1.5': it must be a whole number, or none"),
        ("/undo", "the conversation is empty"),
        ("/retry", "the conversation is empty"),
        ("/undo twice", "/undo takes no value, and got 'twice'"),
        ("/save", "/save needs a value: write /save FILE"),
        ("/save /", "already exists"),
        ('"""', "the input has no more lines"),
        ("a\\", "the input has no more lines"),
    ],
)
def test_wrong_input_of_a_pipe_ends_the_chat(chat: str, piped: Chat, line: str, message: str) -> None:
    status, out, err = piped(f"\n{line}\n", chat, *OPTIONS)
    assert (status, out) == (1, "")
    assert err.startswith("error: standard input, line 2: ")
    assert message in err
    assert err.count("\n") == 1


def test_oldest_turns_leave_a_full_context(small: str, piped: Chat, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    messages = [f"{number} " + "x" * 40 for number in range(6)]
    text = "\n".join([*messages, f"/save {path}", "/stats"])
    status, out, err = piped(text, small, *OPTIONS)
    assert status == 0, err
    assert len(out.splitlines()) >= 6
    assert "the model no longer sees the oldest" in err
    assert contents(path)[::2] == messages  # nothing is lost for the user
    (used,) = re.findall(r"context: (\d+) of 192 tokens", err)
    assert int(used) <= 192


def test_a_message_that_never_fits_is_refused(small: str, piped: Chat) -> None:
    status, out, err = piped("ab\n" + "x" * 300 + "\n", small, *OPTIONS)
    assert status == 1
    assert out == answers(small, "ab")[0] + "\n"
    assert "standard input, line 2: the prompt has" in err


def test_a_model_without_a_chat_template_is_refused(
    piped: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_tiny_model(tmp_path / "plain", chat=False))
    (tmp_path / "plain" / "model.safetensors").unlink()
    monkeypatch.setattr("draftree.cli.chat.require_sound", lambda name: None)  # it would name the missing weights
    monkeypatch.setattr("draftree.cli.chat_session.resolve_with_bar", Path)
    status, _, err = piped("ab\n", folder)
    assert status == 1
    assert "has no chat template, so it cannot chat: continue texts with draftree generate" in err


def test_parameters_of_other_commands_do_not_exist(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "x", "--n", "2"]) == 2
    assert run(["chat", "x", "--json", "--stream"]) == 2
    assert "leave --stream out" in capfd.readouterr().err


@pytest.mark.weights
def test_a_model_remembers_the_conversation(piped: Chat) -> None:
    folder_of(SMOLLM)
    text = "My name is Ada. Please remember it.\nWhat is my name?\n/draft suffix\n/retry\n/stats\n"
    status, out, err = piped(text, SMOLLM, "--draft", "ngram", "--temperature", "0", "--max-tokens", "40")
    assert status == 0, err
    answer, again = out.splitlines()[-2:]
    assert "Ada" in answer
    assert again == answer
    assert "drafter suffix" in err
