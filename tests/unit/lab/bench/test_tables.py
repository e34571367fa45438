"""Statistics of a report, compared with hand-made ones."""

from __future__ import annotations

import json

import pytest

from bench_samples import HEADER, VERSIONS, record
from draftree.core.errors import ConfigurationError
from draftree.lab.bench.benchmark import busy_notes
from draftree.lab.bench.records import Divergence, PassRecord, Record, RecordFile, Results, read_results
from draftree.lab.bench.summary import Rate, Ratio, Report, ratio
from draftree.lab.bench.tables import doubts, grids_of, markdown, provenance_line


def rate(tokens_per_second: float, seconds: float = 2.0, **more: object) -> dict[str, object]:
    return {"tokens_per_second": tokens_per_second, "decode_seconds": seconds, **more}


def results(*records: Record, **header: object) -> Results:
    return Results("r.jsonl", {**HEADER, **header}, records, end={"complete": True, "load_average": [1.5, 1, 1]})


def rows(*records: Record) -> dict[str, object]:
    return {row.method["name"]: row for row in Report(results(*records)).rows()}


def test_rates_are_sums_over_sums_and_speed_ups_medians():
    table = rows(
        record("plain", "a"),
        record("plain", "b", group=1, stats=rate(10.0, 4.0)),
        record("plain", "copy", group=2),
        record("ngram", "a", stats=rate(10.0, 2.0)),
        record("ngram", "b", group=1, stats=rate(20.0, 2.0)),
        record("ngram", "copy", group=2, stats=rate(200.0, 0.1)),
    )
    assert table["plain"].decoding == pytest.approx((20 + 40 + 20) / (2 + 4 + 2))
    assert table["ngram"].decoding == pytest.approx((20 + 40 + 20) / (2 + 2 + 0.1))
    assert table["ngram"].against_plain.median == pytest.approx(2.0)  # of 1, 2 and 20
    assert table["plain"].against_plain.median == pytest.approx(1.0)


def test_a_median_over_repeats_forgets_a_slow_one():
    slow = rate(1.0, 20.0)
    table = rows(*(record("plain", repeat=n, stats=slow if n == 1 else {}) for n in range(3)))
    assert table["plain"].decoding == pytest.approx(10.0)
    assert (table["plain"].slowest, table["plain"].fastest) == (pytest.approx(1.0), pytest.approx(10.0))


def test_whole_calls_count_all_tokens_and_seconds():
    table = rows(record("plain"), record("ngram", seconds=2.1))
    assert table["plain"].whole == pytest.approx(21 / 3.5)
    assert table["ngram"].whole_against_plain.median == pytest.approx(3.5 / 2.1)
    assert table["ngram"].against_plain.median == pytest.approx(1.0)


def test_ours_is_compared_with_the_fastest_peer():
    table = rows(
        record("plain"),
        record("ngram", stats=rate(30.0)),
        record("hf", stats=rate(8.0)),
        record("hf lookup a", stats=rate(12.0)),
        record("hf lookup b", stats=rate(15.0)),
    )
    assert table["ngram"].against_peer.median == pytest.approx(2.0)
    assert table["plain"].against_peer.median == pytest.approx(1.25)
    assert table["hf"].against_peer is None
    assert table["hf lookup b"].against_plain.median == pytest.approx(15 / 8)


def test_prompts_of_a_batch_share_the_seconds():
    table = rows(
        record("plain", "a", stats=rate(10.0, 2.0)),
        record("plain", "b", stats=rate(10.0, 1.0)),
    )
    assert table["plain"].decoding == pytest.approx((20 + 10) / 2.0)
    assert table["plain"].whole == pytest.approx(42 / 3.5)
    assert table["plain"].num_prompts == 2


def test_overhead_is_what_no_model_pass_takes():
    assert rows(record("plain"), record("ngram"))["ngram"].overhead == pytest.approx(0.1)
    methods = [{**method, "draft_is_pass": True} for method in HEADER["methods"]]
    report = Report(results(record("plain"), record("ngram"), methods=methods))
    assert report.rows()[1].overhead == pytest.approx(0.06)
    shares = report.phases()["ngram"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["outside"] == pytest.approx(0.5 / 2.5)
    assert shares["score"] == pytest.approx(1.8 / 2.5)


def test_tokens_per_round_are_counted_over_all_prompts():
    fast = {"rounds": 7}
    assert rows(record("plain"), record("ngram", stats=fast))["ngram"].acceptance_length == pytest.approx(3.0)


def test_texts_of_one_round_have_no_decoding_speed():
    alone = rate(5.0, 0.0)
    table = rows(record("plain", stats=alone), record("ngram", stats=alone))
    assert table["ngram"].decoding is None
    assert table["ngram"].against_plain is None
    assert "| – |" in markdown(results(record("plain", stats=alone)))


def test_a_speed_up_beyond_the_acceptance_length_is_doubted():
    cold = record("plain", stats=rate(10.0))
    doubt = doubts(results(cold, record("ngram", stats=rate(12.0))))
    assert [reason.partition(" per round")[0] for reason in doubt] == [
        "ngram ran 1.20 times as fast as plain decoding at 1.00 tokens"
    ]
    assert doubt[0] in markdown(results(cold, record("ngram", stats=rate(12.0))))
    assert doubts(results(cold, record("ngram", stats={**rate(12.0), "rounds": 15}))) == []


def test_a_busy_machine_is_named():
    assert busy_notes([2.0, 9.0, 9.0], 2) == busy_notes(None, 2) == ()
    assert "load 2.5 on 2 cores" in busy_notes([2.5, 0.0, 0.0], 2)[0]


def test_a_prompt_is_equal_only_if_it_is_in_every_repeat():
    parted = Divergence(4, 0.25, 0.125)
    table = rows(
        record("plain"),
        record("ngram", "a", repeat=0),
        record("ngram", "a", repeat=1, equal_to_plain=False, divergence=parted),
        record("ngram", "b", group=1),
    )
    assert (table["ngram"].num_equal, table["ngram"].num_prompts) == (1, 2)


def test_differences_show_the_score_gap():
    records = [record("plain"), record("hf", equal_to_other_plain=False)]
    records += [
        record("ngram", str(n), group=n, equal_to_plain=False, divergence=Divergence(n, gap, between))
        for n, (gap, between) in enumerate([(0.5, -0.5), (0.25, 0.0), (None, None)])
    ]
    report = Report(results(*records))
    parting = report.partings()[0]
    assert (parting.method, parting.num_prompts, parting.num_parted) == ("ngram", 3, 3)
    assert parting.gaps == (0.25, 0.5)
    assert parting.between == (-0.5, 0.0)
    assert report.agreement() == (0, 1)
    grid = grids_of(results(*records))[-1]
    assert grid.rows[0] == ("ngram", "3", "3", "0.25", "0.38", "0.5", "0.5")
    assert grid.rows[1][:3] == ("plain, compared with transformers", "1", "1")


def test_texts_that_need_not_be_equal_are_not_counted():
    sampled = record("hf lookup a", equal_to_plain=None)
    report = Report(results(record("plain"), record("hf", equal_to_plain=None), sampled))
    assert report.rows()[-1].num_equal is None
    assert report.partings() == []


def test_ratios_have_quartiles_over_prompts():
    base = {n: Rate(10, 1.0) for n in range(5)}
    found = ratio({n: Rate(10 * 2**n, 1.0) for n in range(5)}, base)
    assert found is not None
    assert (found.low, found.median, found.high) == pytest.approx((2.0, 4.0, 8.0))
    assert ratio({0: Rate(0, 0.0)}, base) is None
    alone = ratio({3: Rate(30, 1.0)}, base)
    assert alone == Ratio(*[pytest.approx(3.0)] * 3)


def test_categories_stand_side_by_side():
    found = results(record("plain"), record("plain", "b", category="rag", group=1, stats=rate(40.0)))
    grid = next(grid for grid in grids_of(found) if "category" in grid.title)
    assert grid.headings == ("method", "story", "rag")
    assert grid.rows[0] == ("plain", "10.0 (1.00)", "40.0 (1.00)")
    assert grid.rows[1] == ("ngram", "–", "–")


def test_passes_are_compared_with_one_row_and_the_floor():
    header = {**HEADER, "job": "passes", "weight_bytes": 2e8, "read_bytes_per_second": 1e10}
    found = Results("p", header, (), (PassRecord(1, 64, (40.0, 44.0, 60.0)), PassRecord(8, 64, (66.0,))), {})
    (grid,) = grids_of(found)
    assert "200 MB of weights at 10.0 GB/s take 20.0 ms" in grid.title
    assert grid.rows[0] == ("1", "44.00", "40.00–60.00", "1.00", "2.20")
    assert grid.rows[1][3] == f"{66 / 44:.2f}"
    assert "run not complete" in provenance_line(found)


def test_provenance_is_below_every_table():
    text = markdown(results(record("plain"), notes=["2 prompts left out"], versions={**VERSIONS, "dirty": True}))
    for part in ("0123456789 with changes", "a processor", "2 prompts left out", "load 0.5 before, 1.5 after"):
        assert part in text
    assert "not complete" not in text
    assert "processes" not in text
    assert text.count("| method |") == 4
    divided = markdown(results(record("plain"), processes={"tp": 2, "pp": 3}))
    assert "cores, each of 6 processes (tp=2, pp=3)" in divided


def test_provenance_names_the_kind_of_weights():
    assert f", {HEADER['dtype']}; " in provenance_line(results(record("plain"), quantization=None))
    quantized = provenance_line(results(record("plain"), quantization="int4"))
    assert f", int4 weights, {HEADER['dtype']} otherwise; " in quantized


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
        ("oops\n", "line 1: it is not JSON"),
        ('{"a": 1}\n', "line 1 was not written by draftree bench"),
        ("[]\n", "line 1: it does not hold a JSON object"),
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
