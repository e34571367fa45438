"""Tokens that end a text of a GGUF file: declared ones, and markers of turns that the file does not declare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from block_files import written
from draftree import LLM, SamplingParams

FIRST = 259
"""Id of the first marker."""


@pytest.mark.parametrize("kernels", ["auto", "torch"])  # blocks of the file, and plain weights made from it
@pytest.mark.parametrize(
    ("markers", "header", "ends"),
    [
        (["<|endoftext|>", "<|im_end|>", "<|im_start|>"], {}, {0, 1}),
        (["<s>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"], {}, {0, 1, 2, 3}),
        (["<eos>", "<a>", "<b>", "<c>"], {"eot_token_id": FIRST + 1, "eom_token_id": FIRST + 3}, {0, 1, 3}),
        (["<|endoftext|>", "<|end|>", "<|assistant|>"], {}, {0, 1}),
        (["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"], {}, {0, 1, 3}),
    ],
)
def test_texts_end_with_a_turn(
    markers: list[str], header: dict[str, Any], ends: set[int], kernels: str, tmp_path: Path
) -> None:
    llm = LLM(written(tmp_path, byte_level="gpt-2", markers=markers, **header), dtype="float32", kernels=kernels)
    for place in range(len(markers)):
        params = SamplingParams(logit_bias={FIRST + place: 100}, temperature=0, max_tokens=4)
        (done,) = llm.generate("ab", params)
        if place in ends:
            assert (done.finish_reason, len(done.token_ids), done.text) == ("stop", 1, "")
        else:
            assert done.finish_reason == "length"
