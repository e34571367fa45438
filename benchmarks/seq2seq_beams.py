"""Beam search of encoder-decoder models in the shapes of real ones, with random weights: times beside transformers.

    python benchmarks/seq2seq_beams.py make marian build/marian
    python benchmarks/seq2seq_beams.py times t5-small marian whisper-tiny [--methods torch C] [--peer marian=COMMAND] [--out FILE]

The shapes are those of T5-small, the Marian models of OPUS-MT and Whisper-tiny. The source is random tokens or features,
no token ends a text, and the methods take turns. `make` writes the model for another engine (`peers/ctranslate2_beams.py`).
"""  # noqa: E501

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beam_methods import Peer

from draftree import LLM, BeamSearchParams
from draftree.loading.provenance import load_average, machine, now, versions

SHAPES = ("t5-small", "marian", "whisper-tiny")
Search = Callable[[int, int], tuple[float, list[int]]]
"""Function from width and number of tokens to seconds and the best text."""


def build(shape: str) -> Any:
    """Return a random model in a shape."""
    import transformers

    torch.manual_seed(0)
    if shape == "t5-small":
        sizes = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "vocab_size": 32128}
        ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **ids)).eval()
    parts = ("encoder", "decoder")
    if shape == "marian":
        sizes = {"d_model": 512, "vocab_size": 58101, "max_position_embeddings": 512, "init_std": 0.05}
        sizes |= {f"{part}_{name}": size for part in parts for name, size in (("layers", 6), ("ffn_dim", 2048),
                  ("attention_heads", 8))}  # fmt: skip
        ids = {"pad_token_id": 58100, "eos_token_id": 0, "decoder_start_token_id": 58100, "forced_eos_token_id": None}
        config = transformers.MarianConfig(**sizes, **ids, activation_function="swish", scale_embedding=True)
        return transformers.MarianMTModel(config).eval()
    sizes = {"d_model": 384, "vocab_size": 51865, "num_mel_bins": 80, "init_std": 0.05}
    sizes |= {f"{part}_{name}": size for part in parts for name, size in (("layers", 4), ("ffn_dim", 1536),
              ("attention_heads", 6))}  # fmt: skip
    ids = {"pad_token_id": 50257, "eos_token_id": 50257, "bos_token_id": 50257, "decoder_start_token_id": 50258}
    config = transformers.WhisperConfig(**sizes, **ids, begin_suppress_tokens=None, suppress_tokens=None)
    return transformers.WhisperForConditionalGeneration(config).eval()


def source_of(shape: str, length: int) -> Any:
    """Return a source: token ids, or features."""
    generator = np.random.default_rng(1)
    if shape == "whisper-tiny":
        return generator.normal(size=(80, 3000)).astype(np.float32)
    return [*generator.integers(5, 32000, size=length - 1).tolist(), 1 if shape == "t5-small" else 0]


OURS: dict[str, dict[str, Any]] = {
    "torch": {"kernels": "torch", "dtype": "float32"},
    "C": {"kernels": "native", "dtype": "float32"},
    "C bfloat16": {"kernels": "native", "dtype": "bfloat16"},
    "C int8": {"kernels": "native", "dtype": "bfloat16", "quantization": "int8"},
}
"""Our methods with their options; only those in float32 have to find the text of transformers."""


def ours(folder: Path, source: Any, options: dict[str, Any]) -> Search:
    """Return our search."""
    llm = LLM(folder, "none", **options)

    def search(width: int, tokens: int) -> tuple[float, list[int]]:
        params = BeamSearchParams(beam_width=width, max_new_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        (found,) = llm.beam_search([source], params)
        return time.perf_counter() - start, list(found.best.tokens)

    return search


def theirs(shape: str, folder: Path, source: Any) -> Search:
    """Return transformers' search."""
    from transformers import GenerationMixin

    model = type(build(shape)).from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    model.generation_config.eos_token_id = None
    name = "input_features" if shape == "whisper-tiny" else "input_ids"
    given = {name: torch.as_tensor(source)[None]}

    def search(width: int, tokens: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        with torch.inference_mode():
            # without Whisper's own loop over windows, which needs an end token
            out = GenerationMixin.generate(model, **given, num_beams=width, do_sample=False, max_new_tokens=tokens)
        return time.perf_counter() - start, out[0, 1:].tolist()

    return search


def measure(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each shape, width and method."""
    peers = dict(one.split("=", 1) for one in given.peer)
    for shape in given.shapes:
        source = source_of(shape, given.source)
        with tempfile.TemporaryDirectory() as folder:
            build(shape).save_pretrained(folder)
            methods = {"transformers": theirs(shape, Path(folder), source)}
            methods |= {name: ours(Path(folder), source, OURS[name]) for name in given.methods}
            if shape in peers:
                methods["CTranslate2"] = _peer(peers[shape], source)
            for method in methods.values():
                method(2, 3)
            yield from _turns(shape, methods, given)


def _turns(shape: str, methods: dict[str, Search], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for width in given.widths:
        found: dict[str, list[tuple[float, list[int]]]] = {name: [] for name in methods}
        for _, (name, method) in itertools.product(range(given.repeats), methods.items()):
            found[name].append(method(width, given.tokens))
        first = found["transformers"]
        for name, runs in found.items():
            yield {
                "kind": "time", "shape": shape, "width": width, "tokens": given.tokens, "method": name,
                "median_s": statistics.median(seconds for seconds, _ in runs),
                "ratio": statistics.median(base / own for (base, _), (own, _) in zip(first, runs, strict=True)),
                "same_text": all(text == first[0][1] for _, text in runs),
            }  # fmt: skip


def _peer(command: str, source: list[int]) -> Search:
    peer = Peer(command)

    def search(width: int, tokens: int) -> tuple[float, list[int]]:
        found = peer(source, width, tokens)
        return found.seconds, found.tokens

    return search


def main() -> None:
    """Write a model, or measure, print a table and write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("make", "times"))
    parser.add_argument("shapes", nargs="+", help="shapes; for make, a shape and a folder")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 4, 8])
    for name, default in (("source", 40), ("tokens", 32), ("repeats", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--methods", nargs="+", choices=OURS, default=["torch", "C"])
    parser.add_argument("--peer", action="append", default=[], metavar="SHAPE=COMMAND")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.job == "make":
        build(given.shapes[0]).save_pretrained(given.shapes[1])
        return
    lines = [{
        "kind": "header", "job": "seq2seq_beams", "date": now(), "machine": machine(torch.device("cpu")),
        "versions": versions(), "load_average": load_average(),
        **{name: value for name, value in vars(given).items() if name != "out"},
    }]  # fmt: skip
    for line in measure(given):
        lines.append(line)
        print(f"{line['shape']:<13} {line['width']:>3} {line['method']:<13} {line['median_s']:.3f} s  "
              f"ratio {line['ratio']:.2f}  same text {line['same_text']}", flush=True)  # fmt: skip
        if given.out is not None:
            given.out.write_text("".join(f"{json.dumps(one)}\n" for one in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
