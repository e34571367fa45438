"""GGUF files of models with recurrent layers write the texts that transformers writes, drafted or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.loading.load import load_model
from hybrid_gguf import hybrid_model, write_hybrid
from private_cache import private_cache

PROMPT, NUM_TOKENS = [5, 6, 7, 8, 9] * 5, 24


@pytest.mark.parametrize("family", ["lfm2", "qwen35", "granitehybrid", "falcon-h1", "nemotron_h_moe"])
def test_a_file_writes_the_texts_of_its_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    model = hybrid_model(family)
    write_hybrid(family, tmp_path / "model.gguf", model=model)
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    loaded = load_model(tmp_path / "model.gguf", dtype="float32")
    for draft in ("none", "ngram"):
        llm = LLM(loaded, draft)
        for _ in range(2):  # the second one may continue a kept prefix
            assert list(llm.generate([PROMPT], params)[0].token_ids) == expected, draft
