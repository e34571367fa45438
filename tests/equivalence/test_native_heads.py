"""A head in C that always drafts changes no text, and drafts like the head in torch."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.drafters import head as head_drafter
from draftree.heads import native_passes
from draftree.heads.folders import write_head
from draftree.heads.native_passes import NativePasses
from draftree.heads.passes import HeadPasses
from draftree.heads.torch_passes import TorchPasses
from families import VOCAB_SIZE, drafter_folder, prompts
from head_samples import head_config, random_head

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler")

WIDTH = 64
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 4}
TEXTS = prompts(3, 17, 9)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder("llama", tmp_path_factory.mktemp("models"), distance=0.0, **SIZES)


def saved(folder: Path, variant: str = "eagle3", **values: Any) -> Path:
    sizes: dict[str, Any] = {"target_hidden": WIDTH, "hidden": WIDTH, "vocab_size": VOCAB_SIZE, "max_length": 128}
    sizes |= {"draft_vocab_size": VOCAB_SIZE if variant == "eagle3-full" else 60, "head_dim": 16, "intermediate": 96}
    write_head(random_head(head_config(variant, **{**sizes, **values}), scale=0.2), folder / variant)
    return folder / variant


def params(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=40, temperature=temperature, seed=11)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[HeadPasses]:
    """Passes of heads that were made, in order."""
    found: list[HeadPasses] = []

    def noting(*args: Any) -> HeadPasses:
        found.append(native_passes.passes_of(*args))
        return found[-1]

    monkeypatch.setattr(head_drafter, "passes_of", noting)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("variant", "tree"),
    [
        ("eagle3", ""),
        ("eagle3", ",tree=best-9"),
        ("eagle3.1", ",tree=1-2-2,k=2"),
        ("eagle3-full", ""),
        ("eagle3-before-fc", ""),
    ],
)
def test_texts_are_those_without_it_bit_for_bit(
    model: Path, tmp_path: Path, made: list[HeadPasses], kind: str, variant: str, tree: str
) -> None:
    options = KINDS[kind] | {"exact": True}
    plain, fast = LLM(model, **options), LLM(model, f"head:{saved(tmp_path, variant)}{tree}", plan="fixed", **options)
    assert isinstance(made[-1], NativePasses)
    for temperature in (0.0, 1.0):
        wanted = [done.token_ids for done in plain.generate(TEXTS, params(temperature))]
        done = fast.generate(TEXTS, params(temperature))
        assert [one.token_ids for one in done] == wanted
        assert sum(one.stats.draft_tokens for one in done) > 100
        assert [fast.generate(text, params(temperature))[0].token_ids for text in TEXTS] == wanted
    fast.engine.check_integrity()


@pytest.mark.parametrize(("kind", "quantization"), [("float32", None), ("bfloat16", "int8"), ("int8", "int8")])
def test_weights_have_8_bits_unless_the_target_is_float32(
    model: Path, tmp_path: Path, made: list[HeadPasses], kind: str, quantization: str | None
) -> None:
    LLM(model, f"head:{saved(tmp_path)}", plan="fixed", **KINDS[kind])
    (passes,) = made
    assert isinstance(passes, NativePasses)
    assert passes.quantization == quantization


def test_drafts_are_those_of_torch(model: Path, tmp_path: Path, made: list[HeadPasses]) -> None:
    """With float32 both make the same drafts, so that rounds and accepted tokens agree."""
    spec, counts = f"head:{saved(tmp_path)},tree=best-9", []
    for kernels, kind in (("native", NativePasses), ("torch", TorchPasses)):
        llm = LLM(model, spec, plan="fixed", dtype="float32", kernels=kernels)
        assert isinstance(made[-1], kind)
        done = llm.generate(TEXTS, params(1.0))
        counts.append([(one.stats.rounds, one.stats.draft_tokens, one.stats.accepted_tokens) for one in done])
    assert counts[0] == counts[1]
    assert sum(accepted for _, _, accepted in counts[0]) > 0


def test_a_head_that_c_does_not_support_runs_in_torch(
    model: Path, tmp_path: Path, made: list[HeadPasses], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(model, f"head:{saved(tmp_path, activation='relu')}", plan="fixed", dtype="float32")
    assert isinstance(made[-1], TorchPasses)
    assert "head of kind 'eagle3': kernels: torch (its activation is relu" in caplog.text
    wanted = LLM(model, dtype="float32").generate(TEXTS, params(1.0))
    assert [one.token_ids for one in llm.generate(TEXTS, params(1.0))] == [one.token_ids for one in wanted]
