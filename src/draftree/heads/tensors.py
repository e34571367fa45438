"""Names of tensors that several kinds of heads have, and the maps of a draft vocabulary in a file.

The table of a head's tensors is its class (`heads/kinds.py`): the names of parameters are those of speculators where it
has the kind, and those of the authors' code otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import HeadConfig
from draftree.heads.vocabulary import DraftVocabulary

EMBEDDING = "embed_tokens.weight"
OUTPUT = "lm_head.weight"
OFFSETS, MASK = "d2t", "t2d"
"""Maps of a reduced vocabulary: offsets of the tokens that can be drafted, and whether a token can be drafted."""


def vocabulary_of(tensors: Mapping[str, Tensor], config: HeadConfig) -> DraftVocabulary:
    """Return the vocabulary of the maps.

    Raises:
        ModelLoadError: a reduced vocabulary has no map, a map is damaged, or the maps contradict each other or the
            configuration.
    """
    offsets, mask = tensors.get(OFFSETS), tensors.get(MASK)
    if offsets is None:
        if config.is_full:
            return DraftVocabulary.full(config.vocab_size)
        raise ModelLoadError(
            f"it drafts {config.draft_vocab_size} of {config.vocab_size} tokens, and has no tensor '{OFFSETS}' that "
            "names them: the folder is incomplete"
        )
    if offsets.numel() != config.draft_vocab_size:
        raise ModelLoadError(
            f"'{OFFSETS}' has {offsets.numel()} entries, and config.json {config.draft_vocab_size} tokens"
        )
    vocabulary = DraftVocabulary.from_offsets(offsets, config.vocab_size)
    if mask is not None and not torch.equal(mask.bool(), vocabulary.mask()):
        raise ModelLoadError(f"'{MASK}' and '{OFFSETS}' contradict each other: the map is damaged")
    return vocabulary


def maps_of(vocabulary: DraftVocabulary) -> dict[str, Tensor]:
    """Return the maps of a reduced vocabulary, on the host; none for a full one."""
    if vocabulary.is_full:
        return {}
    return {OFFSETS: vocabulary.offsets().cpu(), MASK: vocabulary.mask().cpu()}


def widest_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype that holds all weights; float32 without weights."""
    found: torch.dtype | None = None
    for tensor in tensors.values():
        if tensor.is_floating_point():
            found = tensor.dtype if found is None else torch.promote_types(found, tensor.dtype)
    return found or torch.float32
