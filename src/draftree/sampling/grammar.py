"""Grammars that texts must follow: JSON schemas, regular expressions and EBNF, compiled for one vocabulary.

Source: xgrammar (Dong et al., arXiv 2411.15100), an extra. Compiling takes some milliseconds; what was compiled is
kept, up to a number of bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import InvalidRequestError
from draftree.core.extras import import_extra
from draftree.sampling.guide import Guide
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams
from draftree.sampling.schema import unenforced

CACHE_BYTES = 128 * 2**20
"""Compiled grammars of one vocabulary that are kept, of JSON and of others each."""


class Grammars:
    """Compiles grammars for one vocabulary.

    Args:
        bytes_of: what each token says; None for special tokens.
        vocab_size: width of the logits.

    Raises:
        InvalidRequestError: xgrammar is not installed.
    """

    def __init__(self, bytes_of: Sequence[bytes | None], *, vocab_size: int) -> None:
        self._xgrammar = _require_xgrammar()
        self._vocab_size = vocab_size
        self._bytes_of = [*bytes_of[:vocab_size], *[None] * (vocab_size - len(bytes_of))]
        self._vocabularies: dict[bool, _Vocabulary] = {}

    def _vocabulary(self, *, of_json: bool) -> _Vocabulary:
        """Made when first asked for."""
        if of_json not in self._vocabularies:
            # JSON on one line has no control characters, but xgrammar allows some in strings of bounded length
            least = 0x20 if of_json else 0
            said = [data if data and min(data) >= least else b"" for data in self._bytes_of]
            info = self._xgrammar.TokenizerInfo(
                said, self._xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=[]
            )
            compiler = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
            self._vocabularies[of_json] = _Vocabulary(said, compiler)
        return self._vocabularies[of_json]

    def open(self, params: SamplingParams, ends: Sequence[int]) -> Guide:
        """A guide for one text.

        Args:
            params: which name a grammar.
            ends: tokens that end a text, the likeliest first.

        Raises:
            InvalidRequestError: no grammar, or one that no text follows, or nothing that could end a text.
        """
        kind, text = params.constraint or ("grammar", "")
        ends = [token for token in ends if token < self._vocab_size]
        if not ends:
            raise InvalidRequestError(
                f"{kind} was given, but no token ends the text: leave ignore_eos out, or give stop_token_ids"
            )
        vocabulary = self._vocabulary(of_json=kind == "json_schema")
        compiled = _compiled(vocabulary.compiler, kind, text)
        matcher = self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=ends)
        guide = Guide(matcher, vocabulary.said, vocab_size=self._vocab_size, ends=ends)
        (first,) = guide.allowed(History([0]), [()])
        if first is None or (not first.forbids and not len(first.tokens)):
            raise _refused(kind, text, "no text follows it in this model's vocabulary")
        return guide


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What each token says, nothing where no grammar may use it, and what compiles for that."""

    said: list[bytes]
    compiler: Any


def _compiled(compiler: Any, kind: str, text: str) -> Any:
    try:
        if kind == "json_schema":
            _require_kept(text)
            # fixed white space: what has no meaning is not the model's to choose, and comes without a pass
            return compiler.compile_json_schema(text, any_whitespace=False)
        if kind == "regex":
            _require_outer_anchors(text)
            return compiler.compile_regex(text)
        return compiler.compile_grammar(text)
    except RuntimeError as error:
        raise _refused(kind, text, _reason(error)) from error


def _require_xgrammar() -> Any:
    return import_extra("grammar", "json_schema, regex and grammar need", error=InvalidRequestError)


def _require_kept(schema: str) -> None:
    gap = unenforced(json.loads(schema))
    if gap is not None:
        raise _refused("json_schema", schema, f"{gap}: leave it out, and check the finished text")


def _require_outer_anchors(regex: str) -> None:
    """Refuses an anchor inside of an expression: xgrammar reads over it."""
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "..", regex, flags=re.DOTALL)
    if "^" in bare[1:] or "$" in bare[:-1]:
        raise _refused("regex", regex, "^ and $ may stand at its ends only, where they say what holds anyway")


def _refused(kind: str, text: str, reason: str) -> InvalidRequestError:
    shown = repr(text if len(text) <= 80 else text[:77] + "...")
    return InvalidRequestError(f"{kind}={shown} is refused: {reason}")


def _reason(error: Exception) -> str:
    """What xgrammar says, less the place in its own source."""
    line = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", line).rstrip(". ")
