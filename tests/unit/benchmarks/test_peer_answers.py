"""The common behaviour of all peer scripts, in a Python with only the standard library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmark_scripts import FOLDER

PEERS = FOLDER / "peers"
LOOKUP = {"a choice": "choices=('simple', 'map')", "a switch": "action='store_true'"}
PEER = """
import sys
sys.path.insert(0, {folder!r})
from answering import answer, options
given = options(draft=8, {lookup})
answer(str(sorted(vars(given).items())), lambda ids, max_tokens: dict(ids=ids, tokens=max_tokens))
"""


def run(lookup: str, *arguments: str, asked: str = "") -> subprocess.CompletedProcess[str]:
    program = PEER.format(folder=str(PEERS), lookup=LOOKUP[lookup])
    command = [sys.executable, "-I", "-S", "-c", program, *arguments]
    return subprocess.run(command, input=asked, capture_output=True, text=True, check=False)


def test_requests_are_answered_line_by_line_after_the_ready_line() -> None:
    asked = "".join(json.dumps({"ids": ids, "max_tokens": 7}) + "\n" for ids in ([1, 2], []))
    ready, *answers = map(json.loads, run("a switch", "m", asked=asked).stdout.splitlines())
    assert list(ready) == ["ready"]
    assert answers == [{"ids": [1, 2], "tokens": 7}, {"ids": [], "tokens": 7}]


@pytest.mark.parametrize(
    ("lookup", "arguments", "expected"),
    [
        ("a switch", ["m"], {"draft": 8, "drafter": None, "lookup": False, "match": 3, "model": "m", "threads": 2}),
        ("a choice", ["m"], {"draft": 8, "drafter": None, "lookup": None, "match": 3, "model": "m", "threads": 2}),
        (
            "a choice",
            ["m", "--lookup", "map", "--draft", "5", "--match", "2", "--threads", "1"],
            {"draft": 5, "drafter": None, "lookup": "map", "match": 2, "model": "m", "threads": 1},
        ),
    ],
)
def test_options_have_one_meaning_for_all_peers(lookup: str, arguments: list[str], expected: dict[str, object]) -> None:
    ready = json.loads(run(lookup, *arguments).stdout)["ready"]
    assert ready == str(sorted(expected.items()))


def test_an_unknown_lookup_is_refused() -> None:
    assert "invalid choice" in run("a choice", "m", "--lookup", "other").stderr
