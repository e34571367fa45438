"""Every figure on real traces of a small random model and on results lines: numbers at known points, and files."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from bench_samples import write_model
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.lab.analysis.theory import expected_tokens, operations_factor, walltime_improvement
from draftree.lab.figures.base import FIGURES, Data, Material
from draftree.lab.figures.drawing import draw_all, material_of
from draftree.lab.figures.gallery import chosen_figures
from draftree.lab.figures.measures import (
    acceptance,
    best_first,
    chain,
    expansion,
    guesses,
    k_ary,
    mean,
    ratio,
    replay,
    texts_of,
    tokens_per_round,
)
from drawn_values import drawn_columns, drawn_values

PROMPT = '{{"id": "{0}", "category": "c", "prompt": "one two three one two {0}"}}\n'
HEADER: dict[str, Any] = {
    "kind": "header",
    "machine": {"cpu": "a processor"},
    "model": {"name": "m"},
    "draft_models": [{"name": "d"}],
    "dtype": "float32",
    "max_tokens": 4,
    "draws": 2,
    "temperature": 0.0,
    "weight_bytes": 1000,
}
DISTRIBUTION: dict[str, Any] = {
    "kind": "distribution",
    "task": "a",
    "category": "c",
    "temperature": 0.5,
    "num_positions": 4,
    "shared_hits": [3.0, 0.5],
    "kept": {"token": [[0.9], [0.7]], "coupled": [[0.8], [0.6]]},
}
RECORD = {"kind": "record", "task": "a", "method": "model:d@fixed", "stats": {"rounds": 4, "accepted_tokens": 2}}
TRIP = {
    "part": "round trip", "model": "m", "draft": "suffix", "tokens": 4, "prompts": 2, "machine": {"cpu": "a"},
    "arm": "drafts",
}  # fmt: skip
LINES: list[dict[str, Any]] = [
    HEADER,
    DISTRIBUTION,
    DISTRIBUTION | {"task": "b", "shared_hits": [1.0, 0.5]},
    RECORD,
    RECORD | {"task": "b", "stats": {"rounds": 4, "accepted_tokens": 4}},
    {"kind": "pass", "rows": 1, "milliseconds": [1.0, 2.0, 3.0]},
    {"kind": "pass", "rows": 8, "milliseconds": [3.0, 4.0, 5.0]},
    TRIP | {"rtt_ms": 0.0, "ms_per_token_by_prompt": [4.0, 6.0]},
    TRIP | {"rtt_ms": 100.0, "ms_per_token_by_prompt": [54.0, 56.0]},
]


def noisy_copy(target: Path, folder: Path) -> Path:
    """The same model with some noise in its weights: a drafter that is often right."""
    shutil.copytree(target, folder)
    model = LlamaForCausalLM.from_pretrained(folder, trust_remote_code=False)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Figures of one command over a tiny model that another one drafts for, and the traces of its runs."""
    home = tmp_path_factory.mktemp("figures")
    target = write_model(home / "target")
    drafter = noisy_copy(target, home / "drafter")
    (home / "prompts.jsonl").write_text("".join(PROMPT.format(name) for name in "ab"))
    runs = "watch,best,merged,plain,fixed,adaptive,length,soft,pair"
    needed = {name for name, one in chosen_figures(()).items() if one.runs and {*one.runs} <= {*runs.split(",")}}
    options = ["--prompts", str(home / "prompts.jsonl"), "--max-tokens", "12", "--tree", "4-2-1", "--merge", "suffix"]
    options += ["--dtype", "float32", "--kernels", "torch", "--figures", ",".join(sorted(needed))]
    out = home / "out"
    assert run(["analyse", str(target), "--draft", f"model:{drafter},k=3", *options, "--output", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def material(folder: Path) -> Material:
    traces = material_of(sorted((folder / "traces").iterdir()), ())
    return Material(traces.traces, {"lines.jsonl": LINES})


def data_of(name: str, material: Material) -> Data:
    return FIGURES[name]().data(material)


def rows(name: str, material: Material) -> list[Mapping[str, Any]]:
    return list(data_of(name, material).rows)


def test_every_figure_of_the_command_has_its_files(folder: Path) -> None:
    drawn = {path.stem for path in folder.glob("*.svg")}
    assert {"expected-tokens", "tree-budget", "walltime", "phases", "trees", "soft-matching"} <= drawn
    for name in drawn:
        svg = (folder / f"{name}.svg").read_text()
        assert FIGURES[name].title.split()[0] in svg
        assert "Losing case:" in svg
        assert len(svg) < 150_000
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        with (folder / f"{name}.csv").open() as stream:
            assert list(csv.DictReader(stream))


def test_a_chain_of_no_token_is_plain_decoding_and_closed_forms_have_known_values(material: Material) -> None:
    found = rows("expected-tokens", material)
    assert found[0]["measured"] == found[0]["closed_form"] == 1.0
    alpha = found[0]["acceptance"]
    assert found[3]["closed_form"] == pytest.approx(1 + alpha + alpha**2 + alpha**3)
    assert found[3]["measured"] >= found[1]["measured"]


def test_replays_of_the_whole_tree_equal_the_recorded_acceptance(material: Material) -> None:
    texts = texts_of(material.one("watch"))
    for text in texts:
        whole = replay(text, lambda position: range(len(position.tree)))
        assert whole == replay(text, expansion(4, 2, 1))
        assert whole.tokens == len(text.tokens) == 12
        assert whole.tokens == whole.rounds + sum(whole.accepted)


def test_a_replayed_chain_equals_the_run_with_this_chain(material: Material) -> None:
    """The same drafter, length and texts, once replayed and once run: coupled picks make them equal."""
    texts = texts_of(material.one("watch"))
    for trace in material.all("length"):
        length = int(trace.header.plan.partition(":")[2])
        if length <= 3:
            runs = [replay(text, chain(length)) for text in texts]
            expected = ratio([run.tokens for run in runs], [run.rounds for run in runs])
            assert tokens_per_round(trace) == expected


def test_cuts_are_trees_within_their_limits(material: Material) -> None:
    for text in texts_of(material.one("watch")):
        for position in text.positions:
            for cut, most in ((chain(2), 2), (k_ary(2, 2), 6), (best_first(5), 5)):
                kept = set(cut(position))
                assert len(kept) <= most
                assert all(position.tree.parents[node] in kept | {-1} for node in kept)


def test_acceptance_counts_first_children(material: Material) -> None:
    texts = texts_of(material.one("watch"))
    found = [g for text in texts for p in text.positions[:-1] for g in guesses(p) if (g.level, g.rank) == (1, 1)]
    assert acceptance(texts).value == pytest.approx(sum(g.is_accepted for g in found) / len(found))
    assert rows("depth-rank", material)[0]["acceptance"] == pytest.approx(acceptance(texts).value)
    assert rows("rank-histogram", material)[0]["share"] == pytest.approx(acceptance(texts).value)
    assert sum(row["share"] for row in rows("rank-histogram", material)) == pytest.approx(1.0)


def test_operations_are_counted(material: Material) -> None:
    found = rows("operations-factor", material)
    assert found[0]["measured"] == 1.0
    alpha = acceptance(texts_of(material.one("watch"))).value
    assert found[2]["closed_form_0.1"] == pytest.approx(operations_factor(alpha, 2, 0.1))


def test_shares_of_rounds_rise_to_one(material: Material) -> None:
    for width in (1, 2, 4):
        shares = [row["share"] for row in rows("verified-cdf", material) if row["width"] == width]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_success_rises_with_the_children(material: Material) -> None:
    first = [row["success"] for row in rows("verify-width", material) if row["level"] == 1]
    assert first == sorted(first)
    assert len(first) == 4


def test_the_oracle_is_above_all_trees(material: Material) -> None:
    found = rows("tree-budget", material)
    best = max(row["tokens"] for row in found if row["family"] == "oracle")
    assert all(row["tokens"] <= best + 1e-9 for row in found if row["family"] in ("chain", "expansion", "k-ary, k = 2"))
    assert {row["family"] for row in found} >= {"chain", "best-first", "merged", "oracle"}


def test_classified_nodes_are_all_nodes(material: Material) -> None:
    found = rows("confidence-classifier", material)
    cells = ("true_positives", "false_positives", "false_negatives", "true_negatives")
    totals = {sum(row[cell] for cell in cells) for row in found}
    assert len(totals) == 1
    assert (found[0]["recall"], found[-1]["false_negatives"] >= found[0]["false_negatives"]) == (1.0, True)
    bins = rows("calibration", material)
    assert all(row["from"] <= row["confidence"] <= row["to"] for row in bins)


def test_the_strip_holds_the_whole_text(material: Material) -> None:
    for run_name in ("fixed", "adaptive"):
        assert sum(row["written"] for row in rows("rounds-strip", material) if row["run"] == run_name) == 12


def test_phases_add_up_and_plain_decoding_drafts_nothing(material: Material) -> None:
    plain, *others = rows("phases", material)
    assert plain["draft"] == pytest.approx(0.0, abs=0.05)
    for row in (plain, *others):
        assert row["draft"] + row["score"] + row["verify"] + row["other"] == pytest.approx(row["total"])
    assert rows("walltime", material)[0]["measured"] == 1.0


def test_trees_have_their_roots_and_parents(material: Material) -> None:
    found = rows("trees", material)
    for number in {row["tree"] for row in found}:
        nodes = {row["node"] for row in found if row["tree"] == number}
        assert all(row["parent"] in nodes for row in found if row["tree"] == number and row["parent"] != "")
    assert all(0 <= row["estimate"] <= 1 for row in rows("survival-map", material))
    assert all(0 <= row["best"] <= 3 for row in rows("optimal-length", material))


def test_the_what_if_table_is_the_closed_form(material: Material) -> None:
    for row in rows("what-if", material)[::17]:
        assert row["speedup"] == walltime_improvement(row["acceptance"], row["length"], row["cost"])
    assert expected_tokens(0.5, 2) == 1.75


def test_soft_matching_at_the_strictest_is_compared_with_the_plain_text(material: Material) -> None:
    found = {row["rule"]: row for row in rows("soft-matching", material)}
    assert found["coupled"]["equal"] == 1.0
    assert len(found) == 4


def test_merged_drafters_are_added_in_order(material: Material) -> None:
    merged = [row for row in rows("width-merged", material) if row["kind"] == "merged"]
    assert [row["number"] for row in merged] == [1, 2]
    assert merged[1]["added"] == "suffix"


def test_results_lines_become_figures(material: Material) -> None:
    (row,) = rows("acceptance-estimates", material)
    assert (row["measured"], row["j"], row["sum_min"]) == pytest.approx((0.5, 0.7, 0.8))
    recorded, pair = sorted(rows("model-pairs", material), key=lambda row: row["target"] == "m")
    assert pair["tokens"] == pytest.approx(14 / 8)
    assert recorded["tokens"] == tokens_per_round(material.one("pair")).value
    one, eight = rows("model-size", material)
    assert (one["milliseconds"], eight["relative"]) == (2.0, 2.0)
    near, far = rows("rtt", material)
    assert (near["ms_per_token"], far["ms_per_token"], near["tokens_per_trip"]) == (5.0, 55.0, 2.0)


def test_figures_of_results_are_drawn(material: Material, tmp_path: Path) -> None:
    chosen = chosen_figures(("acceptance-estimates", "model-size", "rtt"))
    drawn = draw_all(chosen, material, tmp_path, must=True)
    assert {path.name for path in drawn.paths} == {
        f"{name}.{end}" for name in chosen for end in ("svg", "png", "pdf", "csv")
    }


def test_figures_without_data_are_skipped_or_refused(tmp_path: Path) -> None:
    chosen = chosen_figures(("what-if", "rtt"))
    assert set(draw_all(chosen, Material(), tmp_path, must=False).skipped) == {"what-if", "rtt"}
    with pytest.raises(ConfigurationError, match="figure 'what-if': there are no traces or results: watch"):
        draw_all(chosen, Material(), tmp_path, must=True)


def test_a_trace_without_a_draft_everywhere_is_refused(material: Material) -> None:
    with pytest.raises(ConfigurationError, match="record with --plan watch"):
        texts_of(material.one("fixed"))
    with pytest.raises(ConfigurationError, match="cannot be replayed"):
        texts_of(material.all("soft")[1])


def test_intervals_contain_the_estimate_and_shrink_with_more_texts() -> None:
    few, many = ratio([1, 3], [2, 4]), ratio([1, 3] * 20, [2, 4] * 20)
    assert few.value == many.value == pytest.approx(4 / 6)
    assert few.low <= many.low < many.value < many.high <= few.high
    one = mean([0.25])
    assert (one.low, one.value, one.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (["m"], 2, "name a folder"),
        (["m", "--output", "x"], 2, "a model needs a drafter"),
        (["--draft", "ngram", "--output", "x"], 2, "a drafter needs a model"),
        (["--output", "x"], 2, "nothing to draw"),
        (["--results", "nothing.jsonl", "--output", "x"], 1, "cannot be read"),
        (["--results", "nothing.jsonl", "--figures", "bar", "--output", "x"], 1, "unknown figure 'bar'"),
        (["m", "--draft", "nothing", "--output", "x"], 1, "unknown drafter 'nothing'"),
    ],
)
def test_invalid_analyses_are_refused(
    given: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["analyse", *given]) == status
    assert words in " ".join(capsys.readouterr().err.split())


def test_runs_and_prompts_that_do_not_fit_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_model(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text(PROMPT.format("a") + PROMPT.format("long " * 500))
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens", "40", "--tree", "2-1", "--merge", "suffix"]
    options += ["--dtype", "float32", "--kernels", "torch", "--output", str(tmp_path / "out")]
    assert run(["analyse", str(target), "--draft", "suffix,min=1", *options]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "run 'rule' is left out: drafter 'suffix,min=1' supplies free draws, but verifier 'token' accepts" in said
    assert "1 of 2 prompts do not fit" in said
    assert "not drawn: temperature-rules: " in said
    assert list((tmp_path / "out").glob("*.svg"))


def test_all_figures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["analyse", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(FIGURES)
    assert len(lines) == 25


def test_drawings_hold_the_numbers_of_their_files(material: Material) -> None:
    """Columns of numbers are drawn completely, in all figures but a table and one with a single point here."""
    columns = {}
    for name, figure in chosen_figures().items():
        if material.has(figure.runs, figure.results):
            data = figure.data(material)
            columns[name] = drawn_columns(data, drawn_values(figure, data))
    assert len(columns) > 15
    assert {name for name, drawn in columns.items() if not drawn} <= {"acceptance-estimates", "what-if"}
    assert {"length", "measured", "closed_form"} <= columns["expected-tokens"]
    figure, data = FIGURES["expected-tokens"](), data_of("expected-tokens", material)
    other = Data([{**row, "measured": row["measured"] + 0.37} for row in data.rows], data.measured, data.losing)
    assert "measured" not in drawn_columns(other, drawn_values(figure, data)), "numbers that are not drawn are detected"
