"""On a GPU with `exact`: rows have the same bits in every pass, at real sizes, and drafted texts are the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from draftree import LLM, SamplingParams
from draftree.loading.transformers_model import wrap_model
from draftree.models.torch.exact import exact_rows
from draftree.models.torch.static import Shapes
from families import drafter_folder, fresh, prompts
from target_heads import TARGET, head_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "head_dim": 128, "num_attention_heads": 8}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "columns"), [(4096, 1024), (4096, 4096), (4096, 12288), (12288, 4096)])
def test_products_of_real_sizes(depth: int, columns: int, dtype: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(columns, depth, generator=draw, device="cuda").to(dtype) / depth**0.5
    rows = torch.randn(512, depth, generator=draw, device="cuda").to(dtype)
    with torch.inference_mode(), exact_rows(nn.Identity()):
        together = nn.functional.linear(rows, weight)
        for count in (1, 2, 8, 17, 64, 65, 200):
            assert torch.equal(nn.functional.linear(rows[-count:], weight), together[-count:])
        norms = nn.functional.rms_norm(rows, (depth,))
        assert torch.equal(nn.functional.rms_norm(rows[:1], (depth,)), norms[:1])
    error = (together - nn.functional.linear(rows, weight)).abs().max()
    assert float(error) < (1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_rows_have_the_same_bits_in_every_pass(family: str, dtype: torch.dtype) -> None:
    changes = {} if family == "gpt2" else {**WIDE, "num_key_value_heads": 2}
    model = wrap_model(
        fresh(family, dtype=dtype, max_position_embeddings=1024, **changes).cuda(), shapes=Shapes(exact=True)
    )
    assert model.model.is_exact


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_texts_are_the_plain_ones_in_bfloat16(temperature: float, tmp_path: Path) -> None:
    """The model's logits have many near-ties in bfloat16."""
    target = wrap_model(fresh("llama", dtype=torch.bfloat16, **TARGET).cuda(), shapes=Shapes(exact=True))
    texts = prompts(1, 8, 37, 90, 12, 20, 33, 50)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
    plain = [LLM(target, "none").generate([text], params)[0].token_ids for text in texts]
    small = drafter_folder("llama", tmp_path, **TARGET | {"num_hidden_layers": 1})
    for draft in ("none", "ngram,min=1", f"model:{small},tree=best-8,k=4", f"head:{head_folder(tmp_path)},k=3"):
        done = LLM(target, draft).generate(texts, params)
        assert [text.token_ids for text in done] == plain, draft
