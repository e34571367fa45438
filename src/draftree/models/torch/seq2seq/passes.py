"""Forward passes of a decoder over slots: self-attention in the slots' trees, cross-attention to each slot's source."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from draftree.models.source import Source
from draftree.models.torch.attention import LayerCall, SlotPass, attend

NAME = "draftree_seq2seq"
PLAIN = "sdpa"  # the implementation of transformers for calls outside of passes


class DecoderCalls(Protocol):
    """Handler of the attention calls of one pass of a decoder."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        """Attend; queries have shape (1, heads, rows, head_dim), the result (1, rows, heads, head_dim)."""

    def positions_of(self) -> tuple[Tensor, Tensor] | None:
        """Return tokens and positions of the rows, shape (rows,); None to leave positions to the model."""

    def bias_of(self, module: nn.Module) -> bool:
        """Note that a module's bias by position is wanted; returns whether the pass computes it itself."""


_CURRENT: ContextVar[DecoderCalls | None] = ContextVar("draftree_seq2seq_pass", default=None)


def current_calls() -> DecoderCalls | None:
    return _CURRENT.get()


@contextmanager
def announced(calls: DecoderCalls) -> Iterator[None]:
    """Route the decoder's attention calls inside to this handler."""
    token = _CURRENT.set(calls)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    current = _CURRENT.get()
    if current is not None:
        return current.attend(module, query, key, value, **kwargs), None
    return plain_attention(module, query, key, value, attention_mask, **kwargs), None


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Return what transformers computes, shape (batch, rows, heads, head_dim)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[PLAIN](module, query, key, value, mask, **kwargs)[0]


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    if _CURRENT.get() is not None:
        return None
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **kwargs)


def use_in(model: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)


@dataclass(slots=True)
class RecordedCalls:
    """Pass over one text on one source, computed by transformers, that records keys and values of each module.

    transformers calls one attention function for the encoder, for self-attention and for cross-attention. Which
    module is which is learned once, by a pass over a source and a text of different lengths.
    """

    # keys and values by module, shape (1, heads, length, head_dim), in the order of the calls
    keys: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    biased: list[nn.Module] = field(default_factory=list)  # modules that asked for a bias by position

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        self.keys[module] = (key, value)
        return plain_attention(module, query, key, value, None, **kwargs)

    def positions_of(self) -> tuple[Tensor, Tensor] | None:
        return None

    def bias_of(self, module: nn.Module) -> bool:
        self.biased.append(module)
        return False


def layer_call(layer: int, query: Tensor, kwargs: dict[str, Any], bias: Tensor | None) -> LayerCall:
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return LayerCall(layer, scale, kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"), bias)


MAX_STACKED_BYTES = 64 << 20  # larger groups are not copied into a stack when they change: their sources attend alone
SHORT = 32  # sources up to this length are of one group

KeysValues = tuple[Tensor, Tensor]


@dataclass(slots=True, eq=False)
class EncodedSource:
    """Cross-attention keys and values of a source. Its count is changed by its model only."""

    source: Source
    layers: Sequence[KeysValues]  # keys and values of each layer, shape (1, heads, length, head_dim)
    length: int  # number of positions
    num_slots: int = 0  # number of slots that refer to it
    stack: Stack | None = None  # the stack that holds its keys and values; None if they are stored alone
    place: int = 0  # its index in the stack

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for pair in self.layers for tensor in pair)


@dataclass(slots=True, eq=False)
class Stack:
    """Keys and values of several sources.

    Sources of similar length that take part in one pass are stacked, padded to the longest. A source's own keys and
    values then are a part of the stack, so that they are stored once.
    """

    # keys and values of each layer, shape (sources, heads, length, head_dim), with zeros as padding
    layers: Sequence[KeysValues]
    lengths: Sequence[int]  # length of each source
    # additive masks of slices, which are made once
    masks: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)

    def mask(self, first: int, end: int) -> Tensor | None:
        """Return the mask of padding for some sources, shape (sources, 1, 1, length); None without padding."""
        key = (first, end)
        if key not in self.masks:
            lengths, keys = self.lengths[first:end], self.layers[0][0]
            longest = max(lengths)
            if min(lengths) == longest:
                self.masks[key] = None
            else:
                each = torch.tensor(lengths, device=keys.device)[:, None]
                hidden = torch.arange(longest, device=keys.device) >= each
                mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
                self.masks[key] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self.masks[key]


@dataclass(slots=True, eq=False)
class CrossRun:
    layers: Sequence[KeysValues]  # keys and values of each layer, shape (sources, heads, length, head_dim)
    mask: Tensor | None  # additive, shape (sources, 1, rows, length); None without padding
    # rows of each source in the pass, shape (sources, rows), the first repeated as padding; None if they are all
    # rows of the pass in order
    rows: Tensor | None
    places: Tensor | None  # indices of the real rows in `rows`; None if they are all

    def attend(self, layer: int, call: LayerCall, query: Tensor) -> Tensor:
        """Attend with queries of shape (1, heads, rows, head_dim); returns (sources * rows, heads, head_dim)."""
        keys, values = self.layers[layer]
        _, heads, _, dim = query.shape
        if self.rows is None:
            part = query[0].reshape(heads, keys.shape[0], -1, dim).transpose(0, 1)
        else:
            part = query[0][:, self.rows].transpose(0, 1)
        mixed = attend(part, keys, values, call=call, mask=self.mask).transpose(1, 2)
        return mixed.reshape(-1, heads, mixed.shape[-1])


@dataclass(frozen=True, slots=True)
class CrossPass:
    """The cross-attention of one pass: all its runs, which together have every row once."""

    runs: Sequence[CrossRun]

    def attend(self, layer: int, call: LayerCall, query: Tensor) -> Tensor:
        """Attend with queries of shape (1, heads, rows, head_dim); returns (1, rows, heads, head_dim)."""
        if self.runs[0].rows is None:
            return self.runs[0].attend(layer, call, query).unsqueeze(0)
        mixed: Tensor | None = None
        for run in self.runs:
            part = run.attend(layer, call, query)
            if mixed is None:
                mixed = part.new_empty(query.shape[2], *part.shape[1:])
            assert run.rows is not None
            rows = run.rows.flatten()
            if run.places is None:
                mixed[rows] = part
            else:
                mixed[rows[run.places]] = part[run.places]
        assert mixed is not None, "a pass has rows"
        return mixed.unsqueeze(0)


def plan_cross(sources: Sequence[EncodedSource], counts: Sequence[int], device: torch.device) -> CrossPass:
    """Plan the cross-attention of a pass; stacks sources of similar length that are not stacked yet."""
    rows_by_source: dict[int, tuple[EncodedSource, list[int]]] = {}
    first = 0
    for source, count in zip(sources, counts, strict=True):
        rows_by_source.setdefault(id(source), (source, []))[1].extend(range(first, first + count))
        first += count
    if len(rows_by_source) == 1:
        return CrossPass([CrossRun(sources[0].layers, None, None, None)])
    groups: dict[int, list[EncodedSource]] = {}
    for source, _ in rows_by_source.values():
        groups.setdefault((max(source.length, SHORT) - 1).bit_length(), []).append(source)
    parts = [part for group in groups.values() for part in _parts(group)]
    return CrossPass([_run(part, [rows_by_source[id(source)][1] for source in part], first, device) for part in parts])


def _parts(group: list[EncodedSource]) -> list[list[EncodedSource]]:
    """Divide sources into neighbours in a stack; a small group with several parts is stacked anew."""
    parts: list[list[EncodedSource]] = []
    for source in sorted(group, key=lambda encoded: (id(encoded.stack), encoded.place)):
        before = parts[-1][-1] if parts else None
        if before is not None and before.stack is source.stack is not None and source.place == before.place + 1:
            parts[-1].append(source)
        else:
            parts.append([source])
    if len(parts) > 1 and sum(source.num_bytes for source in group) <= MAX_STACKED_BYTES:
        stack(group)
        return [group]
    return parts


def stack(sources: Sequence[EncodedSource]) -> None:
    """Copy the keys and values of sources into a new stack, in this order."""
    lengths = [source.length for source in sources]
    longest, layers = max(lengths), []
    for layer in range(len(sources[0].layers)):
        pair = []
        for kind in (0, 1):
            like = sources[0].layers[layer][kind]
            whole = like.new_zeros(len(sources), like.shape[1], longest, like.shape[3])
            for place, source in enumerate(sources):
                whole[place, :, : source.length] = source.layers[layer][kind][0]
            pair.append(whole)
        layers.append((pair[0], pair[1]))
    made = Stack(layers, lengths)
    for place, source in enumerate(sources):
        source.stack = made
        source.place = place
        length = source.length
        source.layers = [
            (keys[place : place + 1, :, :length], values[place : place + 1, :, :length]) for keys, values in layers
        ]


def _run(part: Sequence[EncodedSource], rows: Sequence[Sequence[int]], num_rows: int, device: torch.device) -> CrossRun:
    if len(part) == 1:
        layers, mask = part[0].layers, None
    else:
        stacked = part[0].stack
        start = part[0].place
        end = part[-1].place + 1
        assert stacked is not None, "neighbours are in a stack"
        mask, longest = stacked.mask(start, end), max(source.length for source in part)
        layers = [(keys[start:end, :, :longest], values[start:end, :, :longest]) for keys, values in stacked.layers]
    most = max(map(len, rows))
    if mask is not None and most > 1:
        mask = mask.expand(-1, -1, most, -1)
    flat = [row for source_rows in rows for row in source_rows]
    is_even = len(flat) == most * len(part)
    if is_even and flat == list(range(num_rows)):
        return CrossRun(layers, mask, None, None)
    padded = torch.tensor(
        [[*source_rows, *[source_rows[0]] * (most - len(source_rows))] for source_rows in rows], device=device
    )
    if is_even:
        return CrossRun(layers, mask, padded, None)
    places = [place * most + row for place, source_rows in enumerate(rows) for row in range(len(source_rows))]
    return CrossRun(layers, mask, padded, torch.tensor(places, device=device))


# Decoders count positions themselves. During a pass positions go by depth; what is replaced for that:
# - T5, mT5, UMT5: `compute_bias`; the bias of a distance is read from the model
# - BART, mBART, PLBart, Marian, Pegasus, Blenderbot, Whisper: `embed_positions`; a row of its table for each depth
# - M2M100, NLLB: the same, with the table's offset and the position of padding tokens
# - others with `decoder_position_ids` or rotary positions: nothing, since the positions are an argument

OWN = "_draftree_own"  # attribute with the method of a module that was replaced
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
            compute_bias: Callable[..., Tensor] = getattr(module, OWN)
            bias = compute_bias(1, count, past_seen_tokens=count - 1)  # (1, heads, 1, keys), the most distant key first
            known = self._tables[module] = bias[0, :, 0].flip(-1).contiguous()
        return known


def replace_positions(model: Any, decoder: nn.Module) -> int | None:
    """Replace the positions of a decoder during passes; idempotent.

    Returns the number of positions that the decoder has; None if it is not limited by a table.
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
    return getattr(module, OWN)(query_length, key_length, *args, **kwargs)


def _learned(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    current = current_calls()
    rows = None if current is None else current.positions_of()
    if rows is None:
        return getattr(module, OWN)(*args, **kwargs)
    weight: Any = module.weight
    return nn.functional.embedding(rows[1] + int(getattr(module, "offset", 0)), weight).unsqueeze(0)


def _sinusoidal(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    current = current_calls()
    rows = None if current is None else current.positions_of()
    if rows is None:
        return getattr(module, OWN)(*args, **kwargs)
    tokens, positions = rows
    pad = int(module.padding_idx)
    last = int(positions.max()) + pad + 2
    if last > module.weights.shape[0]:
        module.make_weights(2 * last, module.embedding_dim, pad)
    # as in generate: the position of a padding token is that of padding
    index = torch.where(tokens == pad, torch.full_like(positions, pad), positions + (pad + 1))
    return module.weights.index_select(0, index).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    own: dict[nn.Module, int]
    cross: dict[nn.Module, int]


@dataclass(slots=True, eq=False)
class DecoderPass:
    layers: DecoderLayers  # the decoder's attention modules
    inner: SlotPass  # the pass over the slots
    cross: CrossPass  # the attention to the sources
    tokens: Tensor  # token of each row, shape (rows,)
    positions: Tensor  # position of each row, shape (rows,)
    num_positions: int  # largest position plus one
    tables: BiasTables  # biases by distance
    # source and number of rows of each job, if the weights of the last cross-attention are computed too
    weighed: Sequence[tuple[EncodedSource, int]] | None = None
    weights: list[Tensor] = field(default_factory=list, init=False)
    """Of the rows of each job, shape (rows, source length): the mean of all heads."""
    bias: Tensor | None = field(default=None, init=False)

    def positions_of(self) -> tuple[Tensor, Tensor]:
        return self.tokens, self.positions

    def bias_of(self, module: nn.Module) -> bool:
        self.bias = self.table_of(module)
        return True

    def table_of(self, module: nn.Module) -> Tensor:
        """Return the bias of a module by distance, shape (heads, distances)."""
        return self.tables.of(module, self.num_positions)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        """Attend to the slots in self-attention modules, to the sources in cross-attention modules."""
        layer = self.layers.own.get(module)
        if layer is not None:
            bias = self.bias if kwargs.get("position_bias") is not None else None
            return self.inner.attend(layer_call(layer, query, kwargs, bias), query, key, value)
        layer = self.layers.cross[module]
        return self.attend_source(layer_call(layer, query, kwargs, None), query)

    def attend_source(self, call: LayerCall, query: Tensor) -> Tensor:
        """Attend to the sources with queries of shape (1, heads, rows, head_dim)."""
        if self.weighed is not None and call.layer == len(self.layers.cross) - 1:
            self._keep_weights(self.weighed, call, query)
        return self.cross.attend(call.layer, call, query)

    def _keep_weights(self, weighed: Sequence[tuple[EncodedSource, int]], call: LayerCall, query: Tensor) -> None:
        first = 0
        for source, count in weighed:
            keys, queries = source.layers[call.layer][0].float(), query[:, :, first : first + count].float()
            keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
            scores = (queries * call.scaling) @ keys.transpose(2, 3)
            self.weights.append(scores.softmax(dim=-1).mean(dim=1)[0])
            first += count

    def weights_of(self, order: Sequence[int]) -> list[np.ndarray]:
        """Return the weights of the jobs, each of shape (rows, source length), float32."""
        weights = dict(zip(order, self.weights, strict=True))
        return [weights[job].cpu().numpy() for job in sorted(weights)]
