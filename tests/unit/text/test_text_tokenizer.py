"""Text to ids and back, conversations, and folders with and without a tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from draftree.core.errors import InvalidRequestError, ModelLoadError
from draftree.text.tokenizer import Tokenizer
from text_backends import CORPUS, byte_fallback, byte_level, word_piece, words


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), name="tiny-chat")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level().save_pretrained(tmp_path / "tiny-chat")
    return tmp_path / "tiny-chat"


@pytest.mark.parametrize("backend", [byte_level, byte_fallback])
def test_text_comes_back_unchanged(backend: object) -> None:
    tokenizer = Tokenizer(backend())  # type: ignore[operator]
    for text in [*CORPUS, " .  , ' n't  ", "a , b . c ' s", ""]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), False).lstrip(" ") == text.lstrip(" ")


def test_long_text_is_not_truncated(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    assert len(tokenizer.encode("z" * 50)) == 50


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a", "b"]])
def test_a_prompt_that_is_not_text_is_refused(tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"type {type(text).__name__}"):
        tokenizer.encode(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback(), words()])
def test_a_text_with_far_too_many_tokens_is_refused_by_its_beginning(
    backend: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, sizes = Tokenizer(backend), []
    encode = backend.encode
    monkeypatch.setattr(backend, "encode", lambda text, **given: sizes.append(len(text)) or encode(text, **given))
    with pytest.raises(InvalidRequestError, match="more than 20 tokens, and at most 10 tokens are allowed"):
        tokenizer.require_fit("ab cd " * 1_000_000, 10)
    assert sum(sizes) < 1000


def test_a_long_text_of_long_tokens_is_not_refused_before_it_is_encoded() -> None:
    tokenizer = Tokenizer(word_piece())  # which drops spaces
    text = "the" + " " * 10_000 + "the"
    assert len(tokenizer.encode(text)) < 10
    tokenizer.require_fit(text, 10)


def test_half_of_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="character 2"):
        tokenizer.encode("ab\ud83dcd")


def test_a_chat_is_encoded_by_the_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 😀"}]
    expected = "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 😀<|im_end|>\n"
    closed = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.decode(closed, False) == expected
    opened = tokenizer.apply_chat_template(messages)
    assert tokenizer.decode(opened, False) == expected + "<|im_start|>assistant\n"
    assert opened[1] == tokenizer.vocabulary().index("<|im_start|>")


def test_bos_is_written_once_in_a_chat() -> None:
    backend = byte_level()
    bos = backend.bos_token_id
    from tokenizers.processors import TemplateProcessing

    backend.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("Hi")[0] == bos
    assert tokenizer.encode("Hi", add_special_tokens=False)[0] != bos
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]).count(bos) == 1


@pytest.mark.parametrize(
    ("messages", "words_of_message"),
    [
        ("Hi", "must be a list of messages, but got str"),
        ({"role": "user", "content": "Hi"}, "must be a list of messages, but got dict"),
        (None, "must be a list of messages, but got NoneType"),
        ([], "list is empty"),
        (["Hi"], "Message 0 .* is of type str"),
        ([{"role": "user"}], '"content" of message 0 of the chat is missing'),
        ([{"content": "Hi"}], '"role" of message 0 of the chat is missing'),
        ([{"role": "user", "content": "Hi"}, {"role": "user", "content": None}], "message 1 .* is of type NoneType"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "Part 0 .*is 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], '"text" of part 0 of message 0 .* type int'),
        ([{"role": 1, "content": "Hi"}], '"role" .* is of type int'),
        ([{"role": " ", "content": "Hi"}], '"role" of message 0 of the chat is empty'),
        ([{"role": "user", "content": "Hi", "audio": []}], "the key 'audio'"),
        ([{"role": "user", "content": "Hi", "tool_calls": [{}]}], 'in a message of the role "assistant"'),
        ([{"role": "assistant", "tool_calls": [{}]}], "Call 0 of message 0 of the chat must be"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}], "JSON text of an obj"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arg": ""}}]}], '"arguments" of call 0'),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}, "type": "x"}]}], 'must be "function"'),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}], "has tool_calls"),
        ([{"role": "user", "content": "\ud800"}], '"content" of message 0 of the chat is not valid Unicode'),
        ([{"role": "wizard", "content": "Hi"}], "tiny-chat does not accept .*Wizards may not speak"),
    ],
)
def test_a_wrong_chat_is_refused(tokenizer: Tokenizer, messages: object, words_of_message: str) -> None:
    with pytest.raises(InvalidRequestError, match=words_of_message) as caught:
        tokenizer.apply_chat_template(messages)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_without_a_template_there_is_no_chat() -> None:
    tokenizer = Tokenizer(byte_level(chat_template=None), name="base-model")
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match=r"base-model has no chat template.*--no-chat"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_a_broken_template_is_one_sentence() -> None:
    tokenizer = Tokenizer(byte_level(chat_template="{% for %}"), name="odd-model")
    with pytest.raises(InvalidRequestError, match="chat template of odd-model"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_the_vocabulary_is_listed_by_id(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary()
    assert vocabulary[:5] == ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    assert vocabulary[-2:] == ["\t\t  ", "日本"]
    assert tokenizer.special_ids == frozenset(range(5))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.has_chat_template


def test_holes_and_doubly_given_ids_of_a_vocabulary() -> None:
    inner = TokenizersTokenizer(tokenizer_models.BPE(vocab={"a": 0, "b": 3}, merges=[]))
    inner.add_tokens([AddedToken("first"), AddedToken("second")])  # numbered from 2, the count of tokens
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner))
    vocabulary = tokenizer.vocabulary()
    assert vocabulary[:2] == ["a", ""]
    assert [tokenizer.decode([i], False) for i in range(len(vocabulary))] == vocabulary


def test_a_folder_is_loaded(folder: Path) -> None:
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer is not None
    assert tokenizer.name == "tiny-chat"
    assert tokenizer.vocabulary() == Tokenizer(byte_level()).vocabulary()
    assert tokenizer.encode("def f(x):") == Tokenizer(byte_level()).encode("def f(x):")
    assert tokenizer.has_chat_template


def test_only_the_tokenizer_file_is_needed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "bare")
    tokenizer = Tokenizer.load(tmp_path / "bare")
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Hi 😀"), True) == "Hi 😀"


def test_a_folder_without_tokenizer_gives_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.load(tmp_path) is None
    assert Tokenizer.load(tmp_path / "missing") is None


@pytest.mark.parametrize("damage", ["", "{", '{"version": "1.0"}', "cut", "not json \x00"])
def test_a_damaged_tokenizer_is_one_sentence(folder: Path, damage: str) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:3000] if damage == "cut" else damage)
    with pytest.raises(ModelLoadError, match="cannot be read") as caught:
        Tokenizer.load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_settings_without_a_vocabulary_are_not_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match="no vocabulary file"):
        Tokenizer.load(folder)


def test_code_in_a_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    settings["tokenizer_class"] = "OwnTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\nclass OwnTokenizer: pass\n")
    with pytest.raises(ModelLoadError):
        Tokenizer.load(folder)
    assert not (tmp_path / "was-run").exists()


def test_spaces_before_punctuation_are_not_cleaned_away() -> None:
    backend = words()
    backend.clean_up_tokenization_spaces = True
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("dog , the fox"), True) == "dog , the fox"
