"""Learning from verified texts changes no text, for every kind of passes, rule and tree."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftree import LLM, SamplingParams
from families import prompts
from native_samples import in_c
from target_heads import head_folder

RAGGED = prompts(3, 17, 9)
KERNELS = ["torch", pytest.param("native", marks=in_c)]
ALWAYS = "share=1,rate=0.3"
THROUGH_TORCH: dict[str, Any] = {"dtype": "float32", "kernels": "torch"}


def ids(llm: LLM, temperature: float, **more: Any) -> list[tuple[int, ...]]:
    params = SamplingParams(**({"max_tokens": 24, "temperature": temperature, "seed": 11} | more))
    return [done.token_ids for done in llm.generate(RAGGED, params, progress=False)]


def use_always(llm: LLM) -> None:
    """Use every correction from now on, also a worse one."""
    assert llm.learned is not None
    for learner in llm.learned._learners.values():
        for correction in getattr(learner, "_corrections", {}).values():
            correction.comparison._decide = lambda: None
            correction.comparison.is_better = True


GIVEN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "presence_penalty": 0.5, "top_k": 9},
]


@functools.cache
def options_and_texts(llama: Path, kernels: str) -> tuple[dict[str, Any], list[list[tuple[int, ...]]]]:
    """Options of a model, and what it writes without drafts."""
    options: dict[str, Any] = {"dtype": "float32", "kernels": kernels, "exact": kernels == "native"}
    plain = LLM(llama, "none", **options)
    return options, [ids(plain, **given) for given in GIVEN]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("draft", ["{}", "{},tree=best-9", "suffix,min=1+{},k=2"])
@pytest.mark.parametrize("variant", ["eagle3", "eagle3-full", "eagle"])
def test_texts_are_those_of_plain_decoding(llama: Path, models: Path, kernels: str, draft: str, variant: str) -> None:
    spec = draft.format(f"head:{head_folder(models, variant)}")
    options, texts = options_and_texts(llama, kernels)
    fast = LLM(llama, spec, plan="fixed", learn=f"server,{ALWAYS}", **options)
    for number in (0, 1, 0, 2):
        assert ids(fast, **GIVEN[number]) == texts[number]
        fast.engine.check_integrity()
        use_always(fast)
    assert fast.learned is not None
    stats = {one.name: one for one in fast.learned.stats}
    assert stats["head"].tokens > 20
    assert stats["head"].base_acceptance is not None
    if "suffix" in spec:
        assert stats["suffix"].texts == 12


@pytest.mark.parametrize("verify", ["token", "block", "recursive", "traversal", "multistep"])
def test_draft_distributions_are_those_that_children_were_drawn_from(
    llama: Path, models: Path, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probabilities in a tree are those after correction: the drawn token must have some, and rules check the sums."""
    tree = {"recursive": ",tree=wor-2-2", "traversal": ",tree=wor-2-2", "multistep": ",tree=iid-2-2"}.get(verify, "")
    spec = f"head:{head_folder(models)}{tree}"
    fast = LLM(llama, spec, verify=verify, plan="fixed", learn=f"server,{ALWAYS}", **THROUGH_TORCH)
    ids(fast, 1.0)
    use_always(fast)
    drafter: Any = fast.engine.parts.drafters[0].drafter
    seen, original = [], drafter.draft

    def draft(states: Any, budgets: Any) -> Any:
        trees = original(states, budgets)
        seen.extend(trees)
        return trees

    monkeypatch.setattr(drafter, "draft", draft)
    ids(fast, 1.0)
    (correction,) = (c for learner in fast.learned._learners.values() for c in learner._owned.values())  # type: ignore[union-attr]
    assert bool(correction.bias.any())
    drawn = [tree for tree in seen if len(tree)]
    assert drawn
    for found in drawn:
        assert found.distributions is not None
        for token, row in zip(found.tokens, found.distributions, strict=True):
            assert float(row.sum()) == pytest.approx(1.0, abs=1e-4)
            assert float(row[token]) > 0


@pytest.mark.parametrize("verify", ["token", "recursive"])
def test_other_rules_write_the_target_s_text_when_greedy(llama: Path, models: Path, verify: str) -> None:
    spec = f"head:{head_folder(models)}"
    fast = LLM(llama, spec, verify=verify, plan="fixed", learn=f"server,{ALWAYS}", **THROUGH_TORCH)
    ids(fast, 1.0)
    use_always(fast)
    assert ids(fast, 0.0) == ids(LLM(llama, "none", **THROUGH_TORCH), 0.0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_a_head_learned_is_restored(llama: Path, models: Path, tmp_path: Path, kernels: str) -> None:
    learn = f"key,folder={tmp_path},{ALWAYS}"

    def loaded(variant: str = "eagle3") -> LLM:
        spec = f"head:{head_folder(models, variant)}+suffix"
        return LLM(llama, spec, plan="fixed", dtype="float32", kernels=kernels, learn=learn)

    first = loaded()
    texts = ids(first, 1.0)
    assert first.learned is not None
    states = {learner.name: learner.state() for learner in first.learned._learners.values()}
    first.learned.close()
    assert {path.name.split("-")[0] for path in tmp_path.glob("*.safetensors")} == {"head", "suffix"}
    again = loaded()
    assert again.learned is not None
    for learner in again.learned._learners.values():
        for owner, arrays in states[learner.name].items():
            for name, array in arrays.items():
                np.testing.assert_array_equal(learner.state()[owner][name], array)
    assert ids(again, 1.0) == texts
    again.learned.close()
    other = loaded("eagle3-full")
    assert other.learned is not None
    assert {one.name: one.size > 0 for one in other.learned.stats} == {"head": False, "suffix": True}
    other.forget()
    assert not list(tmp_path.glob("suffix-*.safetensors"))
    other.learned.close()


def test_a_damaged_file_of_a_head_is_set_aside(
    llama: Path, models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loaded() -> LLM:
        learn = f"server,folder={tmp_path},{ALWAYS}"
        return LLM(llama, f"head:{head_folder(models)}", plan="fixed", learn=learn, **THROUGH_TORCH)

    first = loaded()
    texts = ids(first, 0.0)
    assert first.learned is not None
    first.learned.close()
    (path,) = tmp_path.glob("head-*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        again = loaded()
    assert "is damaged" in caplog.text
    assert ids(again, 0.0) == texts


def test_owners_learn_apart(llama: Path, models: Path) -> None:
    spec = f"head:{head_folder(models)}+suffix"
    llm = LLM(llama, spec, plan="fixed", learn=f"key,{ALWAYS}", **THROUGH_TORCH)
    plain = LLM(llama, "none", **THROUGH_TORCH)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    owners = ["a", "b", None]
    made = [llm.requests.sequences(ids, params, owner=owner)[0] for ids, owner in zip(RAGGED, owners, strict=True)]
    llm.engine.add(*made)
    while not all(sequence.is_finished for sequence in made):
        llm.engine.step()
        llm.engine.check_integrity()
        use_always(llm)
    wanted = [one.token_ids for one in plain.generate(RAGGED, params, progress=False)]
    assert [tuple(sequence.history.output.tolist()) for sequence in made] == wanted
    assert llm.learned is not None
    for stats in llm.learned.stats:
        assert stats.scopes == 2
