"""The benchmark of captures measures both kinds over the same texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark_scripts import script
from cli_samples import save_tiny_model

capture_speed: Any = script("capture_speed")


def test_both_kinds_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_tiny_model(tmp_path / "tiny", chat=True))
    header, *found = capture_speed.measure_all(model, [2, 3], repeats=2, passes=4)
    assert header["job"] == "capture speed"
    assert [(line["batch"], line["measured"], line["repeat"]) for line in found] == [
        (batch, kind, repeat) for batch in (2, 3) for repeat in (0, 1) for kind in ("plain", "capture")
    ]
    assert all(line["kind"] == "speed" and line["tokens_per_second"] > 0 for line in found)
    assert len({line["prompt_tokens"] for line in found if line["batch"] == 3}) == 1
    assert "tokens/s" in capsys.readouterr().out
