"""The default planner on recorded drafts: greedy texts of real models on a simulated machine, idle and in bursts.

Every position of a text has the draft that was made there (`--plan watch`). SmolLM2-135M was recorded with its head and
`suffix`, TinyLlama-1.1B with SmolLM2-135M, which has another tokenizer.
"""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from draftree.engine.trace import Trace, read_trace
from draftree.lab.analysis.simulation import scripts_of
from replayed_texts import Machine, Replay

BF16 = {1: 0.0064, 2: 0.0066, 4: 0.0069, 8: 0.0078, 16: 0.01, 32: 0.016}
INT4 = {1: 0.0024, 2: 0.0028, 4: 0.0032, 8: 0.0042, 16: 0.0065, 32: 0.012}
HEAD = {0: (0.0006, 0.0004), 1: (0.00006, 0.0)}
SLOW = {1: 0.06, 2: 0.062, 4: 0.065, 8: 0.075, 16: 0.1, 32: 0.16}
BURSTS = {"burst": 0.5, "pause": 0.5}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    folder = tmp_path_factory.mktemp("traces")
    found = {}
    for name in ("smollm2", "tinyllama"):
        (folder / name).write_bytes(gzip.decompress((Path(__file__).parent / f"recorded_{name}.jsonl.gz").read_bytes()))
        found[name] = read_trace(folder / name)
    return found


def speeds(trace: Trace, passes: dict[int, float], **machine: Any) -> list[float]:
    """Every text by a planner that knows nothing yet, and then all in turn by one."""
    fresh = [
        Replay(trace, Machine(passes, HEAD, seed=100 * seed + place, **machine)).texts([place])
        for seed in range(2)
        for place in range(len(scripts_of(trace)))
    ]
    return [*(speed for speeds in fresh for speed in speeds), *Replay(trace, Machine(passes, HEAD, **machine)).texts()]


@pytest.mark.parametrize(("passes", "mean", "least"), [(BF16, 1.55, 1.15), (INT4, 1.08, 0.92)], ids=["bf16", "int4"])
@pytest.mark.parametrize(
    "bursts", [{}, BURSTS, {"burst": 0.1, "pause": 0.2, "slow": 4.0}], ids=["idle", "long", "slow"]
)
def test_bursts_of_other_work_hardly_change_what_is_drafted(
    traces: dict[str, Trace], passes: dict[int, float], mean: float, least: float, bursts: dict[str, float]
) -> None:
    found = speeds(traces["smollm2"], passes, **bursts)
    assert geometric_mean(found) > mean
    assert min(found) > least


@pytest.mark.parametrize("bursts", [{}, BURSTS], ids=["idle", "bursts"])
def test_few_misses_do_not_turn_off_a_drafter_that_pays(traces: dict[str, Trace], bursts: dict[str, float]) -> None:
    """Texts that begin at other places, some of them with several misses in a row."""
    lengths, found = [], []
    for number, script in enumerate(scripts_of(traces["tinyllama"])):
        for skipped in range(0, min(26, len(script.text) - 24), 2):
            text = replace(script, text=script.text[skipped:], start=script.start + skipped)
            machine = Machine(SLOW, {0: (0.0105, 0.0105)}, seed=7 * skipped + number, after_draft=1.05, **bursts)
            replay = Replay(traces["tinyllama"], machine)
            found.append(replay.text(text))
            lengths.append(len(text.text) / len(replay.log))
    assert geometric_mean(found) > 1.31
    assert min(found) > 0.95
    assert sum(length < 1.15 for length in lengths) < 0.06 * len(lengths)


def test_what_earlier_texts_gained_is_not_lost_in_one(traces: dict[str, Trace]) -> None:
    """A text after others in which much was gained, with passes whose rows cost so much that little pays."""
    order = [5, 2, 7, 0, 4, 1, 8, 3, 6]
    found = [Replay(traces["smollm2"], Machine(INT4, HEAD, seed=seed)).texts(order) for seed in range(4)]
    assert min(map(min, found)) > 0.95
