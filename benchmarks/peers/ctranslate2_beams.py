"""Beam search of CTranslate2 as a process: a JSON line with prompt, width and tokens for each search.

    python -m venv build/peers/ctranslate2
    build/peers/ctranslate2/bin/pip install ctranslate2 transformers torch
    build/peers/ctranslate2/bin/python benchmarks/peers/ctranslate2_beams.py convert FOLDER build/peers/weights/ct2
    build/peers/ctranslate2/bin/python benchmarks/peers/ctranslate2_beams.py build/peers/weights/ct2 [--threads 2]

The search is that of `benchmarks/beam_search.py`: the tokens of the prompt are given, and no token ends a text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time


def convert(folder: str, target: str) -> None:
    """Convert a model of transformers."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(folder).convert(target, force=True)


def serve(folder: str, threads: int) -> None:
    """Answer the searches of standard input."""
    import ctranslate2

    generator = ctranslate2.Generator(folder, device="cpu", compute_type="float32", intra_threads=threads)
    with open(f"{folder}/vocabulary.json", encoding="utf-8") as file:
        names: list[str] = json.load(file)
    numbers = {name: number for number, name in enumerate(names)}
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        (found,) = generator.generate_batch(
            [[names[token] for token in asked["prompt"]]],
            beam_size=asked["width"],
            max_length=asked["tokens"],
            min_length=asked["tokens"],
            include_prompt_in_result=False,
            length_penalty=1.0,
            max_batch_size=1,
        )
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": [numbers[name] for name in found.sequences[0]]}), flush=True)


def main() -> None:
    """Convert, or answer."""
    if sys.argv[1:2] == ["convert"]:
        convert(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    serve(given.folder, given.threads)


if __name__ == "__main__":
    main()
