"""Shares of a native decoder: which heads, channels and outputs each process of a team computes.

Every output of every product is computed by one process, with the inputs of the whole row and the same additions as in
one process, so its bits are the same. So are those of recurrences, whose heads and channels do not depend on each
other; where processes share the heads of a group, each of them computes the group's keys and queries. Processes
exchange results through memory that they share; weights, keys, values and states of a share are memory of its process
alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.models.native.blueprint import (
    RECURRENCES,
    Blueprint,
    ExpertsBlueprint,
    LayerBlueprint,
    LinearBlueprint,
    LinearRecurrence,
    MixerBlueprint,
    Recurrence,
    ResultPlace,
    ShortConvolution,
)
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.packing import arranged
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


@dataclass(frozen=True, slots=True)
class Section:
    """Successive outputs of a product, and those of a share."""

    count: int
    own: range


def _times(part: range, size: int) -> range:
    return range(part.start * size, part.stop * size)


def _rows_of(sections: Iterable[Section]) -> tuple[range, ...]:
    """Return the rows of a share in a weight of all sections."""
    rows, first = [], 0
    for section in sections:
        rows.append(range(first + section.own.start, first + section.own.stop))
        first += section.count
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of a weight or a bias that belong to a share."""

    name: str  # of the whole
    rows: tuple[range, ...]
    linear: LinearBlueprint | None = None  # product in whose order the rows are; None for the order of the whole


@final
class Share:
    """One process's share of a model.

    Attributes:
        blueprint: of the share; heads and outputs are its own, `mlp` and `vocab` those of the model.
        whole: blueprint of the model.
        kv_heads: its key-value heads; `first_head` is the first of its query heads.
        hidden: its columns of the residual stream.
        vocab: its tokens.
        cuts: its parts of weights, by the names in `blueprint`.
    """

    def __init__(self, whole: Blueprint, rank: int, size: int, memory: TeamMemory) -> None:
        self.whole, self.rank, self.size, self.memory = whole, rank, size, memory
        group = whole.heads // whole.kv_heads
        self.kv_heads = self._part(whole.kv_heads)
        self.first_head = self.kv_heads.start * group
        self.hidden = self.columns(whole.hidden)
        outputs = self.columns(whole.head.outputs)
        self.vocab = range(outputs.start, min(outputs.stop, whole.vocab))
        self.cuts = {name: Cut(name, (self.vocab,)) for name in (whole.embedding, *whole.head.names)}
        self.blueprint = replace(
            whole,
            heads=len(self.kv_heads) * group,
            kv_heads=len(self.kv_heads),
            head=replace(whole.head, outputs=len(outputs)),
            layers=tuple(map(self._layer, whole.layers)),
        )

    def columns(self, count: int) -> range:
        """Return its part of columns, in whole blocks of packed weights."""
        return self._part(count, UNIT)

    def _part(self, count: int, unit: int = 1, rank: int | None = None) -> range:
        """Return the part of `count` numbers in whole units; parts differ by one unit at most."""
        rank, units = self.rank if rank is None else rank, -(-count // unit)
        first, end = (min(count, units * place // self.size * unit) for place in (rank, rank + 1))
        return range(first, end)

    def _layer(self, layer: LayerBlueprint) -> LayerBlueprint:
        if layer.recurrence is not None:
            assert layer.output is not None, "a mixer has results"
            mixer = self._mixer(MixerBlueprint(layer.qkv, layer.recurrence, layer.output))
            layer = replace(layer, qkv=mixer.inputs, recurrence=mixer.recurrence, output=mixer.output)
        elif layer.output is not None:
            layer = replace(layer, qkv=self._cut(layer.qkv, self._heads(layer)), output=self._outputs(layer.output))
        if layer.beside is not None:
            layer = replace(layer, beside=self._mixer(layer.beside))
        if layer.sinks is not None:
            heads = range(self.first_head, self.kv_heads.stop * self.whole.heads // self.whole.kv_heads)
            layer = replace(layer, sinks=self._named(Cut(layer.sinks, (heads,))))
        if layer.experts is not None:
            experts = self._experts(layer.experts)
            return replace(layer, experts=experts, gate_up=(experts.gate_up,), down=experts.down)
        if layer.down is None:
            return layer
        gate_up, down = self._perceptron(layer.gate_up, layer.down)
        return replace(layer, gate_up=gate_up, down=down)

    def _perceptron(
        self, gate_up: Sequence[LinearBlueprint], down: LinearBlueprint
    ) -> tuple[tuple[LinearBlueprint, ...], LinearBlueprint]:
        inner = Section(down.inputs, self.columns(down.inputs))
        return self._cut(gate_up, [inner] * (2 if self.whole.is_gated else 1)), self._outputs(down)

    def _experts(self, plan: ExpertsBlueprint) -> ExpertsBlueprint:
        """Return experts with a part of the columns of each one, and the whole router."""
        (gate_up,), down = self._perceptron([plan.gate_up], plan.down)
        plan = replace(plan, gate_up=gate_up, down=down)
        if plan.shared_down is None:
            return plan
        shared_gate_up, shared_down = self._perceptron(plan.shared_gate_up, plan.shared_down)
        return replace(plan, shared_gate_up=shared_gate_up, shared_down=shared_down)

    def _heads(self, layer: LayerBlueprint) -> Sequence[Section]:
        """Return the sections of an attention's inputs: queries, keys, values, and the gate."""
        whole, dim = self.whole, self.whole.head_dim
        heads = _times(self.kv_heads, whole.heads // whole.kv_heads)
        keys = Section(whole.kv_heads * dim, _times(self.kv_heads, dim))
        gate = Section(whole.heads * layer.gate_size, _times(heads, layer.gate_size))
        return [Section(whole.heads * dim, _times(heads, dim)), keys, keys, gate]

    def _mixer(self, mixer: MixerBlueprint) -> MixerBlueprint:
        plan = mixer.recurrence
        assert plan is not None, "a model's mixers have states"
        if isinstance(plan, ShortConvolution):
            channels = self.columns(plan.channels)
            sections: Sequence[Section] = [Section(plan.channels, channels)] * 3
            convolved = sections[:1]
            recurrence: Recurrence = replace(
                plan, channels=len(channels), place=ResultPlace(channels.start, plan.channels)
            )
        else:
            sections, recurrence = self._heads_of(plan)
            convolved = sections[:3]
        rows = _rows_of(convolved)
        recurrence = replace(
            recurrence,
            convolution=self._named(Cut(plan.convolution, rows)),
            bias=None if plan.bias is None else self._named(Cut(plan.bias, rows)),
        )
        return MixerBlueprint(self._cut(mixer.inputs, sections), recurrence, self._outputs(mixer.output))

    def _heads_of(self, plan: LinearRecurrence) -> tuple[Sequence[Section], LinearRecurrence]:
        """Return the sections of the inputs of a recurrence, and its own heads with their groups."""
        size = plan.heads_of_group
        parts = [self._part(plan.heads, size if plan.groups >= self.size else 1, rank) for rank in range(self.size)]
        heads = parts[self.rank]
        groups = range(heads.start // size, -(-heads.stop // size))
        key = Section(plan.groups * plan.key_dim, _times(groups, plan.key_dim))
        value, number = Section(plan.num_results, _times(heads, plan.value_dim)), Section(plan.heads, heads)

        def own(name: str) -> str:
            return self._named(Cut(name, (heads,)))

        normed = plan.heads // plan.norm_groups  # heads that are normed together
        is_joint = plan.norm is not None and any(bound % normed for part in parts for bound in (part.start, part.stop))
        is_mamba2, norm = plan.kind == RECURRENCES["MAMBA2"], plan.norm
        if norm is not None and is_mamba2 and not is_joint:  # heads of a delta net have the same norm
            norm = self._named(Cut(norm, (value.own,)))
        recurrence = replace(
            plan,
            heads=len(heads),
            groups=len(groups),
            decay=own(plan.decay),
            step_bias=own(plan.step_bias),
            skip=None if plan.skip is None else own(plan.skip),
            norm=norm,
            norm_groups=plan.norm_groups if is_joint else len(heads) // normed,
            has_joint_norm=is_joint,
            place=ResultPlace(value.own.start, value.count),
        )
        sections = [value, key, key, number, value] if is_mamba2 else [key, key, value, number, number, value]
        return sections, recurrence

    def _cut(self, linears: Sequence[LinearBlueprint], sections: Iterable[Section]) -> tuple[LinearBlueprint, ...]:
        """Return the share of products whose outputs are these sections, one after the other."""
        cut, left = [], iter(sections)
        for linear in linears:
            own: list[Section] = []
            while sum(section.count for section in own) < linear.outputs:
                own.append(next(left))
            cut.append(self._with_rows(linear, _rows_of(own)))
        return tuple(cut)

    def _outputs(self, linear: LinearBlueprint) -> LinearBlueprint:
        return self._with_rows(linear, (self.hidden,))

    def _with_rows(self, linear: LinearBlueprint, rows: tuple[range, ...]) -> LinearBlueprint:
        weight, bias = (
            None if name is None else self._named(Cut(name, rows, linear)) for name in (linear.weight, linear.bias)
        )
        assert weight is not None, "a product has a weight"
        return LinearBlueprint(
            weight, bias, linear.inputs, sum(map(len, rows)), expert=linear.expert, factor=linear.factor
        )

    def _named(self, cut: Cut) -> str:
        """Return a name for a part of a weight."""
        name = f"{cut.name}[{len(self.cuts)}]"
        self.cuts[name] = cut
        return name


def divide(blueprint: Blueprint, rank: int, size: int, memory: TeamMemory) -> Share:
    """Return the share of a process of `size` ones.

    Raises:
        ConfigurationError: there are more processes than heads.
        NativeUnavailableError: shares of such a model are not known.
    """
    if blueprint.kv_heads < size:
        raise ConfigurationError(
            f"the model has {blueprint.kv_heads} key-value heads for {size} processes: use tp of at most "
            f"{blueprint.kv_heads}"
        )
    least = min((_num_parts(layer.state) for layer in blueprint.layers if layer.state is not None), default=size)
    if least < size:
        raise ConfigurationError(
            f"a recurrent layer of the model has {least} heads for {size} processes: use tp of at most {least}"
        )
    if blueprint.projection is not None or any(layer.embedding_norm is not None for layer in blueprint.layers):
        raise NativeUnavailableError("a model that reads features is not divided")
    if any(layer.is_beside for layer in blueprint.layers):
        raise NativeUnavailableError("a model with layers beside its residual stream is not divided")
    if blueprint.is_post_norm:
        raise NativeUnavailableError("a model with norms after its sublayers is not divided")
    if any(layer.experts is not None and layer.mlp_post_norm is not None for layer in blueprint.layers):
        raise NativeUnavailableError("a model with norms after its experts is not divided")
    if any(layer.latents for layer in blueprint.layers):
        raise NativeUnavailableError("a model with latent attention or gates of low rank is not divided")
    return Share(blueprint, rank, size, memory)


def _num_parts(plan: Recurrence) -> int:
    """Return the number of parts into which a recurrence can be divided."""
    return plan.channels // UNIT if isinstance(plan, ShortConvolution) else plan.heads


@final
class ShareWeights(Weights):
    """Weights of a share, by the names in its blueprint."""

    def __init__(self, weights: Weights, share: Share) -> None:
        self._weights, self._share = weights, share
        self._released: set[str] = set()
        self._experts: dict[str, Tensor] = {}  # parts of weights that many experts share

    def get(self, name: str) -> Tensor:
        cut = self._share.cuts.get(name)
        if cut is None:
            return self._weights.get(name)
        if cut.linear is None or cut.linear.expert is None:
            return self._rows(self._weights.get(cut.name), cut, cut.linear)
        if name not in self._experts:
            whole, linear = self._weights.get(cut.name), cut.linear
            each = [self._rows(whole, cut, replace(linear, expert=expert)) for expert in range(len(whole))]
            self._experts[name] = torch.stack(each)
        return self._experts[name]

    def _rows(self, whole: Tensor, cut: Cut, linear: LinearBlueprint | None) -> Tensor:
        """Return the rows of a weight, or of one expert, in the order of its product."""
        if linear is not None:
            whole = arranged(whole, linear, head_dim=self._share.whole.head_dim)
        return torch.cat([whole[part.start : part.stop] for part in cut.rows])

    def release(self, name: str) -> None:
        self._experts.pop(name, None)
        whole = self._share.cuts[name].name if name in self._share.cuts else name
        if whole not in self._released:  # several products may be parts of one weight
            self._released.add(whole)
            self._weights.release(whole)
