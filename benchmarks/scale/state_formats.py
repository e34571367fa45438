#!/usr/bin/env python3
"""Share of positions at which rounded hidden states of a split by layers lead to the same greedy token.

Prompts are read once with all layers in one process and once with states rounded after the first N layers: on the way
up only, as with picks on the server, and on the way down, too. `int8, one scale` is int8 without the values that the
format keeps, for comparison.

    python benchmarks/scale/state_formats.py smollm2-135m-instruct --split 1 2 4 8 15

Writes one JSON line per number of layers and format to --out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from end_and_cloud import prompts
from torch import Tensor

from draftree.loading.load import load_model
from draftree.loading.loaded import load_tokenizer
from draftree.loading.provenance import machine, now, versions
from draftree.loading.resolve import resolve_model
from draftree.models.base import Extend, Pass
from draftree.models.kv.slotted import SlottedModel
from draftree.remote.split.messages import StateFormat

MOST = 127


def rounded(kind: str) -> Callable[[Tensor], Tensor]:
    """States after the way in a format."""
    if kind == "int8, one scale":
        return one_scale

    def change(states: Tensor) -> Tensor:
        form = StateFormat(kind, states.shape[1])
        return form.unpack(form.pack(states).tobytes(), len(states))

    return change


def one_scale(states: Tensor) -> Tensor:
    """States as multiples of their largest size / 127, row by row."""
    scales = states.abs().amax(dim=1, keepdim=True) / MOST
    return (states / scales).round() * scales


def choices(model: SlottedModel, tokens: list[int], split: int, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Greedy tokens at every position: of the model, with states rounded on the way up, and in both directions."""
    last, chain = model.num_layers, range(-1, len(tokens) - 1)
    slot = model.open()
    whole = model.run(Pass([Extend(slot, tokens, chain)], capture=(split,)))
    assert whole.hidden is not None, "states were captured"
    middle, wanted = whole.hidden[:, 0].float().clone(), whole.logits.tensor().argmax(dim=-1)
    model.truncate(slot, 0)
    rest = model.run_rest([Extend(slot, [0] * len(tokens), chain)], change(middle), first=split, capture=(last,))
    assert rest.hidden is not None, "states were captured"
    up, end = rest.logits.tensor().argmax(dim=-1), rest.hidden[:, 0].float().clone()
    model.close(slot)
    return [wanted, up, model.read_out(change(end)).tensor().argmax(dim=-1)]


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--split", type=int, nargs="+", default=[1, 2, 4, 8, 15])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("--file", type=Path, help="a workload, as for draftree bench run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model, tokenizer = load_model(given.model).model, load_tokenizer(resolve_model(given.model))
    assert isinstance(model, SlottedModel), "the layers of the model can be divided"
    assert tokenizer is not None, "the model has a tokenizer"
    texts = [list(tokenizer.encode(text))[: given.tokens] for text in prompts(given.prompts, given.file)]
    facts = {
        "part": "formats",
        "model": given.model,
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "time": now(),
    }
    for split in given.split:
        for kind in ("float32", "bfloat16", "int8", "int8, one scale"):
            total = up = both = 0
            for tokens in texts:
                wanted, own_up, own_both = choices(model, tokens, split, rounded(kind))
                total += len(tokens)
                up += int((own_up == wanted).sum())
                both += int((own_both == wanted).sum())
            row: dict[str, Any] = {"split": split, "states": kind, "positions": total}
            row |= {"equal_up": up / total, "equal_both": both / total}
            print(json.dumps(row), flush=True)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(facts | row) + "\n")


if __name__ == "__main__":
    main()
