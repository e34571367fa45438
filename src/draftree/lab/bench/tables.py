"""Tables of results as grids of text, for a terminal or as Markdown. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from draftree.lab.bench.records import DistributionRecord, PassRecord, PerplexityRecord, Results, TreeRecord
from draftree.lab.bench.summary import PHASES, MethodSummary, Ratio, Report, TextDifferences

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: a title, headings, rows of text; the first column is a name, the others are numbers."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        lines = [self.headings, rule, *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])

    def rich(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for place, heading in enumerate(self.headings):
            table.add_column(heading, justify="right" if place else "left", no_wrap=not place)
        for row in self.rows:
            table.add_row(*row)
        return table


def mean_kept(records: Iterable[DistributionRecord], rule: str, place: int = 0) -> float:
    """Return a verifier's mean acceptance over positions; `place` 0, 1, 2 means 1, 2, 4 children."""
    return statistics.fmean(values[place] for record in records for values in record.kept[rule])


def hit_rates(records: Sequence[DistributionRecord]) -> list[float]:
    """Return how often the target token is the drafter's first, second, … guess with shared noise."""
    positions = sum(record.num_positions for record in records)
    return [sum(column) / positions for column in zip(*(record.shared_hits for record in records), strict=True)]


def independent_tokens(records: Sequence[DistributionRecord], depth: int) -> float:
    """Return tokens per round of a coupled chain with the mean acceptance at every position, independently."""
    mean = mean_kept(records, "coupled")
    return sum(mean**level for level in range(depth + 1))


def surviving_tokens(records: Sequence[DistributionRecord], depth: int) -> float:
    """Return tokens per round from each position's own probability: 1 + the mean of their products along the text."""
    products: list[float] = []
    for record in records:
        chances = [values[0] for values in record.kept["coupled"]]
        for start in range(len(chances) - depth + 1):
            survival, total = 1.0, 1.0
            for chance in chances[start : start + depth]:
                survival *= chance
                total += survival
            products.append(total)
    return statistics.fmean(products) if products else float("nan")


def replayed_tokens(records: Iterable[DistributionRecord], widths: Sequence[int]) -> float:
    """Return tokens per round of a coupled tree of these widths, replayed on the texts with their own noise.

    A round continues while the target token is among the drafter's first `width` guesses, and writes one token more;
    the next round starts after it. The replay uses the actual tokens of plain decoding, so no distribution is assumed.
    """
    rounds = written = 0
    for record in records:
        place = 0
        while place < record.num_positions:
            level = 0
            while (
                level < len(widths)
                and place + level < record.num_positions - 1
                and 1 <= record.own_ranks[place + level] <= widths[level]
            ):
                level += 1
            rounds += 1
            written += level + 1
            place += level + 1
    return written / rounds


NUM_SHOWN = 5
LENGTHS = (1, 2, 3, 4, 6, 8)
RULES = (
    ("token", (0,)),
    ("multistep", (1, 2)),
    ("recursive", (0, 1, 2)),
    ("match", (0, 1, 2)),
    ("likeliest", (0, 1, 2)),
)


def distribution_grids(records: Sequence[DistributionRecord]) -> list[Grid]:
    """Return tables of guesses, verifiers and tokens per round, by category and temperature; empty without records."""
    if not records:
        return []
    groups: dict[tuple[str, float], list[DistributionRecord]] = {}
    for record in records:
        groups.setdefault((record.category, record.temperature), []).append(record)
    named = [(f"{category} at {temperature:g}", part) for (category, temperature), part in groups.items()]
    return [_guesses(named), _rules(named), _tokens(named)]


def _guesses(named: Sequence[tuple[str, list[DistributionRecord]]]) -> Grid:
    rows = []
    for name, records in named:
        rates = hit_rates(records)
        cumulated = [sum(rates[: rank + 1]) for rank in range(NUM_SHOWN)]
        positions = sum(record.num_positions for record in records)
        rows.append((name, str(positions), *(f"{value:.3f}" for value in cumulated)))
    headings = ("texts", "positions", *(f"first {rank}" for rank in range(1, NUM_SHOWN + 1)))
    return Grid(
        "Share of positions with the target token among the drafter's first guesses, shared noise",
        headings,
        tuple(rows),
    )


def _rules(named: Sequence[tuple[str, list[DistributionRecord]]]) -> Grid:
    rows = []
    for name, records in named:
        rates = hit_rates(records)
        coupled = " / ".join(
            f"{value:.3f}" for value in (mean_kept(records, "coupled"), sum(rates[:2]), sum(rates[:4]))
        )
        cells = [" / ".join(f"{mean_kept(records, rule, place):.3f}" for place in places) for rule, places in RULES]
        rows.append((name, coupled, *cells))
    headings = (
        "texts",
        "coupled 1 / 2 / 4",
        "token 1",
        "multistep 2 / 4",
        "recursive 1 / 2 / 4",
        "match 1 / 2 / 4",
        "likeliest 1 / 2 / 4",
    )
    return Grid("Probability that one of 1 / 2 / 4 children of a node is accepted", headings, tuple(rows))


def _tokens(named: Sequence[tuple[str, list[DistributionRecord]]]) -> Grid:
    rows = []
    for name, records in named:
        for label, tokens in (
            ("independent", lambda depth, part=records: independent_tokens(part, depth)),
            ("position by position", lambda depth, part=records: surviving_tokens(part, depth)),
            ("replayed", lambda depth, part=records: replayed_tokens(part, (1,) * depth)),
        ):
            rows.append((f"{name}, {label}", *(f"{tokens(depth):.2f}" for depth in LENGTHS)))
    return Grid(
        "Tokens per round of a coupled chain, from the distributions", ("texts", *map(str, LENGTHS)), tuple(rows)
    )


WAYS = ("tree", "chain", "batched", "one by one")


def tree_grids(records: Sequence[TreeRecord]) -> list[Grid]:
    """Return the tables of scoring and drafting that have records."""
    scored = [record for record in records if record.how in WAYS]
    drafted = [record for record in records if record.how not in WAYS]
    return [grid(part) for grid, part in ((_scoring, scored), (_drafting, drafted)) if part]


def _scoring(records: Sequence[TreeRecord]) -> Grid:
    medians = {(record.shape, record.how): statistics.median(record.milliseconds) for record in records}
    rows = []
    for record in records:
        if record.how != "tree":
            continue
        tree = medians[record.shape, "tree"]
        chain, batched, alone = (medians[record.shape, how] for how in WAYS[1:])
        rows.append(
            (
                record.shape,
                str(record.rows),
                str(record.leaves),
                *(f"{value:.1f}" for value in (tree, chain)),
                f"{tree / chain:.3f}",
                *(f"{value:.1f} ({value / tree:.2f})" for value in (batched, alone)),
            )
        )
    headings = ("shape", "nodes", "leaves", "tree ms", "chain ms", "tree / chain", "batched (x tree)", "alone (x tree)")
    title = f"Scoring a tree after {records[0].prefix} tokens: in one pass, as a chain of equal size, path by path"
    return Grid(title, headings, tuple(rows))


def _drafting(records: Sequence[TreeRecord]) -> Grid:
    pairs = zip(records[::2], records[1::2], strict=True)
    rows = []
    for whole, passes in pairs:
        grown, inside = statistics.median(whole.milliseconds), statistics.median(passes.milliseconds)
        temperature = whole.how.rpartition(" ")[2]
        shares = (f"{grown:.2f}", f"{inside:.2f}", f"{grown / inside:.3f}" if inside else NOTHING)
        rows.append((f"{whole.shape} at {temperature}", str(whole.rows), *shares))
    title = f"Drafting a tree after {records[0].prefix} tokens, and the drafter's passes in it"
    return Grid(title, ("shape at temperature", "nodes", "ms", "passes ms", "x passes"), tuple(rows))


TOLERANCE = 1.05
"""A speed-up cannot exceed the tokens per round by more than this factor of noise."""


def grids_of(results: Results) -> list[Grid]:
    """Return every table that a results file has data for."""
    grids = []
    if results.passes:
        grids.append(_passes_grid(results.header, results.passes))
    grids.extend(tree_grids(results.trees))
    grids.extend(distribution_grids(results.distributions))
    if results.perplexities:
        grids.append(_perplexity_grid(results.perplexities))
    if results.records:
        report = Report(results)
        rows = report.rows()
        grids.extend((_decoding_grid(rows), _whole_grid(rows)))
        if len(_categories(results)) > 1:
            grids.append(_category_grid(results))
        grids.extend((_phase_grid(report.phases()), _round_grid(report.round_milliseconds())))
        if report.partings():
            grids.append(_parting_grid(report))
    return grids


def provenance_line(results: Results) -> str:
    """Return the provenance of the numbers in one paragraph."""
    header = results.header
    machine, versions = header["machine"], header["versions"]
    commit = versions["commit"]
    state = "" if commit is None else f" {commit[:10]}{' with changes' if versions['dirty'] else ''}"
    division = header.get("processes", {"tp": 1, "pp": 1})
    count = division["tp"] * division["pp"]
    each = f", each of {count} processes (tp={division['tp']}, pp={division['pp']})" if count > 1 else ""
    where = machine.get("gpu") or f"{machine['cpu']}, {header['threads']} threads of {machine['usable_cores']} cores"
    parts = [
        f"{header['model']['name']}, {_weights(header)}",
        where + each,
        f"draftree {versions['draftree']}{state}, torch {versions['torch']}, transformers {versions['transformers']}",
    ]
    if header["job"] == "texts":
        prompts = header["prompts"]
        parts.append(
            f"{len({record.task for record in results.records})} of {prompts['written']} prompts of {prompts['name']}, "
            f"at most {header['max_tokens']} tokens, temperature {header['temperature']:g}, batch {header['batch']}, "
            f"{header['repeats']} interleaved repeats after a warm-up round"
        )
    if header["job"] == "distributions":
        parts.append(
            f"drafter {header['draft_models'][0]['name']}, {header['prompts']['written']} prompts of "
            f"{header['prompts']['name']}, at most {header['max_tokens']} tokens, {header['draws']} noises"
        )
    if header["job"] == "perplexity":
        text = header["text"]
        parts.append(
            f"{header['num_tokens']} tokens of {text['name']} ({text['sha256']}), windows of {header['window']} tokens "
            "that overlap by half"
        )
    before = header["load_average"]
    after = (results.end or {}).get("load_average")
    if before is not None:
        parts.append(f"load {before[0]:g} before" + (f", {after[0]:g} after" if after else ""))
    parts.append(header["date"])
    if not results.is_complete:
        parts.append("run not complete")
    return "; ".join([*parts, *header.get("notes", ())]) + "."


def _weights(header: Mapping[str, Any]) -> str:
    """Return the kind of weights; with a quantization, the dtype is that of keys and values."""
    quantization = header.get("quantization")
    return str(header["dtype"]) if quantization is None else f"{quantization} weights, {header['dtype']} otherwise"


def doubts(results: Results) -> list[str]:
    """Return the speed-ups that acceptance cannot explain: of all texts together, as the acceptance length is."""
    rows = Report(results).rows() if results.records else []
    plain = {row.method["engine"]: row.decoding for row in rows if row.method["job"] == "plain"}
    found = []
    for row in rows:
        base = plain.get(row.method["engine"])
        if base and row.decoding and row.decoding / base > TOLERANCE * row.acceptance_length:
            found.append(
                f"{row.method['name']} ran {row.decoding / base:.2f} times as fast as plain decoding at "
                f"{row.acceptance_length:.2f} tokens per round: drafting cannot explain that, so the machine's speed "
                "changed during the run"
            )
    return found


def show(results: Results, console: Console) -> None:
    console.print(provenance_line(results), style="dim", highlight=False)
    for reason in doubts(results):
        console.print(f"warning: {reason}", style="bold", highlight=False)
    for grid in grids_of(results):
        console.print()
        console.print(grid.title, style="bold", highlight=False)
        console.print(grid.rich())


def markdown(results: Results) -> str:
    tables = [grid.markdown() for grid in grids_of(results)]
    return "\n\n".join([*tables, *(f"**{reason}**" for reason in doubts(results)), provenance_line(results)]) + "\n"


def _decoding_grid(rows: Sequence[MethodSummary]) -> Grid:
    headings = (
        "method",
        "tokens/s",
        "slowest–fastest",
        "tokens/round",
        "x plain",
        "quartiles",
        "x transformers",
        "overhead",
        "text as plain",
    )
    return Grid("Decoding: after each text's first round", headings, tuple(_decoding_row(row) for row in rows))


def _decoding_row(row: MethodSummary) -> tuple[str, ...]:
    spread = NOTHING if row.slowest == row.fastest else f"{_number(row.slowest)}–{_number(row.fastest)}"
    quartiles = NOTHING if row.against_plain is None else f"{row.against_plain.low:.2f}–{row.against_plain.high:.2f}"
    return (
        str(row.method["name"]),
        _number(row.decoding),
        spread,
        f"{row.acceptance_length:.2f}",
        _ratio(row.against_plain),
        quartiles,
        _ratio(row.against_peer),
        NOTHING if row.overhead is None else f"{100 * row.overhead:.1f}%",
        NOTHING if row.num_equal is None else f"{row.num_equal}/{row.num_prompts}",
    )


def _whole_grid(rows: Sequence[MethodSummary]) -> Grid:
    lines = [
        (str(row.method["name"]), _number(row.whole), _ratio(row.whole_against_plain), _ratio(row.whole_against_peer))
        for row in rows
    ]
    headings = ("method", "tokens/s", "x plain", "x transformers")
    return Grid("Whole calls: prefill included", headings, tuple(lines))


def _category_grid(results: Results) -> Grid:
    categories = _categories(results)
    reports = {category: {r.method["name"]: r for r in Report(results, category).rows()} for category in categories}
    lines = []
    for method in results.header["methods"]:
        cells = [_category_cell(reports[category].get(method["name"])) for category in categories]
        lines.append((str(method["name"]), *cells))
    return Grid("Decoding by category: tokens/s (x plain)", ("method", *categories), tuple(lines))


def _category_cell(row: MethodSummary | None) -> str:
    if row is None:
        return NOTHING
    return f"{_number(row.decoding)} ({_ratio(row.against_plain)})"


def _categories(results: Results) -> list[str]:
    return list(dict.fromkeys(record.category for record in results.records))


def _phase_grid(phases: Mapping[str, Mapping[str, float]]) -> Grid:
    names = (*PHASES, "outside")
    rows = tuple((method, *(f"{100 * shares[name]:.1f}%" for name in names)) for method, shares in phases.items())
    return Grid("Share of time by phase, after the first round", ("method", *names), rows)


def _round_grid(rounds: Mapping[str, Mapping[str, float]]) -> Grid:
    rows = tuple((method, *(f"{times[name]:.2f}" for name in (*PHASES, "all"))) for method, times in rounds.items())
    return Grid("Milliseconds per round, without each text's first round", ("method", *PHASES, "all"), rows)


def _parting_grid(report: Report) -> Grid:
    rows = [_parting_row(parting) for parting in report.partings()]
    agreement = report.agreement()
    if agreement is not None:
        num_equal, num_prompts = agreement
        name = "plain, compared with transformers"
        rows.append((name, str(num_prompts), str(num_prompts - num_equal), *[NOTHING] * 4))
    headings = ("method", "prompts", "other text", "smallest gap", "median gap", "largest gap", "largest difference")
    return Grid(
        "Texts that differ from plain's, and the gap between the two best tokens at the first difference",
        headings,
        tuple(rows),
    )


def _parting_row(parting: TextDifferences) -> tuple[str, ...]:
    gaps = parting.gaps
    cells = (min(gaps), statistics.median(gaps), max(gaps)) if gaps else (None, None, None)
    widest = max((abs(value) for value in parting.between), default=None)
    shown = (NOTHING if value is None else f"{value:.2g}" for value in (*cells, widest))
    return (parting.method, str(parting.num_prompts), str(parting.num_parted), *shown)


def _passes_grid(header: Mapping[str, Any], passes: Sequence[PassRecord]) -> Grid:
    medians = {record.rows: statistics.median(record.milliseconds) for record in passes}
    floor = 1e3 * header["weight_bytes"] / header["read_bytes_per_second"]
    title = (
        f"Cost of a pass after {passes[0].prefix} tokens; {header['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{header['read_bytes_per_second'] / 1e9:.1f} GB/s take {floor:.1f} ms"
    )
    rows = tuple(
        (
            str(record.rows),
            f"{medians[record.rows]:.2f}",
            f"{min(record.milliseconds):.2f}–{max(record.milliseconds):.2f}",
            f"{medians[record.rows] / medians[1]:.2f}",
            f"{medians[record.rows] / floor:.2f}",
        )
        for record in passes
    )
    return Grid(title, ("rows", "ms", "fastest–slowest", "x one row", "x floor"), rows)


def _perplexity_grid(records: Sequence[PerplexityRecord]) -> Grid:
    rows = tuple(
        (
            record.weights,
            record.kernels,
            f"{record.perplexity:.3f}",
            f"{record.ratio:.4f} ± {record.ratio_error:.4f}",
            f"{record.num_other_tokens / record.num_tokens:.2%}",
        )
        for record in records
    )
    return Grid("Perplexity", ("weights", "kernels", "perplexity", "x the first", "changed top token"), rows)


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def _ratio(value: Ratio | None) -> str:
    return NOTHING if value is None else f"{value.mean:.2f}"
