"""Comparison of two vocabularies by id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NUM_DIFFERENCES = 5
PADDING_NAME = re.compile(
    r"[<\[]\|?_?(pad|padding|unused|reserved|dummy|placeholder|extra)(_?special)?(_?(token|id))?[_ -]?\d*_?\|?[>\]]",
    re.IGNORECASE | re.ASCII,
)


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """An id with different tokens in two vocabularies; None for a vocabulary without this id."""

    token_id: int
    target: str | None
    draft: str | None

    def __str__(self) -> str:
        return f"{self.token_id} ({_shown(self.target)} / {_shown(self.draft)})"


@dataclass(frozen=True, slots=True)
class VocabularyComparison:
    """The result of `compare_vocabularies`.

    Attributes:
        same: every id below both sizes has the same token, and ids beyond are padding.
        first_differences: the first differing ids, at most five.
        target_size: number of ids of the target.
        draft_size: number of ids of the drafter.
    """

    same: bool
    first_differences: tuple[TokenDifference, ...]
    target_size: int
    draft_size: int

    @property
    def common_size(self) -> int:
        """The number of ids that both have; the drafter's distributions are truncated to it."""
        return min(self.target_size, self.draft_size)


def compare_vocabularies(target: Sequence[str], draft: Sequence[str]) -> VocabularyComparison:
    """Compare two vocabularies token by token; each is given as the written form of every token by id.

    Models often round the number of their ids up. So ids that only the larger vocabulary has are not a difference if
    they are padding: without a token ("") or with a name like <pad>, [PAD7], <unused3>, <|reserved_special_token_0|>.
    """
    size = min(len(target), len(draft))
    differences: list[TokenDifference] = []
    if list(target[:size]) != list(draft[:size]):
        differences += [
            TokenDifference(i, target[i] or None, draft[i] or None) for i in range(size) if target[i] != draft[i]
        ]
    differences += [TokenDifference(i, target[i], None) for i in range(size, len(target)) if not _is_padding(target[i])]
    differences += [TokenDifference(i, None, draft[i]) for i in range(size, len(draft)) if not _is_padding(draft[i])]
    return VocabularyComparison(not differences, tuple(differences[:NUM_DIFFERENCES]), len(target), len(draft))


def _is_padding(token: str) -> bool:
    return not token or PADDING_NAME.fullmatch(token) is not None


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)
