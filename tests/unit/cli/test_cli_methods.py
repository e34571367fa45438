"""`draftree methods` lists the contents of the method files and classes."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import pytest

from draftree.cli.main import run
from draftree.cli.methods import SEAMS, WIDTH, MethodCard, cards
from draftree.core.registry import Registry

REGISTRIES = [seam.registry for seam in SEAMS]


def card(registry: Registry[Any], name: str) -> MethodCard:
    return next(card for card in cards(registry) if card.name == name)


@pytest.mark.parametrize(
    ("registry", "name"), [(registry, name) for registry in REGISTRIES for name in registry.names()], ids=str
)
def test_options_read_from_the_file_are_those_of_the_class(registry: Registry[Any], name: str) -> None:
    shown = card(registry, name)
    cls = registry.find(name)
    fields = dataclasses.fields(cls.Config)
    assert [option.name for option in shown.options] == [field.name for field in fields]
    hints = typing.get_type_hints(cls.Config)
    for option, field in zip(shown.options, fields, strict=True):
        assert option.needed == (field.default is dataclasses.MISSING)
        assert option.default == (None if option.needed else field.default)
        assert option.is_positional == bool(field.metadata.get("argument"))
        assert eval(option.type) == hints[field.name]


def test_verifiers_list_whether_they_are_lossless() -> None:
    verifiers = next(seam.registry for seam in SEAMS if seam.key == "verifiers")
    stated = {card.name: card.lossless for card in cards(verifiers)}
    assert stated == {name: verifiers.find(name).lossless for name in verifiers.names()}
    assert stated["coupled"] is True
    assert stated["soft"] is False


def test_every_method_and_option_is_listed_within_the_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["methods"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= WIDTH
    words = " ".join(text.split())
    for registry in REGISTRIES:
        for shown in cards(registry):
            assert f" {shown.name} {shown.summary}" in words


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == ["drafters", "verifiers", "planners"]
    ngram = next(method for method in listed["drafters"] if method["name"] == "ngram")
    assert {"name": "k", "type": "int", "default": 10, "needed": False, "is_positional": False} in ngram["options"]
