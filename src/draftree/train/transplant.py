"""Another vocabulary for a model: its embeddings and its output head are rewritten for the tokens of a target.

A token that the model has too keeps its row; any other token starts as the mean of the rows of the tokens that spell
it. Frequent tokens of two vocabularies are mostly the same words, so the model still writes fluent text, and training
has to learn the remaining rows only.

Source: mean of subwords as first embeddings: Gee et al., "Fast Vocabulary Transfer for Language Model Compression",
2022 (arXiv 2402.09977).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.text.retokenize import Lexicon, read_specials

__all__ = ["Spelling", "spell_vocabulary", "transplant"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """The tokens of a target in the tokens of another model.

    Attributes:
        pieces: for each id of the target the model's ids; empty for an id without text.
        shared: number of the target's tokens that the model has too.
    """

    pieces: Sequence[tuple[int, ...]]
    shared: int


def spell_vocabulary(target: Lexicon, own: Lexicon, *, size: int) -> Spelling:
    """Return the spelling of a target's vocabulary.

    Args:
        target: the target's lexicon.
        own: the lexicon of the other model.
        size: number of ids of the target's output head.

    Raises:
        ConfigurationError: the vocabularies have no token in common.
    """
    specials = read_specials(target, own)
    pieces: list[tuple[int, ...]] = [()] * size
    shared = 0
    for token in range(min(size, len(target.bytes_of))):
        data = target.bytes_of[token]
        if data and target.ids_of[data] == token:
            pieces[token] = (own.ids_of[data],) if data in own.ids_of else tuple(own.read(data, begins=False))
            shared += data in own.ids_of
        elif token == target.bos_id and own.bos_id is not None:
            pieces[token] = (own.bos_id,)
        elif token in specials:
            given = specials[token]
            pieces[token] = tuple(own.read(given, begins=False)) if isinstance(given, bytes) else given
    if not shared:
        raise ConfigurationError(
            f"{own.name} and {target.name} have no token in common, so the first cannot start a student of the second: "
            "choose another model, or leave out --from for a new one"
        )
    return Spelling(pieces, shared)


@torch.no_grad()
def transplant(model: Any, spelling: Spelling) -> None:
    """Give a transformers model the vocabulary of a spelling, in place; tied embeddings stay tied."""
    embedding = mean_rows(model.get_input_embeddings().weight, spelling.pieces)
    output = mean_rows(model.get_output_embeddings().weight, spelling.pieces)
    model.resize_token_embeddings(len(spelling.pieces), mean_resizing=False)
    model.get_input_embeddings().weight.copy_(embedding)
    model.get_output_embeddings().weight.copy_(output)


def mean_rows(rows: Tensor, pieces: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the mean of some rows for each token; the mean of all rows where there are none, shape (tokens, width)."""
    owners = torch.tensor([token for token, ids in enumerate(pieces) for _ in ids], dtype=torch.int64)
    chosen = torch.tensor([one for ids in pieces for one in ids], dtype=torch.int64)
    counts = torch.tensor([len(ids) for ids in pieces])
    found = rows.new_zeros(len(pieces), rows.shape[1]).index_add_(0, owners, rows[chosen])
    found /= counts.clamp_min(1)[:, None]
    found[counts == 0] = rows.mean(dim=0)
    return found
