"""Lossy rules are reported: on standard error, in JSON, on completions and in benchmark records; others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli_samples import Generate, generating, save_tiny_model
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.lab.bench.records import read_results
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import Guarantee

SAME_TEXT = {"coupled", "match"}
LOSSY = {"soft", "typical"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("base"), chat=False))


@pytest.fixture
def generate(capfd: pytest.CaptureFixture[str]) -> Generate:
    return generating(capfd)


@pytest.mark.parametrize("name", VERIFIERS.names())
def test_a_promise_goes_by_rule_and_temperature(name: str) -> None:
    wanted = Guarantee.SAME_DISTRIBUTION
    if name in SAME_TEXT:
        wanted = Guarantee.SAME_TEXT
    if name in LOSSY:
        wanted = Guarantee.LOSSY
    assert VERIFIERS.find(name).promise(0.7) is wanted
    assert VERIFIERS.find(name).promise(0.0) is Guarantee.SAME_TEXT


@pytest.mark.parametrize("rule", ["soft", "typical", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_and_statistics_carry_the_promise(base: str, rule: str, temperature: float) -> None:
    llm = LLM(base, draft="ngram", verify=rule)
    (done,) = llm.generate("abab", SamplingParams(max_tokens=8, temperature=temperature, seed=1))
    is_lossy = rule in LOSSY and temperature > 0
    assert done.stats.promise is (Guarantee.LOSSY if is_lossy else Guarantee.SAME_TEXT)
    assert done.lossless is done.stats.lossless is not is_lossy
    assert done.to_json()["stats"]["lossless"] is not is_lossy
    assert llm.is_lossless is (rule not in LOSSY)


def test_each_request_of_a_batch_is_judged_by_its_own_temperature(base: str) -> None:
    llm = LLM(base, draft="ngram", verify="soft")
    params = [SamplingParams(max_tokens=4, temperature=t, seed=1) for t in (0.0, 1.0)]
    assert [done.lossless for done in llm.generate(["ab", "ab"], params)] == [True, False]


def test_without_a_drafter_a_lossy_rule_accepts_nothing(base: str) -> None:
    params = SamplingParams(max_tokens=8, seed=1)
    plain, soft = LLM(base, "none"), LLM(base, "none", verify="soft")
    assert soft.is_lossless
    assert soft.generate("ab", params)[0].token_ids == plain.generate("ab", params)[0].token_ids
    assert soft.generate("ab", params)[0].lossless
    assert LLM(base, "none", verify="token").promise(1.0) is Guarantee.SAME_DISTRIBUTION


@pytest.mark.parametrize("rule", ["soft,tolerance=0.5", "typical"])
def test_generate_announces_a_lossy_rule_once(generate: Any, base: str, rule: str) -> None:
    line = [base, "ab", "--max-tokens", "6", "--draft", "ngram", "--verify", rule]
    _, _, err = generate(*line)
    assert err.count("is lossy at temperature 1:") == 1
    _, out, err = generate(*line, "--json")
    assert err.count("is lossy") == 1
    found = json.loads(out)
    assert (found["lossless"], found["promise"]) == (False, "lossy")
    assert (found["stats"]["lossless"], found["stats"]["promise"]) == (False, "lossy")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--draft", "ngram", "--verify", "soft", "--temperature", "0"],
        ["--draft", "ngram", "--verify", "coupled"],
        ["--draft", "none", "--verify", "soft"],
        ["--draft", "ngram", "--verify", "soft", "--temperature", "0", "--compare"],
    ],
)
def test_lossless_runs_announce_nothing(generate: Any, base: str, arguments: list[str]) -> None:
    status, out, err = generate(base, "ab", "--max-tokens", "6", *arguments, "--json")
    assert status == 0
    assert "lossy" not in err
    assert (json.loads(out)["lossless"], json.loads(out)["promise"]) == (True, "same text")


def bench(base: str, prompts: Path, output: Path, temperature: str) -> int:
    methods = ["--draft", "ngram@soft", "--draft", "ngram@typical", "--draft", "ngram"]
    how = ["--max-tokens", "6", "--repeats", "1", "--temperature", temperature, "--dtype", "float32"]
    return run(["bench", "run", base, *methods, "--prompts", str(prompts), *how, "--output", str(output)])


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_a_benchmark_announces_lossy_methods_and_records_them(
    base: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], temperature: str
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"id": "a", "category": "c", "prompt": "abab"}) + "\n")
    assert bench(base, prompts, output, temperature) == 0
    is_lossy = temperature != "0"
    err = capfd.readouterr().err
    assert err.count("ngram@soft, ngram@typical are lossy at temperature 0.9") == is_lossy
    results = read_results(output)
    assert any("are lossy" in text for text in results.header["notes"]) is is_lossy
    for record in results.records:
        assert record.stats["lossless"] is not (is_lossy and record.method in ("ngram@soft", "ngram@typical"))
