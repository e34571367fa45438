"""The target with the drafter of each candidate, and samples of what it wrote."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import final

from draftree.completion import Completion
from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.llm import LLM
from draftree.loading.loaded import LoadedModel
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer
from draftree.tune.candidates import Candidate
from draftree.tune.contest import Sample

__all__ = ["CandidateModels", "sample_of", "text_digest"]


@final
class CandidateModels:
    """One `LLM` for each candidate, created when it is first needed.

    Args:
        loaded: the target of all candidates.
        tokenizer: its tokenizer; None if it has none.
        trust_remote_code: whether Python code in folders of drafters may run.
        clock: measures drafts and planning, in seconds.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Tokenizer | None,
        *,
        trust_remote_code: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._loaded, self._tokenizer, self._trusts, self._clock = loaded, tokenizer, trust_remote_code, clock
        self._llms: dict[str, LLM] = {}

    def get(self, candidate: Candidate, prompt: Sequence[int], params: SamplingParams) -> LLM:
        """Return the target with the candidate's drafter, without state of earlier texts.

        Args:
            candidate: drafter and planner.
            prompt: token ids of the first text, which is slower than later ones and is not measured.
            params: parameters of that text.

        Raises:
            DraftreeError: the drafter cannot be used with the target.
        """
        found = self._llms.get(candidate.name)
        if found is None:
            found = LLM(
                self._loaded,
                None if candidate.is_plain else candidate.draft,
                plan=candidate.plan,
                tokenizer=self._tokenizer,
                max_batch_size=1,
                trust_remote_code=self._trusts,
                generation_config="none",
                clock=self._clock,
            )
            found.generate([list(prompt)], params, progress=False)
            self._llms[candidate.name] = found
        found.forget()
        return found

    def drop(self, candidate: Candidate) -> None:
        """Remove the `LLM` of a candidate, if there is one."""
        self._llms.pop(candidate.name, None)


def sample_of(done: Completion) -> Sample:
    """Return the measurement of a text: seconds per decoded token, tokens per round, and the digest of its tokens."""
    return Sample(1 / done.stats.tokens_per_second, done.stats.acceptance_length, text_digest(done.token_ids))


def text_digest(tokens: Sequence[int]) -> str:
    """Return the digest of a text by which texts are compared, 16 hexadecimal digits."""
    return hashlib.sha256(repr(tuple(tokens)).encode()).hexdigest()[:16]
