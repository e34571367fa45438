"""The field `beam_options`: parameters of a beam search that have no field of their own in a request body."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftree.beam.params import BeamSearchParams
from draftree.beam.trie import TokenTrie
from draftree.core.errors import suggestion
from draftree.serve.errors import invalid

FIELD = "beam_options"
MAX_PHRASES = 64
"""Required phrases of one request; every one is followed for every candidate."""
MAX_TEXTS = 4096
"""Texts of `allowed_texts`."""
ELSEWHERE = {
    "beam_width": "'n' or 'best_of'",
    "num_return_sequences": "'n'",
    "max_new_tokens": "'max_tokens'",
    "min_new_tokens": "'min_tokens'",
    **{
        name: f"'{name}'"
        for name in (
            "length_penalty", "early_stopping", "temperature", "ignore_eos", "stop", "stop_token_ids", "seed",
            "include_stop_str_in_output", "no_repeat_ngram_size", "ngram_scope",
        )
    },
}  # fmt: skip
"""Parameters that are fields of the body."""
OF_THE_LIBRARY = ("prefix_allowed_tokens_fn", "allowed_trie", "models", "lm_model", "lm_weight", "return_attention")
"""Parameters that are objects, or results that a response has no place for."""
TEXTS = {"force_phrases": MAX_PHRASES, "allowed_texts": MAX_TEXTS}
"""Options that are texts, encoded by the model's tokenizer, and how many there may be."""
NAMES = tuple(
    field.name
    for field in dataclasses.fields(BeamSearchParams)
    if field.name not in ELSEWHERE and field.name not in OF_THE_LIBRARY
)
"""Parameters that are options."""


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Checked options of a body.

    Attributes:
        given: parameters of the search.
        phrases: texts that every result contains.
        allowed: texts that a result may be; empty for any.
    """

    given: Mapping[str, Any]
    phrases: Sequence[str] = ()
    allowed: Sequence[str] = ()

    @property
    def checked_as(self) -> dict[str, Any]:
        """The parameters, with a phrase of one token and a trie of one sequence that stand for texts."""
        found = dict(self.given)
        if self.phrases:
            found["force_words_ids"] = [[0]]
        if self.allowed:
            found["allowed_trie"] = TokenTrie([[0]])
        return found

    async def encoded(
        self, params: BeamSearchParams, encode: Callable[[str], Awaitable[Sequence[int]]]
    ) -> BeamSearchParams:
        """Return the parameters with the token ids of the texts.

        Args:
            params: made from `checked_as`.
            encode: returns the token ids of a text.

        Raises:
            ApiError: a text without tokens.
        """
        if self.phrases:
            params = replace(params, force_words_ids=await _ids("force_phrases", self.phrases, encode))
        if self.allowed:
            params = replace(params, allowed_trie=TokenTrie(await _ids("allowed_texts", self.allowed, encode)))
        return params


async def _ids(
    name: str, texts: Sequence[str], encode: Callable[[str], Awaitable[Sequence[int]]]
) -> list[Sequence[int]]:
    found = [await encode(text) for text in texts]
    for text, ids in zip(texts, found, strict=True):
        if not ids:
            raise invalid(f"{FIELD}.{name}: {text!r} has no tokens: leave it out", f"{FIELD}.{name}")
    return found


def beam_options(body: Mapping[str, Any] | None, seed: int | None) -> BeamOptions:
    """Return the options of a body.

    Args:
        body: the field; null values are those of the preset.
        seed: that of the body, for searches that draw.

    Raises:
        ApiError: an unknown option, one with a field of its own, or texts of a wrong kind.
    """
    given = {name: value for name, value in (body or {}).items() if value is not None}
    for name in given:
        _require_known(name)
    texts = {name: _texts(name, given.pop(name), most) for name, most in TEXTS.items() if name in given}
    if "force_phrases" in texts and "force_words_ids" in given:
        raise invalid(
            f"{FIELD}.force_words_ids and {FIELD}.force_phrases both require phrases: give one of them",
            f"{FIELD}.force_words_ids",
        )
    words = given.get("force_words_ids")
    if isinstance(words, list) and len(words) > MAX_PHRASES:
        raise invalid(f"{FIELD}.force_words_ids has {len(words)} phrases: give at most {MAX_PHRASES}",
                      f"{FIELD}.force_words_ids")  # fmt: skip
    if seed is not None and given.get("sampling", "none") != "none":
        given["seed"] = seed % 2**63
    return BeamOptions(given, texts.get("force_phrases", ()), texts.get("allowed_texts", ()))


def _require_known(name: str) -> None:
    if name in NAMES or name in TEXTS:
        return
    path = f"{FIELD}.{name}"
    if name in ELSEWHERE:
        raise invalid(f"'{path}' is a field of the body: set {ELSEWHERE[name]}", path)
    if name in OF_THE_LIBRARY:
        raise invalid(f"'{path}' is a parameter of the library only: leave it out", path, code="unsupported_parameter")
    raise invalid(f"'{path}' is unknown: {suggestion(name, [*NAMES, *TEXTS])}", path, code="unknown_parameter")


def _texts(name: str, value: object, most: int) -> list[str]:
    path = f"{FIELD}.{name}"
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise invalid(f"'{path}' must be a list of texts, each with at least one character", path)
    if len(value) > most:
        raise invalid(f"'{path}' has {len(value)} texts: give at most {most}", path)
    return value
