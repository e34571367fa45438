"""The extraction of code blocks from documents, which the other tests here rely on."""

from __future__ import annotations

from pathlib import Path

import documents
from documents import blocks, commands, matches

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
