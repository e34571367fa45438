"""A `draftree serve` process on a free port. Not a test itself."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked


class Process:
    """A `draftree serve` process; its standard error is in a file."""

    def __init__(self, model: str | Path, log: Path, *options: str) -> None:
        self.log = log
        command = [*forked.python(), "-m", "draftree", "serve", str(model), "--port", "0", *options]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"http://[0-9.:]+", self.line)
        assert found is not None, log.read_text()
        self.url = found[0]

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def process(model: str | Path, log: Path, *options: str) -> Iterator[Process]:
    running = Process(model, log, *options)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()
