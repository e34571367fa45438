"""Bad input of every kind: one sentence on standard error, the right exit status, nothing on standard output."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from cli_samples import CONTEXT
from draftree.cli.commands import COMMANDS
from draftree.cli.main import run

Refused = Callable[..., str]


@pytest.fixture
def copy(base: str, tmp_path: Path) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(base, tmp_path / "copy"))


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Refused:
    def call(*arguments: str, status: int = 1) -> str:
        assert run(arguments) == status
        captured = capfd.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1, captured.err
        assert captured.err.endswith("\n")
        return captured.err

    return call


USAGE = [
    (["generate"], "missing argument 'MODEL'"),
    (["generate", "MODEL", "ab", "--dratf", "ngram"], "--draft"),
    (["generate", "MODEL", "ab", "--max-tokens", "x"], "'x' is neither a whole number nor 'none'"),
    (["generate", "MODEL", "ab", "--seed", "x"], "'--seed'"),
    (["generate", "MODEL", "ab", "--colour", "pink"], "'pink'"),
    (["generate", "MODEL", "ab", "cd"], "cd"),
    (["generate", "MODEL", "ab", "--json", "--stream"], "--json prints one object"),
    (["generate", "MODEL", "ab", "--json", "--colour", "always"], "--json prints one object without colours"),
    (["generate", "MODEL", "ab", "--stream", "--no-stream"], "it is given 2 times"),
    (["models", "cache", "--clear", "--json"], "--clear has no output"),
    (["generate", "MODEL", "ab", "--n", "2", "--stream"], "--n 2 texts cannot be shown as one"),
    (["generate", "MODEL", "ab", "--logprobs", "2"], "in the object of --json"),
    (["generate", "MODEL", "ab", "--prompt-logprobs", "2"], "in the object of --json"),
    (["generate", "MODEL", "ab", "--no-chat", "--system", "x"], "--no-chat has no system message"),
    (["generate", "MODEL", "ab", "--no-chat", "--allow-control-tokens"], "control tokens are always encoded as such"),
    (["generate", "MODEL", "ab", "--compare", "--draft", "none"], "name a drafter with --draft"),
    (["demo", "--draft", "none"], "the demo needs a drafter"),
    (["genrate"], "did you mean 'generate'?"),
    (["--verbose"], "--verbose"),
    (["models", "gte"], "gte"),
]


@pytest.mark.parametrize(("arguments", "words"), USAGE, ids=[" ".join(arguments) for arguments, _ in USAGE])
def test_wrong_usage(refused: Refused, base: str, arguments: list[str], words: str) -> None:
    text = refused(*(base if word == "MODEL" else word for word in arguments), status=2)
    assert words in text
    assert text.endswith("--help')\n"), "it refers to the help"


def commands() -> Iterator[tuple[list[str], Any]]:
    """All commands, and what is typed to get there."""
    for name, entry in COMMANDS.items():
        command = entry.load()
        yield [name], command
        for inner, below in getattr(command, "commands", {}).items():
            yield [name, inner], below


def test_no_command_takes_an_option_twice_that_holds_one_value() -> None:
    tried = 0
    for path, command in commands():
        for option in command.params:
            if option.param_type_name == "option" and not option.multiple and not option.is_eager:
                once = [option.opts[0]] if option.is_flag else [option.opts[0], "1"]
                with pytest.raises(typer.BadParameter, match="it is given 2 times") as caught:
                    command.make_context(path[-1], [*once, *once])
                assert caught.value.param is option
                tried += 1
    assert tried > 100


REQUESTS = [
    (["--draft", "ngam"], "unknown drafter 'ngam': did you mean 'ngram'?"),
    (["--draft", "ngram,mxa=3"], "unknown option 'mxa' of drafter 'ngram': did you mean 'max'?"),
    (["--draft", "ngram,k=many"], "must be a whole number, got 'many'"),
    (["--draft", "ngram,k=0"], "from 1 to 1024"),
    (["--draft", "none,k=2"], "takes no options"),
    (["--draft", "model"], "needs name"),
    (
        ["--draft", "model:nowhere-to-be-found"],
        "there is no model 'nowhere-to-be-found' on this machine, and the hub cannot be reached",
    ),
    (["--verify", "cuopled"], "unknown verifier 'cuopled': did you mean 'coupled'?"),
    (["--draft", "ngram", "--plan", "fixde:2"], "unknown planner 'fixde': did you mean 'fixed'?"),
    (["--draft", "none", "--plan", "fixed:2"], "there is no drafter"),
    (["--draft", "ngram,", "--verify", "token"], "not of the form key=value"),
    (["--draft", "model:MODEL,tree=iid-2-2-1", "--verify", "token"], "verifier 'token'"),
    (["--temperature", "-1"], "temperature=-1.0 is refused"),
    (["--max-tokens", str(CONTEXT - 1)], f"set max_tokens to {CONTEXT - 2} at most"),
    (["--min-tokens", "9", "--max-tokens", "3"], "min_tokens=9 is more than max_tokens=3"),
    (["--n", "2", "--temperature", "0"], "would all be the same"),
    (["--logit-bias", "99999=1"], "99999"),
    (["--stop-token-ids", "99999"], "99999"),
    (["--logprobs", "99999", "--json"], "99999"),
    (["--draft", "ngram", "--record", "nowhere/t.jsonl"], "its folder is missing"),
    (["--dtype", "foo"], "unknown dtype 'foo'"),
    (["--dtype", "flaot32"], "did you mean 'float32'?"),
    (["--device", "cuda:99"], "'cuda:99'"),
    (["--device", "toaster"], "'toaster'"),
    (["--chat"], "no chat template"),
    (["--system", "x"], "no chat template"),
    (["--allow-control-tokens"], "no chat template"),
    (["--compare", "--draft", "ngram", "--verify", "token"], "use coupled, match"),
    (["--compare", "--draft", "ngram", "--verify", "soft"], "is lossy"),
]


@pytest.mark.parametrize(("arguments", "words"), REQUESTS, ids=[" ".join(arguments) for arguments, _ in REQUESTS])
def test_requests_that_cannot_be_honoured(refused: Refused, base: str, arguments: list[str], words: str) -> None:
    assert words in refused("generate", base, "ab", *(word.replace("MODEL", base) for word in arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(refused: Refused, base: str) -> None:
    assert "this machine has 0 devices of type cuda" in refused("generate", base, "ab", "--device", "cuda")


def test_invalid_prompts_are_refused(refused: Refused, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pipe(raw: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))

    assert "the prompt is empty" in refused("generate", base, "")
    pipe(b"\n")
    assert "the prompt is empty" in refused("generate", base, "-")
    pipe(b"abc\xff")
    assert "byte 3 is invalid" in refused("generate", base)
    assert "not valid Unicode" in refused("generate", base, "a\udcff")
    monkeypatch.setattr(sys, "stdin", None)
    for arguments in (["generate", base], ["generate", base, "-"]):
        assert "pipe one to standard input" in refused(*arguments, status=2)


def test_no_prompt_on_a_terminal(refused: Refused, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert "give a text" in refused("generate", base, status=2)


def test_a_prompt_longer_than_the_context(refused: Refused, base: str) -> None:
    assert f"the model's context holds {CONTEXT}" in refused("generate", base, "a" * CONTEXT)


def test_missing_models_are_refused(refused: Refused, tmp_path: Path) -> None:
    assert "did you mean 'smollm2-135m-instruct'?" in refused("generate", "smollm2", "ab")
    assert "no such folder or file" in refused("generate", str(tmp_path / "nothing"), "ab")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refused("generate", str(tmp_path / "empty"), "ab")
    assert "no model was named" in refused("generate", "", "ab")


def test_damaged_models_are_refused(refused: Refused, copy: Path) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert str(copy) in refused("generate", str(copy), "ab")
    weights.write_bytes(b"")
    assert str(copy) in refused("generate", str(copy), "ab")
    weights.write_bytes(whole)
    settings = (copy / "config.json").read_text(encoding="utf-8")
    (copy / "config.json").write_text(settings[:-20], encoding="utf-8")
    assert "config.json" in refused("generate", str(copy), "ab")
    (copy / "config.json").write_text(
        json.dumps(json.loads(settings) | {"model_type": "no-such-kind"}), encoding="utf-8"
    )
    assert str(copy) in refused("generate", str(copy), "ab")
    (copy / "config.json").write_text(settings, encoding="utf-8")
    (copy / "tokenizer.json").write_text("{", encoding="utf-8")
    assert str(copy) in refused("generate", str(copy), "ab")
    assert run(["generate", str(copy), "ab"]) == 1


def test_a_model_whose_logits_are_not_numbers(refused: Refused, copy: Path) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(copy)
    torch.nn.init.constant_(model.lm_head.weight[5:6], float("nan"))
    model.save_pretrained(copy)
    assert "logits" in refused("generate", str(copy), "ab", "--max-tokens", "4")
