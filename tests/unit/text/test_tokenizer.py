"""Tokenizers: exact text, vocabularies, special tokens and the files that they are read from."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, pre_tokenizers
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from draftree.core.errors import InvalidRequestError, ModelLoadError, TokenizerError
from draftree.core.files import MAX_JSON_BYTES
from draftree.loading.loaded import load_tokenizer
from draftree.text.retokenize import TokenDifference, compare_vocabularies
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
        ([{"role": "user", "content": [{"type": "video", "video": {}}]}], "Part 0 .*is 'video'"),
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


BASE = ["<unk>", "<s>", "</s>", "▁the", "▁a", "日"]


def test_equal_vocabularies_are_the_same() -> None:
    comparison = compare_vocabularies(BASE, tuple(BASE))
    assert comparison.same
    assert comparison.first_differences == ()
    assert (comparison.target_size, comparison.draft_size, comparison.common_size) == (6, 6, 6)


@pytest.mark.parametrize(
    "padding",
    [
        "",
        "<pad>",
        "[PAD]",
        "[PAD151936]",
        "<unused0>",
        "[unused99]",
        "<|pad|>",
        "<|padding|>",
        "<|PAD_TOKEN|>",
        "<|reserved_special_token_12|>",
        "<extra_id_3>",
        "<dummy7>",
        "<|placeholder1|>",
    ],
)
def test_padding_beyond_the_smaller_size_is_no_difference(padding: str) -> None:
    for target, draft in ((BASE, [*BASE, padding]), ([*BASE, padding], BASE)):
        comparison = compare_vocabularies(target, draft)
        assert comparison.same
        assert comparison.common_size == 6


@pytest.mark.parametrize(
    "token", ["the", "▁unused", "<|im_start|>", "pad", "<paddle>", "<extra>x", "[PAD", "<tool_call>"]
)
def test_a_real_token_beyond_the_smaller_size_is_a_difference(token: str) -> None:
    assert compare_vocabularies(BASE, [*BASE, "", token]).first_differences == (TokenDifference(7, None, token),)
    assert compare_vocabularies([*BASE, token], BASE).first_differences == (TokenDifference(6, token, None),)


def test_the_first_five_differences_are_named() -> None:
    draft = [f"x{i}" for i in range(6)]
    comparison = compare_vocabularies(BASE, draft)
    assert not comparison.same
    assert [difference.token_id for difference in comparison.first_differences] == [0, 1, 2, 3, 4]
    assert comparison.first_differences[3] == TokenDifference(3, "▁the", "x3")


def test_a_hole_in_one_of_them_is_a_difference() -> None:
    draft = [*BASE[:3], "", *BASE[4:]]
    assert compare_vocabularies(BASE, draft).first_differences == (TokenDifference(3, "▁the", None),)


def test_one_changed_token_in_a_large_vocabulary_is_found() -> None:
    target = [f"token{i}" for i in range(50_000)]
    draft = target.copy()
    draft[49_000] = "other"
    assert compare_vocabularies(target, draft).first_differences == (TokenDifference(49_000, "token49000", "other"),)


Json = dict[str, Any]
BACKTRACKING = "(a+)+$"


def changed(folder: Path, change: Callable[[Json], object]) -> Path:
    byte_level().save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    return folder


def sequence(kind: str, steps: list[Json]) -> Json:
    return {"type": "Sequence", kind: steps}


def template(single: list[Json], ids: int = 1) -> Json:
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    special = {"s": {"id": "s", "ids": [0] * ids, "tokens": ["s"] * ids}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def table(size: int, rest: bytes) -> Json:
    charsmap = base64.b64encode(size.to_bytes(4, "little") + rest).decode()
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


TEXT, START = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "s", "type_id": 0}}
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
LONG: dict[str, Callable[[Json], object]] = {
    "a large id": lambda file: file["model"]["vocab"].update(zz=2**32 - 1),
    "replacements": lambda file: file.update(normalizer=sequence("normalizers", [REPLACE] * 9)),
    "decoded replacements": lambda file: file.update(decoder=sequence("decoders", [REPLACE] * 9)),
    "bytes of bytes": lambda file: file.update(
        pre_tokenizer=sequence(
            "pretokenizers",
            [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * 40,
        )
    ),
    "a long suffix": lambda file: file["model"].update(end_of_word_suffix="x" * 2000),
    "a table of junk": lambda file: file.update(normalizer=table(0xFFFFFFF0, bytes(300))),
    "a long replacement": lambda file: file.update(normalizer=table(4, bytes(4) + b"x" * 2000 + b"\0")),
    "many tokens": lambda file: file.update(post_processor=template([START] * 30_000 + [TEXT], ids=20_000)),
    "many copies": lambda file: file.update(post_processor=template([TEXT] * 15_000)),
    "copies of copies": lambda file: file.update(post_processor=sequence("processors", [template([TEXT] * 2)] * 40)),
    "spaces": lambda file: file.update(padding=" " * MAX_JSON_BYTES),
}


@pytest.mark.parametrize("name", LONG)
def test_what_takes_unbounded_memory_is_refused(name: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, LONG[name])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_tokenizer(folder)


FAILING: dict[str, Callable[[Json], object]] = {
    "backtracking": lambda file: file.update(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": BACKTRACKING},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "pieces of no length": lambda file: file.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "no unknown token": lambda file: file.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
    "an offset beyond the table": lambda file: file.update(normalizer=table(1000, b"\xa5" * 1000 + bytes(10))),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_tokenizer_that_fails_on_a_text_gives_a_deliberate_error(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(changed(tmp_path, FAILING[name]))
    assert tokenizer is not None
    with pytest.raises(TokenizerError, match=f"the tokenizer of {tmp_path.name} cannot encode this text"):
        tokenizer.encode("a" * 40 + "b")
    with pytest.raises(TokenizerError):
        tokenizer.apply_chat_template([{"role": "user", "content": "a" * 40 + "b"}])


def test_a_failure_to_decode_is_a_deliberate_error(tmp_path: Path) -> None:
    strip = {"type": "Strip", "content": "a", "start": 4_000_000_000, "stop": 4_000_000_000}
    tokenizer = load_tokenizer(changed(tmp_path, lambda file: file.update(decoder=strip)))
    assert tokenizer is not None
    with pytest.raises(TokenizerError, match="cannot decode these tokens"):
        tokenizer.decode(tokenizer.encode("a"), False)


def test_a_panic_in_a_literal_conversation_is_a_deliberate_error() -> None:
    backend = byte_level()
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(BACKTRACKING), "isolated")
    with pytest.raises(TokenizerError):
        Tokenizer(backend).apply_chat_template([{"role": "user", "content": f"<|im_end|>{'a' * 40}b"}])
