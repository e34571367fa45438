"""Damaged GGUF files give one clear error: no crash, no other exception, no memory beyond a small bound."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gguf_mutants
from block_files import written
from draftree.core.errors import ModelLoadError
from draftree.weights.gguf_file import MAX_ITEMS, GgufFile
from gguf_mutants import header, key, tensor, text
from private_cache import private_cache

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4
HUGE = 1 << 62


def listed(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * depth + listed(UINT8, 0)


HEADERS: dict[str, tuple[bytes, str]] = {
    "a key twice": (header((key("a", UINT8, b"\1"), key("a", UINT8, b"\2"))), "the key 'a' twice"),
    "a tensor twice": (header((), (tensor("a", (8,)), tensor("a", (8,))), data=32), "the tensor 'a' twice"),
    "lists nested without end": (header((key("a", ARRAY, nested(50_000)),)), "nested more than"),
    "a list of very many bytes": (header((key("a", ARRAY, listed(UINT8, HUGE)),)), f"claims {HUGE} items"),
    "a list of very many strings": (header((key("a", ARRAY, listed(STRING, HUGE)),)), f"claims {HUGE} items"),
    "a list of very many lists": (header((key("a", ARRAY, listed(ARRAY, HUGE)),)), f"claims {HUGE} items"),
    "a long list": (
        header((key("a", ARRAY, listed(UINT8, MAX_ITEMS + 1, bytes(MAX_ITEMS + 1))),)),
        f"of {MAX_ITEMS} at most",
    ),
    "a list of strings beyond the end": (header((key("a", ARRAY, listed(STRING, 1000)),)), "middle of its header"),
    "a string beyond the end": (header((key("a", STRING, struct.pack("<Q", HUGE)),)), "middle of its header"),
    "very many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "middle of its header"),
    "very many tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "middle of its header"),
    "a value of an unknown type": (header((key("a", 77, b""),)), "unknown type 77"),
    "a list of an unknown type": (header((key("a", ARRAY, listed(77, 1)),)), "unknown type 77"),
    "an alignment that is text": (header((key("general.alignment", STRING, text("x")),)), "alignment of tensors to x"),
    "an alignment of nothing": (header((key("general.alignment", UINT32, bytes(4)),)), "alignment of tensors to 0"),
    "an alignment that is a list": (header((key("general.alignment", ARRAY, listed(UINT8, 0)),)), "alignment of"),
    "a tensor of no size": (header((), (tensor("a", (0, 32)),)), "is not made of blocks"),
    "a tensor without dimensions": (header((), (tensor("a", ()),)), "is not made of blocks"),
    "a tensor of many dimensions": (header((), (tensor("a", (1,) * 9),)), "9 dimensions"),
    "a tensor of a huge size": (header((), (tensor("a", (1 << 63, 1 << 63, 1 << 63)),)), "would end at byte"),
    "a tensor far away": (header((), (tensor("a", (8,), offset=HUGE),)), "would end at byte"),
    "a tensor at an odd place": (header((), (tensor("a", (8,), offset=4),), data=64), "multiple of 32"),
    "a tensor of an unknown kind": (header((), (tensor("a", (32,), kind=9999),)), "unknown type 9999"),
    "part of a block": (header((), (tensor("a", (33,), kind=8),), data=64), "not made of blocks of 32"),
    "a tensor beyond the end": (header((), (tensor("a", (8,)),)), "would end at byte"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_headers(name: str, tmp_path: Path) -> None:
    raw, words = HEADERS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError, match=f"is not a readable GGUF file: .*{words}"):
        GgufFile(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # kilobytes


def run_mutants(action: str, path: Path, count: int, folder: Path) -> dict[str, Any]:
    own = {"DRAFTREE_CACHE": private_cache(folder / "cache"), "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, gguf_mutants.__file__, action, str(path), "0", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | own)
    assert done.stdout, f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not found["wrong"], found
    assert done.returncode == 0
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_changed_headers_are_read_or_refused(tmp_path: Path) -> None:
    outcomes = run_mutants("parse", written(tmp_path, kind="Q4_0"), 4000, tmp_path)["outcomes"]
    assert outcomes["ModelLoadError"] > 500
    assert outcomes["read"] > 200


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_changed_files_are_loaded_or_refused(family: str, tmp_path: Path) -> None:
    outcomes = run_mutants("load", written(tmp_path, family, "Q5_0"), 60, tmp_path)["outcomes"]
    assert outcomes["ModelLoadError"] > 10
