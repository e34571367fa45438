"""Compilation of grammars for one vocabulary, each on its own thread with a time limit."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, final

from draftree.core.errors import InvalidRequestError, QueueFullError, import_extra
from draftree.sampling.grammar.ebnf import with_valid_classes
from draftree.sampling.grammar.guide import Guide
from draftree.sampling.grammar.regex import regex_grammar
from draftree.sampling.grammar.schema_grammar import schema_grammar
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

COMPILE_SECONDS = 20.0  # the longest time that a request waits for its grammar
MAX_COMPILING = 2  # concurrent compilations per vocabulary, including those of refused requests
CACHE_BYTES = 128 * 2**20
"""Size of the cache of compiled grammars per vocabulary; the least recently used is evicted first."""

Key = tuple[str, ...]


@final
class Compilations:
    """Runs each compilation on its own thread and caches the results. Thread-safe.

    xgrammar cannot be interrupted. A grammar that exceeds the limit continues to compile on its thread after its
    request was refused, and its result is cached; the limits on a grammar's size ensure that it terminates. Compilation
    releases the interpreter lock, so other threads continue meanwhile.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[Key, Future[Any]] = {}
        self._done: OrderedDict[Key, Any] = OrderedDict()

    def is_done(self, key: Key) -> bool:
        with self._changed:
            return key in self._done

    def get(self, key: Key, task: Callable[[], Any]) -> Any:
        """Return the result for a key: from the cache, from a running task, or from this task."""
        deadline = time.monotonic() + COMPILE_SECONDS
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: key in self._done or key in self._running or len(self._running) < MAX_COMPILING,
                COMPILE_SECONDS,
            )
            if key in self._done:
                self._done.move_to_end(key)
                return self._done[key]
            if not has_room:
                raise QueueFullError(f"{len(self._running)} grammars are still compiling: try again later")
            if key not in self._running:
                self._running[key] = Future()
                # a daemon, so that the process can exit during a compilation
                threading.Thread(target=self._run, args=(key, task), name="draftree-grammar", daemon=True).start()
            running = self._running[key]
        return running.result(max(0.0, deadline - time.monotonic()))

    def _run(self, key: Key, task: Callable[[], Any]) -> None:
        future = self._running[key]
        try:
            result = task()
        except BaseException as error:
            self._finish(key)
            future.set_exception(error)
        else:
            self._finish(key, result)
            future.set_result(result)

    def _finish(self, key: Key, *results: Any) -> None:
        with self._changed:
            del self._running[key]
            self._done.update((key, result) for result in results)
            while len(self._done) > 1 and sum(result.memory_size_bytes for result in self._done.values()) > CACHE_BYTES:
                self._done.popitem(last=False)
            self._changed.notify_all()


class Grammars:
    """Compiler of grammars for one vocabulary, given by the bytes of each token (None for special ones). Thread-safe.

    Source: xgrammar (Dong et al., arXiv 2411.15100), an extra. Compilation takes some milliseconds, or minutes for an
    adversarial grammar.
    """

    def __init__(self, bytes_of: Sequence[bytes | None], *, vocab_size: int) -> None:
        self._xgrammar = import_extra("grammar", "json_schema, regex and grammar need", error=InvalidRequestError)
        self._vocab_size = vocab_size
        self._bytes_of = [*bytes_of[:vocab_size], *[None] * (vocab_size - len(bytes_of))]
        self._vocabularies: dict[frozenset[int], _Vocabulary] = {}
        self._lock = threading.Lock()
        self._compilations = Compilations()

    def open(self, params: SamplingParams, ends: Sequence[int]) -> Guide:
        """Create a guide for one sequence."""
        kind, text, _ = _key(params)
        ends = [token for token in ends if token < self._vocab_size]
        if not ends:
            raise InvalidRequestError(
                f"{kind} was given, but no token ends the text: leave ignore_eos out, or give stop_token_ids"
            )
        matcher = self._xgrammar.GrammarMatcher(self.compile(params), override_stop_tokens=ends)
        guide = Guide(matcher, self._vocabulary(params).bytes_of, vocab_size=self._vocab_size, ends=ends)
        (first,) = guide.allowed(History([0]), [()])
        if first is None or (not first.forbids and not len(first.tokens)):
            raise _refused(kind, text, "no text in this model's vocabulary matches it")
        return guide

    def is_compiled(self, params: SamplingParams) -> bool:
        return params.constraint is not None and self._compilations.is_done(_key(params))

    def compile(self, params: SamplingParams) -> Any:
        kind, text, prefix = _key(params)
        try:
            return self._compilations.get((kind, text, prefix), lambda: self._compiled(params))
        except TimeoutError as error:
            raise _refused(kind, text, f"its compilation exceeds {COMPILE_SECONDS:.0f} seconds: simplify it") from error

    def _compiled(self, params: SamplingParams) -> Any:
        kind, text, prefix = _key(params)
        compiler = self._vocabulary(params).compiler
        try:
            match kind:
                case "json_schema":
                    ebnf = schema_grammar(text).ebnf
                case "regex":
                    ebnf = regex_grammar(text)
                case _:
                    ebnf = with_valid_classes(text)
            if not prefix:
                return compiler.compile_grammar(ebnf)
            grammar = self._xgrammar.Grammar
            return compiler.compile_grammar(grammar.concat(grammar.from_ebnf(prefix), grammar.from_ebnf(ebnf)))
        except (RuntimeError, ValueError) as error:
            raise _refused(kind, text, _reason(error)) from error

    def _vocabulary(self, params: SamplingParams) -> _Vocabulary:
        """Return the vocabulary for the grammar of these parameters; built on first use."""
        named = {int(token) for text in _key(params)[1:] for token in TOKEN.findall(text)}
        key = frozenset(token for token in named if token < self._vocab_size and not self._bytes_of[token])
        with self._lock:
            if key not in self._vocabularies:
                bytes_of = [data or b"" for data in self._bytes_of]
                for token in key:
                    # a token without bytes is never allowed, and these occur in no text
                    bytes_of[token] = b"\xff%d" % token
                info = self._xgrammar.TokenizerInfo(
                    bytes_of, self._xgrammar.VocabType.RAW, vocab_size=self._vocab_size, stop_token_ids=[]
                )
                compiler = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
                self._vocabularies[key] = _Vocabulary(bytes_of, compiler)
            return self._vocabularies[key]


class _Vocabulary(NamedTuple):
    bytes_of: list[bytes]  # empty for unusable tokens
    compiler: Any


TOKEN = re.compile(r"\bToken(?:TagDispatch\()?\(([0-9]{1,9})\b")  # a special token in EBNF


def _key(params: SamplingParams) -> tuple[str, str, str]:
    """Return the kind of a grammar, its text, and the EBNF of what precedes it."""
    kind, text = params.constraint or ("grammar", "")
    return kind, text, params.grammar_prefix or ""


def _refused(kind: str, text: str, reason: str) -> InvalidRequestError:
    shown = repr(text if len(text) <= 80 else text[:77] + "...")
    return InvalidRequestError(f"{kind}={shown} is refused: {reason}")


def _reason(error: Exception) -> str:
    """Return xgrammar's message without the location in its source code."""
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        # xgrammar cuts its message inside a character
        text = error.object.decode(errors="replace")
    line = next((line for line in text.strip().splitlines() if line.strip()), type(error).__name__)
    reason = re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", line).rstrip(". ")
    return reason if len(reason) <= 300 else reason[:297] + "..."
