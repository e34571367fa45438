"""Grammars that texts must follow: JSON schemas, regular expressions and EBNF, compiled for one vocabulary.

Source: xgrammar (Dong et al., arXiv 2411.15100), an extra. Compiling takes some milliseconds, or minutes for a grammar
made for that; `compilations.py` bounds what a request waits for it, and keeps what was compiled.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import InvalidRequestError
from draftree.core.extras import import_extra
from draftree.sampling.grammar.compilations import COMPILE_SECONDS, Compilations
from draftree.sampling.grammar.guide import Guide
from draftree.sampling.grammar.patterns import unenforced
from draftree.sampling.grammar.schema import prepare_schema
from draftree.sampling.grammar.schema_refs import SchemaError
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams


class Grammars:
    """Compiles grammars for one vocabulary. Texts may be compiled by several threads at the same time.

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
        self._lock = threading.Lock()
        self._compilations = Compilations()

    def open(self, params: SamplingParams, ends: Sequence[int]) -> Guide:
        """A guide for one text.

        Args:
            params: which name a grammar.
            ends: tokens that end a text, the likeliest first.

        Raises:
            InvalidRequestError: no grammar, one that no text follows or that takes too long to compile, or nothing
                that could end a text.
            QueueFullError: other grammars are being compiled, and take too long.
        """
        kind, text = params.constraint or ("grammar", "")
        ends = [token for token in ends if token < self._vocab_size]
        if not ends:
            raise InvalidRequestError(
                f"{kind} was given, but no token ends the text: leave ignore_eos out, or give stop_token_ids"
            )
        compiled = self.compile(params)
        matcher = self._xgrammar.GrammarMatcher(compiled, override_stop_tokens=ends)
        said = self._vocabulary(of_json=kind == "json_schema").said
        guide = Guide(matcher, said, vocab_size=self._vocab_size, ends=ends)
        (first,) = guide.allowed(History([0]), [()])
        if first is None or (not first.forbids and not len(first.tokens)):
            raise _refused(kind, text, "no text follows it in this model's vocabulary")
        return guide

    def is_compiled(self, params: SamplingParams) -> bool:
        """Whether the grammar that parameters name is at hand."""
        return params.constraint is not None and self._compilations.is_done(params.constraint)

    def compile(self, params: SamplingParams) -> Any:
        """The compiled grammar that parameters name; kept for the next call.

        Raises:
            InvalidRequestError: no grammar, or one that takes too long to compile.
            QueueFullError: other grammars are being compiled, and take too long.
        """
        kind, text = params.constraint or ("grammar", "")

        def task() -> Any:
            return _compiled(self._vocabulary(of_json=kind == "json_schema").compiler, kind, text)

        try:
            return self._compilations.get((kind, text), task)
        except TimeoutError as error:
            raise _refused(
                kind, text, f"it is not compiled after {COMPILE_SECONDS:.0f} seconds: simplify it"
            ) from error

    def _vocabulary(self, *, of_json: bool) -> _Vocabulary:
        """Made when first asked for."""
        with self._lock:
            if of_json not in self._vocabularies:
                # JSON on one line has no control characters, but xgrammar allows some in strings of bounded length
                least = 0x20 if of_json else 0
                said = [data if data and min(data) >= least else b"" for data in self._bytes_of]
                info = self._xgrammar.TokenizerInfo(
                    said, self._xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=[]
                )
                compiler = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._vocabularies[of_json] = _Vocabulary(said, compiler)
            return self._vocabularies[of_json]


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What each token says, nothing where no grammar may use it, and what compiles for that."""

    said: list[bytes]
    compiler: Any


def _compiled(compiler: Any, kind: str, text: str) -> Any:
    try:
        if kind == "json_schema":
            # fixed white space: what has no meaning is not the model's to choose, and comes without a pass
            return compiler.compile_json_schema(prepare_schema(text), any_whitespace=False)
        if kind == "regex":
            gap = unenforced(text)
            if gap is not None:
                raise _refused(kind, text, gap)
            return compiler.compile_regex(text)
        return compiler.compile_grammar(text)
    except (RuntimeError, SchemaError) as error:
        raise _refused(kind, text, _reason(error)) from error


def _require_xgrammar() -> Any:
    return import_extra("grammar", "json_schema, regex and grammar need", error=InvalidRequestError)


def _refused(kind: str, text: str, reason: str) -> InvalidRequestError:
    shown = repr(text if len(text) <= 80 else text[:77] + "...")
    return InvalidRequestError(f"{kind}={shown} is refused: {reason}")


def _reason(error: Exception) -> str:
    """What xgrammar says, less the place in its own source."""
    line = next((line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__)
    reason = re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", line).rstrip(". ")
    return reason if len(reason) <= 300 else reason[:297] + "..."
