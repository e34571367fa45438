"""N-gram blocking of `generate` that counts generated tokens only."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from draftree.core.errors import ConfigurationError
from draftree.sampling.logits_processors import ban_repeated_ngrams
from draftree.sampling.params import NGRAM_SCOPES


class GeneratedNgramsProcessor(LogitsProcessor):
    """Bans tokens that would repeat an n-gram of the generated tokens.

    Args:
        size: tokens of an n-gram, at least 1.
        prompt_length: columns of the ids before the generated tokens.
    """

    def __init__(self, size: int, prompt_length: int) -> None:
        self.size = size
        self.prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of shape (rows, vocab) with -inf at the banned tokens."""
        return ban_repeated_ngrams(scores.clone(), input_ids[:, self.prompt_length :], size=self.size)


def scoped(processors: Any, scope: str, prompt_length: int) -> Any:
    """Return the processors of a call with the n-gram blocking of a scope.

    Args:
        processors: those of transformers and those of the call.
        scope: "all" or "generated".
        prompt_length: columns of the prompts, padding included.

    Raises:
        ConfigurationError: another scope, or "generated" without n-gram blocking.
    """
    if scope not in NGRAM_SCOPES:
        raise ConfigurationError(f"ngram_scope={scope!r} is unknown: give 'all' or 'generated'")
    if scope == "all":
        return processors
    found = [type(processor) is NoRepeatNGramLogitsProcessor for processor in processors]
    if not any(found):
        raise ConfigurationError(
            f"ngram_scope={scope!r} needs no_repeat_ngram_size of at least 1: give both or neither"
        )
    return LogitsProcessorList(
        GeneratedNgramsProcessor(processor.ngram_size, prompt_length) if is_blocking else processor
        for processor, is_blocking in zip(processors, found, strict=True)
    )
