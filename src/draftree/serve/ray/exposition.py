"""Metrics of all replicas as one answer: every sample gets the label `replica`. Needs no ray."""

from __future__ import annotations

import re
from collections.abc import Mapping

SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.+)", re.ASCII)
REPEATED = "draftree_repeated_requests_total"


def merged_metrics(texts: Mapping[str, str], *, num_repeated: int) -> str:
    """Return the samples of all replicas in Prometheus' text format, by metric.

    Args:
        texts: metrics of each replica, by its id.
        num_repeated: requests that were repeated on another replica, for a metric of its own.
    """
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                lines = heads.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
            elif (found := SAMPLE.fullmatch(line)) is not None:
                samples.setdefault(family, []).append(_labelled(found, replica))
    own = [
        f"# HELP {REPEATED} Requests that were repeated on another replica",
        f"# TYPE {REPEATED} counter",
        f"{REPEATED} {num_repeated}",
    ]
    lines = [line for family in samples for line in (*heads.get(family, ()), *samples[family])]
    return "\n".join([*lines, *own]) + "\n"


def _labelled(sample: re.Match[str], replica: str) -> str:
    name, labels, value = sample.groups()
    return f'{name}{{{f"{labels}," if labels else ""}replica="{replica}"}} {value}'
