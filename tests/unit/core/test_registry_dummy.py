"""One file is a method everywhere: placed in its seam's folder it is listed, configured, and used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.core.registry import Registry
from draftree.drafters import DRAFTERS
from draftree.models.table import TableLM, hashed
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS

DRAFTER = '''"""Guesses the same token over and over.

Source: none. Costs nothing; loses nearly always.
"""

from dataclasses import dataclass, field

from draftree.core.tree import Draw, chain
from draftree.drafters.base import DraftTraits, SequenceDrafter


class StubbornDrafter(SequenceDrafter):
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

    def open(self):
        return [0]

    def budgets(self, states):
        for state in states:
            state[0] += 1
        return [Budget(self.config.k, self.config.k) if state[0] % 2 else Budget(0, 0) for state in states]
'''
SEAMS = [
    (DRAFTERS, "stubborn_dummy", DRAFTER, "Guesses the same token over and over."),
    (
        VERIFIERS,
        "distrustful_dummy",
        VERIFIER,
        "Keeps nothing that was drafted: plain decoding at the price of drafting.",
    ),
    (PLANNERS, "alternating_dummy", PLANNER, "Drafts in every other round."),
]


@pytest.fixture
def dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The three files, as if they lay in the packages' own folders."""
    packages: list[ModuleType] = []
    for registry, name, source, _ in SEAMS:
        package = importlib.import_module(registry.package)
        folder = tmp_path / registry.kind
        folder.mkdir()
        (folder / f"{name}.py").write_text(source)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        packages.append(package)
    importlib.invalidate_caches()
    yield
    for package, (registry, name, _, _) in zip(packages, SEAMS, strict=True):
        sys.modules.pop(f"{registry.package}.{name}", None)
        vars(package).pop(name, None)


@pytest.mark.parametrize(("registry", "name", "source", "summary"), SEAMS, ids=lambda value: getattr(value, "kind", ""))
def test_a_dropped_file_is_listed(
    dropped: None, registry: Registry[object], name: str, source: str, summary: str
) -> None:
    method = next(method for method in registry.methods() if method.name == name.replace("_", "-"))
    assert method.summary == summary
    assert method.name in registry.names()
    assert f"{registry.package}.{name}" not in sys.modules, "listing imports nothing"


def test_dropped_methods_write_texts_together(dropped: None) -> None:
    model = TableLM(hashed(10, seed=1))
    params = SamplingParams(max_tokens=20, seed=3)
    (plain,) = LLM(model).generate([1, 2], params)
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


@pytest.mark.parametrize(
    ("draft", "verify", "plan", "message"),
    [
        ("stubborn-dummy,q=1", "coupled", None, "unknown option 'q' of drafter 'stubborn-dummy'"),
        ("stubborn-dummy:x", "coupled", None, "option 'token' of drafter 'stubborn-dummy' must be a whole number"),
        ("stubborn-dumy", "coupled", None, "did you mean 'stubborn-dummy'"),
        ("ngram", "distrustful-dumy", None, "did you mean 'distrustful-dummy'"),
        ("ngram", "coupled", "alternating", "did you mean 'alternating-dummy'"),
    ],
)
def test_messages_list_dropped_methods(dropped: None, draft: str, verify: str, plan: str | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LLM(TableLM(hashed(10, seed=1)), draft, verify=verify, plan=plan)


def test_dropped_methods_are_removed_again() -> None:
    for registry, name, _, _ in SEAMS:
        assert name.replace("_", "-") not in registry.names()
