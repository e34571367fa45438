"""Perplexity: every token is predicted once, as by the model alone."""

from __future__ import annotations

import json

import pytest
import torch

from bench_samples import CONTEXT, write_model
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.lab.bench.perplexity import PerplexitySettings, read_text
from draftree.lab.bench.records import read_results
from draftree.models.table import TableLM, hashed
from draftree.options import ModelOptions
from families import peer, prompts, target
from private_cache import private_cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))


def test_a_text_that_fits_a_window_is_read_as_transformers_reads_it() -> None:
    ids = prompts(60)[0]
    found = read_text(target("llama"), ids, start=(), window=CONTEXT)
    with torch.inference_mode():
        logits = peer("llama")(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
    wanted = -logits[torch.arange(59), torch.tensor(ids[1:])]
    assert torch.allclose(found.losses, wanted, atol=1e-4)
    assert found.likeliest.tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("num_tokens", [2, 3, 7, 8, 9, 12, 13, 40])
@pytest.mark.parametrize("start", [(), (1,)])
def test_every_token_is_predicted_once_with_any_windows(num_tokens: int, start: tuple[int, ...]) -> None:
    """A table of order 1 looks one token back, so that windows cannot change what it foretells."""
    model = TableLM(hashed(16, 3), order=1)
    ids = [(5 * i + i * i) % 16 for i in range(num_tokens)]
    whole = read_text(model, ids, start=start, window=1000)
    parts = read_text(model, ids, start=start, window=8)
    assert len(whole.losses) == len(parts.losses) == num_tokens - 1
    assert torch.allclose(whole.losses, parts.losses)
    assert whole.likeliest.tolist() == parts.likeliest.tolist()


def test_windows_wider_than_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompts(100)[0]
    whole = read_text(target("llama"), ids, start=(), window=CONTEXT)
    monkeypatch.setattr("draftree.lab.bench.perplexity.ROWS", 7)
    parts = read_text(target("llama"), ids, start=(), window=CONTEXT)
    assert torch.allclose(whole.losses, parts.losses, atol=1e-4)


def test_kinds_of_weights_are_compared_with_the_first(tmp_path, capsys) -> None:
    folder, text, out = write_model(tmp_path / "tiny"), tmp_path / "a.txt", tmp_path / "out.jsonl"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    kinds = ["--weights", "float64", "--weights", "float32", "--weights", "bfloat16"]
    assert run(["bench", "perplexity", str(folder), "--text", str(text), *kinds, "--output", str(out)]) == 0
    first, second, third = read_results(out).perplexities
    assert (first.ratio, first.num_other_tokens) == (1.0, 0)
    assert second.ratio == pytest.approx(1, abs=1e-5)
    assert 1e-7 < abs(third.ratio - 1) < 0.1
    assert first.num_tokens == third.num_tokens > 100
    assert "x the first" in capsys.readouterr().out
    assert json.loads(out.read_text().splitlines()[0])["text"]["name"] == "a.txt"


def test_bad_arguments_are_refused(tmp_path, capsys) -> None:
    folder, text = write_model(tmp_path / "tiny"), tmp_path / "a.txt"
    assert run(["bench", "perplexity", str(folder), "--text", str(text)]) == 1
    assert "cannot be read" in capsys.readouterr().err
    text.write_text("a")
    assert run(["bench", "perplexity", str(folder), "--text", str(text)]) == 1
    assert "1 tokens" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="unknown dtype 'int3'"):
        PerplexitySettings(ModelOptions("m"), text, weights=("int3",))
    with pytest.raises(ConfigurationError, match="name each once"):
        PerplexitySettings(ModelOptions("m"), text, weights=("int8", "int8"))
