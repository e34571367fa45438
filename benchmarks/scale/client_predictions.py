"""Predictions for clients of a verify server that has one core, beside what was measured.

    python benchmarks/scale/client_predictions.py equal-latency-paced.jsonl

The files are those of `equal_latency.py`; all rows together are one measurement. Prints the calibrated costs and a
table.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from measured_runs import MeasuredClients, cases_of, mean_of


def main() -> None:
    """Print the predictions of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    given = parser.parse_args()
    rows = [json.loads(line) for path in given.results for line in path.read_text("utf-8").splitlines()]
    found = MeasuredClients.of_paced(rows)
    for name in found.host.__dataclass_fields__:
        print(f"{name}: {getattr(found.host, name):.6f}")
    print(f"pass: {found.curve}, client: {found.client:.6f}, reader: {found.reader[0]:.6f}, {found.reader[1]:.6f}")
    print("| arm | round trip | clients | texts | measured | simulated | error |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for (arm, trip, count), some in cases_of(rows).items():
        measured, simulated = mean_of(some), found.simulated_mean(some)
        texts = sum(len(row["each"]) for row in some)
        error = f"{100 * (simulated / measured - 1):+.1f}%"
        print(f"| {arm} | {trip:.0f} ms | {count} | {texts} | {measured:.2f} | {simulated:.2f} | {error} |")


if __name__ == "__main__":
    main()
