"""The measured peaks: as many products as are counted, with the instructions of passes."""

from __future__ import annotations

import functools
import platform
import re
import subprocess

import pytest
import torch

from draftree.lab.bench import passes
from draftree.lab.bench.passes import measure_speeds
from draftree.models.native.build import FLAGS, SOURCES, NativeUnavailableError, find_compiler
from draftree.models.native.library import library
from draftree.models.native.variants import VARIANTS

SOURCE = next(source for source in SOURCES if source.stem == "probe")
INSTRUCTIONS = {
    "amx": ("vfmadd", "tdpbf16ps", "tdpbssd", "vpdpbusd"),
    "avx512-bf16": ("vfmadd", "vdpbf16ps", "vpdpbusd", "vpdpbusd"),
    "avx512-vnni": ("vfmadd", "vfmadd", "vpdpbusd", "vpdpbusd"),
    "avx512": ("vfmadd", "vfmadd", "vpmaddwd", "vpmaddubsw"),
    "avx2-vnni": ("vfmadd", "vfmadd", "vpdpbusd", "vpdpbusd"),
    "avx2": ("vfmadd", "vfmadd", "vpmaddwd", "vpmaddubsw"),
}
"""The instructions of float32, bfloat16, int8 and int4 by variant."""
KINDS = ("float32", "bfloat16", "int8", "int4")
LEAST_CHAINS = 12
TILE_CHAINS = 4


@functools.cache
def functions_of(name: str) -> dict[str, str]:
    """The assembly of each function of a variant."""
    (flags,) = (variant.flags for variant in VARIANTS["x86_64"] if variant.name == name)
    try:
        command = [*find_compiler(), *FLAGS, *flags, "-S", "-o", "-", str(SOURCE)]
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    if done.returncode and any(words in done.stderr for words in ("unrecognized", "unknown", "bad value")):
        pytest.skip(done.stderr.splitlines()[0])
    assert not done.returncode, done.stderr
    parts = re.split(r"^draftree_(probe_\w+):$", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor's assembly")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_every_counted_product_is_computed_by_the_instruction_of_passes(name: str, kind: str) -> None:
    found = functions_of(name)
    body = found[f"probe_{kind}"]
    if same := re.search(r"^\s+jmp\s+draftree_(probe_\w+)", body, flags=re.MULTILINE):  # of two equal functions
        body = found[same[1]]
    instruction = INSTRUCTIONS[name][KINDS.index(kind)]
    count = len(re.findall(rf"\s{instruction}", body))
    assert count >= (TILE_CHAINS if instruction.startswith("tdp") else LEAST_CHAINS)


def test_products_of_bytes_are_faster_than_those_of_float32(monkeypatch) -> None:
    try:
        instructions = library().instructions
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    if not ("int8" in instructions or "tiles" in instructions):
        pytest.skip(f"{instructions} has no products of bytes")
    monkeypatch.setattr(passes, "LEAST_BYTES", 1 << 22)
    monkeypatch.setattr(passes, "CACHES", passes.CACHES / "nowhere")
    monkeypatch.setattr(passes, "PRODUCT_SECONDS", 0.005)
    for _ in range(5):  # other programs may run
        peaks = measure_speeds(torch.device("cpu"), threads=1).operations_per_second
        one, quad, groups = (peaks[kind] or 0.0 for kind in ("float32", "int8", "int4"))
        if min(quad, groups) > 1.5 * one > 0.0:
            return
    pytest.fail(f"int8 has {quad:.3g} and int4 {groups:.3g} operations/s, float32 {one:.3g}")
