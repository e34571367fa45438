"""`draftree chat` in a pseudo-terminal."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest

from chat_samples import COMMON, OPTIONS, SAMPLED, answers, contents, saved
from cli_samples import LONG_CONTEXT, save_tiny_model
from draftree import LLM
from draftree.cli.chatting.answering import write_answer
from draftree.cli.chatting.conversation import INTERRUPTED
from draftree.engine.sequence import Update
from terminals import CTRL_C, CTRL_D, ENTER, PASTE_BEGINS, PASTE_ENDS, UP, terminal

PROMPT = ">>> "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("chat"), chat=True, context=1000))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that writes until it is stopped."""
    return str(save_tiny_model(tmp_path_factory.mktemp("endless"), chat=True, context=LONG_CONTEXT))


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
