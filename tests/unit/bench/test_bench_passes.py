"""Pass costs: timed passes, counted weights, and an unchanged model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench_samples import CONTEXT, write_model
from draftree.bench.pass_times import PassSettings, measure, time_passes, weight_bytes_read
from draftree.bench.speeds import read_bandwidth
from draftree.core.errors import ConfigurationError
from draftree.models.base import LanguageModel, Pass, PassResult
from draftree.models.table import TableLM, hashed


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))


def test_one_row_is_always_among_them_and_rows_ascend():
    assert PassSettings("m", rows=(8, 2, 8)).rows == (1, 2, 8)


@pytest.mark.parametrize(("field", "value"), [("prefix", 0), ("repeats", 0), ("threads", -1), ("rows", (0, 2))])
def test_settings_are_checked(field, value):
    with pytest.raises(ConfigurationError, match="at least 1"):
        PassSettings("m", **{field: value})


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
    assert weight_bytes_read(folder, torch.float32) == 4 * count
    assert weight_bytes_read(folder, torch.bfloat16) == 2 * count


def test_bandwidth_is_a_speed():
    assert 1e8 < read_bandwidth(torch.device("cpu"), num_bytes=1 << 24) < 1e13


def test_measuring_a_folder(tmp_path):
    folder = write_model(tmp_path / "tiny")
    settings = PassSettings(str(folder), rows=(2,), prefix=8, repeats=2, dtype="float32")
    header, records = measure(settings)
    assert [record.rows for record in records] == [1, 2]
    assert (header["job"], header["dtype"], header["model"]["name"]) == ("passes", "float32", "tiny")
    with pytest.raises(ConfigurationError, match=f"context of {CONTEXT}"):
        measure(PassSettings(str(folder), prefix=CONTEXT))
