"""Tables of results as grids of text, for a terminal or as Markdown. No torch."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from draftree.lab.analysis.theory import CHILDREN
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
    """Return a verifier's mean acceptance over positions; `place` is an index of `CHILDREN`."""
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
RULES = (("token", (1,)), ("multistep", (2, 4)), ("recursive", CHILDREN), ("match", CHILDREN), ("likeliest", CHILDREN))
"""Verifiers of the table, and the numbers of children."""


def distribution_grids(records: Sequence[DistributionRecord]) -> list[Grid]:
    """Return tables of guesses, verifiers and tokens per round, by category and temperature; empty without records."""
    if not records:
        return []
    groups: dict[str, list[DistributionRecord]] = {}
    for record in records:
        groups.setdefault(f"{record.category} at {record.temperature:g}", []).append(record)
    guesses = []
    rules = []
    tokens = []
    for name, part in groups.items():
        cumulated = list(itertools.accumulate(hit_rates(part)))
        positions = sum(record.num_positions for record in part)
        guesses.append((name, str(positions), *(f"{share:.3f}" for share in cumulated[:NUM_SHOWN])))
        coupled = (mean_kept(part, "coupled"), cumulated[1], cumulated[3])
        cells = [[mean_kept(part, rule, CHILDREN.index(count)) for count in counts] for rule, counts in RULES]
        rules.append((name, *(" / ".join(f"{value:.3f}" for value in values) for values in (coupled, *cells))))
        rows = {
            "independent": [independent_tokens(part, depth) for depth in LENGTHS],
            "position by position": [surviving_tokens(part, depth) for depth in LENGTHS],
            "replayed": [replayed_tokens(part, (1,) * depth) for depth in LENGTHS],
        }
        tokens += [(f"{name}, {label}", *(f"{value:.2f}" for value in values)) for label, values in rows.items()]
    return [
        Grid(
            "Share of positions with the target token among the drafter's first guesses, shared noise",
            ("texts", "positions", *(f"first {rank}" for rank in range(1, NUM_SHOWN + 1))),
            tuple(guesses),
        ),
        Grid(
            "Probability that one of 1 / 2 / 4 children of a node is accepted",
            ("texts", "coupled 1 / 2 / 4", *(f"{rule} {' / '.join(map(str, counts))}" for rule, counts in RULES)),
            tuple(rules),
        ),
        Grid(
            "Tokens per round of a coupled chain, from the distributions", ("texts", *map(str, LENGTHS)), tuple(tokens)
        ),
    ]


WAYS = ("tree", "chain", "batched", "one by one")


def tree_grids(records: Sequence[TreeRecord]) -> list[Grid]:
    """Return the tables of scoring and drafting that have records."""
    medians = {(record.shape, record.how): statistics.median(record.milliseconds) for record in records}
    scoring = []
    for record in records:
        if record.how == "tree":
            tree, chain, batched, alone = (medians[record.shape, how] for how in WAYS)
            times = (f"{tree:.1f}", f"{chain:.1f}", f"{tree / chain:.3f}")
            others = (f"{value:.1f} ({value / tree:.2f})" for value in (batched, alone))
            scoring.append((record.shape, str(record.rows), str(record.leaves), *times, *others))
    drafts = [record for record in records if record.how not in WAYS]
    drafting = []
    for whole, passes in zip(drafts[::2], drafts[1::2], strict=True):
        grown, inside = statistics.median(whole.milliseconds), statistics.median(passes.milliseconds)
        shares = (f"{grown:.2f}", f"{inside:.2f}", f"{grown / inside:.3f}" if inside else NOTHING)
        drafting.append((f"{whole.shape} at {whole.how.rpartition(' ')[2]}", str(whole.rows), *shares))
    prefix = records[0].prefix if records else 0
    grids = [
        Grid(
            f"Scoring a tree after {prefix} tokens: in one pass, as a chain of equal size, path by path",
            ("shape", "nodes", "leaves", "tree ms", "chain ms", "tree / chain", "batched (x tree)", "alone (x tree)"),
            tuple(scoring),
        ),
        Grid(
            f"Drafting a tree after {prefix} tokens, and the drafter's passes in it",
            ("shape at temperature", "nodes", "ms", "passes ms", "x passes"),
            tuple(drafting),
        ),
    ]
    return [grid for grid in grids if grid.rows]


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
        grids.extend(_text_grids(results))
    return grids


def _text_grids(results: Results) -> Iterator[Grid]:
    report = Report(results)
    rows = report.rows()
    yield Grid(
        "Decoding: after each text's first round",
        (
            *("method", "tokens/s", "slowest–fastest", "tokens/round", "x plain", "quartiles", "x transformers"),
            *("overhead", "text as plain"),
        ),
        tuple(map(_decoding_row, rows)),
    )
    yield Grid(
        "Whole calls: prefill included",
        ("method", "tokens/s", "x plain", "x transformers"),
        tuple(
            (row.method["name"], _number(row.whole), _ratio(row.whole_against_plain), _ratio(row.whole_against_peer))
            for row in rows
        ),
    )
    categories = list(dict.fromkeys(record.category for record in results.records))
    if len(categories) > 1:
        cells = {
            (category, row.method["name"]): f"{_number(row.decoding)} ({_ratio(row.against_plain)})"
            for category in categories
            for row in Report(results, category).rows()
        }
        names = [method["name"] for method in report.methods]
        yield Grid(
            "Decoding by category: tokens/s (x plain)",
            ("method", *categories),
            tuple((name, *(cells.get((category, name), NOTHING) for category in categories)) for name in names),
        )
    phases = (*PHASES, "outside")
    yield Grid(
        "Share of time by phase, after the first round",
        ("method", *phases),
        tuple((name, *(f"{100 * shares[p]:.1f}%" for p in phases)) for name, shares in report.phases().items()),
    )
    phases = (*PHASES, "all")
    yield Grid(
        "Milliseconds per round, without each text's first round",
        ("method", *phases),
        tuple((name, *(f"{times[p]:.2f}" for p in phases)) for name, times in report.round_milliseconds().items()),
    )
    if partings := [_parting_row(parting) for parting in report.partings()]:
        if (agreement := report.agreement()) is not None:
            num_equal, num_prompts = agreement
            name = "plain, compared with transformers"
            partings.append((name, str(num_prompts), str(num_prompts - num_equal), *[NOTHING] * 4))
        yield Grid(
            "Texts that differ from plain's, and the gap between the two best tokens at the first difference",
            ("method", "prompts", "other text", "smallest gap", "median gap", "largest gap", "largest difference"),
            tuple(partings),
        )


def provenance_line(results: Results) -> str:
    """Return the provenance of the numbers in one paragraph."""
    header = results.header
    machine, versions = header["machine"], header["versions"]
    commit = versions["commit"]
    state = "" if commit is None else f" {commit[:10]}{' with changes' if versions['dirty'] else ''}"
    division = header.get("processes", {"tp": 1, "pp": 1})
    count = division["tp"] * division["pp"]
    each = f", each of {count} processes (tp={division['tp']}, pp={division['pp']})" if count > 1 else ""
    quantization = header.get("quantization")  # with one, the dtype is that of keys and values
    weights = header["dtype"] if quantization is None else f"{quantization} weights, {header['dtype']} otherwise"
    where = machine.get("gpu") or f"{machine['cpu']}, {header['threads']} threads of {machine['usable_cores']} cores"
    parts = [
        f"{header['model']['name']}, {weights}",
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


def doubts(results: Results) -> list[str]:
    """Return the speed-ups that acceptance cannot explain: of all texts together, as the acceptance length is."""
    rows = Report(results).rows() if results.records else []
    plain = {row.method["engine"]: row.decoding for row in rows if row.method["job"] == "plain"}
    reasons = []
    for row in rows:
        base = plain.get(row.method["engine"])
        if base and row.decoding and row.decoding / base > TOLERANCE * row.acceptance_length:
            reasons.append(
                f"{row.method['name']} ran {row.decoding / base:.2f} times as fast as plain decoding at "
                f"{row.acceptance_length:.2f} tokens per round: drafting cannot explain that, so the machine's speed "
                "changed during the run"
            )
    return reasons


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


def _parting_row(parting: TextDifferences) -> tuple[str, ...]:
    gaps = parting.gaps
    cells = (min(gaps), statistics.median(gaps), max(gaps)) if gaps else (None, None, None)
    widest = max((abs(value) for value in parting.between), default=None)
    shown = (NOTHING if value is None else f"{value:.2g}" for value in (*cells, widest))
    return (parting.method, str(parting.num_prompts), str(parting.num_parted), *shown)


def _passes_grid(header: Mapping[str, Any], passes: Sequence[PassRecord]) -> Grid:
    floor = 1e3 * header["weight_bytes"] / header["read_bytes_per_second"]
    title = (
        f"Cost of a pass after {passes[0].prefix} tokens; {header['weight_bytes'] / 1e6:.0f} MB of weights at "
        f"{header['read_bytes_per_second'] / 1e9:.1f} GB/s take {floor:.1f} ms"
    )
    medians = {record.rows: statistics.median(record.milliseconds) for record in passes}
    rows = []
    for record in passes:
        spread = f"{min(record.milliseconds):.2f}–{max(record.milliseconds):.2f}"
        ratios = (medians[record.rows] / base for base in (medians[1], floor))
        rows.append((str(record.rows), f"{medians[record.rows]:.2f}", spread, *(f"{ratio:.2f}" for ratio in ratios)))
    return Grid(title, ("rows", "ms", "fastest–slowest", "x one row", "x floor"), tuple(rows))


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
    return NOTHING if value is None else f"{value.median:.2f}"
