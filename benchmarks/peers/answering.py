"""Shared parts of the scripts in this folder: their options, and the loop that answers one request per line.

Each is run by the Python of an environment of its own, so only the standard library may be imported here. A request is
{"ids": [...], "max_tokens": 64}. The first output line names the ready engine, every other one answers a request.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TextIO

Write = Callable[[list[int], int], dict[str, Any]]
"""That many tokens after these: `seconds`, `decode_seconds` after the first token, `tokens`, `ids`."""


def options(*, draft: int, **lookup: Any) -> argparse.Namespace:
    """Those of the command line.

    Args:
        draft: how many tokens a lookup drafts by default.
        lookup: what kind of option `--lookup` is.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lookup", **lookup)
    parser.add_argument("--drafter", help="file of a draft model, if the engine supports one")
    parser.add_argument("--match", type=int, default=3)
    parser.add_argument("--draft", type=int, default=draft)
    return parser.parse_args()


def answer(name: str, write: Write, *, to: TextIO | None = None) -> None:
    """Answer until the input ends."""
    print(json.dumps({"ready": name}), file=to, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(write(asked["ids"], asked["max_tokens"])), file=to, flush=True)
