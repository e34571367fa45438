"""A borrowed model is restored afterwards, and is checked once."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from draftree.loading import lending, transformers_model
from draftree.loading.lending import borrowed
from dropin_samples import ours, padded, plain
from families import fresh

INPUTS = padded(9, 5)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were checked."""
    seen: list[str] = []

    def counted(model: Any, name: str) -> Any:
        seen.append(name)
        return transformers_model.wrap_checked(model, name)

    monkeypatch.setattr(lending, "wrap_checked", counted)
    return seen


@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("llama", "sdpa"), ("gptj", "eager")])
def test_the_model_is_as_it_was(name: str, attention: str) -> None:
    model = fresh(name)
    model.set_attn_implementation(attention)
    attributes = set(vars(model))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    settings = copy.deepcopy(model.generation_config.to_dict())
    wanted = plain(model, INPUTS)
    assert torch.equal(ours(model, INPUTS, draft="ngram"), wanted)
    assert model.config._attn_implementation == attention
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert [type(module) for module in model.modules()] == kinds
    assert set(vars(model)) == attributes
    assert model.generation_config.to_dict() == settings
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(plain(model, INPUTS), wanted)


def test_the_second_call_does_not_check_again(checks: list[str]) -> None:
    model = fresh("llama")
    for _ in range(3):
        ours(model, INPUTS, draft="ngram")
    assert len(checks) == 1
    model.to(torch.float64)
    assert torch.equal(ours(model, INPUTS, draft="ngram"), plain(model, INPUTS))
    assert len(checks) == 2


def test_new_weights_are_used() -> None:
    model = fresh("llama")
    first = ours(model, INPUTS, draft="ngram")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert torch.equal(ours(model, INPUTS, draft="ngram"), plain(model, INPUTS))
    assert not torch.equal(ours(model, INPUTS, draft="ngram"), first)


def test_a_borrowed_model_is_not_kept_alive() -> None:
    model = fresh("llama")
    ours(model, INPUTS, draft="ngram")
    ours(model, INPUTS, assistant_model=model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_memory_of_slots_is_freed() -> None:
    model = fresh("llama")
    with borrowed(model) as loaded:
        memory: Any = loaded.model._pool.memory  # type: ignore[attr-defined]
        loaded.model.reserve(4, 100)
        assert memory.keys
    assert not memory.keys
    assert not list(memory._slots())


def test_a_model_is_put_back_after_an_error_too() -> None:
    model = fresh("llama")
    model.model.layers[0].training = True  # as a user may have it
    with pytest.raises(RuntimeError, match="mine"), borrowed(model):
        assert model.config._attn_implementation == "draftree"
        raise RuntimeError("mine")
    assert model.config._attn_implementation == "sdpa"
    assert model.model.layers[0].training


def test_two_threads_take_turns() -> None:
    model = fresh("llama")
    wanted = plain(model, INPUTS)
    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(ours(model, INPUTS, draft="ngram"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 3
    assert all(torch.equal(one, wanted) for one in got)
