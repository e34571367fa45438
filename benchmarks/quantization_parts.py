"""Perplexity cost of each part of 8-bit weights and activations: each part omitted in turn.

    python benchmarks/quantization_parts.py MODEL_FOLDER TEXT_FILE --limit 2048 --output FILE

The float32 model of transformers, with weights rounded to 8 bits with a scale for each output, and inputs to 16 bits
with a scale for each row, as the native kernels do it, or to 8; compared with itself unrounded, over windows of 1024
tokens that overlap by half.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WINDOW, STEP = 1024, 512
NOTHING: frozenset[str] = frozenset()
QKV = frozenset({"q_proj", "k_proj", "v_proj"})
PARTS = QKV | {"o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
LARGEST_WEIGHT, LARGEST_INPUT = 127, 127 * 256 + 127
BYTES: dict[str, Any] = {"largest_input": 127}
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "inputs whole": {"whole_inputs": PARTS},
    "weights whole": {"whole_weights": True},
    "weights in groups of 64": {"weight_group": 64},
    "inputs of 8 bits": BYTES,
    "inputs of 8 bits, down whole": BYTES | {"whole": frozenset({"down_proj"})},
    "inputs of 8 bits, those of down whole": BYTES | {"whole_inputs": frozenset({"down_proj"})},
    "inputs of 8 bits, head whole": BYTES | {"whole": frozenset({"lm_head"})},
    "inputs of 8 bits, down and head whole": BYTES | {"whole": frozenset({"down_proj", "lm_head"})},
    "inputs of 8 bits, output whole": BYTES | {"whole": frozenset({"o_proj"})},
    "inputs of 8 bits, qkv whole": BYTES | {"whole": QKV},
    "inputs of 8 bits, gate and up whole": BYTES | {"whole": frozenset({"gate_proj", "up_proj"})},
    "inputs of 8 bits in groups of 64": BYTES | {"input_group": 64},
    "inputs of 8 bits and weights in groups of 64": BYTES | {"input_group": 64, "weight_group": 64},
}


def rounded(x: Tensor, *, largest: int, group: int | None) -> Tensor:
    parts = x if group is None or x.shape[-1] % group else x.reshape(*x.shape[:-1], -1, group)
    scale = parts.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return ((parts / scale).round() * scale).reshape(x.shape)


def forward(x: Tensor, *, weight: Tensor, bias: Tensor | None, largest: int | None, group: int | None) -> Tensor:
    return F.linear(x if largest is None else rounded(x, largest=largest, group=group), weight, bias)


def set_up(
    model: nn.Module,
    *,
    whole: frozenset[str] = NOTHING,
    whole_inputs: frozenset[str] = NOTHING,
    whole_weights: bool = False,
    largest_input: int = LARGEST_INPUT,
    input_group: int | None = None,
    weight_group: int | None = None,
) -> None:
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            part = name.rpartition(".")[2]
            weight = layer.weight
            if not whole_weights and part not in whole:
                weight = rounded(weight, largest=LARGEST_WEIGHT, group=weight_group)
            largest = None if part in whole | whole_inputs else largest_input
            layer.forward = partial(forward, weight=weight, bias=layer.bias, largest=largest, group=input_group)


@torch.inference_mode()
def read(model: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    losses, likeliest, known = [], [], 1
    for begin in range(0, max(1, len(ids) - STEP), STEP):
        part = ids[begin : begin + WINDOW]
        logits = model(torch.tensor([part])).logits[0, known - begin - 1 : -1].log_softmax(-1)
        coming = torch.tensor(part[known - begin :])
        losses.append(-logits[torch.arange(len(coming)), coming])
        likeliest.append(logits.argmax(-1))
        known = begin + len(part)
    return torch.cat(losses), torch.cat(likeliest)


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("text", type=Path)
    parser.add_argument("--limit", type=int, default=2048)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.float32, trust_remote_code=False).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(given.folder, trust_remote_code=False)
    ids = tokenizer(given.text.read_text("utf-8"), add_special_tokens=False).input_ids[: given.limit]
    base, picks = read(model, ids)
    lines = [{"kind": "header", "model": Path(given.folder).name, "num_tokens": len(ids), "torch": torch.__version__}]
    for name, changes in VARIANTS.items():
        with torch.inference_mode():
            set_up(model, **changes)
        found, others = read(model, ids)
        gap = (found - base).double()
        error = float(gap.std()) / math.sqrt(len(gap))
        other = float((others != picks).double().mean())
        lines.append(
            {"kind": "part", "name": name, "ratio": math.exp(float(gap.mean())), "error": error, "other": other}
        )
        print(json.dumps(lines[-1]), flush=True)
    if given.output is not None:
        given.output.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
