"""On a pretended card: texts of every drafter are those of a CPU, and a round has few waits and launches."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from card_process import CardProcess, logprobs_of
from draftree import LLM, SamplingParams
from draftree.loading.transformers_model import wrap_model
from families import drafter_folder, fresh, prompts
from pretended_card import why_not
from target_heads import TARGET, head_folder

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PROMPTS = prompts(9, 12, 10, 17)
GREEDY: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {**GREEDY, "temperature": 0.8, "seed": 1}

BUDGETS: dict[str, tuple[int, int, int]] = {
    "none": (1, 10, 41),
    "ngram,min=1": (1, 10, 41),
    "suffix": (1, 10, 41),
    "model:{small},k=3": (2, 11, 42),
    "model:{small},tree=best-8,k=4": (2, 11, 43),
    "head:{eagle3},k=3": (2, 13, 44),
    "head:{eagle3},tree=best-8,k=4": (2, 13, 45),
    "head:{eagle},k=3": (2, 13, 44),
    "head:{dflash}": (4, 133, 248),  # the blocks of these four and their attention are in no graph
    "head:{peagle}": (4, 99, 211),
    "head:{medusa}": (4, 71, 186),
    "head:{dspark}": (9, 170, 309),  # each level waits for its confidence too
    "early-exit:2,k=3": (9, 535, 650),  # passes through a part of the layers are in no graph
}
"""Waits, launches at temperature 0 and launches at 0.8, the most of a round at batch 1. These may only fall.

A round waits once for the draft and once for the target; heads of blocks and early exit wait for each level. Launches
outside graphs count.
"""


@pytest.fixture(scope="module")
def card() -> Iterator[CardProcess]:
    process = CardProcess()
    yield process
    process.close()
    assert not torch.cuda.is_available(), "the card is in the other process only"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("models")
    heads = {
        variant: head_folder(where, variant) for variant in ("eagle3", "eagle", "dflash", "peagle", "medusa", "dspark")
    }
    return {"small": drafter_folder("llama", where, **TARGET | {"num_hidden_layers": 1}), **heads}


@functools.cache
def target() -> Any:
    return wrap_model(fresh("llama", **TARGET))


@functools.cache
def expected(params: tuple[tuple[str, Any], ...], batch: int) -> list[dict[str, Any]]:
    completions = LLM(target(), "none").generate(PROMPTS[:batch], SamplingParams(**dict(params)))
    return [{"tokens": list(done.token_ids), "logprobs": logprobs_of(done)} for done in completions]


def run_on_card(
    card: CardProcess,
    draft: str,
    params: dict[str, Any],
    turns: Sequence[Sequence[Sequence[int]]],
    on: dict[str, Any] | str = TARGET,
) -> dict[str, Any]:
    options = {} if draft == "none" else {"plan": "fixed"}
    result = card.run(target=on, draft=draft, params=params, turns=turns, options=options)
    assert result["is_on_card"]
    assert result["why_eager"] is None
    return result


def steady(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rounds that read no prompt, capture nothing and may draft."""
    return [counts for counts in rounds[2:-2] if not counts["captures"]]


@pytest.mark.essential
@pytest.mark.parametrize("draft", BUDGETS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_those_of_a_cpu_within_the_budget(
    card: CardProcess, folders: dict[str, Path], draft: str, params: dict[str, Any]
) -> None:
    waits, *launches = BUDGETS[draft]
    budget = {"waits": waits, "launches": launches[params["temperature"] > 0]}
    for batch in (4, 1):
        result = run_on_card(card, draft.format(**folders), params, [PROMPTS[:batch]])
        assert result["texts"] == [expected(tuple(params.items()), batch)]
    rounds = steady(result["rounds"])
    assert len(rounds) > 3
    spent = {name: max(counts[name] for counts in rounds) for name in budget}
    assert all(spent[name] <= budget[name] for name in budget), (spent, lines_of(rounds))


@pytest.fixture(scope="module")
def exact_card() -> Iterator[CardProcess]:
    pytest.importorskip("triton")
    process = CardProcess(is_exact=True)
    yield process
    process.close()


def test_exact_passes_stay_within_the_budget(exact_card: CardProcess, folders: dict[str, Path]) -> None:
    draft = "head:{eagle3},k=3"
    params = {**GREEDY, "max_tokens": 12}
    result = run_on_card(exact_card, draft.format(**folders), params, [PROMPTS[:1]])
    assert result["is_exact"]
    assert result["texts"] == [expected(tuple(params.items()), 1)]
    rounds = steady(result["rounds"])
    waits, launches, _ = BUDGETS[draft]
    assert rounds
    assert max(counts["waits"] for counts in rounds) <= waits, lines_of(rounds)
    assert max(counts["launches"] for counts in rounds) <= launches, lines_of(rounds)


def lines_of(rounds: Sequence[dict[str, Any]]) -> Counter[str]:
    """Return the lines that wait, or launch kernels, most often first."""
    return Counter(sum((Counter(counts["lines"]) for counts in rounds), Counter()))


PENALIZED = {**SAMPLED, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
CONTROLS: dict[str, tuple[dict[str, Any], int, int]] = {
    "penalties": (PENALIZED, 1, 4),
    "nucleus": ({**SAMPLED, "top_p": 0.8}, 2, 3),
    "nucleus-k": ({**SAMPLED, "top_p": 0.8, "top_k": 20}, 1, 2),
    "logprobs": ({**GREEDY, "logprobs": 3}, 2, 3),
}
"""Parameters, and the waits of a round at batch 1 without a drafter and with a draft model; these may only fall."""


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_are_those_of_a_cpu(card: CardProcess, folders: dict[str, Path], name: str) -> None:
    params, *waits = CONTROLS[name]
    for draft, batch in (("model:{small},k=3", 4), ("model:{small},k=3", 1), ("none", 1)):
        result = run_on_card(card, draft.format(**folders), params, [PROMPTS[:batch]])
        (texts,) = result["texts"]
        wanted = expected(tuple(params.items()), batch)
        assert [text["tokens"] for text in texts] == [text["tokens"] for text in wanted]
        for text, other in zip(texts, wanted, strict=True):
            assert text["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)
        rounds = steady(result["rounds"])
        spent = max(counts["waits"] for counts in rounds)
        assert batch > 1 or spent <= waits[draft != "none"], (spent, lines_of(rounds))


@pytest.mark.parametrize("draft", ["none", "head:{eagle3},tree=best-8,k=4"])
def test_prompts_continue_a_cached_prefix(card: CardProcess, folders: dict[str, Path], draft: str) -> None:
    (before,) = expected(tuple(GREEDY.items()), 1)
    longer = [*PROMPTS[0], *before["tokens"][:10], 7, 8]
    result = run_on_card(card, draft.format(**folders), GREEDY, [PROMPTS[:1], [longer]])
    (wanted,) = LLM(target(), "none").generate([longer], SamplingParams(**GREEDY))
    assert result["texts"][1][0]["tokens"] == list(wanted.token_ids)
    assert result["cached"][1] == [len(PROMPTS[0]) + 10]


def test_what_a_card_does_not_allow_raises(card: CardProcess) -> None:
    reasons = card.run(faults=True)["faults"]
    assert "on cuda:0 and on the host" in reasons["mix"]
    assert "not permitted when stream is capturing" in reasons["wait in a capture"]
    assert "would repeat the copy" in reasons["copy in a capture"]
    assert reasons["replayed"] == [5.0, 7.0]
    assert reasons["waits"] == {"copy from pageable memory": 1, "copy to the host": 1, "indices from the host": 1}


OTHER_DRAFTS = ("none", "model:{small},tree=best-8,k=4", "head:{eagle3},tree=best-8,k=4")
FILTERED = {**SAMPLED, "top_p": 0.8, "top_k": 20, "logprobs": 3}


@pytest.mark.parametrize("device_type", ["xpu", "mps"])
def test_other_devices_write_the_texts_of_a_cpu(folders: dict[str, Path], device_type: str) -> None:
    process = CardProcess(device_type)
    try:
        for draft in OTHER_DRAFTS:
            for params in (GREEDY, FILTERED):
                result = run_on_card(process, draft.format(**folders), params, [PROMPTS])
                (texts,) = result["texts"]
                wanted = expected(tuple(params.items()), len(PROMPTS))
                assert [text["tokens"] for text in texts] == [text["tokens"] for text in wanted], draft
    finally:
        process.close()


def float8_folder(where: Path) -> Path:
    """Write a model whose matrices have 8 bits, as transformers reads them on GPUs that multiply such numbers."""
    model = fresh("llama", **TARGET)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if value.dim() == 2 and ".layers." in name:
            scale = value.abs().amax() / 448
            tensors[name] = (value / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.full((value.shape[0] // 16, value.shape[1] // 16), float(scale))
        else:
            tensors[name] = value.bfloat16()
    model.config.quantization_config = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    model.config.save_pretrained(where)
    save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
    return where


def test_quantized_weights_are_placed_by_transformers(
    card: CardProcess, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = str(float8_folder(tmp_path))
    (wanted,) = run_on_card(card, "none", GREEDY, [PROMPTS[:2]], on=folder)["texts"]
    (texts,) = run_on_card(card, "model:{small},k=3".format(**folders), GREEDY, [PROMPTS[:2]], on=folder)["texts"]
    assert texts == wanted
    plain = LLM(folder, "none", kernels="torch", dtype="bfloat16").generate(PROMPTS[:2], SamplingParams(**GREEDY))
    assert [text["tokens"] for text in texts] == [list(done.token_ids) for done in plain]
