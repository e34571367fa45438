"""`draftree chat` in a pseudo-terminal and through a pipe."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from cli_samples import LONG_CONTEXT, save_tiny_model
from draftree import LLM, SamplingParams
from draftree.cli.chatting.answering import write_answer
from draftree.cli.chatting.conversation import INTERRUPTED
from draftree.cli.main import run
from draftree.engine.sequence import Update
from real_weights import folder_of
from terminals import CTRL_C, CTRL_D, ENTER, PASTE_BEGINS, PASTE_ENDS, UP, terminal

Chat = Callable[..., tuple[int, str, str]]

PROMPT = ">>> "
LETTERS = [1 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in "abcdefghijklmnop"]
SAMPLED = SamplingParams(temperature=0.7, top_p=0.95, seed=3, max_tokens=12, allowed_token_ids=LETTERS)
"""The tiny model sees one token; with a seed its answers depend on the length of the conversation."""
COMMON = ("--seed", "3", *(word for letter in LETTERS for word in ("--allowed-token-ids", str(letter))))
OPTIONS = (*COMMON, "--max-tokens", "12")
SMOLLM = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("chat"), chat=True, context=1000))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a context of a few messages."""
    return str(save_tiny_model(tmp_path_factory.mktemp("small"), chat=True, context=192))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that writes until it is stopped."""
    return str(save_tiny_model(tmp_path_factory.mktemp("endless"), chat=True, context=LONG_CONTEXT))


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Chat:
    """Runs `draftree chat` with a text on standard input: exit status, standard output, standard error."""

    def call(text: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        status = run(["chat", *arguments])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return call


def answers(folder: str, *messages: str, max_tokens: int = 12, system: str | None = None) -> list[str]:
    """The answers of the library to messages of one conversation."""
    llm = LLM(folder)
    conversation = [] if system is None else [{"role": "system", "content": system}]
    written = []
    for message in messages:
        conversation.append({"role": "user", "content": message})
        written.append(llm.chat(conversation, dataclasses.replace(SAMPLED, max_tokens=max_tokens))[0].text)
        conversation.append({"role": "assistant", "content": written[-1]})
    return written


def saved(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text(encoding="utf-8"))["messages"]


def contents(path: Path) -> list[object]:
    return [message["content"] for message in saved(path)]


def test_lines_of_a_pipe_are_messages_of_one_conversation(model: str, piped: Chat) -> None:
    status, out, err = piped("ab\n\nsecond\n/stats\n", model, *OPTIONS)
    first, second = answers(model, "ab", "second")
    assert (status, out) == (0, f"{first}\n{second}\n")
    prompt = f"[user] ab\n[assistant] {first}\n[user] second\n[assistant] "
    assert f"prompt: {len(prompt.encode())} tokens" in err


def test_continued_lines_and_blocks_are_one_message(model: str, piped: Chat, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    text = f'a\\\nb\n"""\nc "quoted"\n\n/undo\n"""\n"""d"""\n//etc\n/save {path}\n'
    status, _, err = piped(text, model, *OPTIONS, "--system", "Be brief.")
    assert status == 0, err
    messages = saved(path)
    assert [m["content"] for m in messages if m["role"] == "user"] == ["a\nb", 'c "quoted"\n\n/undo', "d", "/etc"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    expected = answers(model, "a\nb", 'c "quoted"\n\n/undo', "d", "/etc", system="Be brief.")
    assert [m["content"] for m in messages if m["role"] == "assistant"] == expected


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("start", ["ngram", "none"])
def test_a_switched_drafter_gives_the_same_text(model: str, piped: Chat, start: str, temperature: str) -> None:
    options = (model, *OPTIONS, "--dtype", "float32", "--temperature", temperature)
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
    assert answers[2]["stats"]["cached_tokens"] > answers[1]["stats"]["prompt_tokens"]  # nothing was read again
    assert "drafter none\ndrafter ngram\n" in err


def test_a_drafter_that_fails_to_load_leaves_the_current_one(model: str, tmp_path: Path) -> None:
    with terminal(["chat", model, *OPTIONS, "--draft", "ngram", "--color", "never"]) as chat:
        chat.wait_for(PROMPT)
        chat.enter(f"/draft model:{tmp_path}")
        chat.wait_for("error: ")
        chat.wait_for(PROMPT)
        chat.enter("/draft")
        chat.wait_for("\ndrafter ngram")
        chat.wait_for(PROMPT)
        chat.enter("ab")
        assert answers(model, "ab")[0] in chat.wait_for("acceptance length")
        chat.wait_for(PROMPT)
        chat.type(CTRL_D)
        assert chat.end() == 0


def test_json_prints_one_object_per_answer(model: str, piped: Chat) -> None:
    status, out, _ = piped("ab\nsecond\n", model, *OPTIONS, "--json", "--draft", "ngram")
    objects = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [one["text"] for one in objects] == answers(model, "ab", "second")
    assert {one["draft"] for one in objects} == {"ngram"}


def test_undo_retry_and_clear_change_the_conversation(model: str, piped: Chat, tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("1", "2", "3"))
    lines = ["ab", "second", "/undo", f"/save {one}", "/retry", f"/save {two}", "/clear", "third", f"/save {three}"]
    status, out, err = piped("\n".join(lines), model, *OPTIONS)
    assert status == 0, err
    (first,) = answers(model, "ab")
    assert contents(one) == contents(two) == ["ab", first]
    assert contents(three) == ["third", *answers(model, "third")]
    assert "took back: second" in err
    assert len(out.splitlines()) >= 4


def test_settings_of_commands_apply_to_later_answers(model: str, piped: Chat) -> None:
    text = "/seed 3\n/max-tokens 5\nab\n/max-tokens 9\n/clear\nab\n/temperature 0\n/temperature\n/seed none\n"
    status, out, err = piped(text, model, *COMMON[2:])
    assert status == 0, err
    (long,) = answers(model, "ab", max_tokens=9)
    (short,) = answers(model, "ab", max_tokens=5)
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
def test_wrong_input_of_a_pipe_ends_the_chat(model: str, piped: Chat, line: str, message: str) -> None:
    status, out, err = piped(f"\n{line}\n", model, *OPTIONS)
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
    monkeypatch.setattr("draftree.cli.chatting.drafting.resolve_with_bar", Path)
    status, _, err = piped("ab\n", folder)
    assert status == 1
    assert "has no chat template, so it cannot chat: continue texts with draftree generate" in err


def test_parameters_of_other_commands_do_not_exist(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "x", "--n", "2"]) == 2
    assert run(["chat", "x", "--json", "--stream"]) == 2
    assert "leave --stream out" in capfd.readouterr().err


def test_a_conversation_in_a_terminal(model: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    first, second = answers(model, "ab", "line one\n\nline two")
    assert first != second  # the answer depends on the conversation
    with terminal(["chat", model, *OPTIONS, "--color", "never"]) as chat:
        before = chat.settings()
        chat.wait_for("Ctrl-D leaves")
        chat.wait_for(PROMPT)
        chat.enter("ab")
        assert first in chat.wait_for(" tokens/s")
        chat.wait_for(PROMPT)
        chat.type(f"{PASTE_BEGINS}line one\r\rline two{PASTE_ENDS}")
        chat.type(ENTER)
        assert second in chat.wait_for(" tokens/s")
        chat.wait_for(PROMPT)
        chat.enter("/undoo")
        assert "error: there is no command '/undoo': did you mean '/undo'?" in chat.wait_for("write two")
        chat.wait_for(PROMPT)
        chat.type("lost" + CTRL_C)
        chat.wait_for(PROMPT)
        chat.enter(f"/save {path}")
        chat.wait_for(PROMPT)
        chat.enter("/draft ngram")
        chat.wait_for("drafter ngram")
        chat.wait_for(PROMPT)
        chat.type(UP + UP + UP + UP + ENTER)  # the pasted message, from the history
        chat.wait_for("acceptance length")
        chat.wait_for(PROMPT)
        chat.enter("/undo")
        chat.wait_for("took back: line one line two")
        chat.wait_for(PROMPT)
        chat.type(CTRL_D)
        assert chat.end() == 0
        assert chat.settings() == before
    assert contents(path) == ["ab", first, "line one\n\nline two", second]


def test_ctrl_c_stops_the_answer_alone(endless: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    with terminal(["chat", endless, *COMMON, "--max-tokens", "none", "--color", "never"]) as chat:
        chat.wait_for(PROMPT)
        chat.enter("ab")
        chat.wait_for("ab\n")
        chat.wait_for(answers(endless, "ab")[0])
        chat.type(CTRL_C)
        chat.wait_for("stopped: this part stays in the conversation")
        chat.wait_for(PROMPT)
        chat.enter("/max-tokens 8")
        chat.wait_for(PROMPT)
        chat.enter("second")  # its prompt has all that was stopped
        chat.wait_for("cut at the limit")
        chat.wait_for(PROMPT)
        chat.enter(f"/save {path}")
        chat.wait_for(PROMPT)
        chat.enter("/quit")
        assert chat.end() == 0
    messages = saved(path)
    assert [message.get("interrupted", False) for message in messages] == [False, True, False, False]
    stopped = str(messages[1]["content"])
    assert len(stopped.encode()) >= 12
    (whole,) = answers(endless, "ab", max_tokens=len(stopped.encode()) + 8)
    assert whole.startswith(stopped)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_an_answer_and_leaves_the_engine_usable(endless: str, presses: int) -> None:
    llm, before = LLM(endless), signal.getsignal(signal.SIGINT)
    ids = llm.prompts.encode_chat([{"role": "user", "content": "ab"}])

    def press(update: Update) -> None:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        assert presses == 1, "the second one raises"

    params = dataclasses.replace(SAMPLED, max_tokens=None)
    answer = write_answer(llm, ids, params=params, draft="none", show=press, stoppable=True)
    assert (answer.finish_reason, answer.completion) == (INTERRUPTED, None)
    (whole,) = answers(endless, "ab")
    assert answer.text
    assert whole.startswith(answer.text)
    llm.engine.check_integrity()
    assert llm.generate([ids], SAMPLED)[0].text == whole
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        write_answer(llm, ids, params=params, draft="none", show=press, stoppable=False)
    llm.engine.check_integrity()


def test_a_termination_leaves_the_terminal_as_it_was(model: str) -> None:
    with terminal(["chat", model]) as chat:
        before = chat.settings()
        chat.wait_for(PROMPT)
        chat.type("half a li")
        chat.wait_for("half a li")
        chat.process.terminate()
        assert chat.end() == 143
        assert chat.settings() == before
        assert "terminated" in chat.screen


def test_drafted_tokens_are_coloured(model: str) -> None:
    with terminal(["chat", model, "--draft", "ngram", "--plan", "fixed:4", *OPTIONS, "--color", "always"]) as chat:
        chat.wait_for(PROMPT)
        chat.enter("ab")
        chat.wait_for(PROMPT)
        chat.enter("/max-tokens 60")
        chat.wait_for(PROMPT)
        chat.enter("/retry")
        chat.wait_for("cut at the limit")
        chat.wait_for(PROMPT)
        assert chat.screen.count("\x1b[32m") >= 2  # the legend, and accepted tokens
        chat.type(CTRL_D)
        assert chat.end() == 0


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
