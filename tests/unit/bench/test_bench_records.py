"""Results files are read as written, and other files are refused."""

from __future__ import annotations

import json

import pytest

from bench_samples import HEADER, record
from draftree.bench.records import Divergence, PassRecord, RecordFile, read_results, sha256_of
from draftree.core.errors import ConfigurationError


def test_results_are_read_as_written(tmp_path):
    path = tmp_path / "r.jsonl"
    parted = record("ngram", equal_to_plain=False, divergence=Divergence(3, 0.1, -0.1))
    with path.open("w") as stream:
        lines = RecordFile(stream)
        lines.add("header", HEADER)
        lines.add("record", record("plain"))
        lines.add("record", parted)
        lines.add("pass", PassRecord(4, 256, (1.0, 2.0)))
        before_end = read_results(path)
        lines.add("end", {"complete": True})
    results = read_results(path)
    assert before_end.records == results.records == (record("plain"), parted)
    assert results.passes == (PassRecord(4, 256, (1.0, 2.0)),)
    assert results.header == HEADER
    assert results.is_complete
    assert not before_end.is_complete
    assert lines.results("r.jsonl") == results


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"kind": "header", **HEADER}) + '\n{"kind": "rec')
    assert read_results(path).records == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no header line"),
        ("oops\n", "line 1 is not JSON"),
        ('{"a": 1}\n', "line 1 was not written by draftree bench"),
        ("[]\n", "line 1 was not written by draftree bench"),
        ('{"kind": "header", "format": 99}\n', "has format 99, this version reads 1"),
        ('{"kind": "poem"}\n', "unknown kind 'poem'"),
        ('{"kind": "record", "divergence": null, "task": "a"}\n', "line 1 was not written"),
    ],
)
def test_other_files_are_refused(tmp_path, text, said):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        read_results(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none\.jsonl' does not exist"):
        read_results(tmp_path / "none.jsonl")


def test_hashes_of_texts_and_tokens_differ():
    assert sha256_of([1, 2]) == sha256_of((1, 2)) != sha256_of([12])
    assert len(sha256_of("text")) == 16
