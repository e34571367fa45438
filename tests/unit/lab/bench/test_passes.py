"""Seconds of passes by rows, the bytes that they read, and the machine's speeds."""

from __future__ import annotations

import functools
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench_samples import CONTEXT, write_model
from draftree.core.errors import ConfigurationError
from draftree.lab.bench import passes
from draftree.lab.bench.passes import (
    PassSettings,
    bytes_of_pass,
    measure,
    measure_speeds,
    read_bandwidth,
    time_passes,
    weights_of_pass,
)
from draftree.loading.load import load_model
from draftree.models.base import LanguageModel, Pass, PassResult
from draftree.models.native.blueprint import LinearBlueprint
from draftree.models.native.build import FLAGS, SOURCES, VARIANTS, NativeUnavailableError, find_compiler
from draftree.models.native.library import HEAD_KIND, LAYER_KIND, library
from draftree.models.table import TableLM, hashed
from draftree.options import ModelOptions
from families import fresh
from native_samples import EXPERTS, FAMILIES, SIZES
from private_cache import private_cache


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))


def test_one_row_is_always_among_them_and_rows_ascend():
    assert PassSettings(ModelOptions("m"), rows=(8, 2, 8)).rows == (1, 2, 8)


@pytest.mark.parametrize(("field", "value"), [("prefix", 0), ("repeats", 0), ("rows", (0, 2))])
def test_settings_are_checked(field, value):
    with pytest.raises(ConfigurationError, match="at least 1"):
        PassSettings(ModelOptions("m"), **{field: value})


def test_passes_are_timed_interleaved_after_the_prefix(monkeypatch):
    model = TableLM(hashed(8, 0), order=2)
    seen: list[tuple[int, int]] = []
    run = TableLM.run

    def watched(self: LanguageModel, pass_: Pass) -> PassResult:
        seen.append((pass_.jobs[0].slot.length, len(pass_.jobs[0].tokens)))
        return run(self, pass_)

    monkeypatch.setattr(TableLM, "run", watched)
    records = time_passes(model, (1, 4), prefix=5, repeats=3)
    assert seen == [(0, 5), *[(5, 1), (5, 4)] * (3 + 2)]
    assert [(r.rows, r.prefix, len(r.milliseconds)) for r in records] == [(1, 5, 3), (4, 5, 3)]
    assert all(value > 0 for record in records for value in record.milliseconds)


def test_weights_that_a_pass_reads(tmp_path):
    folder = write_model(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    count = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    assert weights_of_pass(folder) == count


def test_bandwidth_is_a_speed():
    assert 1e8 < read_bandwidth(torch.device("cpu"), num_bytes=1 << 24) < 1e13


def test_measuring_a_folder(tmp_path):
    folder = write_model(tmp_path / "tiny")
    settings = PassSettings(ModelOptions(str(folder), dtype="float32"), rows=(2,), prefix=8, repeats=2)
    header, records = measure(settings)
    assert [record.rows for record in records] == [1, 2]
    assert (header["job"], header["dtype"], header["model"]["name"]) == ("passes", "float32", "tiny")
    with pytest.raises(ConfigurationError, match=f"context of {CONTEXT}"):
        measure(PassSettings(ModelOptions(str(folder)), prefix=CONTEXT))
    _, records = measure(PassSettings(ModelOptions(str(folder)), rows=(CONTEXT - 8,), repeats=1))
    assert {record.prefix for record in records} == {8}, "without a prefix, as many tokens as fit"


def parameters_of(model: Any, *, without: str) -> int:
    return sum(value.numel() for name, value in model.named_parameters() if without not in name)


@pytest.mark.parametrize("family", EXPERTS)
def test_a_row_reads_the_experts_that_it_uses(tmp_path, family):
    model = fresh(family, **(SIZES | FAMILIES[family]))
    model.save_pretrained(tmp_path / "model")
    config = model.config
    experts = sum(value.numel() for name, value in model.named_parameters() if ".experts." in name)
    rest = parameters_of(model, without=".experts.") - model.get_input_embeddings().weight.numel()
    wanted = rest + experts * config.num_experts_per_tok // config.num_local_experts
    assert experts > 0
    assert weights_of_pass(tmp_path / "model") == wanted


@pytest.mark.parametrize(("family", "rows"), [("gpt2", "wpe"), ("opt", "embed_positions")])
def test_of_tables_of_positions_a_pass_reads_rows_only(tmp_path, family, rows):
    model = fresh(family, **(SIZES | FAMILIES[family] | {"tie_word_embeddings": True}))
    model.save_pretrained(tmp_path / "model")
    assert weights_of_pass(tmp_path / "model") == parameters_of(model, without=rows)


@pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")
@pytest.mark.parametrize("family", ["llama", "qwen2", *EXPERTS])
def test_bytes_in_groups_are_those_of_the_products_of_a_row(tmp_path, family):
    fresh(family, **(SIZES | FAMILIES[family])).save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model", quantization="int4", dtype="bfloat16")
    plan, groups = loaded.model.blueprint, library().groups  # type: ignore[attr-defined]

    def packed(products: Iterable[LinearBlueprint], kind: str) -> int:
        return sum(-(-one.outputs // 16) * groups.block_bytes(one.inputs, kind) for one in products)

    wanted, unused, routers = packed([plan.head], HEAD_KIND), 0, 0
    for layer in plan.layers:
        every = packed(layer.products, LAYER_KIND)
        if layer.experts is not None:
            own = layer.experts
            left = (own.count - own.chosen) * packed([own.gate_up, own.down], LAYER_KIND)
            assert left > 0
            outputs = sum(one.outputs for one in own.unquantized)
            every, unused = every - left, unused + left
            of_pair = 3 if library().keeps_compact else 4
            routers += 16 * -(-outputs // 16) * own.router.inputs // 2 * of_pair
        wanted += every
    found = bytes_of_pass(loaded)
    assert found == wanted + routers
    separate = 0 if plan.is_tied else packed([plan.head], HEAD_KIND)
    small = 32 << 10  # norms, biases, and room between the products
    assert found + unused + separate <= loaded.model.footprint.weights < found + unused + separate + small


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
