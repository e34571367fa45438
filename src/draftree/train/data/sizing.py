"""Size and duration of a capture, from a short measurement before it starts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from draftree.core.errors import ConfigurationError
from draftree.engine.sequence import WritingSequence
from draftree.train.data.capture import Capture
from draftree.train.data.settings import CaptureSettings

SAMPLE = 100
"""Prompts whose length is measured."""
PROBE_PASSES = 12
PROBE_SECONDS = 10.0
"""Limits of the measurement."""
DISK_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """Size of a capture whose texts are all as long as allowed.

    Attributes:
        texts: number of texts if all of them are as long as allowed; with a limit of tokens there are more if some end
            early.
        tokens: number of rows.
        num_bytes: size on disk.
        seconds: duration.
        tokens_per_second: measured new tokens per second of a whole batch.
    """

    texts: int
    tokens: int
    num_bytes: int
    seconds: float
    tokens_per_second: float

    def __str__(self) -> str:
        minutes = self.seconds / 60
        duration = f"{minutes:.0f} minutes" if minutes >= 2 else f"{self.seconds:.0f} seconds"
        return (
            f"{self.texts:,} texts of full length: at most {self.tokens:,} tokens, {self.num_bytes / 1e6:,.0f} MB, "
            f"about {duration} ({self.tokens_per_second:,.0f} new tokens/s measured)"
        )


def estimate(
    capture: Capture,
    settings: CaptureSettings,
    *,
    done_prompts: int = 0,
    done_tokens: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Estimate:
    """Estimate the rest of a capture by generating a few tokens of its next texts, which are not stored.

    Args:
        capture: the capture.
        settings: its settings.
        done_prompts: prompts that are done.
        done_tokens: rows that are stored.
        clock: returns seconds.
    """
    jobs = capture.jobs[done_prompts:]
    lengths = [len(found.history) for found in _sequences(capture, done_prompts, SAMPLE)]
    if not lengths:
        return Estimate(0, 0, 0, 0.0, 0.0)
    prompt = sum(lengths) / len(lengths)
    rows = prompt + settings.max_tokens - 1
    texts, tokens = len(jobs), round(len(jobs) * rows)
    if settings.limit_tokens is not None:
        tokens = min(tokens, max(0, settings.limit_tokens - done_tokens))
        texts = min(texts, -(-tokens // round(rows)))
    if not texts:
        return Estimate(0, 0, 0, 0.0, 0.0)
    read_seconds, pass_seconds, batch = _probe(capture, _sequences(capture, done_prompts, settings.batch), clock)
    speed = batch / pass_seconds
    seconds = texts * (prompt * read_seconds + settings.max_tokens / speed)
    return Estimate(texts, tokens, tokens * capture.row_bytes, seconds, speed)


def _sequences(capture: Capture, first: int, count: int) -> list[WritingSequence]:
    found = (capture.sequence(job) for job in islice(capture.jobs, first, None))
    return list(islice((sequence for sequence in found if not isinstance(sequence, str)), count))


def _probe(capture: Capture, sequences: list[WritingSequence], clock: Callable[[], float]) -> tuple[float, float, int]:
    """Return seconds per prompt token, seconds per pass over one token of each text, and the number of texts."""
    _, engine = capture.engine()
    prompt_tokens = sum(len(sequence.history) for sequence in sequences)
    engine.add(*sequences)
    try:
        start = clock()
        while not all(sequence.counts.rounds or sequence.is_finished for sequence in sequences):
            engine.step()
        read = clock() - start
        start, passes, tokens = clock(), 0, 0
        while not engine.is_idle and passes < PROBE_PASSES and clock() - start < PROBE_SECONDS:
            tokens += len(engine.running)
            engine.step()
            passes += 1
        seconds = max(clock() - start, 1e-9)
    finally:
        engine.abort(sequences)
    size = max(1, round(tokens / max(1, passes)))
    return read / prompt_tokens, seconds / max(1, passes), size


def require_disk(folder: Path, num_bytes: int) -> None:
    """Refuse a capture that is larger than the free disk space.

    Raises:
        ConfigurationError: the message has both sizes.
    """
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if num_bytes > DISK_SHARE * free:
        raise ConfigurationError(
            f"the data may take {num_bytes / 1e9:,.1f} GB, but '{place}' has {free / 1e9:,.1f} GB of free disk space: "
            "lower limit_tokens, or choose another folder"
        )
