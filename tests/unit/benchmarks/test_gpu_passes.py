"""The timer of random models runs end to end on a CPU, so that no GPU time is spent on its mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmark_scripts import script


@pytest.fixture(scope="module")
def timer() -> ModuleType:
    return script("gpu_passes")


def test_all_tables_come_out(timer: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "passes.jsonl"
    timer.main(
        "--shape tiny --device cpu --dtype float32 --rows 2 --batches 2 --prefix 8 --tokens 12 --repeats 1 --k 2 "
        f"--bandwidth-bytes {1 << 22} --output {output}".split()
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    kinds = [line["type"] for line in lines]
    assert kinds[0] == "header"
    assert lines[0]["weight_bytes"] > 4 * 256 * 64
    passes = [(one["kernels"].split()[0], one["batch"], one["rows"]) for one in lines if one["type"] == "pass"]
    assert passes == [
        (kernels, batch, rows) for kernels in ("torch", "graphs") for batch in (1, 2) for rows in (1, 2, 3)
    ]
    assert [one["batch"] for one in lines if one["type"] == "decode" and one["how"].startswith("trans")] == [1, 2]
    drafted = [one for one in lines if one["type"] == "synthetic"]
    assert len(drafted) == 4
    assert all(one["tokens_per_round"] > 1 and one["share"] > 0 for one in drafted)


def test_weights_that_a_pass_reads_leave_the_embedding_out(timer: ModuleType) -> None:
    shape = timer.SHAPES["tiny"]
    model = timer.build(shape, context=32, device=torch.device("cpu"), dtype=torch.float32)
    count = sum(p.numel() for p in model.parameters()) - shape.vocab_size * shape.hidden_size
    assert timer.weight_bytes(model) == 4 * count
