"""The answers that `draftree chat` must give, and options that it is run with. Not a test itself."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

from tokenizers import pre_tokenizers

from draftree import LLM, SamplingParams

LETTERS = [1 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter) for letter in "abcdefghijklmnop"]
SAMPLED = SamplingParams(seed=3, max_tokens=12, allowed_token_ids=LETTERS)
"""The tiny model sees one token; with a seed its answers depend on the length of the conversation."""
COMMON = ("--seed", "3", *(word for letter in LETTERS for word in ("--allowed-token-ids", str(letter))))
OPTIONS = (*COMMON, "--max-tokens", "12")


@functools.cache
def loaded(folder: str) -> LLM:
    return LLM(folder, "none")


def answers(folder: str, *messages: str, max_tokens: int = 12, system: str | None = None) -> list[str]:
    """The answers of the library to messages of one conversation."""
    llm = loaded(folder)
    conversation = [] if system is None else [{"role": "system", "content": system}]
    written = []
    for message in messages:
        conversation.append({"role": "user", "content": message})
        written.append(llm.chat(conversation, dataclasses.replace(SAMPLED, max_tokens=max_tokens))[0].text)
        conversation.append({"role": "assistant", "content": written[-1]})
    return written


def saved(path: Path) -> list[dict[str, object]]:
    return json.loads(path.read_text(encoding="utf-8"))["messages"]


def contents(path: Path) -> list[object]:
    return [message["content"] for message in saved(path)]
