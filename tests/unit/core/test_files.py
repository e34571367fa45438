"""Paths and JSON files from outside the program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftree.cli.size import host_costs_of
from draftree.core.errors import DraftreeError
from draftree.core.files import (
    MAX_JSON_BYTES,
    JsonError,
    code_named_in,
    parse_json,
    read_json,
    read_json_lines,
    shown_name,
)
from draftree.engine.trace import read_trace
from draftree.heads.calibration import CONFIDENCE, read_calibration, read_rates
from draftree.heads.shipped import MANIFEST, read_manifest
from draftree.lab.bench.records import read_results
from draftree.lab.bench.suite.submission import read_submission
from draftree.lab.bench.workload import read_workload
from draftree.lab.figures.base import read_lines
from draftree.lab.fleet.measured import Measurements
from draftree.loading.encoder_decoder import is_encoder_decoder
from draftree.models.native.build import why_unusable
from draftree.train.checkpoints import load_checkpoint
from draftree.train.data.shards import Manifest
from draftree.train.finishing import RECIPE, earlier_runs
from draftree.train.loop import read_log
from draftree.weights.cache import Cache
from draftree.weights.folders import check_model_folder
from draftree.weights.packed_checkpoint import quantization_of

DEEP = b"[" * 200_000
DAMAGE: dict[str, bytes | None] = {
    "a folder": None,
    "deep": DEEP + b"\n",
    "deep inside": b'{"kind": "trace", "format": 1, "a": ' + DEEP + b"]" * 200_000 + b"}\n",
    "another encoding": b'{"a": "\xff"}\n',
    "empty": b"",
    "no object": b"[null]\n",
    "a long number": b"1" * 5000,
    "other values": b'{"kind": "draft", "format": [], "run": 3, "config": {}, "target": 1, "milliseconds": 2}\n',
}
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "trace": ("t.jsonl", read_trace),
    "results": ("r.jsonl", read_results),
    "figures": ("r.jsonl", read_lines),
    "workload": ("w.jsonl", read_workload),
    "submission": ("s.json", read_submission),
    "measurements": ("m.jsonl", Measurements.read),
    "calibration runs": ("c.jsonl", lambda path: host_costs_of(path, None, None)),
    "training log": ("log.jsonl", lambda path: read_log(path) if path.is_file() else None),
    "checkpoint": ("c.safetensors", load_checkpoint),
    "library": ("library.so", why_unusable),
    "training data": ("manifest.json", lambda path: Manifest.read(path.parent)),
    "shipped head": (MANIFEST, lambda path: read_manifest(path.parent)),
    "confidence": (CONFIDENCE, lambda path: read_calibration(path.parent)),
    "rates": (RECIPE, lambda path: read_rates(path.parent)),
    "recipe": (RECIPE, lambda path: earlier_runs(path.parent)),
    "manifest": ("draftree.json", lambda path: Cache().manifest(str(path.parent))),
    "kind of model": ("config.json", lambda path: is_encoder_decoder(path.parent)),
    "quantization": ("config.json", lambda path: quantization_of(path.parent)),
    "code": ("config.json", lambda path: code_named_in(path.parent)),
    "model": ("config.json", lambda path: check_model_folder(path.parent)),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("reader", READERS)
def test_a_damaged_file_is_a_deliberate_error(reader: str, damage: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    content = DAMAGE[damage]
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    with contextlib.suppress(DraftreeError):
        read(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (DEEP, "nested too deeply"),
        (b"\xff", "not UTF-8"),
        (b"{", "not JSON"),
        (b"[1]", "does not hold a JSON object"),
        (b" " * (MAX_JSON_BYTES + 1), "more than 64 MiB"),
    ],
)
def test_the_reason_is_given(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(JsonError, match=reason):
        read_json(path)


def test_a_missing_file_is_not_a_damaged_one(tmp_path: Path) -> None:
    for read in (read_json, read_json_lines):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "a.json")


def test_the_number_of_a_damaged_line_is_given(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2\n', "utf-8")
    with pytest.raises(JsonError, match="line 3: it is not JSON"):
        read_json_lines(path)
    path.write_text('\n{"a": 1}\n', "utf-8")
    assert read_json_lines(path) == [{"a": 1}]


def test_only_line_feeds_end_a_line_and_none_is_endless(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "1\u2028\x85"}\n{"a": ', "utf-8")
    assert read_json_lines(path, may_be_cut=True) == [{"a": "1\u2028\x85"}]
    if Path("/dev/zero").exists():
        with pytest.raises(JsonError, match="line 1: it has more than 64 MiB"):
            read_json_lines(Path("/dev/zero"))


def test_a_byte_order_mark_is_no_content() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_a_path_is_shown_by_its_last_part_and_a_name_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path / "small")
    assert shown_name(str(tmp_path / "small")) == shown_name(".") == "small"
    assert shown_name("owner/name") == "owner/name"
