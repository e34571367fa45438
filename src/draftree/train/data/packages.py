"""Prompts from the documentation and the sources of installed packages, which are read and never imported.

The prompts are a function of the installed packages and of the number: every package in turn, each with its prompts in
an order given by a hash. They quote the packages; published data made with them must follow their licences.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distributions
from itertools import islice, zip_longest
from pathlib import Path

from draftree.train.data.jobs import DataPrompt

MAX_FILES = 12
"""Source files of a package that are read."""
MAX_FILE_BYTES = 200_000
MIN_TEXT, MAX_TEXT = 200, 1200
"""Characters of a quoted text."""
MIN_LINES, MAX_LINES = 4, 25
"""Lines of a quoted function."""
HEAD_LINES = 20
"""Lines of a quoted beginning of a file."""
MAX_LINE = 160
"""Longer lines are data, not code."""
OWN = "draftree"

OF_TEXT = (
    "Summarise this text in two sentences:\n\n{text}",
    "What is this text about? Explain it in simple words:\n\n{text}",
    "Write three questions that this text answers:\n\n{text}",
    "Rewrite this text as a short list of points:\n\n{text}",
)
OF_FUNCTION = (
    "Explain this function:\n\n```python\n{text}\n```",
    "Write a docstring for this function:\n\n```python\n{text}\n```",
    "Write a unit test for this function:\n\n```python\n{text}\n```",
    "How could this function be improved?\n\n```python\n{text}\n```",
)
OF_FILE = ("Continue this Python file:\n\n```python\n{text}\n```",)


def package_prompts(number: int) -> tuple[list[DataPrompt], list[str]]:
    """Make prompts from the packages of this Python environment.

    Args:
        number: maximum number of prompts.

    Returns:
        The prompts, and the packages that they quote, each with version and licence.
    """
    found = {_key(package): package for package in distributions()}
    names = sorted(name for name in found if not name.startswith(f"{OWN}=="))
    rounds = zip_longest(*([(name, text) for text in _prompts(found[name], number)] for name in names))
    chosen = list(islice((pair for turn in rounds for pair in turn if pair is not None), number))
    used = sorted({name for name, _ in chosen})
    return (
        [DataPrompt.of_text(text) for _, text in chosen],
        [f"{name} ({licence_of(found[name])})" for name in used],
    )


def _key(package: Distribution) -> str:
    return f"{str(package.metadata['Name']).lower()}=={package.version}"


LONGEST_LICENCE = 120


def licence_of(package: Distribution) -> str:
    """Return the licence that a package's metadata name, or "unknown licence"."""
    for field in ("License-Expression", "License"):
        value = str(package.metadata[field]).strip() if field in package.metadata else ""
        # some packages give the whole text
        if 0 < len(value) <= LONGEST_LICENCE and "\n" not in value:
            return value
    named = [value for value in package.metadata.get_all("Classifier") or () if value.startswith("License ::")]
    return named[0].rpartition(" :: ")[2] if named else "unknown licence"


def _prompts(package: Distribution, number: int) -> list[str]:
    """Return prompts of one package, different ones only, in the order of a hash."""
    made = dict.fromkeys(_of_description(package))
    for path in _sources(package):
        made |= dict.fromkeys(_of_source(path))
    return sorted(made, key=_hash)[:number]


def _of_description(package: Distribution) -> Iterator[str]:
    yield from _about(_paragraphs(str(package.metadata.json.get("description", ""))), OF_TEXT)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield runs of paragraphs of prose of a suitable length."""
    run: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.replace("\r", "")):
        own = paragraph.strip()
        is_prose = len(own) > 60 and own[0].isalpha() and not re.search(r"https?://|[<>{}|`]|::|\.\. ", own)
        if is_prose and sum(map(len, run)) + len(own) <= MAX_TEXT:
            run.append(own)
            continue
        if sum(map(len, run)) >= MIN_TEXT:
            yield "\n\n".join(run)
        run = [own] if is_prose and len(own) <= MAX_TEXT else []
    if sum(map(len, run)) >= MIN_TEXT:
        yield "\n\n".join(run)


def _sources(package: Distribution) -> list[Path]:
    names = [file for file in package.files or () if file.suffix == ".py" and "test" not in str(file).lower()]
    return [
        Path(str(package.locate_file(file))) for file in sorted(names, key=lambda file: _hash(str(file)))[:MAX_FILES]
    ]


def _of_source(path: Path) -> Iterator[str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):  # files for other versions of Python, or no text
        return
    lines = source.splitlines()
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)]
    yield from _about((part for text in texts for part in _paragraphs(text)), OF_TEXT)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    yield from _about(_bodies(functions, lines), OF_FUNCTION)
    if len(lines) > 2 * HEAD_LINES and not _is_data(lines[:HEAD_LINES]):
        yield from _about(["\n".join(lines[:HEAD_LINES])], OF_FILE)


def _bodies(functions: Iterable[ast.FunctionDef], lines: Sequence[str]) -> Iterator[str]:
    for function in functions:
        own = lines[function.lineno - 1 : function.end_lineno]
        has_code = len(function.body) > 1 or not isinstance(function.body[0], ast.Expr | ast.Pass)
        if has_code and MIN_LINES <= len(own) <= MAX_LINES and not _is_data(own):
            indent = len(own[0]) - len(own[0].lstrip())
            yield "\n".join(line[indent:] for line in own)


def _is_data(lines: Sequence[str]) -> bool:
    return any(len(line) > MAX_LINE for line in lines)


def _about(texts: Iterable[str], forms: Sequence[str]) -> Iterator[str]:
    """Yield one prompt for each text, with the form that its hash selects."""
    for text in texts:
        yield forms[_hash(text) % len(forms)].replace("{text}", text)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "little")
