"""`draftree beam` and `LLM.beam_search`: texts, scores, options, further models and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_samples import END, save_tiny_model
from draftree import LLM, BeamSearchParams, SamplingParams, TokenTrie
from draftree.cli.main import run


def test_json_equals_the_library(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["beam", base, "abc", "--beam-width", "3", "--num-return-sequences", "2", "--max-new-tokens", "9", "--json"]
    assert run([*line, "--dtype", "float32", "--length-penalty", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    params = BeamSearchParams(beam_width=3, num_return_sequences=2, max_new_tokens=9, length_penalty=0.5)
    (expected,) = LLM(base, "none", dtype="float32").beam_search("abc", params)
    assert found["prompt_tokens"] == 3
    assert [(one["tokens"], one["text"]) for one in found["hypotheses"]] == [
        (list(one.tokens), one.text) for one in expected.hypotheses
    ]
    assert [one["score"] for one in found["hypotheses"]] == pytest.approx([one.score for one in expected.hypotheses])


def test_texts_and_scores_go_to_their_streams(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["beam", base, "abc", "--preset", "vllm", "--beam-width", "2", "--max-new-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert "--- 2: score -" in captured.err
    assert "5 steps" in captured.err
    assert "score" not in captured.out


def test_drafts_change_the_passes_only(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["beam", base, "abcabcabc", "--max-new-tokens", "12", "--dtype", "float32", "--num-return-sequences", "3"]
    assert run([*line, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    for draft in ("ngram,min=1+runners-up", f"model:{base}"):
        assert run([*line, "--draft", draft, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [one["tokens"] for one in found["hypotheses"]] == [one["tokens"] for one in plain["hypotheses"]]
        assert found["num_drafted"] > 0
    assert found["num_passes"] < found["num_steps"] == plain["num_steps"] == plain["num_passes"]
    assert run([*line, "--draft", f"model:{base}"]) == 0
    assert "drafted nodes used" in capsys.readouterr().err
    assert run([*line, "--draft", "lookahead,window=3"]) == 1
    assert "target tokens of earlier passes" in capsys.readouterr().err


def test_phrases_are_contained(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["beam", base, "abc", "--force-phrase", "xyz", "--force-phrase", "qq", "--max-new-tokens", "12"]
    assert run([*line, "--set", "strict=true", "--set", "early_stopping=never", "--beam-width", "6"]) == 0
    out = capsys.readouterr().out
    assert "xyz" in out
    assert "qq" in out


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (["--set", "early_stopping=always"], "early_stopping='always' is refused"),
        (["--set", "length_bounds=[1,2]"], "four numbers"),
        (["--set", "lenght_bounds=[0,1,0,9]"], "did you mean 'length_bounds'"),
        (["--set", "strict"], "NAME=VALUE"),
        (["--set", "top_k=1", "--set", "top-k=2"], "top_k is set twice"),
        (["--set", "beam_width=3", "--beam-width", "4"], "option of its own"),
        (["--set", "models=[1]"], "models"),
        (["--preset", "marian"], "fairseq"),
        (["--num-return-sequences", "9"], "beam_width"),
        (["--beam-width", "2", "--set", "top_k=3"], "sampling"),
        (["--set", "ordered=true"], "force_words_ids"),
        (["--set", "lm_weight=0.5"], "lm_model"),
        (["--allowed-texts", "/nowhere"], "cannot be read"),
        (["--ensemble", "no-such-model"], "no-such-model"),
    ],
)
def test_refusals(base: str, given: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["beam", base, "abc", *given]) != 0
    assert part in capsys.readouterr().err


def test_conversations_and_batches(chat: str) -> None:
    llm = LLM(chat, "none")
    talk = [{"role": "user", "content": "hi"}]
    params = BeamSearchParams(beam_width=2, max_new_tokens=6)
    (one,) = llm.beam_search(talk, params)
    assert llm.beam_search([talk, talk], [params, params]) == [one, one]
    (text,) = llm.beam_search(llm.prompts.encode_chat(talk), params)
    assert text == one
    assert llm.beam_search(["a", "bc"]) == llm.beam_search(["a"]) + llm.beam_search("bc")


def test_stop_strings_end_a_text(base: str) -> None:
    llm = LLM(base, "none")
    plain = llm.beam_search("abc", BeamSearchParams(beam_width=1, max_new_tokens=12))[0].best
    assert plain.text is not None
    assert END not in plain.text
    stop = plain.text[4:6]
    cut = llm.beam_search("abc", BeamSearchParams(beam_width=1, max_new_tokens=12, stop=stop))[0].best
    kept = llm.beam_search(
        "abc", BeamSearchParams(beam_width=1, max_new_tokens=12, stop=stop, include_stop_str_in_output=True)
    )[0].best
    assert cut.finish_reason == "stop"
    assert cut.text == plain.text[: plain.text.index(stop)]
    assert kept.text == cut.text + stop


def test_generation_goes_on_after_a_search(base: str) -> None:
    llm = LLM(base, "none")
    params = SamplingParams(temperature=0, max_tokens=20)
    before = llm.generate("abc", params)[0].token_ids
    llm.beam_search(["abc", "xy"], BeamSearchParams(beam_width=5))
    llm.model.check_integrity()
    assert llm.generate("abc", params)[0].token_ids == before


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("other"), chat=False, seed=2))


def found(capsys: pytest.CaptureFixture[str], *line: str) -> list[list[int]]:
    assert run(["beam", *line, "--dtype", "float32", "--max-new-tokens", "6", "--json"]) == 0
    return [one["tokens"] for one in json.loads(capsys.readouterr().out)["hypotheses"]]


def searched(llm: LLM, **given: Any) -> list[list[int]]:
    (result,) = llm.beam_search("abc", BeamSearchParams(max_new_tokens=6, **given))
    return [list(one.tokens) for one in result.hypotheses]


def test_results_are_lines_of_a_file(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "names.txt"
    file.write_text("red\n\nredder\nblue\n", "utf-8")
    llm = LLM(base, "none", dtype="float32")
    trie = TokenTrie([llm.prompts.encode_text(name, add_special_tokens=False) for name in ("red", "redder", "blue")])
    wanted = searched(llm, allowed_trie=trie, beam_width=3, num_return_sequences=3)
    line = ["--allowed-texts", str(file), "--beam-width", "3", "--num-return-sequences", "3"]
    assert found(capsys, base, "abc", *line) == wanted
    assert {llm.tokenizer.decode(one, True) for one in wanted} == {"red", "redder", "blue"}  # type: ignore[union-attr]


def test_further_models_take_part(base: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    llm, second = (LLM(folder, "none", dtype="float32") for folder in (base, other))
    plain = searched(llm)
    ensemble = searched(llm, models=[second.model])
    assert found(capsys, base, "abc", "--ensemble", other) == ensemble != plain
    fused = searched(llm, lm_model=second.model, lm_weight=0.7)
    line = ["--lm-model", other, "--set", "lm_weight=0.7"]
    assert found(capsys, base, "abc", *line) == fused != plain
