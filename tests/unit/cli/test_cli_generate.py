"""`draftree generate`: the outputs on each stream, the fields of --json, and --compare."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli_samples import CONTEXT, END, GREEDY, expected
from draftree import LLM, SamplingParams
from draftree.cli import runs
from draftree.cli.options import Setup
from draftree.cli.prompt import Task
from draftree.cli.render import Colour, Style
from paced import paced_llm

GREEN, RESET = "\x1b[32m", "\x1b[0m"
COMPLETION_KEYS = {"text", "token_ids", "finish_reason", "stop_reason", "seed", "stats"}
HEAD_KEYS = {
    "model",
    "draft",
    "verify",
    "plan",
    "chat",
    "device",
    "dtype",
    "kernels",
    "fallback_reason",
    "draft_note",
    "lossless",
    "promise",
    "prompt_tokens",
    "seconds",
}
STATS_KEYS = {
    "rounds",
    "draft_tokens",
    "accepted_tokens",
    "acceptance_length",
    "prompt_tokens",
    "completion_tokens",
    "prefill_seconds",
    "decode_seconds",
    "tokens_per_second",
    "seconds",
}


def piped(monkeypatch: pytest.MonkeyPatch, raw: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


def test_text_goes_to_standard_output_and_statistics_to_standard_error(generate: Any, base: str) -> None:
    status, out, err = generate(base, "ab", *GREEDY, "--draft", "ngram")
    assert status == 0
    assert out == expected(base, "ab", temperature=0, max_tokens=60) + "\n"
    assert err.startswith("60 tokens in ")
    assert "acceptance length" in err
    assert err.endswith("rounds, cut at the limit\n")
    assert err.count("\n") == 1
    assert "\x1b" not in out + err, "a pipe gets no colours"


@pytest.mark.parametrize("flag", ["--stream", "--no-stream"])
def test_streaming_changes_nothing_in_a_pipe(generate: Any, base: str, flag: str) -> None:
    assert generate(base, "ab", *GREEDY, flag)[1] == expected(base, "ab", temperature=0, max_tokens=60) + "\n"


def test_standard_input_is_read_without_its_last_line_break(
    generate: Any, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = expected(base, "ab\n", temperature=0, max_tokens=60) + "\n"
    for arguments in ([base, "-"], [base]):
        piped(monkeypatch, b"ab\n\n")
        assert generate(*arguments, *GREEDY)[1] == wanted


def test_the_chat_template_is_applied_by_default_if_there_is_one(generate: Any, base: str, chat: str) -> None:
    def asked(*arguments: str) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(generate(*arguments, "--json", "--max-tokens", "1")[1])
        return result

    assert not asked(base, "ab")["chat"]
    assert asked(base, "ab")["prompt_tokens"] == 2
    assert asked(chat, "ab")["chat"]
    assert asked(chat, "ab")["prompt_tokens"] == len("[user] ab\n[assistant] ")
    assert asked(chat, "ab", "--system", "hm")["prompt_tokens"] == len("[system] hm\n[user] ab\n[assistant] ")
    assert not asked(chat, "ab", "--no-chat")["chat"]
    assert asked(chat, "ab", "--no-chat")["prompt_tokens"] == 2


def test_a_control_token_in_a_message_is_text_unless_allowed(generate: Any, chat: str) -> None:
    def num_prompt_tokens(*arguments: str) -> int:
        count: int = json.loads(generate(chat, f"a{END}b", *arguments, "--json", "--max-tokens", "1")[1])[
            "prompt_tokens"
        ]
        return count

    template = len("[user] ab\n[assistant] ")
    assert num_prompt_tokens() == template + len(END)
    assert num_prompt_tokens("--allow-control-tokens") == template + 1
    assert num_prompt_tokens("--no-chat") == 3


def test_json_is_one_object_and_nothing_else(generate: Any, base: str) -> None:
    status, out, err = generate(base, "ab", "--seed", "5", "--max-tokens", "40", "--draft", "ngram,k=3", "--json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert set(result) == HEAD_KEYS | COMPLETION_KEYS
    assert set(result["stats"]) >= STATS_KEYS
    assert result["text"] == expected(base, "ab", seed=5, max_tokens=40)
    assert (result["seed"], result["draft"], result["plan"]) == (5, "ngram,k=3", "adaptive")
    assert result["model"] == base


def test_a_logarithm_of_zero_is_null_in_json() -> None:
    from draftree.cli.runs import dump

    assert (
        dump({"a": [float("-inf"), 1.5, {"b": float("nan")}], "c": "é"}) == '{"a": [null, 1.5, {"b": null}], "c": "é"}'
    )


def test_several_texts_have_headings(generate: Any, base: str) -> None:
    arguments = [base, "ab", "--n", "2", "--seed", "1", "--max-tokens", "12"]
    texts = [c.text for c in LLM(base, "none").generate("ab", SamplingParams(n=2, seed=1, max_tokens=12))]
    status, out, err = generate(*arguments)
    assert status == 0
    assert out == f"--- 1 of 2 ---\n{texts[0]}\n--- 2 of 2 ---\n{texts[1]}\n"
    assert err.startswith(
        "draft auto: suffix (needs no training; this package has no trained drafter for this model)\n24 tokens in "
    )
    completions = json.loads(generate(*arguments, "--json")[1])["completions"]
    assert [completion["text"] for completion in completions] == texts


def test_accepted_text_is_green_and_the_legend_comes_once(
    generate: Any, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.llm.LLM", paced_llm)
    _, out, err = generate(base, "ab", *GREEDY, "--draft", "ngram", "--colour", "always")
    assert err.count("drafted and accepted") == 1
    assert out.replace(GREEN, "").replace(RESET, "") == expected(base, "ab", temperature=0, max_tokens=60) + "\n"
    llm = paced_llm(base, "ngram")
    pieces = []
    llm.generate("ab", SamplingParams(temperature=0, max_tokens=60), on_update=lambda u: pieces.extend(u.pieces))
    green = "".join(part.split(RESET)[0] for part in out.split(GREEN)[1:])
    assert green == "".join(piece.text for piece in pieces if piece.drafted)
    assert green


def test_plain_decoding_needs_no_legend(generate: Any, base: str) -> None:
    _, out, err = generate(base, "ab", *GREEDY, "--draft", "none", "--colour", "always")
    assert GREEN not in out + err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--prediction", __file__], "no drafter uses the prediction: add '--draft prediction'"),
        (["--draft", "ngram", "--prediction", __file__], "no drafter uses the prediction"),
        (["--draft", "prediction"], "has nothing to draft from: give a file with --prediction"),
        (["--draft", "ngram+prediction"], "has nothing to draft from: give a file with --prediction"),
        (["--draft", "grammar"], "has nothing to draft from: give --json-schema, --regex or --grammar"),
        (["--draft", "prediction", "--prediction", "no/such"], "'no/such' cannot be read"),
    ],
)
def test_a_drafters_inputs_are_required(generate: Any, given: list[str], words: str) -> None:
    status, out, err = generate("no-such-model", "ab", *given)
    assert (status, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(("count", "kept"), [("-1", 9), ("4", 4)])
def test_the_default_length_leaves_a_prompt_that_fits_as_it_is(generate: Any, base: str, count: str, kept: int) -> None:
    status, out, _ = generate(base, "abcdefghi", "--temperature", "0", "--json", "--truncate-prompt-tokens", count)
    assert status == 0
    result = json.loads(out)
    assert (result["prompt_tokens"], result["finish_reason"]) == (kept, "length")
    assert len(result["token_ids"]) == CONTEXT - kept


def test_a_model_cannot_control_the_terminal() -> None:
    from draftree.cli.runs import harmless
    from draftree.engine.sequence import Piece

    assert harmless(Piece("a\x1b[2J\tb\n\x07\x7f\x9b", drafted=True)) == Piece("a␛[2J\tb\n␇␡�", drafted=True)


def test_help_names_every_flag_and_an_example(generate: Any) -> None:
    status, out, _ = generate("--help-all")
    assert status == 0
    for flag in ("--draft", "--verify", "--plan", "--temperature", "--logit-bias", "--compare", "--json", "--system"):
        assert f"  {flag}" in out
    status, short, _ = generate("--help")
    assert status == 0
    assert "  --draft" in short
    assert "--help-all" in short
    assert len(short) < len(out)
    assert "[default: 256]" in " ".join(out.split())
    assert "  draftree generate smollm2-135m-instruct" in out


def test_a_folder_may_be_a_relative_path(generate: Any, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(base).parent)
    assert generate(f"./{Path(base).name}", "ab", *GREEDY)[0] == 0


@pytest.mark.parametrize(
    ("colour", "terminal", "environment", "coloured"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_each_stream_is_coloured_by_itself(
    colour: str, terminal: bool, environment: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    for name, value in ({"TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    if "NO_COLOR" not in environment:
        monkeypatch.delenv("NO_COLOR", raising=False)
    assert Style.chosen(Colour(colour), Stream()).coloured is coloured
    assert Style.chosen(Colour(colour), None).coloured is (colour == "always")


def test_later_runs_draft_with_what_earlier_ones_learned(generate: Any, base: str, tmp_path: Path) -> None:
    given = [*GREEDY, "--draft", "suffix", "--plan", "fixed:8", "--json"]
    found = [json.loads(generate(base, "ab", *given, "--learn", f"server,folder={tmp_path}")[1]) for _ in range(2)]
    assert {one["text"] for one in found} == {expected(base, "ab", temperature=0, max_tokens=60)}
    first, second = (one["stats"]["rounds"] for one in found)
    assert second < first
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\n", encoding="utf-8")
    again = generate(base, "--prompts", str(prompts), *given, "--learn", f"server,folder={tmp_path}")[1]
    assert json.loads(again)["stats"]["rounds"] <= second
    compared = json.loads(generate(base, "ab", *given, "--learn", f"server,folder={tmp_path}", "--compare")[1])
    assert compared["equal"]
    assert compared["stats"]["rounds"] <= second


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--draft", "ngram", "--learn", "server"], "no drafter learns"),
        (["--draft", "none", "--learn", "server"], "no drafter learns"),
        (["--draft", "suffix", "--learn", "all"], "learn is 'all'"),
    ],
)
def test_wrong_learning_is_refused_before_the_model_is_loaded(
    generate: Any, base: str, given: list[str], message: str
) -> None:
    status, out, err = generate(base, "ab", *given)
    assert (status, out) == (1, "")
    assert message in err


def test_compare_compares_both_texts(generate: Any, base: str) -> None:
    status, out, err = generate(base, "ab", *GREEDY, "--draft", "ngram", "--compare")
    assert status == 0
    assert out == expected(base, "ab", temperature=0, max_tokens=60) + "\n"
    plain, fast, again, verdict = err.splitlines()
    assert plain.startswith("plain: 60 tokens in ")
    assert "acceptance length" not in plain
    assert fast.startswith("ngram: 60 tokens in ")
    assert again.startswith("plain again: 60 tokens in ")
    assert verdict.startswith("speed-up ")
    assert ", the texts are the same" in verdict


def test_a_comparison_divides_decode_rates_and_says_when_nothing_was_accepted() -> None:
    def run(tokens: int, prefill: float, decode: float, accepted: int = 0) -> runs.Run:
        stats = SimpleNamespace(decode_seconds=decode, tokens_per_second=tokens / decode, accepted_tokens=accepted)
        completion: Any = SimpleNamespace(stats=stats, token_ids=[1] * tokens)
        return runs.Run(Setup("model"), Task("a"), [completion], prefill + decode)

    plain = [run(60, 9.0, 2.0), run(60, 1.0, 1.0)]  # a cold start, and a machine that has warmed up
    assert runs.verdict(plain, run(60, 0.1, 1.0, 30)) == "speed-up 1.33, the texts are the same"
    assert runs.verdict(plain, run(60, 0.1, 1.0)).endswith("no drafted token was accepted: the difference is noise")
    assert runs.verdict(plain, run(60, 0.1, 2.0)).endswith("no drafted token was accepted: drafting only cost time")


def test_a_prediction_is_read_from_a_file_and_the_plain_run_has_none(generate: Any, base: str, tmp_path: Path) -> None:
    text = expected(base, "ab", temperature=0, max_tokens=60)
    file = tmp_path / "expected.txt"
    file.write_text(text, encoding="utf-8")
    given = (*GREEDY, "--draft", "prediction", "--prediction", str(file), "--compare")
    status, out, err = generate(base, "ab", *given)
    assert status == 0
    assert out == text + "\n"
    assert "acceptance length" in err


def test_a_grammar_is_compiled_before_either_clock_starts(
    generate: Any, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftree.cli import runs
    from draftree.sampling.grammar.compiler import Grammars

    steps = []
    for where, name in ((Grammars, "_compiled"), (runs, "write")):
        plain = getattr(where, name)

        def noted(*given: Any, plain: Any = plain, name: str = name, **named: Any) -> Any:
            steps.append(name)
            return plain(*given, **named)

        monkeypatch.setattr(where, name, noted)
    status, _, err = generate(base, "ab", *GREEDY, "--draft", "ngram", "--compare", "--regex", "[a-d]{5,9}")
    assert (status, ", the texts are the same" in err.splitlines()[-1]) == (0, True)
    assert steps[: steps.index("write")] == ["_compiled", "_compiled"]
    assert steps.count("write") == 3


@pytest.mark.parametrize("number", ["1", "2"])
def test_compare_in_json(generate: Any, base: str, number: str) -> None:
    status, out, err = generate(
        base, "ab", "--draft", "ngram", "--compare", "--json", "--max-tokens", "30", "--n", number
    )
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["equal"] is True
    plain = result["plain"]
    assert result["speedup"] > 0
    assert set(plain) == set(result) - {"plain", "equal", "speedup"}
    assert (plain["draft"], plain["plan"]) == ("none", None)
    first, second = (run.get("completions", [run])[0] for run in (result, plain))
    assert first["seed"] == second["seed"]
    assert first["token_ids"] == second["token_ids"]


def test_texts_that_differ_are_an_error(generate: Any, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftree.cli import runs

    write = runs.write

    def miswrite(llm: Any, setup: Any, task: Any, *, params: Any, screen: Any) -> Any:
        shifted = params if setup.is_plain else SamplingParams(max_tokens=30, seed=params.seed + 1)
        return write(llm, setup, task, params=shifted, screen=screen)

    monkeypatch.setattr(runs, "write", miswrite)
    arguments = [base, "ab", "--max-tokens", "30", "--seed", "1", "--draft", "ngram", "--compare"]
    status, _, err = generate(*arguments)
    assert status == 1
    assert "THE TEXTS DIFFER from character " in err
    status, out, _ = generate(*arguments, "--json")
    assert status == 1
    assert json.loads(out)["equal"] is False


def test_only_rules_that_keep_the_text_can_be_compared() -> None:
    from draftree.verifiers import VERIFIERS

    at_temperature = {name: runs.keeps_text(VERIFIERS.find(name), 0.8) for name in VERIFIERS.names()}
    assert [name for name, keeps in at_temperature.items() if keeps] == ["coupled", "match"]
    greedy = {name: runs.keeps_text(VERIFIERS.find(name), 0) for name in VERIFIERS.names()}
    assert all(greedy.values()), "at temperature 0 every rule writes the greedy text"
