"""The page of papers names every paper of the sources and every file of a method."""

from __future__ import annotations

import re

from documents import DOCS
from generator import papers

from draftree.drafters import DRAFTERS
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS

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
    assert len(papers.method_files()) > 35
    assert [name for name in papers.method_files() if f"../src/draftree/{name})" not in PAGE] == []


def test_links_have_targets() -> None:
    links = re.findall(r"\]\((\.\./src/[^)]+)\)", PAGE)
    assert links
    assert [link for link in links if not (DOCS / link).is_file()] == []


def test_several_numbers_after_one_word_are_all_found() -> None:
    assert papers.NAMED.findall("(arXiv 1804.06609, 1905.04519): and 2401.00001") == ["1804.06609, 1905.04519"]


def test_sources_end_with_their_sentence() -> None:
    assert (
        papers.source_of("A.\n\nSource: lookup (A. Saxena,\n2023); more. Costs much.")
        == "lookup (A. Saxena, 2023); more"
    )
    assert papers.source_of("A.") == "–"


def test_the_glossary_names_every_method() -> None:
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    seams = (("drafter", DRAFTERS), ("verifier", VERIFIERS), ("planner", PLANNERS))
    wanted = [f"(methods/{seam}-{name}.md)" for seam, registry in seams for name in registry.names()]
    assert [link for link in wanted if link not in text] == []
