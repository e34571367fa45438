"""Generate a page for every drafter, verifier and planner, and their index, from registries and method files."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftree.build import choose_methods
from draftree.cli.methods import MethodCard, Option, cards
from draftree.core.errors import ConfigurationError
from draftree.core.registry import Registry
from draftree.core.tree import Draw
from draftree.drafters import DRAFTERS
from draftree.drafters.tree_builder import builder
from draftree.drafters.wrappers import several
from draftree.engine.parts import PREFERENCE
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS
from generator import examples, measured
from generator.docstrings import members, option_texts
from generator.markdown import code, fence, listed, page, table

__all__ = ["guarantee", "make"]

SMALL, TARGET, OTHER = "stories15m", "tinyllama-1.1b-chat", "smollm2-135m-instruct"
PROMPT = "Once upon a time"
GRAMMAR = "grammar"
SCHEMA = '{"enum": ["red", "green", "blue"]}'
SHAPES = ("chain", "1-1-3-1-1", "best-32", "iid-2-2-1", "wor-2-2-1")
MERGED = f"ngram+model:{SMALL}"
MARK = "<!-- Made by docs/build.py"
EXAMPLE_LENGTH = 4

SAME_TEXT, SAME_DISTRIBUTION, LOSSY = "same text", "same distribution", "lossy"


@dataclass(frozen=True, slots=True)
class Entry:
    """A method of a seam."""

    seam: str
    card: MethodCard
    cls: type[Any]
    source: str

    @property
    def file(self) -> str:
        """Name of its page."""
        return f"{self.seam}-{self.card.name}.md"


def entries(seam: str, registry: Registry[Any]) -> list[Entry]:
    """All methods of a seam."""
    modules = {method.name: method.module for method in registry.methods()}
    return [
        Entry(seam, card, registry.find(card.name), f"src/{modules[card.name].replace('.', '/')}.py")
        for card in cards(registry)
    ]


def make() -> dict[str, str]:
    """File name to text: the index and one page a method."""
    with examples.present():
        return made()


def made() -> dict[str, str]:
    """As `make`, where the folders of examples are."""
    agreed_draw.cache_clear()  # a method may have come since
    drafters, verifiers, planners = (
        entries(seam, registry)
        for seam, registry in (("drafter", DRAFTERS), ("verifier", VERIFIERS), ("planner", PLANNERS))
    )
    specs = [spec for entry in drafters for spec in specs_of(entry)]
    pages = {"README.md": index(drafters, verifiers, planners, specs)}
    for entry in drafters:
        pages[entry.file] = page(*head(entry), *drafter_blocks(entry), *measured.blocks("drafter", entry.card.name))
    for entry in verifiers:
        pages[entry.file] = page(
            *head(entry), *verifier_blocks(entry, specs), *measured.blocks("verifier", entry.card.name)
        )
    for entry in planners:
        pages[entry.file] = page(*head(entry), *planner_blocks(entry), *measured.blocks("planner", entry.card.name))
    return pages


def head(entry: Entry) -> Iterator[str]:
    """Blocks that all kinds share: title, docstring, options."""
    text = inspect.cleandoc(importlib.import_module(entry.cls.__module__).__doc__ or "")
    yield f"# {entry.card.name}: a {entry.seam}"
    yield f"{MARK} from {entry.source}: change it there, then `make docs`. -->"
    yield text
    yield f"File: [{entry.source}](../../{entry.source})"
    yield "## Options"
    yield options(entry)


def options(entry: Entry) -> str:
    if not entry.card.options:
        return "None."
    texts = option_texts(entry.cls.Config.__doc__)
    rows = []
    for option in entry.card.options:
        text = texts.get("" if option.is_positional else option.name, texts.get(option.name))
        if not text:
            raise ConfigurationError(
                f"option '{option.name}' of {entry.seam} '{entry.card.name}' has no meaning: "
                "describe it in the docstring of its Config, as `name`: what it does, or under Attributes"
            )
        name = f"{entry.card.name}:{option.name.upper()}" if option.is_positional else option.name
        default = "needed" if option.needed else "automatic" if option.default is None else code(option.default)
        rows.append((code(name), code(option.type), default, text))
    return table(("option", "type", "default", "meaning"), rows)


def specs_of(entry: Entry) -> list[str]:
    """Specs of a method: plain, and in every shape if it grows trees."""
    needed = [option for option in entry.card.options if option.needed and option.is_positional]
    spec = ":".join([entry.card.name, *map(example_of, needed)])
    if all(option.name != "tree" for option in entry.card.options):
        return [spec]
    return [spec if shape == "chain" else f"{spec},tree={shape}" for shape in SHAPES]


def example_of(option: Option) -> str:
    """A value of the option after a method's colon."""
    if option.type != "str":
        return str(EXAMPLE_LENGTH)
    return examples.HEAD if option.name == "path" else SMALL


@functools.cache
def agreed_draw(draft: str, verify: str) -> Draw | None:
    """The draw that drafter and verifier agree on; None if they are refused."""
    try:
        return choose_methods(draft, verify, None).draw
    except ConfigurationError:
        return None


def draws_of(spec: str) -> frozenset[Draw]:
    return choose_methods(spec, "coupled", None).drafters[0].traits.draws


def spelled(draws: frozenset[Draw]) -> str:
    return listed([draw.value for draw in Draw if draw in draws], none="none")


def drafter_blocks(entry: Entry) -> Iterator[str]:
    specs = specs_of(entry)
    rules = VERIFIERS.names()
    yield "## Draws and compatible verifiers"
    rows = []
    for spec in specs:
        taken = [rule for rule in rules if agreed_draw(spec, rule)]
        rows.append((code(spec), spelled(draws_of(spec)), listed(taken, none="none")))
    yield table(("spec", "draws", "compatible verifiers"), rows)
    yield "The draws are explained in the [index](README.md#draws)."
    yield from example(draft=specs[0])


def verifier_blocks(entry: Entry, specs: list[str]) -> Iterator[str]:
    cls, name = entry.cls, entry.card.name
    yield "## Guarantee and requirements"
    children = "one child per node (chains)" if cls.chains_only else "any number of children"
    noise = "the request's own noise where they are free" if cls.shares_noise else "a separate stream"
    yield table(
        ("", ""),
        (
            ("guarantee", f"{guarantee(cls)} ([explanation](../lossless.md))"),
            ("draws", spelled(cls.accepts)),
            ("trees", children),
            (
                "draft distributions",
                distributions_wanted(cls),
            ),
            ("candidates are ranked with", noise),
        ),
    )
    fitting = [spec for spec in [*specs, MERGED] if agreed_draw(spec, name)]
    yield f"Compatible drafters: {listed(fitting, none='none')}."
    yield from example(draft=min(fitting, key=lambda spec: showing(spec, name)), verify=name)


def distributions_wanted(cls: type[Any]) -> str:
    if cls.needs_distributions:
        return "required; for a certain child (point) it is implied"
    return "used if given" if cls.wants_distributions else "not read"


def showing(spec: str, verify: str) -> tuple[bool, int, bool]:
    """Sort key of examples for a rule: trees first, then the least restrictive draw, then a small model."""
    draw = agreed_draw(spec, verify)
    assert draw is not None, "only drafters that fit are shown"
    return "tree=" not in spec, PREFERENCE.index(draw), SMALL not in spec


def planner_blocks(entry: Entry) -> Iterator[str]:
    yield "## Requirements"
    if entry.cls.wants_costs:
        yield "A few passes of the target are timed before the first round. Any drafter, any verifier."
    else:
        yield "Nothing is measured. Any drafter, any verifier."
    plan = entry.card.name
    for option in entry.card.options:
        if option.is_positional:
            plan = f"{plan}:{EXAMPLE_LENGTH if option.default is None else option.default}"
    shape = ",tree=best-32" if entry.cls.wants_costs else ""
    yield from example(draft=f"model:{SMALL}{shape}", plan=plan)


def example(*, draft: str, verify: str | None = None, plan: str | None = None) -> Iterator[str]:
    """A command and the same in Python; the combination is checked, no weights are read."""
    predicts = choose_methods(draft, verify or "coupled", plan).traits.reads_predictions
    model = TARGET if SMALL in draft else OTHER
    flags = [("draft", draft), *([("verify", verify)] if verify else []), *([("plan", plan)] if plan else [])]
    typed = " ".join(f"--{name} {value}" for name, value in flags)
    given = ", ".join(f'{name}="{value}"' for name, value in flags)
    yield "## Example"
    before = ""
    if predicts:
        typed += " --prediction README.md"
        before = 'params = SamplingParams(prediction=Path("README.md").read_text())\n'
    if draft == GRAMMAR:
        typed += f" --json-schema '{SCHEMA}'"
        before = f"params = SamplingParams(json_schema='{SCHEMA}')\n"
    yield fence(f"draftree generate {model} '{PROMPT}' --no-chat {typed}", "sh")
    params = ", params" if before else ""
    yield fence(f'{before}LLM("{model}", {given}).generate("{PROMPT}"{params})', "python")


def guarantee(cls: type[Any]) -> str:
    """The guarantee of a rule, as docs/lossless.md names it."""
    if not cls.lossless:
        return LOSSY
    return SAME_DISTRIBUTION if cls.needs_distributions else SAME_TEXT


def index(drafters: list[Entry], verifiers: list[Entry], planners: list[Entry], specs: list[str]) -> str:
    """All methods on one page, and their compatible pairs."""
    rules = [entry.card.name for entry in verifiers]
    return page(
        "# Methods",
        f"{MARK} from the files in src/draftree/: change them there, then `make docs`. -->",
        "One method is one file; the file name is the method name. `draftree methods` prints the same list. "
        "How to choose: [guides/choosing.md](../guides/choosing.md).",
        "## Drafters",
        "`--draft`, `LLM(draft=…)`. `none` is plain decoding.",
        table(("name", "what it does"), [(link(e), e.card.summary) for e in drafters]),
        "## Verifiers",
        "`--verify`, `LLM(verify=…)`. Default: `coupled`. The guarantees are explained in "
        "[lossless.md](../lossless.md).",
        table(
            ("name", "what it does", "guarantee", "accepts"),
            [(link(e), e.card.summary, guarantee(e.cls), spelled(e.cls.accepts)) for e in verifiers],
        ),
        "## Planners",
        "`--plan`, `LLM(plan=…)`. Default: `adaptive`; `fixed` under a rule whose text depends on what was drafted, "
        "and for drafters that work ahead (`lookahead`).",
        table(("name", "what it does"), [(link(e), e.card.summary) for e in planners]),
        "## Which fit together",
        "Rows are specs of drafters, columns verifiers. A cell is the draw that both agree on. A dash means that the "
        "pair is refused, before any weights are read. Every planner works with every pair.",
        table(
            ("", *map(code, rules)),
            [(code(spec), *(fit(spec, rule) for rule in rules)) for spec in [*specs, MERGED]],
        ),
        "## Draws",
        "How the children of a node were chosen, which determines what a verifier may conclude from them:",
        "\n".join(f"* `{value}`: {text}" for value, text in members(Draw).items()),
        "## Shapes",
        inspect.cleandoc(builder.__doc__ or ""),
        "A drafter with the option `tree` accepts all of them.",
        "## Several drafters",
        f"`a+b` names two drafters, such as `{MERGED}`; any number is allowed.",
        inspect.cleandoc(several.__doc__ or ""),
    )


def link(entry: Entry) -> str:
    return f"[{entry.card.name}]({entry.file})"


def fit(draft: str, verify: str) -> str:
    draw = agreed_draw(draft, verify)
    return "-" if draw is None else draw.value
