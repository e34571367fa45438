"""Pages generated from the code are up to date and complete, and a new method without a page is reported."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import build
import pytest
from documents import DOCS
from generator import measured, papers
from generator.docstrings import attributes
from generator.methods import guarantee

import draftree.planners
from draftree.core.types import SequenceRecord
from draftree.drafters import DRAFTERS
from draftree.outputs import CompletionStats
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS

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

    def open(self, *, is_sampled=False):
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


def test_a_new_method_without_a_page_is_reported(planners: Path) -> None:
    (planners / "dummy_length.py").write_text(PLANNER.format(options="`width`: nodes and levels."))
    pages = build.pages()
    name = Path("methods/planner-dummy-length.md")
    assert {name, Path("methods/README.md")} <= set(build.outdated(DOCS, pages))
    assert "Plans as a dummy does." in pages[name]
    assert "| `width` | `int` | `2` | nodes and levels |" in pages[name]
    assert "--plan dummy-length" in pages[name]


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


def test_fields_have_descriptions() -> None:
    assert all(attribute.text for attribute in attributes(CompletionStats))
    below = {attribute.name: attribute.text for attribute in attributes(SequenceRecord)}
    assert below["num_in_path"].startswith("Drafted tokens")


def test_the_lossless_page_states_the_guarantee_of_every_verifier() -> None:
    rows = re.findall(
        r"^\| \[([\w-]+)\]\(methods/\S+\) \| ([\w ]+) \|", (DOCS / "lossless.md").read_text(), re.MULTILINE
    )
    assert dict(rows) == {name: guarantee(VERIFIERS.find(name)) for name in VERIFIERS.names()}


PAGE = papers.make()


def test_every_paper_of_the_sources_has_a_title() -> None:
    unknown = {number: files for number, files in papers.cited().items() if number not in papers.TITLES}
    assert unknown == {}, "add a row to TITLES in docs/generator/papers.py"


def test_every_title_is_named_by_a_source() -> None:
    assert set(papers.TITLES) <= set(papers.cited()), "remove the row from TITLES in docs/generator/papers.py"


def test_every_paper_is_listed_once_with_all_its_files() -> None:
    for number, files in papers.cited().items():
        (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| [{number}]"))
        assert set(re.findall(r"\(\.\./src/draftree/([^)]+)\)", row)) == set(files)


def test_every_method_head_and_strategy_is_on_the_page() -> None:
    assert len(papers.method_files()) > 30
    assert [name for name in papers.method_files() if f"../src/draftree/{name})" not in PAGE] == []


def test_links_have_targets() -> None:
    links = re.findall(r"\]\((\.\./src/[^)]+)\)", PAGE)
    assert links
    assert [link for link in links if not (DOCS / link).is_file()] == []


def test_the_glossary_names_every_method() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    seams = (("drafter", DRAFTERS), ("verifier", VERIFIERS), ("planner", PLANNERS))
    wanted = [f"(methods/{seam}-{name}.md)" for seam, registry in seams for name in registry.names()]
    assert [link for link in wanted if link not in text] == []


ALL = [
    f"{seam} {name}"
    for seam, registry in (("drafter", DRAFTERS), ("verifier", VERIFIERS), ("planner", PLANNERS))
    for name in registry.names()
]
PLAIN = {"method": "plain", "repeat": 1, "texts": [{"text": "ab", "tokens": 10, "rounds": 10, "seconds": 2.0}]}
FORCED = {"method": "grammar", "repeat": 1, "texts": [{"text": "ab", "tokens": 10, "rounds": 5, "seconds": 1.0}]}


@pytest.mark.parametrize("key", ALL)
def test_every_method_has_rows_or_the_reason_why_not(key: str) -> None:
    text = "\n".join(measured.blocks(*key.split()))
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert bool(rows) == (key in measured.FILES)
    assert rows or key in measured.NOTES or "Tokens per round at temperature" in text
    assert {match[1] for row in rows if (match := re.search(r"/(\w[^/]*)\.jsonl\)", row))} == set(
        measured.FILES.get(key, ())
    )


def test_only_methods_have_files_and_notes() -> None:
    assert set(measured.FILES) | set(measured.NOTES) <= set(ALL)


def test_an_unknown_method_is_not_measured() -> None:
    assert list(measured.blocks("planner", "dummy"))[-1] == "Not measured: no results file has this method."


def test_a_file_without_the_method_is_refused() -> None:
    with pytest.raises(ValueError, match="no row of drafter 'head'"):
        measured.rows_of("smollm2-lookahead", "drafter", "head")


def test_methods_of_a_run_show_one_part() -> None:
    assert measured.belongs("ngram,k=3@fixed", "drafter", "ngram")
    assert not measured.belongs("ngram+suffix@fixed", "drafter", "ngram")
    assert not measured.belongs("ngram@fixed@match", "drafter", "ngram")
    assert measured.belongs("ngram@fixed:4", "planner", "fixed")
    assert measured.belongs("ngram@fixed", "verifier", "coupled")
    assert not measured.belongs("plain", "verifier", "coupled")


def test_rows_of_records_are_sums_over_texts(tmp_path: Path) -> None:
    file = tmp_path / "grammar.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in ({"machine": {}}, PLAIN, FORCED)))
    ((method, row),) = measured.grammar_rows(file)
    assert (method, row[1:]) == ("grammar", ("`grammar`", "10.0", "2.00", "2.00", "1 of 1"))
