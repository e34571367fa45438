"""Fill-in-the-middle: prompts with the text after the gap, for models whose tokenizer has the tokens.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", arXiv 2207.14255. Most models
read prefix, suffix and then write the middle; Codestral reads the suffix first and continues the prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftree.core.errors import InvalidRequestError
from draftree.text.tokenizer import Tokenizer

__all__ = ["FillIn", "SourceFile", "can_fill"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Another file of the repository."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class _Format:
    """The tokens of a family; `middle` is empty where the suffix comes first."""

    prefix: str
    suffix: str
    middle: str


FORMATS = (
    _Format("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Format("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    _Format("[PREFIX]", "[SUFFIX]", ""),
)
SEPARATORS = ("<|file_sep|>", "<file_sep>")  # tokens before the name of a file
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>", "<fim_pad>", "<|file_sep|>", "<file_sep>", "<|repo_name|>")
"""Tokens that end a middle besides the model's own."""


def can_fill(tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer has the tokens of a gap."""
    return _format_of(tokenizer.added_tokens.values()) is not None


def _format_of(tokens: Iterable[str]) -> _Format | None:
    known = frozenset(tokens)
    return next((form for form in FORMATS if {form.prefix, form.suffix, form.middle} - {""} <= known), None)


class FillIn:
    """Encoder of prompts with a gap for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {text: token for token, text in tokenizer.added_tokens.items()}
        gap_format = _format_of(self._ids)
        if gap_format is None:
            raise InvalidRequestError(
                f"{tokenizer.name} has no tokens for a text after the gap, such as {FORMATS[0].suffix}: "
                "leave it out, or use a model for fill-in-the-middle",
                param="suffix",
            )
        self._format = gap_format

    @property
    def stop_ids(self) -> list[int]:
        """Tokens that end a middle; they include tokens of the next file."""
        return [self._ids[text] for text in ENDS if text in self._ids]

    def encode(self, before: str, after: str, files: Sequence[SourceFile] = ()) -> list[int]:
        """Return the token ids of a prompt with a gap."""
        encode = self._tokenizer.encode
        ids = self._ids
        form = self._format
        prefix = [ids[form.prefix], *encode(before, add_special_tokens=False)]
        suffix = [ids[form.suffix], *encode(after, add_special_tokens=False)]
        context = [token for file in files for token in self._file(file)]
        rest = [*prefix, *suffix, ids[form.middle]] if form.middle else [*suffix, *prefix]
        return [*self._tokenizer.start_ids, *context, *rest]

    def _file(self, file: SourceFile) -> list[int]:
        separator = next((self._ids[text] for text in SEPARATORS if text in self._ids), None)
        text = self._tokenizer.encode(f"{file.name}\n{file.text}\n", add_special_tokens=False)
        return text if separator is None else [separator, *text]
