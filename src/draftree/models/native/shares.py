"""Shares of a native decoder: which heads and outputs each process of a team computes.

Every output of every product is computed by one process, with the inputs of the whole row and the same additions as in
one process, so its bits are the same. Processes exchange results through memory that they share; weights, keys and
values of a share are memory of its process alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.models.native.blueprint import Blueprint, LayerBlueprint, LinearBlueprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.weights import Weights

UNIT = 16  # outputs of one block of packed weights
PAGE = mmap.PAGESIZE
RELEASED = 1 << 48  # more arrivals than passes can need


class TeamMemory:
    """Memory that the processes of a team share, which grows; each process calls `at_least` with the same sizes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = self._address = self._num_releases = 0
        self._memory: mmap.mmap | None = None
        self._view: ctypes.Array[ctypes.c_char] | None = None

    @staticmethod
    def create() -> TeamMemory:
        TeamMemory.require_possible()
        return TeamMemory(os.memfd_create("draftree-team"))

    @staticmethod
    def require_possible() -> None:
        """Raise NativeUnavailableError if the system has no files in memory."""
        if not hasattr(os, "memfd_create"):
            raise NativeUnavailableError("this system has no files in memory, through which processes could share rows")

    @staticmethod
    def opened(path: str) -> TeamMemory:
        """Return the memory of another process on this machine, from `path` of its memory."""
        try:
            return TeamMemory(os.open(path, os.O_RDWR))
        except OSError as error:
            raise ModelLoadError(
                f"the memory that processes share is not accessible ({error}): start them as one user, or use kernels "
                "'torch'"
            ) from error

    @property
    def path(self) -> str:
        """Path under which other processes of this user open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def at_least(self, size: int) -> int:
        """Return the address of the memory, after making room for `size` bytes."""
        if size > self._size:
            self._grow(max(-(-size // PAGE) * PAGE, 2 * self._size))
        return self._address

    def release(self) -> None:
        """Let all passes return that wait for a process of the team; their results are of no use. From any thread."""
        self._num_releases += 1
        # the count of arrivals begins the memory; written through the file, because the mapping may be replaced
        os.pwrite(self._descriptor, (RELEASED * self._num_releases).to_bytes(8, sys.byteorder), 0)

    def _grow(self, size: int) -> None:
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as error:
            raise MemoryError(f"no memory for {size} bytes that processes share: {error.strerror}") from error
        self._view = None
        if self._memory is not None:
            self._memory.close()
        self._memory = mmap.mmap(self._descriptor, size)
        self._view = (ctypes.c_char * size).from_buffer(self._memory)
        self._address, self._size = ctypes.addressof(self._view), size


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    rank: int  # number of the process
    size: int  # number of processes
    blueprint: Blueprint  # of the share: heads and outputs are its own, `mlp` and `vocab` those of the model
    whole: Blueprint  # blueprint of the model
    kv_heads: range  # its key-value heads
    hidden: range  # its columns of the residual stream
    mlp: range  # its columns of the multilayer perceptrons
    vocab: range  # its tokens
    memory: TeamMemory  # shared by the team

    @property
    def group(self) -> int:
        return self.whole.heads // self.whole.kv_heads

    @property
    def first_head(self) -> int:
        return self.kv_heads.start * self.group


def divide(blueprint: Blueprint, rank: int, size: int, memory: TeamMemory) -> Share:
    if blueprint.kv_heads < size:
        raise ConfigurationError(
            f"the model has {blueprint.kv_heads} key-value heads for {size} processes: use tp of at most "
            f"{blueprint.kv_heads}"
        )
    if blueprint.projection is not None or any(layer.embedding_norm is not None for layer in blueprint.layers):
        raise NativeUnavailableError("a model that reads features is not divided")
    if blueprint.is_post_norm or any(linear.is_arranged for layer in blueprint.layers for linear in layer.linears):
        raise NativeUnavailableError(
            "a model with norms after its sublayers, experts, or weights in another order is not divided"
        )
    if blueprint.is_recurrent or any(layer.gate_size for layer in blueprint.layers):
        raise NativeUnavailableError("a model with recurrent layers, or with gates of attention, is not divided")
    if blueprint.has_joint_norms:
        raise NativeUnavailableError("a model that normalizes queries and keys of all heads together is not divided")
    if any(
        layer.sinks is not None or layer.down is None or layer.down.inputs != blueprint.mlp
        for layer in blueprint.layers
    ):
        raise NativeUnavailableError("a model with sinks or perceptrons of several sizes is not divided")
    kv_heads = _range_of(blueprint.kv_heads, 1, rank, size)
    hidden = _range_of(blueprint.hidden, UNIT, rank, size)
    mlp = _range_of(blueprint.mlp, UNIT, rank, size)
    vocab = _range_of(blueprint.head.outputs, UNIT, rank, size)
    group = blueprint.heads // blueprint.kv_heads
    part = replace(
        blueprint,
        heads=len(kv_heads) * group,
        kv_heads=len(kv_heads),
        head=replace(blueprint.head, outputs=len(vocab)),
        layers=tuple(_layer(layer, blueprint, len(kv_heads), len(hidden), len(mlp)) for layer in blueprint.layers),
    )
    vocab = range(vocab.start, min(vocab.stop, blueprint.vocab))
    return Share(rank, size, part, blueprint, kv_heads, hidden, mlp, vocab, memory)


def _range_of(count: int, unit: int, rank: int, size: int) -> range:
    """Return the part of `count` numbers in whole units; parts differ by one unit at most."""
    units = -(-count // unit)
    return range(min(count, units * rank // size * unit), min(count, units * (rank + 1) // size * unit))


def _layer(layer: LayerBlueprint, whole: Blueprint, kv_heads: int, hidden: int, mlp: int) -> LayerBlueprint:
    def share(part: LinearBlueprint, count: int, of: int) -> LinearBlueprint:
        return replace(part, outputs=part.outputs * count // of)

    assert layer.output is not None, "a layer that is divided has a mixer"
    assert layer.down is not None, "a layer that is divided has a perceptron"
    return replace(
        layer,
        qkv=tuple(share(part, kv_heads, whole.kv_heads) for part in layer.qkv),
        output=replace(layer.output, outputs=hidden),
        gate_up=tuple(share(part, mlp, whole.mlp) for part in layer.gate_up),
        down=replace(layer.down, outputs=hidden),
    )


class ShareWeights(Weights):
    def __init__(self, weights: Weights, share: Share) -> None:
        self._weights = weights
        # for each weight and bias, the rows of the whole that belong to the share
        self._rows: dict[str, list[range]] = {}
        whole = share.whole
        dim = share.whole.head_dim
        queries = range(share.first_head * dim, share.kv_heads.stop * share.group * dim)
        keys = range(share.kv_heads.start * dim, share.kv_heads.stop * dim)
        first_key = whole.heads * dim
        first_value = (whole.heads + whole.kv_heads) * dim
        parts: list[tuple[LinearBlueprint, list[range]]] = [(whole.head, [share.vocab])]
        for layer in whole.layers:
            qkv = [[queries], [keys], [keys]]
            if len(layer.qkv) == 1:
                qkv = [[queries, _after(keys, first_key), _after(keys, first_value)]]
            is_fused = whole.is_gated and len(layer.gate_up) == 1
            gate_up = [share.mlp, _after(share.mlp, whole.mlp)] if is_fused else [share.mlp]
            parts += zip(layer.qkv, qkv, strict=True)
            parts += [(part, gate_up) for part in layer.gate_up]
            parts += [(part, [share.hidden]) for part in (layer.output, layer.down) if part is not None]
        for part, rows in parts:
            self._rows |= dict.fromkeys(part.names, rows)
        self._rows[whole.embedding] = [share.vocab]

    def get(self, name: str) -> Tensor:
        whole, rows = self._weights.get(name), self._rows.get(name)
        return whole if rows is None else torch.cat([whole[part.start : part.stop] for part in rows])

    def release(self, name: str) -> None:
        self._weights.release(name)


def _after(part: range, start: int) -> range:
    return range(start + part.start, start + part.stop)
