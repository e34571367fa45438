"""Texts that a grammar accepts, byte by byte."""

from __future__ import annotations

import functools
from typing import Any

import xgrammar

from draftree import SamplingParams


@functools.cache
def _compiled(grammar: str) -> Any:
    letters = [bytes([code]) for code in range(256)]
    info = xgrammar.TokenizerInfo(letters, xgrammar.VocabType.RAW, vocab_size=256, stop_token_ids=[])
    return xgrammar.GrammarCompiler(info).compile_grammar(SamplingParams(grammar=grammar).grammar)


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text follows the grammar."""
    matcher = xgrammar.GrammarMatcher(_compiled(grammar), terminate_without_stop_token=True)
    return bool(matcher.accept_string(text) and matcher.is_terminated())
