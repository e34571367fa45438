"""A tokenizer loaded from its file alone equals transformers', or is not used."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Tokenizer

from draftree.core.errors import InvalidRequestError
from draftree.loading.loaded import load_tokenizer
from draftree.text.detokenize import Detokenizer
from draftree.text.plain import PlainBackend, plain_facts, plain_tokenizer
from draftree.text.tokenizer import Tokenizer
from real_weights import folder_of
from text_backends import OTHER_BACKENDS, TABLE_BACKENDS, byte_level

TEXT = "Once upon a time 日本語 😀🎉, naïve café 👨‍👩‍👧\n\n\tdef f(x):\n        return x  # 東京\n"
USER = [{"role": "user", "content": "Hello </s> there"}]
CHATS = [USER, [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "Hi"}, *USER]]
REAL = ("smollm2-135m-instruct", "tinyllama-1.1b-chat", "stories15m", "gemma3-270m")
NAMESPACE = "{% set seen = namespace(count=0) %}{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DRAFTREE_BLUEPRINTS")
    return tmp_path / "cache" / "blueprints"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))


def pair(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    """By the file alone, and through transformers."""
    theirs = Tokenizer.load(folder)
    assert theirs is not None
    facts = plain_facts(theirs.backend, folder)
    assert facts is not None
    return plain_tokenizer(folder, facts), theirs


def require_alike(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in (TEXT, "", " ", "<s>a</s>", "a <s> b", "<|im_start|>x", "<unk>"):
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, special)
        assert ours.encode_literally(text) == theirs.encode_literally(text)
    for name in ("eos_token_id", "bos_token_id", "start_ids", "ignored_ids", "special_ids", "has_chat_template"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.vocabulary() == theirs.vocabulary()
    if theirs.has_chat_template:
        for chat in CHATS:
            for opens in (True, False):
                both = [one.apply_chat_template(chat, add_generation_prompt=opens) for one in (ours, theirs)]
                assert both[0] == both[1]


@pytest.mark.parametrize("backend", [*TABLE_BACKENDS, *OTHER_BACKENDS], ids=lambda backend: backend.__name__)
def test_every_kind_gives_equal_results(tmp_path: Path, backend: Callable[[], Any]) -> None:
    backend().save_pretrained(tmp_path)
    ours, theirs = pair(tmp_path)
    require_alike(ours, theirs)
    ids = theirs.encode(TEXT)
    for cut in range(len(ids)):  # characters are cut into bytes somewhere
        for skip in (True, False):
            assert ours.decode(ids[: cut + 1], skip) == theirs.decode(ids[: cut + 1], skip)


@functools.cache
def real_pair(name: str) -> tuple[Tokenizer, Tokenizer]:
    return pair(folder_of(name))


@pytest.mark.weights
@pytest.mark.parametrize("name", REAL)
@settings(max_examples=30)
@given(data=st.data())
def test_real_tokenizers_give_equal_results(name: str, data: st.DataObject) -> None:
    ours, theirs = real_pair(name)
    text = data.draw(st.text() | st.sampled_from([TEXT, "</s><s>", "<|im_end|>\n", "<bos> a"]))
    of_bytes_and_special = st.integers(0, 300)
    tokens = st.integers(0, len(theirs.vocabulary()) - 1) | of_bytes_and_special | st.sampled_from(theirs.encode(TEXT))
    ids = data.draw(st.lists(tokens, max_size=70))
    for flag in (True, False):
        assert ours.encode(text, flag) == theirs.encode(text, flag)
        assert ours.decode(ids, flag) == theirs.decode(ids, flag)
        pieces = Detokenizer(ours, skip_special_tokens=flag)
        assert "".join(map(pieces.push, ids)) + pieces.finish() == theirs.decode(ids, flag)
    assert ours.encode_literally(text) == theirs.encode_literally(text)


@pytest.mark.weights
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_are_equal_in_all_other_respects(name: str) -> None:
    require_alike(*real_pair(name))


@pytest.mark.usefixtures("cache")
def test_the_second_time_transformers_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "byte-level"
    byte_level().save_pretrained(folder)
    first = load_tokenizer(folder)
    monkeypatch.setattr(Tokenizer, "load", lambda folder: pytest.fail("transformers was asked"))
    second = load_tokenizer(folder)
    assert first is not None
    assert second is not None
    require_alike(second, first)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"])
def test_a_file_that_changed_is_compared_anew(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "byte-level"
    byte_level().save_pretrained(folder)
    load_tokenizer(folder)
    path = folder / name
    old = path.read_text() if path.exists() else "{}"
    path.write_text(old.replace("assistant", "Assistant").replace('"</s>"', '"<|im_end|>"') + "\n")
    found, wanted = load_tokenizer(folder), Tokenizer.load(folder)
    assert found is not None
    assert wanted is not None
    assert not isinstance(found._backend, PlainBackend)
    require_alike(found, wanted)


def test_rebuilt_tokenizers_stay_with_transformers(tmp_path: Path) -> None:
    """Its class reads the vocabulary, but not the file's pre-tokenization."""
    byte_level().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": GPT2Tokenizer.__name__}))
    rebuilt = GPT2Tokenizer.from_pretrained(tmp_path, add_prefix_space=True)
    assert plain_facts(rebuilt, tmp_path) is None


def test_settings_that_add_tokens_keep_it_there(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<|nothing|>"}))
    theirs = Tokenizer.load(tmp_path)
    assert theirs is not None
    assert len(theirs.encode("<|nothing|>")) == 1
    assert plain_facts(theirs.backend, tmp_path) is None


@pytest.mark.parametrize("template", [NAMESPACE, "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}"])
def test_templates_with_namespaces_and_marks_need_no_transformers(tmp_path: Path, template: str) -> None:
    byte_level(template).save_pretrained(tmp_path)
    ours, theirs = pair(tmp_path)
    assert plain_facts(theirs.backend, tmp_path).renders is True  # type: ignore[union-attr]
    require_alike(ours, theirs)


def test_a_template_that_transformers_renders_otherwise_is_rendered_as_there(tmp_path: Path) -> None:
    template = "{{ documents is none }}{{ lipsum is defined }}{{ messages[0]['content'] }}"
    byte_level(template).save_pretrained(tmp_path)
    _, theirs = pair(tmp_path)
    assert plain_facts(theirs.backend, tmp_path).renders is False  # type: ignore[union-attr]


def test_a_template_that_computes_too_much_is_not_given_to_transformers(tmp_path: Path) -> None:
    byte_level("{{ 'a' * 9000000000 }}").save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    with pytest.raises(InvalidRequestError, match="the template was stopped"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_a_refusing_template_gives_its_reason(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path)
    ours, _ = pair(tmp_path)
    with pytest.raises(InvalidRequestError, match="Wizards may not speak"):
        ours.apply_chat_template([{"role": "wizard", "content": "Fly!"}])


@pytest.mark.usefixtures("cache")
def test_without_a_file_it_is_as_ever(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    byte_level().save_pretrained(tmp_path / "old")
    shutil.copy(tmp_path / "old" / "tokenizer.json", tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path) is not None
