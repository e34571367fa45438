"""Positions by depth in decoders that count them themselves.

| families | what is replaced during a pass |
| --- | --- |
| T5, mT5, UMT5 | `compute_bias`: the bias of a distance is read from the model, and distances go by depth |
| BART, mBART, PLBart, Marian, Pegasus, Blenderbot, Whisper | `embed_positions`: a row of its table for each depth |
| M2M100, NLLB | the same, with the table's offset and the position of padding tokens |
| others with `decoder_position_ids` or rotary positions | nothing: the positions are an argument |

Outside of passes the modules do as before.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from draftree.models.torch.seq2seq.attention import current_calls

OWN = "_draftree_own"
"""Attribute with the method of a module that was replaced."""
FIRST_DISTANCES = 128


class BiasTables:
    """Biases of the decoder's modules by distance, read from the model and kept."""

    def __init__(self) -> None:
        self._tables: dict[nn.Module, Tensor] = {}

    @torch.inference_mode()
    def of(self, module: nn.Module, length: int) -> Tensor:
        """Return the bias of a module for distances below `length` at least, shape (heads, distances)."""
        known = self._tables.get(module)
        if known is None or known.shape[1] < length:
            count = max(FIRST_DISTANCES, 1 << (length - 1).bit_length())
            own: Callable[..., Tensor] = getattr(module, OWN)
            bias = own(1, count, past_seen_tokens=count - 1)  # (1, heads, 1, keys), the most distant key first
            known = self._tables[module] = bias[0, :, 0].flip(-1).contiguous()
        return known


def replace_positions(model: Any, decoder: nn.Module) -> int | None:
    """Replace the positions of a decoder during passes; idempotent.

    Returns:
        The number of positions that the decoder has; None if it is not limited by a table.
    """
    for module in decoder.modules():
        if hasattr(module, "relative_attention_bias") and hasattr(module, "compute_bias"):
            _replace(module, "compute_bias", _bias)
    table = getattr(decoder, "embed_positions", None)
    if not isinstance(table, nn.Module):
        return None
    if table is getattr(model.get_encoder(), "embed_positions", None):
        return None  # shared with the encoder: the self-check decides
    if isinstance(table, nn.Embedding):
        _replace(table, "forward", _learned)
        return int(table.weight.shape[0]) - int(getattr(table, "offset", 0))
    if isinstance(getattr(table, "weights", None), Tensor):
        _replace(table, "forward", _sinusoidal)
        return int(model.config.max_position_embeddings)
    return None


def restore_positions(decoder: nn.Module) -> None:
    """Undo `replace_positions`."""
    for module in decoder.modules():
        if OWN in module.__dict__:
            for name in ("compute_bias", "forward"):
                module.__dict__.pop(name, None)
            del module.__dict__[OWN]


def _replace(module: nn.Module, name: str, ours: Callable[..., Any]) -> None:
    if OWN not in module.__dict__:
        setattr(module, OWN, getattr(module, name))
        setattr(module, name, types.MethodType(ours, module))


def _bias(module: nn.Module, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> Tensor:
    current = current_calls()
    if current is not None and current.bias_of(module):
        return torch.empty(0)  # the pass adds the bias itself
    found: Tensor = getattr(module, OWN)(query_length, key_length, *args, **kwargs)
    return found


def _learned(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    current = current_calls()
    rows = None if current is None else current.positions_of()
    if rows is None:
        found: Tensor = getattr(module, OWN)(*args, **kwargs)
        return found
    weight: Any = module.weight
    return nn.functional.embedding(rows[1] + int(getattr(module, "offset", 0)), weight).unsqueeze(0)


def _sinusoidal(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    current = current_calls()
    rows = None if current is None else current.positions_of()
    if rows is None:
        found: Tensor = getattr(module, OWN)(*args, **kwargs)
        return found
    tokens, positions = rows
    pad = int(module.padding_idx)
    last = int(positions.max()) + pad + 2
    if last > module.weights.shape[0]:
        module.make_weights(2 * last, module.embedding_dim, pad)
    # as in generate: the position of a padding token is that of padding
    index = torch.where(tokens == pad, torch.full_like(positions, pad), positions + (pad + 1))
    return module.weights.index_select(0, index).unsqueeze(0)
