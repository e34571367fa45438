"""`draftree generate --compare`: the comparison of two texts and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_samples import GREEDY, Generate, expected, generating, save_tiny_model
from draftree import SamplingParams
from draftree.cli import compare


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("base"), chat=False))


@pytest.fixture
def generate(capfd: pytest.CaptureFixture[str]) -> Generate:
    return generating(capfd)


def test_compare_compares_both_texts(generate: Any, base: str) -> None:
    status, out, err = generate(base, "ab", *GREEDY, "--draft", "ngram", "--compare")
    assert status == 0
    assert out == expected(base, "ab", temperature=0, max_tokens=60) + "\n"
    plain, fast, verdict = err.splitlines()
    assert plain.startswith("plain: 60 tokens in ")
    assert "acceptance length" not in plain
    assert fast.startswith("ngram: 60 tokens in ")
    assert verdict.startswith("speed-up ")
    assert verdict.endswith("the texts are the same")


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
    from draftree.cli import writing
    from draftree.sampling.grammar import processor as grammar

    steps = []
    for where, name in ((grammar, "_compiled"), (writing, "write")):
        plain = getattr(where, name)

        def noted(*given: Any, plain: Any = plain, name: str = name, **named: Any) -> Any:
            steps.append(name)
            return plain(*given, **named)

        monkeypatch.setattr(where, name, noted)
    status, _, err = generate(base, "ab", *GREEDY, "--draft", "ngram", "--compare", "--regex", "[a-d]{5,9}")
    assert (status, err.splitlines()[-1].endswith("the texts are the same")) == (0, True)
    assert steps[: steps.index("write")] == ["_compiled", "_compiled"]
    assert steps.count("write") == 2


@pytest.mark.parametrize("number", ["1", "2"])
def test_compare_in_json(generate: Any, base: str, number: str) -> None:
    status, out, err = generate(
        base, "ab", "--draft", "ngram", "--compare", "--json", "--max-tokens", "30", "--n", number
    )
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["equal"] is True
    plain = result["plain"]
    assert result["speedup"] == pytest.approx(plain["seconds"] / result["seconds"])
    assert set(plain) == set(result) - {"plain", "equal", "speedup"}
    assert (plain["draft"], plain["plan"]) == ("none", None)
    first, second = (run.get("completions", [run])[0] for run in (result, plain))
    assert first["seed"] == second["seed"]
    assert first["token_ids"] == second["token_ids"]


def test_texts_that_differ_are_an_error(generate: Any, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftree.cli import writing

    write = writing.write

    def miswrite(llm: Any, setup: Any, task: Any, *, params: Any, screen: Any) -> Any:
        shifted = params if setup.is_plain else SamplingParams(max_tokens=30, seed=params.seed + 1)
        return write(llm, setup, task, params=shifted, screen=screen)

    monkeypatch.setattr(writing, "write", miswrite)
    arguments = [base, "ab", "--max-tokens", "30", "--seed", "1", "--draft", "ngram", "--compare"]
    status, _, err = generate(*arguments)
    assert status == 1
    assert "THE TEXTS DIFFER from character " in err
    status, out, _ = generate(*arguments, "--json")
    assert status == 1
    assert json.loads(out)["equal"] is False


def test_only_rules_that_keep_the_text_can_be_compared() -> None:
    from draftree.verifiers import VERIFIERS

    at_temperature = {name: compare.keeps_text(VERIFIERS.find(name), 0.8) for name in VERIFIERS.names()}
    assert [name for name, keeps in at_temperature.items() if keeps] == ["coupled", "match"]
    greedy = {name: compare.keeps_text(VERIFIERS.find(name), 0) for name in VERIFIERS.names()}
    assert all(greedy.values()), "at temperature 0 every rule writes the greedy text"
