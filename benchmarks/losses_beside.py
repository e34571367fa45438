"""Perplexity and likeliest tokens of several kinds of weights, beside llama.cpp on the same GGUF files.

    python benchmarks/losses_beside.py --base smollm2-135m-instruct --ours 'int4=smollm2-135m-instruct@int4' \\
        --ours 'Q4_0=smollm2-q4_0.gguf' --text LICENSE --limit 500 \\
        --peer 'llama.cpp Q4_0=PYTHON benchmarks/peers/llama_losses.py smollm2-q4_0.gguf --threads 2' \\
        --out benchmarks/results/four-bits-losses.jsonl

The base are the model's own weights in float32. All read the same tokens once, without a token before the text. A peer
whose name ends with that of weights of ours is also compared with these: the share of positions with the same likeliest
token.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import torch

from draftree.lab.bench.records import sha256_of
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel, tokenizer_of
from draftree.loading.provenance import machine, now, versions
from draftree.models.base import Extend, Pass

FIRST = 16
"""Tokens of the text that are only read."""


def ours(loaded: LoadedModel, ids: list[int]) -> dict[str, Any]:
    model = loaded.model
    slot = model.open()
    scores = model.run(Pass([Extend(slot, ids, range(-1, len(ids) - 1))])).logits.tensor()[FIRST - 1 : -1].double()
    model.close(slot)
    wanted = torch.tensor(ids[FIRST:])
    losses = -scores.log_softmax(-1)[torch.arange(len(wanted)), wanted]
    return {"losses": losses.tolist(), "likeliest": scores.argmax(-1).tolist()}


def of_peer(command: str, ids: list[int]) -> dict[str, Any]:
    request = json.dumps({"ids": ids, "first": FIRST}) + "\n"
    done = subprocess.run(shlex.split(command), input=request, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--ours", action="append", default=[])
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    base = load_model(given.base, dtype="float32")
    tokenizer = tokenizer_of(base, None)
    assert tokenizer is not None, "the base has a tokenizer"
    text = given.text.read_text("utf-8")
    ids = list(tokenizer.encode(text, add_special_tokens=False)[: given.limit])
    found = {"float32": ours(base, ids)}
    del base
    for spec in given.ours:
        name, _, rest = spec.partition("=")
        model, _, quantization = rest.partition("@")
        found[name] = ours(load_model(model, quantization=quantization or None), ids)
    for spec in given.peer:
        name, _, command = spec.partition("=")
        found[name] = of_peer(command, ids)
    known = found["float32"]["likeliest"]
    rows = []
    for name, one in found.items():
        count = len(one["losses"])
        agreement = sum(a == b for a, b in zip(one["likeliest"], known, strict=True)) / count
        rows.append({"weights": name, "perplexity": math.exp(sum(one["losses"]) / count), "likeliest": agreement})
        same = [own for own in found if own != name and name.endswith(f" {own}")]
        if same:
            pairs = zip(one["likeliest"], found[same[0]]["likeliest"], strict=True)
            rows[-1]["likeliest_of_ours"] = sum(a == b for a, b in pairs) / count
        print(f"{name:24} {rows[-1]['perplexity']:8.3f} {100 * agreement:6.1f}%", rows[-1].get("likeliest_of_ours", ""))
    if given.out is not None:
        header = {
            "job": "losses-beside",
            "date": now(),
            "machine": machine(torch.device("cpu")),
            "versions": versions(),
        }
        header |= {"base": Path(given.base).name, "tokens": len(ids) - FIRST}
        header |= {"text": {"name": given.text.name, "sha256": sha256_of(text)}}
        with given.out.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(line) + "\n" for line in (header, *rows))


if __name__ == "__main__":
    main()
