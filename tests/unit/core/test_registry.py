"""Registries: a file in a folder is a method everywhere, and specs are parsed strictly."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.core.registry import Registry, Spec, build_config
from draftree.drafters import DRAFTERS
from draftree.models.table import TableLM, hashed
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS

BASE = """
class Base:
    pass
"""

METHOD = '''"""Does {what} to tokens.

More of it.
"""

from dataclasses import dataclass, field

from {package}.base import Base


class Method(Base):
    @dataclass(frozen=True)
    class Config:
        path: str = field(default="here", metadata={{"argument": True}})
        width: int = 2

        def __post_init__(self):
            if self.width < 1:
                raise ValueError(f"width must be at least 1, got {{self.width}}")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "sample_methods"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text(BASE)
    (package / "one.py").write_text(METHOD.format(what="one thing", package=package.name))
    (package / "two_words.py").write_text(METHOD.format(what="two things", package=package.name))
    (package / "_private.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "sample_methods"]:
        del sys.modules[name]


@pytest.fixture
def registry(folder: Path) -> Registry[object]:
    return Registry("sample_methods", "sample_methods.base:Base", kind="gadget")


def test_folder_is_the_list(registry: Registry[object]) -> None:
    assert registry.names() == ["one", "two-words"]
    assert [method.summary for method in registry.methods()] == [
        "Does one thing to tokens.",
        "Does two things to tokens.",
    ]


def test_listing_imports_no_method(registry: Registry[object]) -> None:
    registry.methods()
    assert "sample_methods.one" not in sys.modules


def test_a_new_file_is_a_new_method(registry: Registry[object], folder: Path) -> None:
    (folder / "three.py").write_text(METHOD.format(what="three things", package="sample_methods"))
    assert "three" in registry.names()
    assert registry.find("three").__module__ == "sample_methods.three"
    assert [spec.name for spec in registry.parse("one+three")] == ["one", "three"]


def test_subpackages_and_base_are_no_methods(folder: Path) -> None:
    helpers = folder / "helpers"
    helpers.mkdir()
    (helpers / "__init__.py").write_text("")
    registry: Registry[object] = Registry("sample_methods", "sample_methods.base:Base", kind="gadget")
    assert registry.names() == ["one", "two-words"]


def test_unknown_names_get_a_suggestion(registry: Registry[object]) -> None:
    with pytest.raises(ConfigurationError, match="unknown gadget 'two-word': did you mean 'two-words'"):
        registry.find("two-word")
    with pytest.raises(ConfigurationError, match="known: one, two-words"):
        registry.find("zzzzz")


ONE = METHOD.format(what="odd things", package="sample_methods")


@pytest.mark.parametrize("text", ["x = 1\n", ONE + "\n\nclass Second(Base):\n    pass\n"])
def test_a_file_defines_exactly_one_class(registry: Registry[object], folder: Path, text: str) -> None:
    (folder / "odd.py").write_text(text)
    with pytest.raises(ConfigurationError, match="exactly one gadget"):
        registry.find("odd")


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("one", [Spec("one")]),
        ("one:a/b", [Spec("one", "a/b")]),
        ("one:C++lib", [Spec("one", "C++lib")]),
        ("one,width=3", [Spec("one", None, (("width", "3"),))]),
        ("one:x,width=3+two-words", [Spec("one", "x", (("width", "3"),)), Spec("two-words")]),
        ("two-words:a+one:b", [Spec("two-words", "a"), Spec("one", "b")]),
    ],
)
def test_specs_are_parsed(registry: Registry[object], text: str, specs: list[Spec]) -> None:
    assert registry.parse(text) == specs
    assert "+".join(str(spec) for spec in specs) == text


@pytest.mark.parametrize("text", ["one + two-words", "one+ two-words", " one +two-words ", "one,width=3 + two-words"])
def test_spaces_around_a_plus_sign_are_ignored(registry: Registry[object], text: str) -> None:
    assert [spec.name for spec in registry.parse(text)] == ["one", "two-words"]


def test_values_other_than_text_are_not_specs(registry: Registry[object]) -> None:
    with pytest.raises(ConfigurationError, match="gadget None is not a string"):
        registry.parse(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "says"), [("one,width", "key=value"), ("one,=3", "key=value"), ("", "empty gadget")])
def test_malformed_specs_are_refused(registry: Registry[object], text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        registry.parse(text)


def test_configuration_is_built_and_checked(registry: Registry[object]) -> None:
    cls, config = registry.configure(Spec("one", "there", (("width", "5"),)))
    assert cls.__name__ == "Method"
    assert (config.path, config.width) == ("there", 5)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (Spec("one", None, (("widht", "1"),)), "unknown option 'widht' of gadget 'one': did you mean 'width'"),
        (Spec("one", None, (("width", "wide"),)), "must be a whole number, got 'wide'"),
        (Spec("one", None, (("width", "0"),)), "width must be at least 1, got 0"),
        (Spec("one", None, (("width", "1"), ("width", "2"))), "given twice"),
        (Spec("one", "a", (("path", "b"),)), "given twice"),
        (Spec("one", ""), "needs path after the colon"),
    ],
)
def test_bad_configurations_are_refused(registry: Registry[object], spec: Spec, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        registry.configure(spec)


@dataclass(frozen=True)
class Options:
    name: str = field(metadata={"argument": True})
    share: float = 0.5
    limit: int | None = None
    on: bool = False


@dataclass(frozen=True)
class NoOptions:
    pass


def test_values_are_converted_by_their_types() -> None:
    spec = Spec("x", "n", (("share", "0.25"), ("limit", "7"), ("on", "yes")))
    assert build_config(Options, spec, "gadget") == Options("n", 0.25, 7, True)


def test_missing_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match="gadget 'x' needs name: write x:NAME"):
        build_config(Options, Spec("x"), "gadget")


def test_arguments_and_options_of_methods_without_them_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="takes no argument after a colon"):
        build_config(NoOptions, Spec("x", "y"), "gadget")
    with pytest.raises(ConfigurationError, match="it takes none"):
        build_config(NoOptions, Spec("x", None, (("a", "1"),)), "gadget")
    with pytest.raises(ConfigurationError, match="true or false"):
        build_config(Options, Spec("x", "n", (("on", "maybe"),)), "gadget")


DRAFTER = '''"""Guesses the same token over and over.

Source: none. Costs nothing; loses nearly always.
"""

from dataclasses import dataclass, field

from draftree.core.tree import Draw, chain
from draftree.drafters.base import DraftTraits, Drafter


class StubbornDrafter(Drafter):
    @dataclass(frozen=True, slots=True)
    class Config:
        token: int = field(default=0, metadata={"argument": True})
        k: int = 3

    @classmethod
    def describe(cls, config):
        return DraftTraits(draws=frozenset({Draw.FREE, Draw.POINT}), depth=config.k, nodes=config.k)

    def __init__(self, config, context):
        self.config, self.draw = config, context.draw

    def open(self, sequence):
        return sequence

    def draft_one(self, state, budget):
        return chain([self.config.token] * min(budget.num_nodes, budget.depth), draw=self.draw)
'''
VERIFIER = '''"""Keeps nothing that was drafted: plain decoding at the price of drafting."""

from dataclasses import dataclass

from draftree.core.tree import Draw
from draftree.core.types import Verdict
from draftree.verifiers.base import Verifier


class Distrustful(Verifier):
    @dataclass(frozen=True, slots=True)
    class Config:
        pass

    accepts = frozenset(Draw)

    def verify(self, tree, distributions, chance):
        return Verdict((), distributions.picks()[0])
'''
PLANNER = '''"""Drafts in every other round."""

from dataclasses import dataclass

from draftree.core.types import Budget
from draftree.planners.base import Planner


class Alternating(Planner):
    @dataclass(frozen=True, slots=True)
    class Config:
        k: int = 2

    def open(self, *, is_sampled=False):
        return [0]

    def budgets(self, states):
        for state in states:
            state[0] += 1
        return [Budget(self.config.k, self.config.k) if state[0] % 2 else Budget(0, 0) for state in states]
'''
SEAMS = [
    (DRAFTERS, "stubborn_dummy", DRAFTER),
    (VERIFIERS, "distrustful_dummy", VERIFIER),
    (PLANNERS, "alternating_dummy", PLANNER),
]


@pytest.fixture
def dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The three files, as if they lay in the packages' own folders."""
    packages: list[ModuleType] = []
    for registry, name, source in SEAMS:
        package = importlib.import_module(registry.package)
        folder = tmp_path / registry.kind
        folder.mkdir()
        (folder / f"{name}.py").write_text(source)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        packages.append(package)
    importlib.invalidate_caches()
    yield
    for package, (registry, name, _) in zip(packages, SEAMS, strict=True):
        sys.modules.pop(f"{registry.package}.{name}", None)
        vars(package).pop(name, None)


@pytest.mark.parametrize(("registry", "name", "source"), SEAMS, ids=lambda value: getattr(value, "kind", ""))
def test_a_dropped_file_is_listed(dropped: None, registry: Registry[object], name: str, source: str) -> None:
    method = next(method for method in registry.methods() if method.name == name.replace("_", "-"))
    assert source.startswith(f'"""{method.summary}')
    assert method.name in registry.names()
    assert f"{registry.package}.{name}" not in sys.modules, "listing imports nothing"


def test_dropped_methods_write_texts_together(dropped: None) -> None:
    model = TableLM(hashed(10, seed=1))
    params = SamplingParams(max_tokens=20, seed=3)
    (plain,) = LLM(model, "none").generate([1, 2], params)
    methods = [
        ("stubborn-dummy", "coupled", "fixed"),
        ("stubborn-dummy:4,k=2", "token", "heuristic"),
        ("stubborn-dummy", "distrustful-dummy", "alternating-dummy,k=3"),
        ("ngram,min=1", "distrustful-dummy", "fixed"),
        ("ngram,min=1+stubborn-dummy:3", "coupled", "alternating-dummy"),
    ]
    for draft, verify, plan in methods:
        (done,) = LLM(model, draft, verify=verify, plan=plan).generate([1, 2], params)
        assert len(done.token_ids) == 20
        assert done.stats.draft_tokens > 0
        if verify != "token":
            assert done.token_ids == plain.token_ids
        if verify == "distrustful-dummy":
            assert done.stats.accepted_tokens == 0
            assert done.stats.rounds == 20
