"""`draftree chat` in a pseudo-terminal."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from chat_samples import COMMON, OPTIONS, SAMPLED, answers, contents, saved
from cli_samples import LONG_CONTEXT, save_tiny_model
from draftree import LLM
from draftree.cli.chat_session import INTERRUPTED, write_answer
from draftree.engine.sequence import Update
from terminals import CTRL_C, CTRL_D, ENTER, PASTE_BEGINS, PASTE_ENDS, UP, terminal

PROMPT = ">>> "


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that writes until it is stopped."""
    return str(save_tiny_model(tmp_path_factory.mktemp("endless"), chat=True, context=LONG_CONTEXT))


def test_a_conversation_in_a_terminal(chat: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    first, second = answers(chat, "ab", "line one\n\nline two")
    assert first != second  # the answer depends on the conversation
    with terminal(["chat", chat, *OPTIONS, "--color", "never"]) as screen:
        before = screen.settings()
        screen.wait_for("Ctrl-D leaves")
        screen.wait_for(PROMPT)
        screen.enter("ab")
        assert first in screen.wait_for(" tokens/s")
        screen.wait_for(PROMPT)
        screen.type(f"{PASTE_BEGINS}line one\r\rline two{PASTE_ENDS}")
        screen.type(ENTER)
        assert second in screen.wait_for(" tokens/s")
        screen.wait_for(PROMPT)
        screen.enter("/undoo")
        assert "error: there is no command '/undoo': did you mean '/undo'?" in screen.wait_for("write two")
        screen.wait_for(PROMPT)
        screen.type("lost" + CTRL_C)
        screen.wait_for(PROMPT)
        screen.enter(f"/save {path}")
        screen.wait_for(PROMPT)
        screen.enter("/draft ngram")
        screen.wait_for("drafter ngram")
        screen.wait_for(PROMPT)
        screen.enter(f"/draft model:{tmp_path}")  # fails, and leaves the current one
        screen.wait_for("error: ")
        screen.wait_for(PROMPT)
        screen.enter("/draft")
        screen.wait_for("\ndrafter ngram")
        screen.wait_for(PROMPT)
        screen.type(6 * UP + ENTER)  # the pasted message, from the history
        screen.wait_for("acceptance length")
        screen.wait_for(PROMPT)
        screen.enter("/undo")
        screen.wait_for("took back: line one line two")
        screen.wait_for(PROMPT)
        screen.type(CTRL_D)
        assert screen.end() == 0
        assert screen.settings() == before
    assert contents(path) == ["ab", first, "line one\n\nline two", second]


def test_ctrl_c_stops_the_answer_alone(endless: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    with terminal(["chat", endless, *COMMON, "--max-tokens", "none", "--color", "never"]) as screen:
        screen.wait_for(PROMPT)
        screen.enter("ab")
        screen.wait_for("ab\n")
        screen.wait_for(answers(endless, "ab")[0])
        screen.type(CTRL_C)
        screen.wait_for("stopped: this part stays in the conversation")
        screen.wait_for(PROMPT)
        screen.enter("/max-tokens 8")
        screen.wait_for(PROMPT)
        screen.enter("second")  # its prompt has all that was stopped
        screen.wait_for("cut at the limit")
        screen.wait_for(PROMPT)
        screen.enter(f"/save {path}")
        screen.wait_for(PROMPT)
        screen.enter("/quit")
        assert screen.end() == 0
    messages = saved(path)
    assert [message.get("interrupted", False) for message in messages] == [False, True, False, False]
    stopped = str(messages[1]["content"])
    assert len(stopped.encode()) >= 12
    (whole,) = answers(endless, "ab", max_tokens=len(stopped.encode()) + 8)
    assert whole.startswith(stopped)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_an_answer_and_leaves_the_engine_usable(endless: str, presses: int) -> None:
    llm, before = LLM(endless, "none"), signal.getsignal(signal.SIGINT)
    ids = llm.prompts.encode_chat([{"role": "user", "content": "ab"}])

    def press(update: Update) -> None:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        assert presses == 1, "the second one raises"

    params = dataclasses.replace(SAMPLED, max_tokens=None)
    answer = write_answer(llm, "a", ids, params=params, draft="none", show=press, stoppable=True)
    assert (answer.finish_reason, answer.completion) == (INTERRUPTED, None)
    (whole,) = answers(endless, "ab")
    assert answer.text
    assert whole.startswith(answer.text)
    llm.engine.check_integrity()
    assert llm.generate([ids], SAMPLED)[0].text == whole
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        write_answer(llm, "a", ids, params=params, draft="none", show=press, stoppable=False)
    llm.engine.check_integrity()


def test_a_termination_leaves_the_terminal_as_it_was(chat: str) -> None:
    with terminal(["chat", chat]) as screen:
        before = screen.settings()
        screen.wait_for(PROMPT)
        screen.type("half a li")
        screen.wait_for("half a li")
        screen.process.terminate()
        assert screen.end() == 143
        assert screen.settings() == before
        assert "terminated" in screen.screen


def test_drafted_tokens_are_coloured(chat: str) -> None:
    with terminal(["chat", chat, "--draft", "ngram", "--plan", "fixed:4", *OPTIONS, "--color", "always"]) as screen:
        screen.wait_for(PROMPT)
        screen.enter("ab")
        screen.wait_for(PROMPT)
        screen.enter("/max-tokens 60")
        screen.wait_for(PROMPT)
        screen.enter("/retry")
        screen.wait_for("cut at the limit")
        screen.wait_for(PROMPT)
        assert screen.screen.count("\x1b[32m") >= 2  # the legend, and accepted tokens
        screen.type(CTRL_D)
        assert screen.end() == 0
