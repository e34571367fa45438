"""Hostile tokenizer files are refused when they are loaded, or fail as a deliberate error."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from draftree.core.errors import ModelLoadError, TokenizerError
from draftree.core.files import MAX_JSON_BYTES
from draftree.loading.loaded import load_tokenizer
from draftree.text.tokenizer import Tokenizer
from text_backends import byte_level

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
