"""On a GPU with `exact`, a row has the same bits in every pass; layers for which this cannot hold are refused by name.

Without a GPU the kernels run in Triton's interpreter, which `conftest.py` selects. Sizes are multiples of 64: elsewhere
a CPU computes the last numbers of a row, such as sines, by other instructions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.loading import options as options_module
from draftree.loading import transformers_model
from draftree.loading.options import resolve_place, shapes_of
from draftree.loading.transformers_model import wrap_model
from draftree.models.base import Extend, Pass
from draftree.models.check import EXACT_PARENTS, exact_tokens, rounds_alike
from draftree.models.torch import exact, hf, static
from draftree.models.torch.hf import HFModel
from draftree.models.torch.static import Shapes
from draftree.options import ModelOptions
from families import fresh
from slot_samples import filled

pytest.importorskip("triton")
HAS_GPU = os.environ["TRITON_INTERPRET"] != "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
ROWS = (1, 2, 8, 17, 64, 70)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=not HAS_GPU)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_interpreter import repair

    repair(monkeypatch.setattr)
    for module in (static, hf, exact):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def operations(dtype: torch.dtype) -> dict[str, tuple[Callable[[Tensor], Tensor], int]]:
    """Return functions of rows, each with the length of a row."""
    weight, bias = normal(50, 72, dtype=dtype), normal(50, dtype=dtype)
    scale, shift = normal(300, dtype=dtype), normal(300, dtype=dtype, seed=1)
    wide, transposed = normal(30, 300, dtype=dtype), normal(40, 20, dtype=dtype)
    return {
        "product": (lambda x: nn.functional.linear(x, weight), 72),
        "product with bias": (lambda x: nn.functional.linear(x, weight, bias), 72),
        "long product": (lambda x: nn.functional.linear(x, wide), 300),
        "transposed": (lambda x: torch.addmm(bias[:20], x, transposed), 40),
        "matmul": (lambda x: x @ transposed, 40),
        "layer norm": (lambda x: nn.functional.layer_norm(x, (300,), scale, shift), 300),
        "plain layer norm": (lambda x: nn.functional.layer_norm(x, (80,)), 80),
        "norm": (lambda x: nn.functional.rms_norm(x, (300,), scale), 300),
        "mean": (lambda x: x.pow(2).mean(-1, keepdim=True), 300),
        "outer": (lambda x: torch.bmm(x[:, :, None], x[:, None, :]), 8),
    }


@pytest.mark.essential
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", operations(torch.float32))
def test_bits_of_a_row_do_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    compute, length = operations(dtype)[name]
    rows = normal(max(ROWS), length, dtype=dtype)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with torch.inference_mode(), exact.exact_rows(nn.Identity()):
        together = compute(rows)
        for count in ROWS[:-1]:
            assert torch.equal(compute(rows[-count:]), together[-count:])
        assert torch.equal(compute(rows[order]), together[order])
        assert torch.equal(compute(rows[3].clone()[None])[0], together[3])
    expected = compute(rows).float()
    assert float((together.float() - expected).abs().max()) <= TOLERANCE[dtype] * float(expected.abs().max())


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.softmax(-1),
        lambda x: x.topk(2).values,
        lambda x: x.mean(0),
        lambda x: x[None] @ x[None].mT,
        lambda x: x.sum(-1),
        lambda x: nn.functional.conv1d(x[None], x[None].mT[:, :, :1]),
        lambda x: x.double() @ x.double(),
        lambda x: x.float().index_add(0, torch.tensor([0, 0], device=x.device), x[:2]),
    ],
)
def test_other_sums_raise(compute: Callable[[Tensor], Tensor]) -> None:
    rows = normal(4, 4, dtype=torch.float32)
    with (
        pytest.raises(UnsupportedModelError, match="may round a row differently"),
        torch.inference_mode(),
        exact.exact_rows(nn.Identity()),
    ):
        compute(rows)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_moe", r"model\.layers\.0\.mlp\.gate \(Qwen3MoeTopKRouter\) computes 'aten::_softmax'"),
        ("gpt_oss", r"model\.layers\.0\.mlp\.router \(GptOssTopKRouter\)"),
        ("gemma3n_text", r"model\.layers\.0\.altup"),
        ("mamba", "recurrent layers"),
        ("falcon", "does not let its attention be chosen|calls the registered attention"),
    ],
)
def test_layers_that_cannot_hold_it_are_refused_by_name(family: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"exact was requested for '.*', but .*{reason}.*: leave exact out"):
        wrap_model(fresh(family).to(DEVICE), shapes=Shapes(exact=True))


def test_models_that_hide_their_operators_are_refused() -> None:
    model = fresh("llama").to(DEVICE)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(UnsupportedModelError, match="quantized"):
        HFModel(model, shapes=Shapes(exact=True))
    model = fresh("llama").to(DEVICE)
    type(model).__module__, before = "elsewhere", type(model).__module__
    try:
        with pytest.raises(UnsupportedModelError, match="code of its own"):
            HFModel(model, shapes=Shapes(exact=True))
    finally:
        type(model).__module__ = before


def test_it_is_refused_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "runs_triton", lambda device: False)
    with pytest.raises(UnsupportedModelError, match=r"needs Triton and a GPU of compute capability 8\.0"):
        HFModel(fresh("llama").to(DEVICE), shapes=Shapes(exact=True))


def test_only_passes_on_a_gpu_change_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    wanted = ModelOptions("any", exact=True)
    assert shapes_of(wanted, gpu, by_default=True) == Shapes(exact=True)
    assert shapes_of(wanted, cpu, by_default=False) is None
    assert shapes_of(ModelOptions("any"), gpu, by_default=True) == Shapes()
    monkeypatch.setattr(options_module, "resolve_device", lambda device: gpu)
    monkeypatch.setattr(options_module, "has_native_bfloat16", lambda device: True)
    for others in ({"kernels": "torch"}, {"offload": "1GB"}):
        with pytest.raises(ConfigurationError, match="exact on a GPU needs kernels 'graphs' or 'auto' and no offload"):
            resolve_place(ModelOptions("any", exact=True, dtype="float32", **others))


WIDE = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gemma3_text", torch.float32)], ids=str)
def test_rows_have_the_same_bits_in_every_pass(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In trees, chains, chunks of a prompt, token by token and beside others, as the check at load compares."""
    monkeypatch.setattr(transformers_model, "rounds_alike", partial(rounds_alike, lengths=(20,)))
    changes = {"sliding_window": 8, "layer_types": ["sliding_attention"]} if family == "gemma3_text" else {}
    loaded = wrap_model(fresh(family, dtype=dtype, **WIDE, **changes).to(DEVICE), shapes=Shapes(exact=True))
    assert loaded.model.is_exact
    model = loaded.model
    assert isinstance(model, HFModel)
    assert model.static is not None
    tokens = exact_tokens(model.vocab_size)
    job = Extend(filled(model, tokens[:20]), tokens[-len(EXACT_PARENTS) :], EXACT_PARENTS)
    rows = []
    for is_static in (True, False):  # long prompts are in no graph
        monkeypatch.setattr(model.static, "fits", lambda *args, is_static=is_static, **others: is_static)
        rows.append(model.run(Pass([job])).logits.tensor().clone())
        model.commit(job.slot, ())
    assert torch.equal(*rows)
