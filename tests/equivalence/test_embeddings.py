"""Embedding and output head of every kind of model: with captured states they give the model's logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.kv.slotted import SlottedModel
from draftree.models.native.model import NativeModel
from draftree.models.table import TableLM, hashed
from draftree.models.torch.hf import HFModel
from draftree.models.torch.packing import can_pack, pack
from families import SLOTTED, VOCAB_SIZE, fresh, target
from model_subjects import PARENTS, PREFIX, TREE
from native_samples import DTYPES, in_c, lower
from native_samples import FAMILIES as NATIVE_FAMILIES
from native_samples import SIZES as NATIVE_SIZES
from slot_samples import filled

HEADLESS = {
    "roberta": "more between its last layer",
    "gemma3n_text": "4 axes from layer to layer",
}
"""Families whose logits are no function of the kind that `EmbeddingFacts` expresses, and how the message goes."""

ROW = torch.tensor([[1.0]])


def final_norm(model: Any) -> Any:
    """The module that norms what leaves the last layer."""
    base = model.base_model
    base = getattr(base, "decoder", base)
    names = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
    return next(getattr(base, name) for name in names if getattr(base, name, None) is not None)


@torch.inference_mode()
def require_same_logits(model: SlottedModel, other: Any, *, error: float) -> None:
    """Captured states, the final norm of transformers, the head and the facts give the logits of the same pass."""
    slot = filled(model, PREFIX)
    outcome = model.run(Pass([Extend(slot, TREE, PARENTS)], capture=(0, model.num_layers)))
    model.commit(slot, ())
    logits = model.run(Pass([Extend(slot, TREE, PARENTS)])).logits.tensor()
    model.close(slot)
    assert outcome.hidden is not None
    facts, head, embedding = model.embedding_facts(), model.output_head(), model.input_embedding()
    assert head.shape == embedding.shape == (VOCAB_SIZE, outcome.hidden.shape[2])
    assert head.dtype == embedding.dtype == model.dtype
    found = facts.logits(final_norm(other).float()(outcome.hidden[:, 1]), head)
    assert float((found - logits).norm()) <= error * float(logits.norm())
    normed = model.final_norm(outcome.hidden[:, 1])
    assert normed.dtype == torch.float32
    tolerance = 1e-4 if model.dtype == torch.float32 else 1e-2  # the weight of the norm is rounded
    wanted = final_norm(other).float()(outcome.hidden[:, 1])
    assert torch.allclose(normed, wanted, atol=1e-4, rtol=tolerance)
    assert float((facts.logits(normed, head) - logits).norm()) <= error * float(logits.norm())
    # two tokens at one position: learned positions cancel
    pair = outcome.hidden[[1, 2], 0]
    rows = embedding[[TREE[1], TREE[2]]].float() * facts.embedding_scale
    assert torch.allclose(rows[0] - rows[1], pair[0] - pair[1], atol=1e-4 if model.dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("family", sorted(set(SLOTTED) - set(HEADLESS)))
def test_captured_states_and_the_head_give_the_logits_through_torch(family: str) -> None:
    model = target(family)
    assert isinstance(model, SlottedModel)
    require_same_logits(model, fresh(family), error=1e-4)


@in_c
@pytest.mark.parametrize("family", sorted(NATIVE_FAMILIES))
def test_captured_states_and_the_head_give_the_logits_in_c(family: str) -> None:
    changes = NATIVE_SIZES | NATIVE_FAMILIES[family]
    model, other = lower(HFModel(fresh(family, **changes))), fresh(family, **changes)
    require_same_logits(model, other, error=1e-4)
    assert torch.equal(model.output_head(), other.get_output_embeddings().weight)
    assert torch.equal(model.input_embedding(), other.get_input_embeddings().weight)


@in_c
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "error"), [("bfloat16", 0.02), ("int8", 0.03)])
def test_half_precision_and_int8_in_c(kind: str, error: float, tied: bool) -> None:
    changes = {**NATIVE_SIZES, "tie_word_embeddings": tied}
    given = HFModel(fresh("llama", dtype=DTYPES[kind], **changes))
    model, other = lower(given, quantization="int8" if kind == "int8" else None), fresh("llama", **changes)
    require_same_logits(model, other, error=error)
    head, embedding = (part().weight.detach() for part in (other.get_output_embeddings, other.get_input_embeddings))
    assert torch.equal(model.input_embedding(), embedding.bfloat16()), "the embedding is never quantized"
    if kind == "bfloat16":
        assert torch.equal(model.output_head(), head.bfloat16())
    else:
        steps = head.bfloat16().float().abs().amax(dim=1, keepdim=True) / 127
        error_in_steps = (model.output_head() - head.bfloat16().float()).abs() / steps
        assert float(error_in_steps.max()) < 1.0


@in_c
def test_no_second_copy_of_the_head_is_kept() -> None:
    model: NativeModel = lower(HFModel(fresh("llama", **NATIVE_SIZES)))
    before = model.footprint.weights
    head = model.output_head()
    head.zero_()
    assert model.footprint.weights == before
    assert float(model.output_head().abs().max()) > 0


def test_the_head_of_packed_linear_layers_is_exact() -> None:
    if not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("no packed linear layers here")
    given = fresh("phi")
    pack(given)
    model = HFModel(given)
    assert torch.equal(model.output_head(), fresh("phi").get_output_embeddings().weight)
    require_same_logits(model, fresh("phi"), error=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "scales"),
    [
        ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}, (3.0, 0.5, None)),
        ("cohere", {"logit_scale": 0.25}, (1.0, 0.25, None)),
        ("gemma2", {"final_logit_softcapping": 3.0}, (32**0.5, 1.0, 3.0)),
        ("llama", {}, (1.0, 1.0, None)),
    ],
)
def test_scales_and_caps_are_found(family: str, changes: Any, scales: tuple[float, float, float | None]) -> None:
    facts = HFModel(fresh(family, **changes)).embedding_facts()
    assert facts.embedding_scale == pytest.approx(scales[0], rel=1e-6)
    assert (facts.logit_scale, facts.soft_cap) == scales[1:]


@pytest.mark.parametrize("family", ["falcon", "gptj", "mpt", "codegen"])
def test_families_with_modules_of_their_own_give_both(family: str) -> None:
    model, other = target(family), fresh(family)
    facts = model.embedding_facts()
    assert torch.equal(model.output_head(), other.get_output_embeddings().weight)
    assert torch.equal(model.input_embedding(), other.get_input_embeddings().weight)
    states: list[Tensor] = []
    hook = other.get_output_embeddings().register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with torch.inference_mode():
        logits = other(input_ids=torch.tensor([PREFIX]), use_cache=False).logits
        assert torch.allclose(facts.logits(states[0], model.output_head()), logits, atol=1e-4)
    hook.remove()
    slot = model.open()
    outcome = model.run(Pass([Extend(slot, PREFIX, range(-1, len(PREFIX) - 1))], capture=(2,)))
    model.close(slot)
    assert outcome.hidden is not None
    normed = model.final_norm(outcome.hidden[:, 0])
    assert torch.allclose(normed, states[0][0], atol=1e-4)
    assert torch.allclose(facts.logits(normed, model.output_head()), logits[0], atol=1e-4)


@pytest.mark.parametrize("family", sorted(HEADLESS))
def test_models_that_do_more_are_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=HEADLESS[family]):
        target(family).embedding_facts()


def test_an_embedding_that_is_normed_first_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="changes embeddings by more than a factor"):
        target("bloom").embedding_facts()


def test_models_without_an_embedding_are_refused() -> None:
    model: LanguageModel = TableLM(hashed(VOCAB_SIZE, seed=1))
    for ask in (model.input_embedding, model.output_head, model.embedding_facts, lambda: model.final_norm(ROW)):
        with pytest.raises(UnsupportedModelError, match="choose a drafter that needs none"):
            ask()


def test_a_model_without_a_final_norm_leaves_states_as_they_are() -> None:
    class Headed(torch.nn.Module):
        """Stands where a final norm was."""

        def forward(self, states: Tensor) -> Tensor:
            return states

    given = fresh("llama")
    given.model.norm = Headed()
    assert torch.equal(HFModel(given).final_norm(ROW.repeat(1, 32)), ROW.repeat(1, 32))


def test_more_than_a_norm_before_the_head_is_refused() -> None:
    given = fresh("llama")
    given.model.norm = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32))
    with pytest.raises(UnsupportedModelError, match="than one norm: choose a drafter"):
        HFModel(given).final_norm(ROW.repeat(1, 32))


def test_a_table_with_hidden_states_gives_its_logits() -> None:
    model = TableLM(hashed(VOCAB_SIZE, seed=1), num_features=3)
    model.num_layers = 2
    slot = model.open()
    outcome = model.run(Pass([Extend(slot, PREFIX, range(-1, len(PREFIX) - 1))], capture=(0, 2)))
    assert outcome.hidden is not None
    found = model.embedding_facts().logits(model.final_norm(outcome.hidden[:, 1]), model.output_head())
    assert torch.allclose(found, outcome.logits.tensor().float(), atol=1e-5)
    assert model.input_embedding().shape == (VOCAB_SIZE, VOCAB_SIZE)
