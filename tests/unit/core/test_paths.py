"""Names of models in rows and reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftree.core.files import shown_name


def test_a_path_is_shown_by_its_last_part_and_a_name_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path / "small")
    assert shown_name(str(tmp_path / "small")) == shown_name(".") == "small"
    assert shown_name("owner/name") == "owner/name"
