"""Settings of captures, and the size of their data before the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_samples import VOCAB, capture_of
from draftree.core.errors import ConfigurationError
from draftree.train.data.capture import Capture
from draftree.train.data.reading import TrainingData
from draftree.train.data.settings import CaptureSettings
from draftree.train.data.sizing import estimate, require_disk
from draftree.train.data.writing import ShardWriter


@pytest.mark.parametrize(
    ("layers", "expected"), [(30, (2, 15, 27)), (7, (2, 3, 4)), (6, (2, 3, 4)), (2, (0, 1, 2)), (1, (0, 1))]
)
def test_automatic_features(layers: int, expected: tuple[int, ...]) -> None:
    assert CaptureSettings().layers(layers) == expected


def test_no_features() -> None:
    assert CaptureSettings(features="none").layers(30) == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": "1,x"}, "give 'auto', 'none', or layers"),
        ({"teacher": "top:3"}, "give 'hidden' or 'top-k:K'"),
        ({"temperatures": ()}, "give one or several numbers"),
        ({"temperatures": (-1.0,)}, "give one or several numbers"),
        ({"batch": 0}, "batch is 0: it must be at least 1"),
        ({"limit_tokens": 0}, "limit_tokens is 0"),
    ],
)
def test_invalid_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CaptureSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": "0,3"}, "features name layer 3, but the target has 2 layers"),
        ({"features": "2,-1"}, "name each layer once"),
        ({"teacher": "top-k:431"}, "K from 1 to 430"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        capture_of(**settings)


def test_the_size_is_estimated_before_the_start(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    settings = CaptureSettings(max_tokens=12, batch=3, limit_tokens=100)
    capture = capture_of(limit_tokens=100)
    found = estimate(capture, settings, clock=lambda: float(next(ticks)))
    assert found.tokens == 100
    assert found.num_bytes == 100 * capture.row_bytes
    assert capture.row_bytes == 4 + 4 * VOCAB * 8
    assert found.seconds > 0
    assert "100 tokens" in str(found)
    manifest = capture.run(tmp_path)
    rest = estimate(capture, settings, done_prompts=manifest.next_prompt, done_tokens=manifest.num_tokens)
    assert (rest.texts, rest.tokens, rest.num_bytes) == (0, 0, 0)
    everything = estimate(capture_of(), CaptureSettings(max_tokens=12, batch=3))
    assert everything.texts == 12
    assert everything.tokens >= TrainingData(tmp_path).num_tokens
    require_disk(tmp_path / "new" / "folder", 1000)
    with pytest.raises(ConfigurationError, match="of free disk space: lower limit_tokens"):
        require_disk(tmp_path, 1 << 60)


def test_the_writer_counts_what_is_not_closed(tmp_path: Path) -> None:
    capture = capture_of(limit_tokens=60)
    capture.run(tmp_path / "source")
    texts = list(TrainingData(tmp_path / "source"))
    writer = ShardWriter(tmp_path / "copy", capture.recipe, row_bytes=capture.row_bytes)
    writer.skip("no reason")
    writer.add(texts[0])
    assert (writer.num_texts, writer.next_prompt) == (1, 2)
    writer.save()
    writer.close()
    assert [path.name for path in sorted((tmp_path / "copy").iterdir())] == [
        "manifest.json",
        "shard-00000-first-1.safetensors",
    ]
    again = ShardWriter(tmp_path / "copy", capture.recipe, row_bytes=capture.row_bytes)
    assert (again.num_texts, again.num_tokens, again.next_prompt) == (1, texts[0].num_rows, 2)
    assert again.skipped == {"no reason": 1}
    again.save(complete=True)
    assert isinstance(capture, Capture)
    assert TrainingData(tmp_path / "copy").folders[0].manifest.skipped == {"no reason": 1}
