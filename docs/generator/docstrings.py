"""Parse docstrings: Google sections, the options that a `Config` describes, attributes and their texts."""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Attribute", "Doc", "attributes", "members", "option_texts", "parse"]

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example")
ENTRY = re.compile(r"^((?:\*\*)?\w+): +(.*)$")
OPTION_HEAD = re.compile(r"(?:`[^`]+`(?:, | and )?)+: ")
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Doc:
    """A parsed docstring.

    Attributes:
        text: all before the first section.
        sections: by title, dedented.
    """

    text: str
    sections: dict[str, str]

    def entries(self, title: str) -> dict[str, str]:
        """Name and text of every `name: text` in a section; indented lines below continue the text."""
        found: dict[str, str] = {}
        name = ""
        for line in self.sections.get(title, "").splitlines():
            entry = ENTRY.match(line)
            if entry:
                name = entry[1]
                found[name] = entry[2]
            elif name:
                found[name] = f"{found[name]} {line.strip()}".strip()
        return found


@dataclass(frozen=True, slots=True)
class Attribute:
    """A field of a dataclass, as its file writes it; `default` is empty where there is none."""

    name: str
    type: str
    default: str
    text: str


def parse(docstring: str | None) -> Doc:
    """Parts of a Google docstring."""
    text: list[str] = []
    sections: dict[str, list[str]] = {}
    lines = text
    for line in inspect.cleandoc(docstring or "").splitlines():
        title = line.removesuffix(":")
        if line.endswith(":") and title in SECTIONS:
            lines = sections.setdefault(title, [])
        else:
            lines.append(line)
    parts = {title: textwrap.dedent("\n".join(body)).strip() for title, body in sections.items()}
    return Doc("\n".join(text).strip(), parts)


def option_texts(docstring: str | None) -> dict[str, str]:
    """Descriptions of the options of a `Config`.

    Written as an `Attributes:` section, or as clauses: `` `max` and `min`: length of the run; `k`: tokens ahead ``.
    The option after a method's colon has the empty name and is written as in a spec: `` `model:NAME`: … ``.
    """
    doc = parse(docstring)
    found = doc.entries("Attributes")
    flat = " ".join(doc.text.split())
    heads = list(OPTION_HEAD.finditer(flat))
    for place, head in enumerate(heads):
        end = heads[place + 1].start() if place + 1 < len(heads) else len(flat)
        text = flat[head.end() : end].strip(" ;.")
        for code in CODE.findall(head[0]):
            found["" if ":" in code else code] = text
    return found


def attributes(cls: type) -> list[Attribute]:
    """Fields of a dataclass with their texts: from its docstring, else from beside the field."""
    described = parse(cls.__doc__).entries("Attributes")
    return [
        Attribute(
            name,
            ast.unparse(line.annotation),
            "" if line.value is None else ast.unparse(line.value),
            described.get(name) or text,
        )
        for line, text in statements(cls)
        if isinstance(line, ast.AnnAssign) and (name := ast.unparse(line.target))
    ]


def members(cls: type) -> dict[str, str]:
    """Members of an enumeration: value, and the text beside it."""
    return {ast.literal_eval(line.value): text for line, text in statements(cls) if isinstance(line, ast.Assign)}


def statements(cls: type) -> Iterator[tuple[ast.stmt, str]]:
    """Yield the statements of a class, each with the string below it, or the comment beside or above it."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    for place, line in enumerate(node.body):
        below = node.body[place + 1] if place + 1 < len(node.body) else None
        above = line.lineno
        while lines[above - 2].lstrip().startswith("#"):
            above -= 1
        number = line.end_lineno or line.lineno
        beside = comments.get(number) or " ".join(comments[one] for one in range(above, line.lineno))
        yield line, string_of(below) or sentence(beside)


def string_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def sentence(comment: str) -> str:
    return f"{comment[:1].upper()}{comment[1:].rstrip('.')}." if comment and not comment.startswith("noqa") else ""
