"""`draftree beam` with texts that results may be, further models and a language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_samples import save_tiny_model
from draftree import LLM, BeamSearchParams, TokenTrie
from draftree.cli.main import run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [str(save_tiny_model(tmp_path_factory.mktemp("beam"), chat=False, seed=seed)) for seed in (1, 2)]


def found(capsys: pytest.CaptureFixture[str], *line: str) -> list[list[int]]:
    assert run(["beam", *line, "--dtype", "float32", "--max-new-tokens", "6", "--json"]) == 0
    return [one["tokens"] for one in json.loads(capsys.readouterr().out)["hypotheses"]]


def searched(llm: LLM, **given: Any) -> list[list[int]]:
    (result,) = llm.beam_search("abc", BeamSearchParams(max_new_tokens=6, **given))
    return [list(one.tokens) for one in result.hypotheses]


def test_results_are_lines_of_a_file(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "names.txt"
    file.write_text("red\n\ngreen\nblue\n", "utf-8")
    llm = LLM(folders[0], dtype="float32")
    trie = TokenTrie([llm.prompts.encode_text(name, add_special_tokens=False) for name in ("red", "green", "blue")])
    wanted = searched(llm, allowed_trie=trie, beam_width=3, num_return_sequences=3)
    line = ["--allowed-texts", str(file), "--beam-width", "3", "--num-return-sequences", "3"]
    assert found(capsys, folders[0], "abc", *line) == wanted
    assert {llm.tokenizer.decode(one, True) for one in wanted} == {"red", "green", "blue"}  # type: ignore[union-attr]


def test_further_models_take_part(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    llm, other = (LLM(folder, dtype="float32") for folder in folders)
    plain = searched(llm)
    ensemble = searched(llm, models=[other.model])
    assert found(capsys, folders[0], "abc", "--ensemble", folders[1]) == ensemble != plain
    fused = searched(llm, lm_model=other.model, lm_weight=0.7)
    line = ["--lm-model", folders[1], "--lm-weight", "0.7"]
    assert found(capsys, folders[0], "abc", *line) == fused != plain


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (["--lm-weight", "0.5"], "--lm-model"),
        (["--allowed-texts", "/nowhere"], "cannot be read"),
        (["--ensemble", "no-such-model"], "no-such-model"),
    ],
)
def test_refusals(folders: list[str], line: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["beam", folders[0], "abc", *line]) != 0
    assert part in capsys.readouterr().err
