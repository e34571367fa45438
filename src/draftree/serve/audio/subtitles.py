"""Formats of a transcribed text."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from draftree.completion import Completion
from draftree.long_speech import Transcript
from draftree.spoken import Segment


def srt(segments: Sequence[Segment]) -> str:
    """Return segments as SubRip subtitles."""
    parts = [
        f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{one.text.strip()}\n\n"
        for number, one in enumerate(segments, 1)
    ]
    return "".join(parts)


def vtt(segments: Sequence[Segment]) -> str:
    """Return segments as WebVTT subtitles."""
    # an arrow would end the text of a subtitle
    parts = [
        f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{one.text.strip().replace('-->', '->')}\n\n"
        for one in segments
    ]
    return "WEBVTT\n\n" + "".join(parts)


def _time(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    hours, rest = divmod(whole, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def segments_json(
    segments: Sequence[Segment], done: Completion | Transcript, *, temperature: float, no_speech: float | None
) -> list[dict[str, Any]]:
    """Return segments as the objects of `verbose_json`.

    Args:
        segments: of the text.
        done: the text, with log-probabilities.
        temperature: of the request.
        no_speech: probability that there is no speech; None if it is unknown.
    """
    return [
        {
            "id": number,
            "seek": 0,
            "start": round(one.start, 3),
            "end": round(one.end, 3),
            "text": one.text,
            "tokens": list(done.token_ids[one.first : one.last]),
            "temperature": temperature,
            "avg_logprob": _mean([entry.logprob for entry in (done.logprobs or ())[one.first : one.last]]),
            "compression_ratio": _compression_ratio(one.text),
            "no_speech_prob": no_speech,
        }
        for number, one in enumerate(segments)
    ]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _compression_ratio(text: str) -> float:
    raw = text.encode("utf-8")
    return len(raw) / len(zlib.compress(raw)) if raw else 1.0
