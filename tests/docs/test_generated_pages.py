"""Pages generated from the code are up to date, and a new method without a page is reported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import build
import pytest
from documents import DOCS
from generator.docstrings import attributes, option_texts, parse
from generator.methods import guarantee

import draftree.planners
from draftree.completion import CompletionStats
from draftree.core.types import SequenceRecord
from draftree.verifiers.base import VERIFIERS

PLANNER = '''"""Plans as a dummy does.

More of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftree.core.types import Budget
from draftree.planners.base import Planner


class DummyPlanner(Planner):
    @dataclass(frozen=True)
    class Config:
        """{options}"""

        width: int = 2

    def open(self):
        return None

    def budgets(self, states):
        return [Budget(self.config.width, self.config.width) for _ in states]
'''


@pytest.fixture
def planners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose files are planners too."""
    monkeypatch.setattr(draftree.planners, "__path__", [*draftree.planners.__path__, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("draftree.planners.dummy_length", None)


def test_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--check"]) == 0, capsys.readouterr().err


def test_a_new_method_without_a_page_is_reported(planners: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (planners / "dummy_length.py").write_text(PLANNER.format(options="`width`: nodes and levels."))
    assert build.main(["--check"]) == 1
    complaint = capsys.readouterr().err
    assert "methods/planner-dummy-length.md is out of date" in complaint
    assert "methods/README.md is out of date" in complaint
    page = build.pages()[Path("methods/planner-dummy-length.md")]
    assert "Plans as a dummy does." in page
    assert "| `width` | `int` | `2` | nodes and levels |" in page
    assert "--plan dummy-length" in page


def test_an_option_without_a_description_is_refused(planners: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (planners / "dummy_length.py").write_text(PLANNER.format(options="Has an option."))
    assert build.main([]) == 1
    assert "option 'width' of planner 'dummy-length' has no meaning" in capsys.readouterr().err


def test_only_files_that_differ_are_written(tmp_path: Path) -> None:
    wanted = {Path("methods/a.md"): "a\n", Path("reference.md"): "r\n"}
    assert set(build.write(tmp_path, wanted)) == set(wanted)
    assert build.write(tmp_path, wanted) == []
    (tmp_path / "methods" / "gone.md").write_text("a method that is no more\n")
    (tmp_path / "reference.md").write_text("edited by hand\n")
    assert set(build.outdated(tmp_path, wanted)) == {Path("methods/gone.md"), Path("reference.md")}
    build.write(tmp_path, wanted)
    assert build.outdated(tmp_path, wanted) == []
    assert not (tmp_path / "methods" / "gone.md").exists()


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main(["--chek"]) == 2
    assert "usage" in capsys.readouterr().err


def test_option_texts_of_both_kinds() -> None:
    clauses = "`max` and `min`: length of the run; that must match. `name:K`: tokens ahead, `k` or fewer."
    assert option_texts(clauses) == {
        "max": "length of the run; that must match",
        "min": "length of the run; that must match",
        "": "tokens ahead, `k` or fewer",
    }
    assert option_texts("What.\n\nAttributes:\n    a: one,\n        two.\n    b: three") == {
        "a": "one, two.",
        "b": "three",
    }


def test_docstrings_are_parsed() -> None:
    doc = parse(
        "Does it.\n\n    More.\n\n    Args:\n        x: of shape\n            (rows).\n    Raises:\n        E: why\n"
    )
    assert doc.text == "Does it.\n\nMore."
    assert doc.entries("Args") == {"x": "of shape (rows)."}
    assert doc.entries("Raises") == {"E": "why"}


def test_fields_have_descriptions() -> None:
    assert all(attribute.text for attribute in attributes(CompletionStats))
    below = {attribute.name: attribute.text for attribute in attributes(SequenceRecord)}
    assert below["num_in_path"].startswith("Drafted tokens")


def test_the_lossless_page_states_the_guarantee_of_every_verifier() -> None:
    rows = re.findall(
        r"^\| \[([\w-]+)\]\(methods/\S+\) \| ([\w ]+) \|", (DOCS / "lossless.md").read_text(), re.MULTILINE
    )
    assert dict(rows) == {name: guarantee(VERIFIERS.find(name)) for name in VERIFIERS.names()}
