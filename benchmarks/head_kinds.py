"""Drafts by random heads of every kind, by native kernels and in PyTorch, for a random target in the shape of a model.

python benchmarks/head_kinds.py smollm2-135m --quantization int8 --kinds mtp dflash --out FILE

Times do not depend on the weights. Both sides have a target of their own and take turns text by text. Prints and
appends one JSON line for each kind and side: medians of rounds in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from random_models import SHAPES, Shape, build

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.drafters import head as head_drafter
from draftree.heads import native_passes
from draftree.heads.base import Head
from draftree.heads.calibration import read_rates
from draftree.heads.config import HeadConfig
from draftree.heads.folders import head_class
from draftree.heads.vocabulary import DraftVocabulary
from draftree.models.native.build import NativeUnavailableError

LEVELS = 4
PROMPT = [(7 * i + 11) % 3000 + 5 for i in range(40)]


def config_of(kind: str, shape: Shape) -> HeadConfig:
    """A head with layers of the target's shape, and its embedding and output."""
    hidden, vocab, last = shape.hidden_size, shape.vocab_size, shape.num_hidden_layers
    sizes: dict[str, Any] = {
        "kind": kind, "target_hidden": hidden, "hidden": hidden, "vocab_size": vocab, "draft_vocab_size": vocab,
        "depth": LEVELS, "features": (-1,) if kind in ("eagle", "mtp", "medusa") else (2, last // 2, last - 3),
    }  # fmt: skip
    if kind == "medusa":
        return HeadConfig(**sizes, num_layers=0, block_size=LEVELS, head_layers=1)
    sizes |= {
        "num_heads": shape.num_attention_heads, "num_kv_heads": shape.num_key_value_heads, "head_dim": shape.head_dim,
        "intermediate": shape.intermediate_size, "own_output": False,
    }  # fmt: skip
    block = {"num_layers": 3, "qk_norm": True, "mask_token_id": 5}
    others: dict[str, dict[str, Any]] = {
        "mtp": {"layer": {"model_type": "llama", **vars_of(shape), "rms_norm_eps": 1e-6}},
        "peagle": {"mask_token_id": 5},
        "dflash": {**block, "block_size": LEVELS + 1, "anchor_predicts": False},
        "dspark": {
            **block, "block_size": LEVELS, "markov_rank": 256, "has_confidence": True, "confidence_with_markov": True,
        },
    }  # fmt: skip
    return HeadConfig(**sizes | others.get(kind, {}))


def vars_of(shape: Shape) -> dict[str, Any]:
    return {name: getattr(shape, name) for name in Shape.__dataclass_fields__}


def random_head(config: HeadConfig) -> Head:
    head = head_class(config.kind)(config, DraftVocabulary.full(config.vocab_size)).to(torch.bfloat16)
    with torch.no_grad():
        for part in head.parameters():
            if part.dim() > 1:
                part.normal_(0, 0.02)
    return head.eval().requires_grad_(False)


def drafting(
    target: Path, config: HeadConfig, *, is_native: bool, quantization: str | None
) -> tuple[LLM, list[RoundRecord]]:
    """A target with a random head, and its rounds."""
    rounds: list[RoundRecord] = []
    with ExitStack() as stack:
        rates = read_rates(target)
        replaced: dict[str, Any] = {
            "head_folder": lambda _: target,
            "read_config": lambda _: config,
            "read_head": lambda *_, **__: random_head(config),
            "read_rates": lambda _: rates,
            "read_calibration": lambda _: None,
        }
        stack.enter_context(mock.patch.multiple(head_drafter, **replaced))
        if not is_native:
            refusal = mock.Mock(side_effect=NativeUnavailableError("measured in PyTorch"))
            stack.enter_context(mock.patch.multiple(native_passes, NativePasses=refusal, NativeBlockPasses=refusal))
        options = {} if quantization is None else {"quantization": quantization}
        llm = LLM(target, f"head:x,k={LEVELS}", plan="fixed", dtype="bfloat16", on_round=rounds.append, **options)
    return llm, rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--quantization")
    parser.add_argument(
        "--kinds", nargs="+", default=["eagle", "eagle3", "mtp", "peagle", "dflash", "dspark", "medusa"]
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder)
        build(shape, context=2048, device=torch.device("cpu"), dtype=torch.bfloat16).save_pretrained(target)
        for kind in options.kinds:
            config = config_of(kind, shape)
            sides = {
                name: drafting(target, config, is_native=name == "native", quantization=options.quantization)
                for name in ("native", "torch")
            }
            for _ in range(options.texts):
                for llm, _rounds in sides.values():
                    llm.generate([PROMPT], SamplingParams(max_tokens=16, temperature=0.0))
            for name, (_, rounds) in sides.items():
                known = [record for record in rounds if record.num_prompt_rows == 0 and record.sequences[0].drafted]
                seconds = {
                    part: [getattr(record, f"{part}_seconds") for record in known] for part in ("draft", "total")
                }
                line = {
                    "shape": options.shape, "quantization": options.quantization, "kind": kind, "kernels": name,
                    "threads": options.threads, "rounds": len(known),
                    **{f"{part}_ms": round(1e3 * statistics.median(row), 2) for part, row in seconds.items()},
                }  # fmt: skip
                print(json.dumps(line), flush=True)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
