"""Passes of heads in C compute what the module computes, with the same bits alone, in trees and in batches."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.core.tree import path
from draftree.drafters.tree_builder.head_stepper import HeadStepper
from draftree.heads import native_passes
from draftree.heads.base import FeatureHead, TargetParts
from draftree.heads.folders import read_head
from draftree.heads.layouts import Values
from draftree.heads.layouts.mtp import layer_config
from draftree.heads.mtp import HIDDEN_FIRST, MtpHead
from draftree.heads.native_passes import NativePasses
from draftree.heads.native_plans import plan_head
from draftree.heads.passes import HeadPasses, RowJob, TorchPasses
from draftree.heads.vocabulary import DraftVocabulary
from draftree.models.base import EmbeddingFacts
from draftree.models.kv.slots import KVSlot
from draftree.models.native import decoder
from draftree.models.native.build import NativeUnavailableError
from head_samples import HIDDEN, VOCAB, head_config, random_head, random_parts
from head_texts import HeadText
from mtp_families import FAMILIES, WIDTH, Reference
from native_builds import EACH_BUILD, built

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")

SIZES: dict[str, Any] = {"hidden": 32, "target_hidden": 32, "head_dim": 16, "intermediate": 64}
EAGLE_3 = ["eagle3", "eagle3-full", "eagle3.1", "eagle3-before-fc", "eagle3-qwen3", "eagle3-llama3-rope"]
VARIANTS = [*EAGLE_3, "eagle", "eagle-own"]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TREE = ([7, 8, 9, 7, 30, 31], [-1, -1, 0, 0, 1, 3], (2, 3, 1))
"""Tokens, parents and sizes of levels."""
LONG = [(7 * i + i // 5) % VOCAB for i in range(150)]


def bound(variant: str = "eagle3", dtype: str = "float32", **values: Any) -> FeatureHead:
    head = random_head(head_config(variant, **{**SIZES, "max_length": 256, **values}), scale=0.2)
    head.to(getattr(torch, dtype))
    parts = random_parts(hidden=32)
    parts.embedding.div_(4)
    parts.output.div_(4)
    head.bind(parts)
    return head


def in_c(variant: str = "eagle3", kind: str = "float32", **values: Any) -> NativePasses:
    quantization = "int8" if kind == "int8" else None
    return NativePasses(bound(variant, "float32" if quantization else kind, **values), quantization=quantization)


def in_torch(variant: str = "eagle3", kind: str = "float32", **values: Any) -> TorchPasses:
    return TorchPasses(bound(variant, kind, **values), torch.device("cpu"))


LAYER: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4}
GLM: dict[str, Any] = {
    **EXPERTS, "model_type": "glm4_moe", "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "use_qk_norm": True,
}  # fmt: skip
NEXT: dict[str, Any] = {
    **EXPERTS, "model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **GLM, "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_group": 2, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "deepseek": {name: value for name, value in {**LAYER, **LATENT}.items() if name not in ("head_dim", "use_qk_norm")},
    "llama": LAYER,
    "hidden-first": {**LAYER, HIDDEN_FIRST: True},
    "qwen3": {**LAYER, "model_type": "qwen3"},
    "glm": {**LAYER, **GLM},
    "qwen3-next": {**LAYER, **NEXT},
}
"""Configurations of the layers of MTP heads."""


def bound_mtp(name: str, dtype: str = "float32", **facts: Any) -> FeatureHead:
    config = layer_config(Values(LAYERS[name]), depth=3, target_name="")
    head = MtpHead(config, DraftVocabulary.full(VOCAB))
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for part in head.parameters():
            spread = torch.randn(part.shape, generator=noise) * (0.1 if part.dim() == 1 else 0.2)
            part.copy_(1 + spread if part.dim() == 1 else spread).requires_grad_(False)
    parts = random_parts(hidden=32)
    head.eval().to(getattr(torch, dtype)).bind(
        replace(parts, facts=EmbeddingFacts(**{"embedding_scale": 1.0, "logit_scale": 1.0} | facts))
    )
    return head


@pytest.mark.parametrize(
    "facts",
    [{}, {"embedding_scale": 3.0, "logit_scale": 0.5, "soft_cap": 8.0, "bias": torch.arange(VOCAB) / 9}],
    ids=["plain", "scaled"],
)
@pytest.mark.parametrize("name", LAYERS)
def test_mtp_layers_compute_what_their_modules_do(name: str, facts: dict[str, Any]) -> None:
    native = NativePasses(bound_mtp(name, **facts))
    found, wanted = (rows_of(p, rounds=3) for p in (native, TorchPasses(bound_mtp(name, **facts), torch.device("cpu"))))
    assert (found - wanted).abs().max() < 5e-5 * (wanted.max() - wanted.min())


def published(name: str, folder: Path) -> FeatureHead:
    Reference(FAMILIES[name]).write(folder)
    head = read_head(folder)
    assert isinstance(head, FeatureHead)
    noise = torch.Generator().manual_seed(4)
    embedding, output = (torch.randn(head.config.vocab_size, WIDTH, generator=noise) for _ in range(2))
    head.bind(TargetParts(embedding, output, EmbeddingFacts(1.0, 1.0), lambda states: states, 2))
    return head


@pytest.mark.parametrize("name", ["ernie-4.5", "glm-4.7-flash", "mellum", "mimo"])
def test_mtp_layers_of_other_families_compute_what_their_modules_do(name: str, tmp_path: Path) -> None:
    native = NativePasses(published(name, tmp_path))
    found, wanted = (
        rows_of(p, rounds=3) for p in (native, TorchPasses(published(name, tmp_path), torch.device("cpu")))
    )
    assert (found - wanted).abs().max() < 5e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("glm-5", "keeps DynamicIndexedLayer beside keys and values"),
        ("nemotron-h", "keeps states outside"),
        ("step-3.7", "are in a model of images"),
    ],
)
def test_mtp_layers_that_kernels_do_not_have_are_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match=words):
        NativePasses(published(name, tmp_path))


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.04), ("int8", 0.06)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_mtp_layers_in_smaller_formats_stay_near_float32(name: str, kind: str, share: float) -> None:
    is_int8 = kind == "int8"
    passes = NativePasses(bound_mtp(name, "float32" if is_int8 else kind), quantization="int8" if is_int8 else None)
    found, wanted = rows_of(passes), rows_of(TorchPasses(bound_mtp(name), torch.device("cpu")))
    assert (found - wanted).abs().max() < share * (wanted.max() - wanted.min())
    check_bits(passes)


def rows_of(passes: HeadPasses, tokens: Sequence[int] = PROMPT, rounds: int = 1) -> Tensor:
    """Logits of the tokens of the draft vocabulary, after a text and after every node of trees, after rejections."""
    text = HeadText(HeadStepper(passes), passes.head, list(tokens)).read(3).read()
    found = []
    for accepted, bonus in (((0, 2), 13), ((), 12), ((0, 3, 5), 15))[:rounds]:
        found += text.levels(*TREE)
        text.write([*(TREE[0][node] for node in accepted), bonus], accepted)
        text.stepper.check_integrity([text.state])
    return torch.cat(found)[:, passes.head.vocabulary.ids].float()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_the_module(variant: str) -> None:
    found, wanted = rows_of(in_c(variant), rounds=3), rows_of(in_torch(variant), rounds=3)
    assert (found - wanted).abs().max() < 2e-5 * (wanted.max() - wanted.min())


OTHERS = [{"mlp_bias": True}, {"output_bias": True}, {"own_output": False}, {"fc_bias": True}]


@pytest.mark.parametrize("more", [*OTHERS, {"activation": "gelu_pytorch_tanh"}], ids=str)
def test_other_parts(more: dict[str, Any]) -> None:
    found, wanted = rows_of(in_c(**more)), rows_of(in_torch(**more))
    assert (found - wanted).abs().max() < 2e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.02), ("int8", 0.04)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_smaller_formats_stay_near_float32(variant: str, kind: str, share: float) -> None:
    found, wanted = rows_of(in_c(variant, kind)), rows_of(in_torch(variant))
    assert (found - wanted).abs().max() < share * (wanted.max() - wanted.min())


def states_before(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, SIZES["hidden"], generator=torch.Generator().manual_seed(seed))


def hidden_states(count: int, seed: int = 0, layers: int = 3) -> Tensor:
    """The target's hidden states of sizes as in models, shape (rows, layers, hidden)."""
    found = torch.randn(count, layers, SIZES["hidden"], generator=torch.Generator().manual_seed(seed))
    return found * torch.tensor([0.1, 1.0, 30.0])[-layers:, None]


def text_before(passes: HeadPasses, count: int, seed: int) -> Tensor:
    """States of texts with even numbers, and hidden states of the target for the others."""
    layers = len(passes.head.config.features)
    return hidden_states(count, seed, layers) if seed % 2 else states_before(count, seed)


def filled(slots: HeadPasses, count: int, seed: int = 0) -> KVSlot:
    """A slot with rows of a text."""
    slot = slots.pool.open()
    before = text_before(slots, count, seed)
    slots.read([RowJob(slot, LONG[:count], range(1, count + 1), range(-1, count - 1), before)])
    return slot


def check_bits(passes: HeadPasses) -> None:
    tokens, parents, _ = TREE
    before, depths = states_before(len(tokens), 9), [1, 1, 2, 2, 2, 3]
    lengths = (70, 75, 130)
    texts = [filled(passes, length, seed) for seed, length in enumerate(lengths)]
    jobs = [
        RowJob(slot, tokens, [length + depth for depth in depths], parents, before, range(len(tokens)))
        for slot, length in zip(texts, lengths, strict=True)
    ]
    found = passes.extend(jobs)
    states, together = found.states, found.logits.tensor().view(3, len(tokens), -1)
    for number, (slot, length) in enumerate(zip(texts, lengths, strict=True)):
        # the text row by row, then the path of every node row by row
        alone = passes.pool.open()
        text = text_before(passes, length, number)
        for row in range(length):
            passes.read([RowJob(alone, [LONG[row]], [row + 1], [-1], text[row : row + 1])])
        for node in range(len(tokens)):
            for depth, at in enumerate(path(parents, node)):
                job = RowJob(alone, [tokens[at]], [length + depth + 1], [depth - 1], before[at : at + 1], [0])
                one = passes.extend([job])
                state, row = one.states, one.logits
            assert torch.equal(row.tensor()[0], together[number, node])
            assert torch.equal(state[0], states[number * len(tokens) + node])
            passes.pool.truncate(alone, length)
        passes.pool.truncate(slot, length)


@pytest.mark.parametrize(("kind", "bound_of_error"), [("float32", 2e-5), ("bfloat16", 0.02), ("int8", 2e-5)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_projected_hidden_states_are_those_of_the_module(variant: str, kind: str, bound_of_error: float) -> None:
    """Weights of the projection have the dtype of the head, never 8 bits; it may have a bias and norms."""
    passes = in_c(variant, kind, fc_bias=True)
    features = hidden_states(5, layers=len(passes.head.config.features))
    found, wanted = passes.project(features), in_torch(variant, fc_bias=True).project(features)
    assert (found - wanted).abs().max() < bound_of_error * wanted.abs().max()
    slot = passes.pool.open()
    result = passes.read([RowJob(slot, LONG[:5], range(1, 6), range(-1, 4), features, [2, 4])])
    assert torch.equal(result.before, found)
    assert torch.equal(passes.before(slot, 3)[0].float(), found[3]), "slots keep all bits"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("variant", ["eagle3", "eagle3-before-fc", "eagle"])
def test_bits_are_the_same_alone_in_trees_and_in_batches(variant: str, kind: str) -> None:
    check_bits(in_c(variant, kind, num_heads=9, num_kv_heads=3))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", EACH_BUILD)
def test_every_set_of_instructions_agrees(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = rows_of(in_c("eagle3-qwen3", kind))
    library = built(name)
    monkeypatch.setattr(decoder, "library", lambda: library)
    passes = in_c("eagle3-qwen3", kind)
    check_bits(passes)
    found = rows_of(in_c("eagle3-qwen3", kind))
    assert (found - wanted).abs().max() < 0.01 * (wanted.max() - wanted.min())


def test_positions_need_not_be_those_of_the_slot() -> None:
    """Rows whose hidden states are unknown are left out, and windows drop the first ones."""
    found = []
    for slots in (in_c(), in_torch()):
        slot = slots.pool.open()
        positions = [1, 2, 9, 10, 11]
        slots.read([RowJob(slot, LONG[:5], positions, range(-1, 4), states_before(5))])
        slots.pool.drop_first(slot, 1)
        found.append(slots.extend([RowJob(slot, [4, 5], [1500, 1500], [-1, -1], states_before(2, 1))]).states)
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_the_embedding_of_the_target_is_not_copied_and_own_weights_are_released() -> None:
    head = bound()
    parameters = sum(tensor.numel() for tensor in head.state_dict().values())
    embedding = head.embedding_weight()
    passes = NativePasses(head)
    assert passes._decoder.input_embedding().data_ptr() == embedding.data_ptr()
    assert not sum(tensor.numel() for tensor in head.state_dict().values())
    assert passes.weight_bytes >= 4 * parameters
    assert passes.weight_bytes < 4 * (parameters + 16 * VOCAB * HIDDEN)


@pytest.mark.parametrize(
    ("variant", "values", "words"),
    [
        ("eagle3", {"activation": "relu"}, "its activation is relu"),
        ("eagle3", {"head_dim": 8}, "head_dim of 8 is no multiple of 16"),
        ("eagle", {"intermediate": 48}, "intermediate of 48 is no multiple of 32"),
    ],
)
def test_other_heads_are_refused_and_left_unchanged(variant: str, values: dict[str, Any], words: str) -> None:
    head = bound(variant, **values)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    with pytest.raises(NativeUnavailableError, match=words):
        NativePasses(head)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


def test_half_precision_is_refused() -> None:
    with pytest.raises(NativeUnavailableError, match="not float16"):
        plan_head(bound(dtype="float16"))


def test_torch_targets_keep_torch_heads() -> None:
    class Target:
        device = torch.device("cpu")

        @property
        def here(self) -> Target:
            return self

    found = native_passes.passes_of(bound(), Target())  # type: ignore[arg-type]
    assert isinstance(found, TorchPasses)
    assert isinstance(found, TorchPasses)
