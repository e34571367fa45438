"""Resident memory of models that run on the blocks of their GGUF files, for a first start and a second one.

    python benchmarks/resident.py smollm2-q4_0.gguf tinyllama-q4_k_m.gguf --warm stories15m-q8_0.gguf --out FILE

Every start is a process of its own, whose cache is a new folder that both starts of a file share. It first loads the
small file `--warm` and runs a pass, so that code, libraries and buffers are in memory, then loads the file. The growth
of the resident set, from /proc/self/smaps, is divided into private memory and pages that are mapped from files;
`ratio` is that of private memory and mapped weights to the size of the file. `ratio_after_pass` is the same after a
pass over 64 tokens, with keys, values, rotary tables and logits. Needs Linux.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

SMAPS = Path("/proc/self/smaps")
ROWS = 64
WEIGHT_FILES = (".gguf", ".bin", ".safetensors")


def resident() -> Counter[str]:
    """Return the resident bytes of this process: private memory, files of weights, other files."""
    found: Counter[str] = Counter()
    kind = ""
    for line in SMAPS.read_text("utf-8", errors="replace").splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            path = rest.split(maxsplit=4)[4] if len(rest.split(maxsplit=4)) > 4 else ""
            is_file = path.startswith("/")
            kind = "private" if not is_file else "weight_files" if path.endswith(WEIGHT_FILES) else "other_files"
        elif first == "Anonymous:" and kind != "private":  # pages of a file that were written to
            changed = 1024 * int(rest.split()[0])
            found["private"] += changed
            found[kind] -= changed
        elif first == "Rss:":
            found[kind] += 1024 * int(rest.split()[0])
    return found


def grown(before: Counter[str]) -> dict[str, int]:
    """Return the growth since then in bytes."""
    now = resident()
    return {name: now[name] - before[name] for name in ("private", "weight_files", "other_files")}


def in_memory(growth: dict[str, int]) -> int:
    """Return private memory and mapped weights; code of libraries does not count."""
    return growth["private"] + growth["weight_files"]


def load(path: Path) -> Any:
    """Load a model."""
    from draftree.loading.load import load_model

    loaded = load_model(path)
    assert loaded.quantization == "gguf", "it runs on the blocks of its file"
    return loaded


def run(loaded: Any) -> None:
    """Run a pass over a text."""
    from draftree.models.base import Extend, Pass

    slot, tokens = loaded.model.open(), [5 + row for row in range(ROWS)]
    loaded.model.run(Pass([Extend(slot, tokens, range(-1, ROWS - 1), logits_at=[ROWS - 1])])).logits.tensor()
    loaded.model.close(slot)


def measure(path: Path, warm: Path) -> dict[str, Any]:
    """Return the growth of this process by a model."""
    small = load(warm)
    run(small)
    gc.collect()
    before = resident()
    loaded = load(path)
    growth = grown(before)
    run(loaded)
    after = grown(before)
    size = path.stat().st_size
    found = {"model": path.name, "file": size, "weights": loaded.model.footprint.weights, **growth}
    found |= {"ratio": round(in_memory(growth) / size, 3), "ratio_after_pass": round(in_memory(after) / size, 3)}
    del small
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--warm", required=True, type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.models[0], given.warm)))
        return
    rows = []
    for model in given.models:
        with tempfile.TemporaryDirectory() as cache:
            for start in ("first", "second"):
                command = [sys.executable, __file__, str(model), "--warm", str(given.warm), "--child"]
                environment = os.environ | {"DRAFTREE_CACHE": cache}
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                rows.append({"start": start} | json.loads(done.stdout.splitlines()[-1]))
                print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        import torch

        from draftree.loading.provenance import machine, now, versions

        header = {"job": "resident", "date": now(), "machine": machine(torch.device("cpu")), "versions": versions()}
        given.out.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)), "utf-8")


if __name__ == "__main__":
    main()
