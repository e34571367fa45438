"""Acceptance of drafted tokens: by depth and rank, by width, by rule and temperature, and its closed forms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from statistics import fmean
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.engine.trace import Trace
from draftree.lab.figures.base import Data, Figure, Material
from draftree.lab.figures.drawing import INK, SERIES, band, dodged, grouped, legend, spread
from draftree.lab.figures.measures import (
    BARS,
    Estimate,
    deepest,
    guesses,
    mean,
    measured_on,
    ratio,
    steps_by_sequence,
    tokens_per_round,
    watched,
    widest,
)

CLOSED_FORMS = {"j": "coupled", "sum_min": "token"}
"""Rules whose acceptance the closed forms are."""
LINES = {
    "measured": ("measured, shared noise", (INK["measured"], "o", "-")),
    "j": ("J: the closed form of shared noise", (INK["other"], "s", "--")),
    "sum_min": ("Σ min(T, D): the bound of every rule", (INK["theory"], "^", ":")),
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
        rows: list[dict[str, Any]] = []
        for (name, temperature), part in sorted(groups.items()):
            hits = [line["shared_hits"][0] for line in part]
            places = [line["num_positions"] for line in part]
            row = {"category": name, "temperature": temperature, "texts": len(part)}
            rows.append(row | ratio(hits, places).row("measured"))
            for form, rule in CLOSED_FORMS.items():
                kept = [fmean(chances[0] for chances in line["kept"][rule]) for line in part]
                rows[-1] |= mean(kept).row(form)
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
        groups = grouped(data.rows, "category")
        every = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for axes, (name, rows) in zip(every, groups.items(), strict=True):
            x = [row["temperature"] for row in rows]
            for place, (key, (label, series)) in enumerate(LINES.items()):
                band(axes, dodged(x, place, len(LINES), step=0.02), rows, key, label=label, series=series)
            axes.set(title=name, xlabel="temperature", ylim=(0, 1))
        figure.axes[0].set_ylabel("acceptance α")
        legend(figure.axes[0], loc="upper left")


MAX_RANK = 4
COLOURS = (INK["measured"], INK["other"], INK["good"], INK["losing"])


@final
class DepthRank(Figure):
    title = "Acceptance by depth and rank"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace, texts = watched(material)
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
            nodes = [counts[level, rank] for counts in drafted]
            accepted = ratio([counts[level, rank] for counts in kept], nodes)
            rows.append({"depth": level, "rank": rank, "nodes": sum(nodes), **accepted.row("acceptance")})
        if not rows:
            raise ConfigurationError("the trace has no drafted nodes: there is no acceptance to draw")
        least = min(rows, key=lambda row: row["acceptance"])
        return Data(
            rows,
            measured_on(trace, what="Share of drafted nodes that are target tokens, given that their parents are")
            + BARS,
            f"rank {least['rank']} at depth {least['depth']}: {least['acceptance']:.3f} of {least['nodes']} nodes",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        ranks = {row["depth"]: max(r["rank"] for r in data.rows if r["depth"] == row["depth"]) for row in data.rows}
        for rank, rows in sorted(grouped(data.rows, "rank").items()):
            x = [row["depth"] + 0.2 * (rank - (ranks[row["depth"]] + 1) / 2) for row in rows]
            style = {"color": COLOURS[rank - 1], "capsize": 2, "error_kw": {"elinewidth": 1.0}}
            values = [row["acceptance"] for row in rows]
            axes.bar(x, values, 0.19, yerr=spread(rows, "acceptance"), label=f"rank {rank}", **style)
        axes.set(xlabel="depth of the node", ylabel="share accepted, given the parent", ylim=(0, 1))
        axes.set_xticks(sorted({row["depth"] for row in data.rows}))
        legend(axes)


@final
class RankHistogram(Figure):
    title = "Rank of the target's next token among the drafter's guesses"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace, texts = watched(material)
        width = widest(texts)
        if not width:
            raise ConfigurationError("the trace has no drafted nodes: there is no rank to draw")
        places = [len(text.positions) - 1 for text in texts]
        ranks = [[p.ranks[p.path[0]] if p.path else 0 for p in text.positions[:-1]] for text in texts]
        rows = [
            {"rank": rank, **ratio([each.count(rank) for each in ranks], places).row("share")}
            for rank in (*range(1, width + 1), 0)
        ]
        return Data(
            rows,
            measured_on(trace, what=f"Rank among the first {width} guesses at every position") + BARS,
            f"at {rows[-1]['share']:.0%} of the positions the target's token is not among {width} guesses",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        x = range(len(data.rows))
        colours = [*[INK["measured"]] * (len(data.rows) - 1), INK["losing"]]
        axes.bar(x, [row["share"] for row in data.rows], yerr=spread(data.rows, "share"), capsize=2, color=colours)
        sums = list(accumulate(row["share"] for row in data.rows[:-1]))
        axes.plot(x[:-1], sums, "o--", color=INK["theory"], markersize=3)
        style = {"textcoords": "offset points", "ha": "right", "fontsize": 7, "color": INK["theory"]}
        axes.annotate("cumulative", (x[-2], sums[-1]), (0, 5), **style)
        axes.set_xticks(x, [*(str(row["rank"]) for row in data.rows[:-1]), "absent"])
        axes.set(
            xlabel="rank of the target's token among the drafter's guesses", ylabel="share of positions", ylim=(0, 1)
        )


@final
class VerifyWidth(Figure):
    """Verify success by width: the share of positions at which one of the first w children is the target's token.

    Source: SpecInfer, arXiv 2305.09781, table 1, of the success of verification by tree width.
    """

    title = "Verify success by the number of children"
    runs = ("watch",)

    def data(self, material: Material) -> Data:
        trace, texts = watched(material)
        rows = []
        for level in range(1, deepest(texts) + 1):
            # the drafted children of every node on the text above this level
            families = [
                [here for p in text.positions[:-1] if (here := [guess for guess in guesses(p) if guess.level == level])]
                for text in texts
            ]
            for children in range(1, max((len(here) for each in families for here in each), default=0) + 1):
                hits = [
                    sum(any(guess.is_accepted and guess.rank <= children for guess in here) for here in each)
                    for each in families
                ]
                success = ratio(hits, [len(each) for each in families])
                rows.append({"level": level, "children": children, **success.row("success")})
        if not rows:
            raise ConfigurationError("the trace has no drafted nodes: there is no success to draw")
        least = min(rows, key=lambda row: row["success"])
        return Data(
            rows,
            measured_on(trace, what="Share of nodes on the text with an accepted child") + BARS,
            f"at depth {least['level']} with {least['children']} child{'' if least['children'] == 1 else 'ren'} "
            f"{1 - least['success']:.0%} of the verifications fail",
        )

    def draw(self, figure: Any, data: Data) -> None:
        axes = figure.subplots()
        levels = grouped(data.rows, "level")
        for place, ((level, rows), series) in enumerate(zip(levels.items(), SERIES * 3, strict=False)):
            x = dodged([row["children"] for row in rows], place, len(levels))
            band(axes, x, rows, "success", label=f"depth {level}", series=series)
        axes.set(xlabel="children of the node", ylabel="share with an accepted child", ylim=(0, 1))
        axes.set_xticks(sorted({row["children"] for row in data.rows}))
        legend(axes, loc="lower right")


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
        names = grouped(data.rows, "rule")
        for place, (name, rows) in enumerate(names.items()):
            x = dodged([row["temperature"] for row in rows], place, len(names), step=0.008)
            style = {"linewidth": 1.1, "elinewidth": 0.7, "capsize": None}
            band(axes, x, rows, "tokens", label=name, series=STYLES[name], **style)
        axes.set_xticks(sorted({row["temperature"] for row in data.rows}))
        axes.set(xlabel="temperature", ylabel="tokens per pass, bonus included")
        legend(axes, loc="center left", bbox_to_anchor=(1.0, 0.5))


@final
class SoftMatching(Figure):
    title = "Soft against exact matching"
    runs = ("soft",)

    def data(self, material: Material) -> Data:
        traces = material.all("soft")
        plain = next((_tokens_by_text(trace) for trace in traces if trace.header.verify == "coupled"), None)
        if plain is None:
            raise ConfigurationError("the traces of the run 'soft' have none of the rule coupled: record one")
        rows: list[dict[str, Any]] = [
            {
                "rule": trace.header.verify,
                **tokens_per_round(trace).row("tokens"),
                **_share_equal(plain, _tokens_by_text(trace)).row("equal"),
            }
            for trace in traces
        ]
        worst = min(rows, key=lambda row: row["equal"])
        return Data(
            rows,
            measured_on(
                traces[0],
                what="Tokens per pass, and share of the text before its first difference from plain decoding with the "
                "same seed",
            )
            + BARS,
            f"{worst['rule']} keeps only {worst['equal']:.0%} of the tokens before the first difference",
        )

    def draw(self, figure: Any, data: Data) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        names = [row["rule"] for row in data.rows]
        colours = [INK["measured"] if name.startswith("coupled") else INK["losing"] for name in names]
        for axes, key, label in (
            (left, "tokens", "tokens per pass"),
            (right, "equal", "share equal to plain decoding"),
        ):
            values = [row[key] for row in data.rows]
            axes.barh(names, values, xerr=spread(data.rows, key), color=colours, capsize=2)
            axes.set_xlabel(label)
        left.invert_yaxis()
        right.set_xlim(0, 1.02)


def _tokens_by_text(trace: Trace) -> list[list[int]]:
    return [
        [token for step in steps for token in step.tokens[: step.num_written]]
        for steps in steps_by_sequence(trace).values()
    ]


def _share_equal(plain: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Estimate:
    """Return the share of tokens before the first difference from the text of `coupled`, which is the plain one."""
    same = [
        sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(plain_text, other, strict=False)))
        for plain_text, other in zip(plain, texts, strict=True)
    ]
    return ratio(same, [len(text) for text in plain])
