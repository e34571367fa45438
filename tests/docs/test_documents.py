"""The extraction of code blocks from documents, which the other tests here rely on."""

from __future__ import annotations

import re
from pathlib import Path

import documents
import pytest
from documents import blocks, commands, matches
from generator.markdown import WIDTH, wrapped

PAGE = """# A page

```python
x = 1
```

```text
1
```

Prose.

```sh fails
# a comment
$ draftree generate
make test
```

Prose between.

```text
not its output
```
"""


def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    return path


def test_blocks_know_their_line_and_what_they_print(tmp_path: Path) -> None:
    found = [(block.line, block.language, block.info, block.expected) for block in blocks(page(tmp_path))]
    assert found == [
        (3, "python", "", "1\n"),
        (7, "text", "", None),
        (13, "sh", "fails", None),
        (21, "text", "", None),
    ]


def test_commands_are_lines_without_comments(tmp_path: Path) -> None:
    assert [line for _, line in commands(page(tmp_path))] == ["draftree generate", "make test"]


def test_dots_stand_for_anything_in_a_line() -> None:
    assert matches("error: 3 files.\n", "error: … files.")
    assert not matches("error: 3 files\n", "error: … files.")
    assert not matches("error:\n3 files.", "error: … files.")


def test_there_are_documents() -> None:
    names = {path.relative_to(documents.ROOT).as_posix() for path in documents.documents()}
    assert {"README.md", "docs/architecture.md", "docs/lossless.md", "docs/reference.md"} <= names


def too_long(text: str) -> list[str]:
    """Lines of prose over the width; tables, headings and code may be wider."""
    outside, in_fence = [], False
    for line in text.splitlines():
        in_fence ^= line.lstrip().startswith("```")
        if not in_fence and not line.startswith(("|", "#", "    ")):
            outside.append(line)
    return [line for line in outside if len(line) > WIDTH]


@pytest.mark.parametrize("path", documents.documents(), ids=lambda path: str(path.relative_to(documents.ROOT)))
def test_prose_is_wrapped(path: Path) -> None:
    if path.name != "CHANGELOG.md":
        assert too_long(path.read_text(encoding="utf-8")) == []


def test_wrapping_keeps_words_code_and_tables() -> None:
    words = " ".join(["word"] * 18)
    text = f"# {words} {words}\n\n* {words} `a b`, {words}\n  {words}\n* short\n\n| {words} | {words} |\n\n"
    text += f"```text\n{words} {words}\n```\n\n    {words} {words}\n\n{words} {words}\nend"
    made = wrapped(text)
    assert made.split() == text.split()
    assert too_long(text)
    assert too_long(made) == []
    lines = made.splitlines()
    assert lines[2].startswith("* word")
    assert sum("`a b`," in line for line in lines) == 1
    assert f"| {words} | {words} |" in lines
    assert f"    {words} {words}" in lines
    assert all(line.startswith(("* ", "  ")) for line in lines[2:6])
    assert wrapped(made) == made


@pytest.mark.parametrize("path", documents.documents(), ids=lambda path: str(path.relative_to(documents.ROOT)))
def test_no_merge_is_left_open(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match(r"<{7} |>{7} |={7}$", line)] == []
