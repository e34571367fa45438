"""Beam search of CTranslate2 as a process: a JSON line with prompt, width and tokens for each search.

    python -m venv build/peers/ctranslate2
    build/peers/ctranslate2/bin/pip install ctranslate2 transformers torch
    build/peers/ctranslate2/bin/python benchmarks/peers/ctranslate2_beams.py convert FOLDER build/peers/weights/ct2
    build/peers/ctranslate2/bin/python benchmarks/peers/ctranslate2_beams.py build/peers/weights/ct2 [--threads 2]

The search is that of `benchmarks/beam_search.py` and `benchmarks/seq2seq_beams.py`: the tokens of the prompt, or of the
source, are given, and no token ends a text. A folder without a tokenizer is converted with a made-up vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path


class Words:
    """A vocabulary of numbered words with the padding token as the last one, for random models."""

    eos_token, bos_token, unk_token, pad_token = "w0", "w0", "w1", "<pad>"

    def __init__(self, size: int) -> None:
        self._names = [*(f"w{number}" for number in range(size - 1)), self.pad_token]

    def get_vocab(self) -> dict[str, int]:
        """Return the ids by name."""
        return {name: number for number, name in enumerate(self._names)}

    def convert_ids_to_tokens(self, number: int) -> str:
        """Return a name."""
        return self._names[number]


def convert(folder: str, target: str) -> None:
    """Convert a model of transformers."""
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):  # type: ignore[misc]
        def load_tokenizer(self, kind: object, name: str, **given: object) -> object:
            if any(Path(folder).glob("tokenizer*")):
                return super().load_tokenizer(kind, name, **given)
            return Words(json.loads((Path(folder) / "config.json").read_text("utf-8"))["vocab_size"])

    Converter(folder).convert(target, force=True)


def serve(folder: str, threads: int) -> None:
    """Answer the searches of standard input."""
    import ctranslate2

    shared = Path(folder) / "shared_vocabulary.json"
    reads_source = shared.is_file()
    kind = ctranslate2.Translator if reads_source else ctranslate2.Generator
    model = kind(folder, device="cpu", compute_type="float32", intra_threads=threads)
    names: list[str] = json.loads((shared if reads_source else Path(folder) / "vocabulary.json").read_text("utf-8"))
    numbers = {name: number for number, name in enumerate(names)}
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        prompt, count = [[names[token] for token in asked["prompt"]]], asked["tokens"]
        common = {"beam_size": asked["width"], "length_penalty": 1.0, "max_batch_size": 1}
        if reads_source:
            limits = {"max_decoding_length": count, "min_decoding_length": count}
            written = model.translate_batch(prompt, **common, **limits)[0].hypotheses[0]
        else:
            limits = {"max_length": count, "min_length": count, "include_prompt_in_result": False}
            written = model.generate_batch(prompt, **common, **limits)[0].sequences[0]
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": [numbers[name] for name in written]}), flush=True)


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
