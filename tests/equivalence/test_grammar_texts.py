"""Texts under a grammar match it and equal plain decoding's: every drafter, in batches and streams, to every end."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree import LLM, Completion, SamplingParams
from draftree.core.errors import UnsatisfiableError
from draftree.drafters.tree_builder.builder import GrowingTree, TreeBuilder
from draftree.loading.load import load_model
from draftree.models.table import TableLM, hashed
from draftree.text.tokenizer import Tokenizer
from families import drafter_folder
from paced import steady
from target_heads import TARGET, head_folder
from text_backends import byte_level

DRAFTS = ["grammar", "ngram,min=1", "suffix", "lookahead", "prediction", "ngram,min=1+suffix+grammar"]
PROMPT = [20, 30, 40, 20, 30]
EOS = 2


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


@functools.cache
def model(seed: int = 1, scale: float = 2.0) -> TableLM:
    """A text that repeats itself, so that there is something to copy."""
    return TableLM(hashed(len(tokenizer().vocabulary()), seed=seed, scale=scale), order=1)


def write(draft: str | None, prompts: list[list[int]] | None = None, **params: Any) -> list[Completion]:
    llm = LLM(model(), draft, plan=steady(draft), tokenizer=tokenizer())
    given = {"max_tokens": 60, "seed": 5, "temperature": 0.8} | params
    if draft and "prediction" in draft:
        given["prediction"] = '{"a": [1, 2], "ab": "ab"}'
    return llm.generate(prompts or [PROMPT], SamplingParams(**given))


def texts_of(done: list[Completion]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(one.text, tuple(one.token_ids), one.finish_reason) for one in done]


SCHEMA = {
    "type": "object",
    "properties": {
        "first name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["one thing", "other thing", 7, None]},
        "list": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "maxItems": 3},
    },
    "required": ["first name", "kind", "list"],
}


def check_record(text: str) -> None:
    record = json.loads(text)
    assert list(record) == ["first name", "kind", "list"]
    assert len(record["first name"]) <= 6
    assert record["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]
    assert len(record["list"]) <= 3
    assert all(-5 <= number <= 120 for number in record["list"])


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_a_record_parses_and_is_plain(draft: str | None, temperature: float) -> None:
    params = {"json_schema": SCHEMA, "temperature": temperature, "top_p": 0.95, "repetition_penalty": 1.1}
    (plain,) = write(None, **params)
    (done,) = write(draft, **params)
    assert texts_of([done]) == texts_of([plain])
    assert done.finish_reason == "stop"
    check_record(done.text)
    if draft:
        assert done.stats.rounds < plain.stats.rounds
        assert done.stats.accepted_by_source["grammar"] >= 5


@pytest.mark.parametrize(
    "verify", ["coupled", "match", "multistep", "traversal", "token", "block", "recursive", "soft", "typical"]
)
def test_every_rule_keeps_to_the_grammar(verify: str) -> None:
    for seed in range(5):
        llm = LLM(model(), "ngram,min=1", verify=verify, plan="fixed", tokenizer=tokenizer())
        params = SamplingParams(json_schema=SCHEMA, max_tokens=100, seed=seed)
        check_record(llm.generate([PROMPT], params)[0].text)


@pytest.mark.parametrize("tree", ["chain", "1-2-2", "best-8", "iid-2-2", "wor-2-1-1"])
@pytest.mark.parametrize("verify", ["coupled", "multistep", "recursive"])
def test_a_model_drafts_under_the_mask(tree: str, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (tree, verify) in {("iid-2-2", "recursive"), ("wor-2-1-1", "multistep")} or (
        verify != "coupled" and tree in ("chain", "1-2-2", "best-8")
    ):
        pytest.skip("they do not fit together")
    monkeypatch.setattr("draftree.drafters.model.load_model", lambda name, **_: _loaded())
    for seed in range(4):
        llm = LLM(model(), f"model:small,tree={tree},k=3", verify=verify, plan="fixed", tokenizer=tokenizer())
        params = SamplingParams(json_schema=SCHEMA, max_tokens=100, seed=seed)
        (done,) = llm.generate([PROMPT], params)
        check_record(done.text)
        assert done.stats.accepted_tokens > done.stats.accepted_by_source["grammar"] > 0
        if verify == "coupled":
            assert texts_of([done]) == texts_of(LLM(model(), "none", tokenizer=tokenizer()).generate([PROMPT], params))


def _loaded() -> Any:
    from draftree.loading.loaded import LoadedModel

    return LoadedModel(model(1, 1.8), None, (), "small")


@pytest.mark.parametrize("draft", ["ngram,min=1", "suffix+grammar"])
def test_batches_and_several_texts_of_a_prompt_are_each_as_alone(draft: str) -> None:
    prompts = [PROMPT, [7, 8, 9], [50] * 12]
    wanted = [
        SamplingParams(json_schema=SCHEMA, max_tokens=60, seed=1, n=2),
        SamplingParams(max_tokens=20, seed=2),
        SamplingParams(regex="(ab|cd)+;", max_tokens=40, seed=3, temperature=0.5),
    ]
    llm = LLM(model(), draft, plan=steady(draft), tokenizer=tokenizer())
    plain = LLM(model(), "none", tokenizer=tokenizer())
    together = llm.generate(prompts, wanted)
    alone = [one for prompt, given in zip(prompts, wanted, strict=True) for one in plain.generate([prompt], given)]
    assert texts_of(together) == texts_of(alone)
    assert together[0].text != together[1].text
    check_record(together[0].text)
    check_record(together[1].text)


@pytest.mark.parametrize("draft", [None, "ngram,min=1"])
def test_a_stream_shows_the_text_and_may_be_left(draft: str | None) -> None:
    llm = LLM(model(), draft, plan=steady(draft), tokenizer=tokenizer())
    params = SamplingParams(json_schema=SCHEMA, max_tokens=60, seed=1)
    (whole,) = llm.generate([PROMPT], params)
    assert "".join(llm.stream(PROMPT, params)) == whole.text
    pieces = llm.stream(PROMPT, params)
    next(pieces)
    pieces.close()
    assert "".join(llm.stream(PROMPT, params)) == whole.text


@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_ends_other_than_the_grammars_own_cut_the_text(draft: str | None) -> None:
    (cut,) = write(draft, json_schema=SCHEMA, max_tokens=9)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 9)
    (stopped,) = write(draft, json_schema=SCHEMA, stop="kind")
    assert stopped.finish_reason == "stop"
    assert stopped.text.endswith('", "')
    assert texts_of([cut, stopped]) == texts_of(
        [*write(None, json_schema=SCHEMA, max_tokens=9), *write(None, json_schema=SCHEMA, stop="kind")]
    )


@pytest.mark.parametrize("draft", [None, "ngram,min=1", "grammar"])
def test_a_minimum_of_tokens_holds_where_the_grammar_goes_on_and_fails_where_it_cannot(draft: str | None) -> None:
    (done,) = write(draft, regex="[ab]+", min_tokens=30, max_tokens=40)
    assert len(done.token_ids) >= 30
    assert re.fullmatch("[ab]+", done.text)
    with pytest.raises(UnsatisfiableError, match="no token agrees with min_tokens and regex"):
        write(draft, regex="ab", min_tokens=30, max_tokens=40)


@pytest.mark.parametrize("draft", [None, "ngram,min=1"])
def test_another_stop_token_may_end_the_text_where_the_grammar_does(draft: str | None) -> None:
    stop = tokenizer().encode("b", add_special_tokens=False)[0]
    (done,) = write(draft, regex="[ac]{3,}", ignore_eos=True, stop_token_ids=[stop])
    assert done.token_ids[-1] == stop
    assert re.fullmatch("[ac]{3,}", done.text)


def regexes() -> st.SearchStrategy[str]:
    """Expressions whose texts are not too long."""
    parts = st.sampled_from(["a", "the ", "[a-f]", "é", "日", r"\d", r"[^a-z\n]", ".", "dog", r"\.", "[語本]"])
    return st.recursive(
        parts,
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map("".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda some: f"({'|'.join(some)})"),
            st.tuples(inner, st.sampled_from(["?", "{2}", "{0,2}", "{1,3}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
        ),
        max_leaves=6,
    )


@settings(max_examples=40)
@given(regex=regexes(), draft=st.sampled_from(["grammar", "ngram,min=1", "suffix"]), seed=st.integers(0, 20))
def test_random_expressions_are_matched(regex: str, draft: str, seed: int) -> None:
    (plain,) = write(None, regex=regex, seed=seed, max_tokens=200)
    (done,) = write(draft, regex=regex, seed=seed, max_tokens=200)
    assert done.finish_reason == "stop"
    assert re.fullmatch(regex, done.text, flags=re.DOTALL), done.text
    assert texts_of([done]) == texts_of([plain])


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of finite texts."""
    leaves: st.SearchStrategy[dict[str, Any]] = st.one_of(
        st.integers(0, 4).map(lambda most: {"type": "string", "maxLength": most}),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.tuples(st.integers(-30, 5), st.integers(6, 300)).map(
            lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}
        ),
        st.lists(st.sampled_from(["red", "reddish", 'a"b', "日本", 3, None]), min_size=1, max_size=3).map(
            lambda values: {"enum": values}
        ),
    )
    names = st.sampled_from(["a", "name", "日付", "a b", "x\ty"])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, st.integers(0, 2)).map(
                lambda pair: {"type": "array", "items": pair[0], "minItems": pair[1], "maxItems": 2}
            ),
            st.dictionaries(names, inner, min_size=1, max_size=3).map(
                lambda fields: {"type": "object", "properties": fields, "required": list(fields)[:2]}
            ),
            st.lists(inner, min_size=1, max_size=2).map(lambda ways: {"anyOf": ways}),
        ),
        max_leaves=4,
    )


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """A small reading of JSON Schema, independent of the one that made the grammar."""
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    if "anyOf" in schema:
        return any(fits(value, way) for way in schema["anyOf"])
    kind = schema["type"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= 2
            and all(fits(one, schema["items"]) for one in value)
        )
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(schema["properties"])
            and all(fits(one, schema["properties"][name]) for name, one in value.items())
        )
    return isinstance(value, bool) if kind == "boolean" else value is None


@settings(max_examples=40)
@given(schema=schemas(), draft=st.sampled_from(["grammar", "ngram,min=1", "suffix"]), seed=st.integers(0, 20))
def test_random_schemas_are_followed(schema: dict[str, Any], draft: str, seed: int) -> None:
    (plain,) = write(None, json_schema=schema, seed=seed, max_tokens=400)
    (done,) = write(draft, json_schema=schema, seed=seed, max_tokens=400)
    assert done.finish_reason == "stop"
    assert fits(json.loads(done.text), schema), done.text
    assert texts_of([done]) == texts_of([plain])


def test_trees_of_heads_grow_in_one_call_and_again_where_the_grammar_forbids_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(tokenizer().vocabulary())
    target = drafter_folder("llama", tmp_path / "target", distance=0.0, **TARGET, vocab_size=size)
    native = {"head_dim": 16, "intermediate": 64, "vocab_size": size, "draft_vocab_size": size}
    head = head_folder(tmp_path, "eagle3-full", **native)
    model = load_model(target, dtype="float32", kernels="native")
    params = SamplingParams(max_tokens=60, seed=5, temperature=0.8, regex="[a-z ]{20,40}(, [0-9]{1,3}){4,8}")
    (plain,) = LLM(model, "none", tokenizer=tokenizer()).generate([PROMPT], params)
    grown, levels = [], []
    is_forbidden, choose = GrowingTree.is_forbidden, TreeBuilder._choose

    def noted(tree: GrowingTree) -> bool:
        grown.append(tree)
        return is_forbidden.__get__(tree)

    def chosen(builder: TreeBuilder, *args: Any) -> None:
        levels.append(builder)
        choose(builder, *args)

    monkeypatch.setattr(GrowingTree, "is_forbidden", property(noted))
    monkeypatch.setattr(TreeBuilder, "_choose", chosen)
    (done,) = LLM(model, f"head:{head}", plan="fixed", tokenizer=tokenizer()).generate([PROMPT], params)
    assert texts_of([done]) == texts_of([plain])
    assert len(grown) > 3, "in one call"
    assert levels, "level by level, where the grammar forbids the tree"
