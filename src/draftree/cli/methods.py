"""`draftree methods`: the available methods, read from their source files."""

from __future__ import annotations

import ast
import dataclasses
import json
import sys
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from draftree.cli.options import AS_JSON
from draftree.cli.render import Colour, Style, say
from draftree.core.registry import Method, Registry
from draftree.drafters import DRAFTERS
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Seam:
    """A kind of method and the flag that chooses one."""

    key: str
    flag: str
    registry: Registry[Any]
    remark: str


SEAMS = (
    Seam("drafters", "--draft", DRAFTERS, "'none' is plain decoding, 'auto' chosen for the model."),
    Seam("verifiers", "--verify", VERIFIERS, "'coupled' if not given."),
    Seam("planners", "--plan", PLANNERS, "'adaptive' if not given, or 'fixed' (see 'adaptive')."),
)


@dataclass(frozen=True, slots=True)
class Option:
    name: str
    type: str
    default: Any  # None if the method decides
    needed: bool  # whether it must be given; there is no default then
    is_positional: bool  # whether it may follow the method's name and a colon


@dataclass(frozen=True, slots=True)
class MethodCard:
    """Facts about a method from its source file."""

    name: str
    summary: str
    lossless: bool | None  # for a verifier, whether the text keeps the model's distribution; None for other kinds
    options: tuple[Option, ...]


def methods(
    as_json: bool = AS_JSON,
) -> None:
    """List drafters, verifiers and planners with their summaries and options."""
    if as_json:
        listed = {seam.key: [dataclasses.asdict(card) for card in cards(seam.registry)] for seam in SEAMS}
        say(json.dumps(listed, indent=2) + "\n")
        return
    style = Style.chosen(Colour.AUTO, sys.stdout)
    for number, seam in enumerate(SEAMS):
        if number:
            say("\n")
        say(f"{style.bold(f'{seam.key} ({seam.flag})')}  {seam.remark}\n")
        shown = cards(seam.registry)
        margin = max(len(card.name) for card in shown) + 4
        for card in shown:
            say(entry(card, style, margin))


def entry(card: MethodCard, style: Style, margin: int) -> str:
    summary = card.summary if card.lossless is not False else f"{card.summary} Lossy."
    lines = textwrap.wrap(summary, WIDTH - margin)
    head = f"  {style.accepted(card.name)}{'':{margin - 2 - len(card.name)}}{lines[0]}"
    options = textwrap.wrap(", ".join(map(spelled, card.options)), WIDTH - margin)
    rest = [*(f"{'':{margin}}{line}" for line in lines[1:]), *(f"{'':{margin}}{style.dim(line)}" for line in options)]
    return "\n".join([head, *rest]) + "\n"


def spelled(option: Option) -> str:
    """Return an option in command-line form."""
    value = "needed" if option.needed else "automatic" if option.default is None else option.default
    return f":{option.name.upper()} ({value})" if option.is_positional else f"{option.name}={value}"


def cards(registry: Registry[Any]) -> list[MethodCard]:
    """Return all methods of a seam from their source files, without imports."""
    return [card_of(method, states_lossless=registry is VERIFIERS) for method in registry.methods()]


def card_of(method: Method, *, states_lossless: bool) -> MethodCard:
    spec = find_spec(method.module)
    assert spec is not None, "a method was found by its file"
    body, config = class_and_config(ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8")))
    lines = [] if config is None else config.body
    options = tuple(option_of(line) for line in lines if isinstance(line, ast.AnnAssign))
    return MethodCard(method.name, method.summary, is_lossless(body) if states_lossless else None, options)


def class_and_config(tree: ast.Module) -> tuple[ast.ClassDef, ast.ClassDef | None]:
    """Return the class of a method's file, which has a `Config` or is the first final one, without options."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for outer in classes:
        for inner in outer.body:
            if isinstance(inner, ast.ClassDef) and inner.name == "Config":
                return outer, inner
    return next(node for node in classes if any(ast.unparse(use) == "final" for use in node.decorator_list)), None


def is_lossless(verifier: ast.ClassDef) -> bool:
    for line in verifier.body:
        if isinstance(line, ast.AnnAssign) and ast.unparse(line.target) == "lossless" and line.value is not None:
            return bool(ast.literal_eval(line.value))
    return True


def option_of(line: ast.AnnAssign) -> Option:
    """Return an option from its line: `name: type`, `name: type = default`, or `name: type = field(...)`."""
    name, kind, value = ast.unparse(line.target), ast.unparse(line.annotation), line.value
    if not isinstance(value, ast.Call):
        return Option(name, kind, literal(value), needed=value is None, is_positional=False)
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    metadata = literal(keywords.get("metadata")) or {}
    return Option(
        name,
        kind,
        literal(keywords.get("default")),
        needed="default" not in keywords,
        is_positional=bool(metadata.get("argument")),
    )


def literal(node: ast.expr | None) -> Any:
    return None if node is None else ast.literal_eval(node)
