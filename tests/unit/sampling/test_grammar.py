"""Grammars on a vocabulary small enough for enumeration: allowed, forced and refused tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.models.table import TableLM, hashed
from draftree.sampling.controls import build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.grammar.compiler import Grammars
from draftree.sampling.grammar.guide import Guide
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits

END = 0
TOKENS: list[bytes | None] = [None, b"a", b"b", b"ab", b"c", b"abc", None, b"\xc3", b"\xa9", "é".encode()]
A, B, AB, C, ABC, OTHER, HIGH, LOW, E_ACUTE = range(1, 10)
VOCAB = len(TOKENS) + 3
GRAMMARS = Grammars(TOKENS, vocab_size=VOCAB)


def guide(**constraint: Any) -> Guide:
    return GRAMMARS.open(SamplingParams(**constraint), [END])


def text(*tokens: int) -> History:
    history = History([5, 5])
    history.append(tokens)
    return history


def allowed(led: Guide, history: History, *path: int) -> set[int] | None:
    (found,) = led.allowed(history, [path])
    if found is None:
        return None
    tokens = set(found.tokens.tolist())
    return set(range(VOCAB)) - tokens if found.forbids else tokens


def test_allowed_tokens_are_those_that_the_grammar_accepts() -> None:
    led = guide(regex="(ab)+c?")
    assert allowed(led, text()) == {A, AB, ABC}
    assert allowed(led, text(), A) == {B}
    assert allowed(led, text(), AB) == {A, AB, ABC, C, END}
    assert allowed(led, text(), ABC) == {END}


def test_tokens_that_spell_a_part_of_a_character_are_put_together() -> None:
    led = guide(grammar='root ::= "é" "a"')
    assert allowed(led, text()) == {HIGH, E_ACUTE}
    assert allowed(led, text(), HIGH) == {LOW}
    assert allowed(led, text(), HIGH, LOW) == {A}


def test_forbidden_paths_end_and_anything_may_follow_the_end() -> None:
    led = guide(regex="ab")
    assert allowed(led, text(), B) is None
    assert allowed(led, text(), B, A) is None
    assert allowed(led, text(), AB, END) == set(range(VOCAB))
    assert allowed(led, text(), AB, END, A) is None
    assert allowed(led, text(), OTHER) is None, "a special token has no text"
    assert allowed(led, text()) == {A, AB}, "looking ahead changes nothing"


def test_the_text_may_grow_in_pieces_and_be_rolled_back() -> None:
    led = guide(regex="(ab)+c")
    history = text(A)
    assert allowed(led, history, B) == {A, AB, ABC, C}
    history.append([B, AB])
    assert allowed(led, history) == {A, AB, ABC, C}
    assert allowed(led, text(A)) == {B}, "another history is another text"
    assert allowed(led, text(AB, A), B, C) == {END}


def test_paths_in_any_order_give_the_same() -> None:
    paths = [(), (A,), (AB,), (A, B), (AB, A), (AB, C), (B,), (A, B, C), (A, B, A, B)]
    led = guide(regex="(ab)+c?")
    there = [allowed(led, text(), *path) for path in paths]
    back = [allowed(guide(regex="(ab)+c?"), text(), *path) for path in reversed(paths)]
    assert there == back[::-1]


@pytest.mark.parametrize(
    ("regex", "written", "expected"),
    [
        ("abcab", (), [ABC, AB, END]),
        ("abcab", (A,), [B, C, AB, END]),
        ("a|b", (), []),
        ("a(b|c)", (), [AB, END]),
        ("ab(c|a)b", (), [ABC, B, END]),
        ("é", (), [E_ACUTE, END]),
        ("(ab)+", (), [AB]),
        ("(ab)+", (A,), [B]),
        ("abc", (ABC,), [END]),
        ("a?", (A,), [END]),
    ],
)
def test_forced_tokens(regex: str, written: tuple[int, ...], expected: list[int]) -> None:
    """A single token is certain, several prefixes of each other a guess: after a comes b or c, and ab is a token."""
    led = guide(regex=regex)
    assert led.forced(text(*written), (), 10) == expected
    assert led.forced(text(), written, 10) == expected
    assert led.forced(text(*written), (), 1) == expected[:1]


def test_a_certain_run_ends_where_another_token_spells_the_same() -> None:
    led = guide(regex="cabc")
    assert led.forced(text(), (), 10) == [C, ABC, END]
    assert led.forced(text(), (), 10, certain=True) == [C]
    assert led.forced(text(), (C, A), 10, certain=True) == [B, C, END]
    assert led.forced(text(), (C, AB), 10, certain=True) == [C, END]


def test_a_grammar_without_an_end_forces_no_more_than_is_asked_for() -> None:
    assert guide(grammar='root ::= "c" root').forced(text(), (), 7) == [C] * 7


def test_of_several_ends_the_models_own_is_forced() -> None:
    led = GRAMMARS.open(SamplingParams(regex="c", stop_token_ids=[1]), [OTHER, A])
    assert led.forced(text(), (), 5) == [C, OTHER]
    assert allowed(led, text(), C) == {OTHER, A}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_distribution_of_a_row_is_the_models_without_the_forbidden(dtype: torch.dtype) -> None:
    given = SamplingParams(regex="(ab)+c?", temperature=0.7, top_p=0.9, logit_bias={A: 2.0})
    free = SamplingParams(temperature=0.7, top_p=0.9, logit_bias={A: 2.0})
    paths = [(), (A,), (AB,), (B,), (ABC, END)]
    raw = torch.randn(len(paths), VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    ruled = build_controls(given, vocab_size=VOCAB, eos_ids=[END], grammars=lambda: GRAMMARS, seed=1)
    distributions = Distributions(TensorLogits(raw), [DistributionRows(text(), ruled, paths)]).of(0)
    masked = raw.clone()
    for row, tokens in enumerate([{A, AB, ABC}, {B}, {A, AB, ABC, C, END}]):
        masked[row, sorted(set(range(VOCAB)) - tokens)] = -torch.inf
    plainly = build_controls(free, vocab_size=VOCAB, eos_ids=[END], seed=1)
    expected = Distributions(TensorLogits(masked), [DistributionRows(text(), plainly, paths)]).of(0)
    assert torch.equal(distributions.probs(), expected.probs())
    assert distributions.picks() == expected.picks()


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        ({"regex": "(a"}, "parenthesis is not closed"),
        ({"regex": "a^b"}, "no text matches it"),
        ({"regex": "x"}, "no text in this model's vocabulary matches it"),
        ({"grammar": "root ::= other"}, '"other" is not defined'),
        ({"grammar": 'start ::= "a"'}, "root"),
        ({"grammar": "root ::= root"}, "no text in this model's vocabulary matches it"),
        ({"json_schema": {"type": "strin"}}, "'type' is 'strin'"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json_schema": {"enum": []}}, "enum"),
    ],
)
def test_unusable_grammars_are_refused_with_the_reason(constraint: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match="is refused") as found:
        guide(**constraint)
    assert reason in str(found.value)
    assert "/cpp/" not in str(found.value)


@pytest.mark.parametrize("regex", ["^abc$", "a[$^]b|c", r"a\$|c", "abc"])
def test_anchors_at_the_ends_and_signs_that_are_none_are_read(regex: str) -> None:
    assert allowed(guide(regex=regex), text())


def test_names_and_values_of_a_schema_are_not_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"not": {"const": {"not": 1}}, "if": {"type": "integer", "default": {"contains": 1}}},
        "required": ["not"],
    }
    everything = Grammars([bytes([byte]) for byte in range(256)] + [None], vocab_size=257)
    assert everything.open(SamplingParams(json_schema=schema), [256]).forced(History([0]), (), 6) == list(b'{"not"')


def test_no_control_character_stands_in_json() -> None:
    everything = Grammars([bytes([byte]) for byte in range(256)] + [b"\n]", None], vocab_size=258)
    for schema in ({"type": "string", "maxLength": 3}, {"type": "string"}, {"type": "array"}):
        led = everything.open(SamplingParams(json_schema=schema), [257])
        history = History([0])
        history.append(led.forced(history, (), 1))
        (found,) = led.allowed(history, [()])
        assert found is not None
        tokens = set(found.tokens.tolist())
        inside = set(range(258)) - tokens if found.forbids else tokens
        assert not inside & {*range(0x20), 256}
        assert ord(" ") in inside or schema["type"] == "array"


class Record:
    """The method of pydantic models."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"é": {"type": "integer"}}}


def test_a_schema_is_a_dictionary_text_or_a_class() -> None:
    expected = SamplingParams(json_schema=Record.model_json_schema()).json_schema
    assert SamplingParams(json_schema=Record).json_schema == expected
    assert SamplingParams(json_schema=expected).constraint == ("json_schema", expected)
    assert SamplingParams().constraint is None


def test_a_grammar_needs_a_tokenizer_and_an_end() -> None:
    llm = LLM(TableLM(hashed(VOCAB, seed=1)), "none")
    with pytest.raises(InvalidRequestError, match="regex needs a tokenizer"):
        llm.generate([[1]], SamplingParams(regex="a"))
    with pytest.raises(InvalidRequestError, match="no token ends the text"):
        GRAMMARS.open(SamplingParams(regex="a", ignore_eos=True), [])
