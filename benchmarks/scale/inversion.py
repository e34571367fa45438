#!/usr/bin/env python3
"""Tokens that a server recovers from the hidden states of a split by layers, by the number of layers.

Two attempts on the states of prompts, as a server gets them:

    nearest   the token whose embedding has the largest cosine with the state, as they are, or with every dimension of
              both scaled to mean 0 and variance 1
    weights   the attacker has the first layers, as anyone has of a public model, and inverts token by token: every
              token of the vocabulary is tried after the recovered prefix, in the order of `nearest`, until a state is
              as near as the format of the states allows; if none is, the nearest of all

    python benchmarks/scale/inversion.py smollm2-135m-instruct --split 1 2 4 8 15 --states float32 int8

Writes one JSON line per number of layers, format and attempt to --out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from end_and_cloud import prompts
from torch import Tensor

from draftree.loading.first_layers import load_first_layers
from draftree.loading.loaded import load_tokenizer
from draftree.loading.provenance import machine, now, versions
from draftree.loading.resolve import resolve_model
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.options import ModelOptions
from draftree.remote.split.messages import StateFormat

CHUNK = 512
"""Tokens that are tried in one pass, as a tree of one level."""
NEAR = {"float32": 1e-3, "bfloat16": 2e-2, "int8": 5e-2}
"""Relative distance at which a state counts as found: a few times the rounding of the format."""


def states_of(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Output of the first layers for a text, shape (tokens, hidden)."""
    slot = model.open()
    job = Extend(slot, tokens, range(-1, len(tokens) - 1), logits_at=())
    hidden = model.run(Pass([job], capture=(model.num_layers,))).hidden
    model.close(slot)
    assert hidden is not None, "states were captured"
    return hidden[:, 0].float()


def nearest(embedding: Tensor, states: Tensor, count: int) -> Tensor:
    """Tokens in order of the cosine of their embeddings with each state, shape (states, count)."""
    unit = torch.nn.functional.normalize(embedding.float(), dim=-1)
    return (torch.nn.functional.normalize(states, dim=-1) @ unit.T).topk(count, dim=-1).indices


def scaled(values: Tensor) -> Tensor:
    """Values with mean 0 and variance 1 in every dimension: a few dimensions of states are far larger than others."""
    return (values - values.mean(dim=0)) / values.std(dim=0).clamp(min=1e-6)


def inverted(model: LanguageModel, embedding: Tensor, sent: Tensor, kind: str, count: int) -> tuple[list[int], int]:
    """The first tokens that an attacker with the first layers recovers, and how many he tried."""
    slot, found, num_tried = model.open(), [], 0
    order = nearest(scaled(embedding), scaled(sent), len(embedding))
    form = StateFormat(kind, sent.shape[1])
    for place, state in enumerate(sent[:count]):
        best, closest = -1, float("inf")
        for start in range(0, len(embedding), CHUNK):
            tried = order[place, start : start + CHUNK].tolist()
            job = Extend(slot, tried, [-1] * len(tried), logits_at=())
            hidden = model.run(Pass([job], capture=(model.num_layers,))).hidden
            model.commit(slot, ())
            assert hidden is not None, "states were captured"
            guesses = form.unpack(form.pack(hidden[:, 0]).tobytes(), len(tried))
            distances = (guesses - state).norm(dim=-1) / state.norm()
            num_tried += len(tried)
            if float(distances.min()) < closest:
                closest, best = float(distances.min()), tried[int(distances.argmin())]
            if closest < NEAR[kind]:
                break
        found.append(best)
        model.run(Pass([Extend(slot, [best], [-1], logits_at=())]))
        model.commit(slot, [0])
    model.close(slot)
    return found, num_tried


def rows(given: argparse.Namespace, split: int) -> list[dict[str, Any]]:
    """Rows of one number of layers."""
    device = torch.device("cpu")
    model = load_first_layers(ModelOptions(given.model, device=str(device)), split)
    tokenizer = load_tokenizer(resolve_model(given.model))
    assert tokenizer is not None, "the model has a tokenizer"
    texts = [list(tokenizer.encode(text))[: given.tokens] for text in prompts(given.prompts, given.file)]
    embedding, found = model.input_embedding().float(), []
    for kind in given.states:
        shares: dict[str, list[bool]] = {"nearest": [], "nearest, scaled": [], "weights": []}
        seconds, num_tried = 0.0, 0
        for place, tokens in enumerate(texts):
            states = states_of(model, tokens)
            form = StateFormat(kind, states.shape[1])
            sent = form.unpack(form.pack(states).tobytes(), len(states))
            guesses = {
                "nearest": nearest(embedding, sent, 1)[:, 0].tolist(),
                "nearest, scaled": nearest(scaled(embedding), scaled(sent), 1)[:, 0].tolist(),
            }
            if place < given.inverted:
                start = time.perf_counter()
                guesses["weights"], tried = inverted(model, embedding, sent, kind, given.inverted_tokens)
                num_tried, seconds = num_tried + tried, seconds + time.perf_counter() - start
            for name, tokens_found in guesses.items():
                shares[name] += [guess == token for guess, token in zip(tokens_found, tokens, strict=False)]
        for name, hits in shares.items():
            row = {"split": split, "states": kind, "attempt": name, "tokens": len(hits), "recovered": sum(hits)}
            if name == "weights" and hits:
                row |= {"tried_per_token": num_tried / len(hits), "seconds": seconds}
            if hits:
                found.append(row | {"share": sum(hits) / len(hits)})
    return found


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--split", type=int, nargs="+", default=[1, 2, 4, 8, 15])
    parser.add_argument("--states", nargs="+", default=["float32", "int8"])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--inverted", type=int, default=1, help="prompts for the attempt with weights")
    parser.add_argument("--inverted-tokens", type=int, default=12, help="of these prompts, from the first on")
    parser.add_argument("--tokens", type=int, default=48, help="of each prompt")
    parser.add_argument("--file", type=Path, help="a workload, as for draftree bench run")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    facts = {
        "part": "inversion",
        "model": given.model,
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "time": now(),
    }
    for split in given.split:
        for row in rows(given, split):
            print(json.dumps(row), flush=True)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(facts | row) + "\n")


if __name__ == "__main__":
    main()
