"""Acceptance of drafted tokens: by depth and rank, by width, by rule and temperature, and its closed forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.engine.trace import Trace
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, band, dodged, legend
from draftree.lab.figures.measures import (
    Text,
    deepest,
    estimates,
    guesses,
    mean,
    measured_on,
    ratio,
    spread,
    texts_by_sequence,
    texts_of,
    tokens_per_round,
    widest,
)

RULES = {"j": "coupled", "sum_min": "token"}
LINES = {
    "measured": ("measured, shared noise", INK["measured"], "o", "-"),
    "j": ("J: the closed form of shared noise", INK["other"], "s", "--"),
    "sum_min": ("Σ min(T, D): the bound of every rule", INK["theory"], "^", ":"),
}


@final
class AcceptanceEstimates(Figure):
    """Acceptance of a drafted token: measured under shared noise, and the closed forms sum of min and J.

    For target T and drafter D, `sum min(T, D)` is the acceptance of rejection sampling and the upper bound of any rule;
    `J = sum_i 1 / sum_j max(T_j / T_i, D_j / D_i)` is that of shared noise. Source: arXiv 2211.17192; arXiv 2408.07978.
    """

    title = "Acceptance of one drafted token: measured, and its estimates"
    results = ("distribution",)

    def data(self, material: Material) -> Data:
        lines = material.lines(kind="distribution")
        header = lines[0][0]
        groups: dict[tuple[str, float], list[Mapping[str, Any]]] = {}
        for _, line in lines:
            groups.setdefault((line["category"], line["temperature"]), []).append(line)
        rows: list[dict[str, Any]] = [
            {"category": name, "temperature": t, **_row(part)} for (name, t), part in sorted(groups.items())
        ]
        least = min(rows, key=lambda row: row["measured"])
        return Data(
            rows,
            "Share of positions at which drafter and target choose the same token, over "
            f"{len({line['task'] for _, line in lines})} texts of "
            f"{header['max_tokens']} tokens: {header['model']['name']} drafted by {header['draft_models'][0]['name']}, "
            f"{header['dtype']}, noise of {header['draws']} seeds; bars: 95% over texts",
            f"{least['category']} at temperature {least['temperature']:g}: {least['measured']:.2f} of the drafted "
            "tokens are accepted",
        )

    def draw(self, figure: Any, data: Data) -> None:
        names = list(dict.fromkeys(row["category"] for row in data.rows))
        for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
            rows = [row for row in data.rows if row["category"] == name]
            x = [row["temperature"] for row in rows]
            for place, (key, (label, colour, marker, line)) in enumerate(LINES.items()):
                shown = estimates(rows, key)
                places = dodged(x, place, len(LINES), step=0.02)
                band(axes, places, shown, label=label, colour=colour, marker=marker, line=line)
            axes.set(title=name, xlabel="temperature", ylim=(0, 1))
        figure.axes[0].set_ylabel("acceptance α")
        legend(figure.axes[0], loc="upper left")


def _row(part: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    measured = ratio([line["shared_hits"][0] for line in part], [line["num_positions"] for line in part])
    closed = {name: mean([_mean_kept(line, rule) for line in part]) for name, rule in RULES.items()}
    found = {"texts": len(part), **measured.row("measured")}
    for name, estimate in closed.items():
        found |= estimate.row(name)
    return found


def _mean_kept(line: Mapping[str, Any], rule: str) -> float:
    """Return the mean over positions of the probability that one child is accepted."""
    first = [kept[0] for kept in line["kept"][rule]]
    return float(sum(first) / len(first))


MAX_RANK = 4
COLOURS = (INK["measured"], INK["other"], INK["good"], INK["losing"])
BARS = {"error_kw": {"elinewidth": 1.0}}


@final
class DepthRank(Figure):
    title = "Acceptance by depth and rank"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        drafted = [Counter[tuple[int, int]]() for _ in texts]
        kept = [Counter[tuple[int, int]]() for _ in texts]
        for number, text in enumerate(texts):
            for position in text.positions[:-1]:
                for guess in guesses(position):
                    key = guess.level, guess.rank
                    drafted[number][key] += 1
                    kept[number][key] += guess.is_accepted
        rows = []
        for level, rank in sorted({key for counts in drafted for key in counts if key[1] <= MAX_RANK}):
            below = [counts[level, rank] for counts in drafted]
            found = ratio([counts[level, rank] for counts in kept], below)
            rows.append({"depth": level, "rank": rank, "nodes": sum(below), **found.row("acceptance")})
        if not rows:
            raise ConfigurationError("the trace has no drafted nodes: there is no acceptance to draw")
        least = min(rows, key=lambda row: row["acceptance"])
        return Data(
            rows,
            measured_on(trace, what="Share of drafted nodes that are target tokens, given that their parents are")
            + "; bars: 95% over texts",
            f"rank {least['rank']} at depth {least['depth']}: {least['acceptance']:.3f} of {least['nodes']} nodes",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        ranks = {row["depth"]: max(r["rank"] for r in data.rows if r["depth"] == row["depth"]) for row in data.rows}
        for rank in range(1, MAX_RANK + 1):
            rows = [row for row in data.rows if row["rank"] == rank]
            x = [row["depth"] + 0.2 * (rank - (ranks[row["depth"]] + 1) / 2) for row in rows]
            values = [row["acceptance"] for row in rows]
            axes.bar(
                x,
                values,
                0.19,
                yerr=spread(rows, "acceptance"),
                capsize=2,
                color=COLOURS[rank - 1],
                label=f"rank {rank}",
                **BARS,
            )
        axes.set(xlabel="depth of the node", ylabel="share accepted, given the parent", ylim=(0, 1))
        axes.set_xticks(sorted({row["depth"] for row in data.rows}))
        legend(axes)


@final
class RankHistogram(Figure):
    title = "Rank of the target's next token among the drafter's guesses"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        width = widest(texts)
        if not width:
            raise ConfigurationError("the trace has no drafted nodes: there is no rank to draw")
        places = [len(text.positions) - 1 for text in texts]
        ranks = [_ranks(text) for text in texts]
        rows = [
            {"rank": rank, **ratio([one.count(rank) for one in ranks], places).row("share")}
            for rank in (*range(1, width + 1), 0)
        ]
        return Data(
            rows,
            measured_on(trace, what=f"Rank among the first {width} guesses at every position")
            + "; bars: 95% over texts",
            f"at {rows[-1]['share']:.0%} of the positions the target's token is not among {width} guesses",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        x = range(len(data.rows))
        colours = [*[INK["measured"]] * (len(data.rows) - 1), INK["losing"]]
        axes.bar(x, [row["share"] for row in data.rows], yerr=spread(data.rows, "share"), capsize=2, color=colours)
        total = 0.0
        sums = []
        for row in data.rows[:-1]:
            total += row["share"]
            sums.append(total)
        axes.plot(x[:-1], sums, "o--", color=INK["theory"], markersize=3)
        axes.annotate(
            "cumulative", (x[-2], sums[-1]), (0, 5), textcoords="offset points", ha="right", fontsize=7,
            color=INK["theory"],
        )  # fmt: skip
        axes.set_xticks(x, [*(str(row["rank"]) for row in data.rows[:-1]), "absent"])
        axes.set(
            xlabel="rank of the target's token among the drafter's guesses", ylabel="share of positions", ylim=(0, 1)
        )


def _ranks(text: Text) -> list[int]:
    return [p.ranks[p.path[0]] if p.path else 0 for p in text.positions[:-1]]


@final
class VerifyWidth(Figure):
    """Verify success by width: the share of positions at which one of the first w children is the target's token.

    Source: SpecInfer, arXiv 2305.09781, table 1, of the success of verification by tree width.
    """

    title = "Verify success by the number of children"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace = material.one("watch")
        texts = texts_of(trace)
        rows = []
        for level in range(1, deepest(texts) + 1):
            ranks = [_accepted_ranks(text, level) for text in texts]
            width = max((drafted for one in ranks for _, drafted in one), default=0)
            for children in range(1, width + 1):
                hits = [sum(0 < rank <= children for rank, _ in one) for one in ranks]
                found = ratio(hits, [len(one) for one in ranks])
                rows.append({"level": level, "children": children, **found.row("success")})
        if not rows:
            raise ConfigurationError("the trace has no drafted nodes: there is no success to draw")
        least = min(rows, key=lambda row: row["success"])
        return Data(
            rows,
            measured_on(trace, what="Share of nodes on the text with an accepted child") + "; bars: 95% over texts",
            f"at depth {least['level']} with {least['children']} child{'' if least['children'] == 1 else 'ren'} "
            f"{1 - least['success']:.0%} of the verifications fail",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        levels = list(dict.fromkeys(row["level"] for row in data.rows))
        for place, (level, (colour, marker, line)) in enumerate(zip(levels, SERIES * 3, strict=False)):
            rows = [row for row in data.rows if row["level"] == level]
            x = dodged([row["children"] for row in rows], place, len(levels))
            band(axes, x, estimates(rows, "success"), label=f"depth {level}", colour=colour, marker=marker, line=line)
        axes.set(xlabel="children of the node", ylabel="share with an accepted child", ylim=(0, 1))
        axes.set_xticks(sorted({row["children"] for row in data.rows}))
        legend(axes, loc="lower right")


def _accepted_ranks(text: Text, level: int) -> list[tuple[int, int]]:
    """Return the accepted rank, 0 for none, and the children of every node on the text above this level."""
    found = []
    for position in text.positions[:-1]:
        here = [guess for guess in guesses(position) if guess.level == level]
        if here:
            found.append((next((guess.rank for guess in here if guess.is_accepted), 0), len(here)))
    return found


STYLES = {
    "coupled": ("#0068b5", "o", "-"),
    "match": ("#2a97b5", "s", "-"),
    "token": ("#c46ba3", "^", "-"),
    "block": ("#7a2e5d", "D", "-"),
    "multistep": ("#b58900", "v", "-"),
    "recursive": ("#00694e", "P", "-"),
    "traversal": ("#57606a", "X", "-"),
    "typical": ("#d55e00", "o", ":"),
    "soft": ("#6e4a00", "s", ":"),
}


@final
class TemperatureRules(Figure):
    title = "Tokens per pass of every rule against the temperature"
    runs = ("rule",)
    size = (7.6, 4.8)

    def data(self, material: Material) -> Data:
        traces = material.all("rule")
        rows: list[dict[str, Any]] = [
            {
                "rule": trace.header.verify.split(",")[0],
                "temperature": float(trace.header.about["temperature"]),
                **tokens_per_round(trace).row("tokens"),
            }
            for trace in traces
        ]
        rows.sort(key=lambda row: (list(STYLES).index(row["rule"]), row["temperature"]))
        least = min(rows, key=lambda row: row["tokens"])
        about = measured_on(traces[0], what="Tokens per pass").replace(f", temperature {rows[0]['temperature']:g}", "")
        return Data(
            rows,
            about + f" in each run, plan {traces[0].header.plan}; dotted rules change the distribution of the texts; "
            "bars: 95% over texts",
            f"{least['rule']} at temperature {least['temperature']:g}: {least['tokens']:.2f} tokens per pass",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        names = list(dict.fromkeys(row["rule"] for row in data.rows))
        for place, name in enumerate(names):
            rows = [row for row in data.rows if row["rule"] == name]
            colour, marker, line = STYLES[name]
            shown = estimates(rows, "tokens")
            x = [row["temperature"] + 0.008 * (place - len(names) / 2) for row in rows]
            errors = list(zip(*(one.errors for one in shown), strict=True))
            values = [one.value for one in shown]
            axes.errorbar(
                x, values, yerr=errors, color=colour, marker=marker, linestyle=line, label=name, markersize=4,
                linewidth=1.1, elinewidth=0.7,
            )  # fmt: skip
        axes.set_xticks(sorted({row["temperature"] for row in data.rows}))
        axes.set(xlabel="temperature", ylabel="tokens per pass, bonus included")
        legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


@final
class SoftMatching(Figure):
    title = "Soft against exact matching"
    runs = ("soft",)

    def data(self, material: Material) -> Data:
        traces = material.all("soft")
        plain = next((trace for trace in traces if trace.header.verify == "coupled"), None)
        if plain is None:
            raise ConfigurationError("the traces of the run 'soft' have none of the rule coupled: record one")
        rows = [
            {"rule": trace.header.verify, **tokens_per_round(trace).row("tokens"), **_equal(plain, trace).row("equal")}
            for trace in traces
        ]
        worst = min(rows, key=lambda row: row["equal"])
        return Data(
            rows,
            measured_on(traces[0], what="Tokens per pass, and share of the text before its first difference from plain "
                        "decoding with the same seed") + "; bars: 95% over texts",
            f"{worst['rule']} keeps only {worst['equal']:.0%} of the tokens before the first difference",
        )  # fmt: skip

    def draw(self, figure: Any, data: Data) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        names = [row["rule"] for row in data.rows]
        for axes, key, label in (
            (left, "tokens", "tokens per pass"),
            (right, "equal", "share equal to plain decoding"),
        ):
            values = [row[key] for row in data.rows]
            colours = [INK["measured"] if name.startswith("coupled") else INK["losing"] for name in names]
            axes.barh(names, values, xerr=spread(data.rows, key), color=colours, capsize=2)
            axes.set_xlabel(label)
        left.invert_yaxis()
        right.set_xlim(0, 1.02)


def _equal(plain: Trace, trace: Trace) -> Any:
    """Return the share of tokens before the first difference from the text of `coupled`, which is the plain one."""
    pairs = list(zip(texts_by_sequence(plain), texts_by_sequence(trace), strict=True))
    same = [sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False))) for pair in pairs]
    return ratio(same, [len(text) for text, _ in pairs])
