"""Schemas that zod 4 and pydantic 2 generate for their types are accepted, and texts of their grammars are valid.

`record_zod_schemas.mjs` made `zod_schemas.json`.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from draftree.sampling.grammar.languages import Languages
from draftree.sampling.grammar.regex import language, parse
from draftree.sampling.grammar.schema import violations
from draftree.sampling.grammar.schema_grammar import schema_grammar
from schema_samples import written

ZOD: dict[str, Any] = json.loads((pathlib.Path(__file__).parents[2] / "support" / "zod_schemas.json").read_text())
DRAFTS = {"draft-04": Draft4Validator, "draft-07": Draft7Validator}
REPORTED = {
    "emailUnicode": "'format' 'email'",
    "hostname": "'pattern'",
    "set": "'uniqueItems'",
    "frozenset": "'uniqueItems'",
    "conset": "'uniqueItems'",
    "HttpUrl": "'maxLength' 2083",
}
"""What is reported for the few types whose schemas a grammar cannot enforce in full."""


def check(name: str, schema: Any, judge: Any = Draft202012Validator) -> None:
    reports = schema_grammar(json.dumps(schema)).unenforced
    assert len(reports) == (name in REPORTED)
    assert all(report.startswith(REPORTED[name]) for report in reports)
    validator = judge(schema, format_checker=judge.FORMAT_CHECKER)
    texts = [text for seed in range(5) if (text := written(schema, seed)) is not None]
    for text in texts:
        assert reports or violations(json.dumps(schema), text) == ()
        errors = [error for error in validator.iter_errors(json.loads(text)) if error.validator != "uniqueItems"]
        assert name in REPORTED or not errors, text


@pytest.mark.parametrize("case", ZOD["schemas"])
def test_a_schema_of_zod(case: str) -> None:
    name, draft, _ = case.split()
    schema = ZOD["schemas"][case]
    if name == "null" and draft.startswith("openapi"):
        assert written(schema, 1) == "null"
        return
    if "\\p{" in json.dumps(schema):
        # a property of Unicode, which Python's re does not know
        assert schema_grammar(json.dumps(schema)).unenforced == ()
        return
    check(name, schema, DRAFTS.get(draft, Draft202012Validator))


def test_the_pattern_of_an_emoji_is_enforced() -> None:
    (pattern,) = [schema["pattern"] for case, schema in ZOD["schemas"].items() if case.startswith("emoji ")]
    made = Languages()
    texts = language(parse(pattern), made, is_search=True)
    assert made.matches(texts, "🎉👍🏽")
    assert not made.matches(texts, "🎉a")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Inner(BaseModel):
    count: int


class Node(BaseModel):
    value: int
    next: Node | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    meows: int


class Dog(BaseModel):
    kind: Literal["dog"]
    barks: str


class Forbidding(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class Allowing(BaseModel):
    model_config = ConfigDict(extra="allow", json_schema_extra={"optional": True, "order": 3})
    name: str = Field(json_schema_extra={"markdownDescription": "*x*", "examples": ["a"]})


class Typed(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int] = Field(init=False)
    name: str


class Pair(NamedTuple):
    first: int
    second: str = "x"


@dataclass
class Plain:
    first: int
    second: str = "y"


PYDANTIC: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "bytes": bytes,
    "None": type(None),
    "Any": Any,
    "date": datetime.date,
    "time": datetime.time,
    "datetime": datetime.datetime,
    "timedelta": datetime.timedelta,
    "Decimal": decimal.Decimal,
    "Fraction": Fraction,
    "complex": complex,
    "UUID": uuid.UUID,
    "Enum": Colour,
    "IntEnum": Level,
    "Literal": Literal["a", 1, True, None],
    "Optional": int | None,
    "Union": int | str | list[int],
    "list": list[int],
    "any list": list,
    "tuple": tuple[int, str],
    "tuple of any length": tuple[int, ...],
    "empty tuple": tuple[()],
    "set": set[int],
    "frozenset": frozenset[str],
    "deque": collections.deque[int],
    "Counter": collections.Counter[str],
    "dict": dict[str, int],
    "any dict": dict,
    "dict of Enum": dict[Colour, int],
    "dict of int": dict[int, str],
    "dict of Literal": dict[Literal["a", "b"], int],
    "Mapping": Mapping[str, float],
    "Sequence": Sequence[int],
    "Pattern": re.Pattern,
    "Path": pathlib.Path,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv4Interface": ipaddress.IPv4Interface,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "AnyUrl": pydantic.AnyUrl,
    "HttpUrl": pydantic.HttpUrl,
    "FileUrl": pydantic.FileUrl,
    "PostgresDsn": pydantic.PostgresDsn,
    "SecretStr": pydantic.SecretStr,
    "SecretBytes": pydantic.SecretBytes,
    "Json": pydantic.Json[int],
    "JsonValue": pydantic.JsonValue,
    "ByteSize": pydantic.ByteSize,
    "conint": pydantic.conint(gt=0, le=100),
    "confloat": pydantic.confloat(ge=0.5, lt=2.25),
    "multiple of 5": pydantic.conint(multiple_of=5),
    "multiple of 0.25": pydantic.confloat(multiple_of=0.25),
    "constr": pydantic.constr(min_length=2, max_length=10, pattern="^[a-z]+$"),
    "upper": pydantic.constr(to_upper=True, max_length=5),
    "conlist": pydantic.conlist(int, min_length=1, max_length=3),
    "conset": pydantic.conset(int, max_length=2),
    "conbytes": pydantic.conbytes(max_length=4),
    "condecimal": pydantic.condecimal(max_digits=5, decimal_places=2),
    "bounded decimal": pydantic.condecimal(gt=decimal.Decimal(0), le=decimal.Decimal("9.99")),
    "condate": pydantic.condate(gt=datetime.date(2020, 1, 1)),
    "PositiveInt": pydantic.PositiveInt,
    "NegativeFloat": pydantic.NegativeFloat,
    "StrictInt": pydantic.StrictInt,
    "PastDate": pydantic.PastDate,
    "AwareDatetime": pydantic.AwareDatetime,
    "FilePath": pydantic.FilePath,
    "ImportString": pydantic.ImportString,
    "Base64Str": pydantic.Base64Str,
    "Base64UrlBytes": pydantic.Base64UrlBytes,
    "UUID4": pydantic.UUID4,
    "model": Inner,
    "recursive model": Node,
    "tagged union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "extra=forbid": Forbidding,
    "extra=allow": Allowing,
    "typed extra": Typed,
    "NamedTuple": Pair,
    "dataclass": Plain,
    "nested": dict[str, list[tuple[int, Inner | None]]],
}


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("name", PYDANTIC)
def test_a_schema_of_pydantic(name: str, mode: Any) -> None:
    check(name, TypeAdapter(PYDANTIC[name]).json_schema(mode=mode))
