"""Packed weights of a decoder for the C library."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from draftree.models.native.blueprint import (
    LAYER_NORM,
    Blueprint,
    ExpertsBlueprint,
    LayerBlueprint,
    LinearBlueprint,
    LinearRecurrence,
    Recurrence,
    filled_up,
)
from draftree.models.native.library import FORMATS, LANES, Library, address, lookup_of
from draftree.models.native.packing import Packer, bytes_needed
from draftree.models.native.shares import Share
from draftree.models.native.structures import (
    NORMS,
    CDecoder,
    CExperts,
    CLatent,
    CLayer,
    CLinear,
    CRecurrence,
    expert_products,
    latents_of,
)
from draftree.models.native.weights import Weights


def packed_experts(
    plan: ExpertsBlueprint,
    pack: Callable[..., CLinear],
    router_format: int,
    *,
    is_gated: bool,
    share: Share | None = None,
) -> tuple[CExperts, tuple[Any, Any]]:
    """Return the structure of a layer's experts, whose router is never quantized, and the arrays it points to."""
    router = pack(plan.unquantized, kind=router_format, is_one=True, release=False)
    first, last = [], []

    def add(gate_up: Sequence[LinearBlueprint], down: LinearBlueprint) -> None:
        start, hidden = (0, 0) if share is None else (share.columns(down.inputs).start, share.hidden.start)
        first.append(pack(gate_up, in_turns=is_gated, first_output=start, release=False))
        last.append(pack([down], first_output=hidden, release=False))

    for expert in range(plan.count):
        add([replace(plan.gate_up, expert=expert)], replace(plan.down, expert=expert))
    if plan.shared_down is not None:
        add(plan.shared_gate_up, plan.shared_down)
    gate_up, down = (CLinear * len(first))(*first), (CLinear * len(last))(*last)
    experts = CExperts(
        router=router,
        gate_up=ctypes.addressof(gate_up),
        down=ctypes.addressof(down),
        count=plan.count,
        chosen=plan.chosen,
        is_renormalized=plan.is_renormalized,
        shared=plan.shared_down is not None,
        has_shared_gate=plan.shared_gate is not None,
        scale=plan.scale,
        **{name: getattr(plan, name) for name in ("scores", "groups", "chosen_groups", "group_scores")},
    )
    return experts, (gate_up, down)


class PackedSource(Protocol):
    decoder: CDecoder  # structure of the model
    layers: Any  # array of the structures of its layers, whose keys and values passes set

    @property
    def biases(self) -> Sequence[Tensor]:
        """Score biases by distance, shape (heads, distances)."""
        ...

    @property
    def num_bytes(self) -> int: ...

    def at(self, place: int | None) -> Tensor | None:
        """Return the tensor at an address; None for no address."""
        ...


HUGE_PAGE = 1 << 21


def huge_pages(num_bytes: int) -> Tensor:
    """Return bytes in huge pages if available: address translation of small pages takes a tenth of a pass.

    The rest after the last whole huge page lies in small pages, so that no memory is in use beyond these bytes.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -whole.data_ptr() % HUGE_PAGE
    if num_bytes >= HUGE_PAGE:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, skipped, num_bytes // HUGE_PAGE * HUGE_PAGE)
    return whole[skipped : skipped + num_bytes]


NO_ROPE = NO_TOKEN = -1
SAME = (
    *(
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "value_dim",
        "shared_dim",
        "mlp",
        "vocab",
        "activation",
        "epsilon",
        "embedding_scale",
    ),
    *("norm_offset", "residual_scale", "logit_scale", "norm", "is_post_norm", "is_gated", "is_parallel"),
    *("has_joint_norms", "gate_limit", "gate_slope", "is_start_norm_first"),
)
"""Fields of a decoder's structure that have the values of the same fields of its blueprint."""
PAGE = 1 << 12


class PackedWeights:
    """Packed weights of one model, in the structures of the C library; keys, values and score biases are not set.

    Weights are read one by one and released once they are packed. `arena` is memory for the products, such as a
    mapped file; `after_layer` gets the bytes of it that are in use.
    """

    def __init__(
        self,
        library: Library,
        blueprint: Blueprint,
        weights: Weights,
        *,
        kind: int,
        share: Share | None = None,
        arena: Tensor | None = None,
        after_layer: Callable[[int], object] | None = None,
    ) -> None:
        self._library = library
        self._share = share
        self._blueprint = blueprint
        self._weights = weights
        self._format, self._is_grouped = kind, kind == FORMATS["grouped"]
        self._dtype: torch.dtype = getattr(torch, blueprint.dtype)
        self._kept: list[Tensor] = []
        self._norms: dict[str, int] = {}
        self._structures: list[Any] = []  # of experts, to which layers point
        self._lent: list[Tensor] = []  # weights of another owner, which are not counted
        names = Counter(
            name for layer in blueprint.layers for name in {n for part in layer.linears for n in part.names}
        )
        self._shared = {name for name, count in names.items() if count > 1}  # weights that several layers use
        size = bytes_needed(blueprint, library, weights, kind=kind, page=PAGE)
        self.arena = huge_pages(size) if arena is None else arena  # memory of all products
        self.layer_ends: list[int] = []  # for each layer, the byte of the arena at which its products end
        self.used_bytes = 0
        self._after_layer = after_layer
        with torch.inference_mode(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
            self._packer = Packer(library, weights, self._dtype, blueprint.head_dim, self._room, self._keep, pool)
            self.layers = (CLayer * len(blueprint.layers))(*map(self._layer, blueprint.layers))
            for name in self._shared:
                weights.release(name)
            self.biases = [
                self._keep(self._rounded(bias.weight)[torch.tensor(bias.buckets)].t().contiguous())
                for bias in blueprint.score_biases
            ]
            self.decoder = self._pack()
        del self._weights, self._packer

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept)

    @property
    def beside(self) -> list[Tensor]:
        """Weights outside the arena: norms, scales, sums, biases and a separate embedding."""
        start = self.arena.data_ptr()
        end = start + self.arena.numel()
        return [tensor for tensor in (*self._kept, *self._lent) if not start <= tensor.data_ptr() < end]

    def at(self, place: int | None) -> Tensor | None:
        if place is None:
            return None
        return next(tensor for tensor in (*self._kept, *self._lent) if tensor.data_ptr() == place)

    def _pack(self) -> CDecoder:
        plan, share = self._blueprint, self._share
        # a tied embedding is read from the packed head if that keeps its bits, or groups have a lookup of their own
        tied = plan.is_tied and (self._is_grouped or self._format == FORMATS[plan.dtype])
        packs_lookup = self._is_grouped and not plan.is_tied and not self._weights.lends(plan.embedding)
        embedding = None
        lookup = CLinear()
        first = 0 if share is None else share.vocab.start
        if not (tied or packs_lookup):  # after the layers, whose weights are released by then
            embedding = self._embedding(plan)
        if packs_lookup:
            lookup = self._linear([lookup_of(plan)], is_head=True, first_output=first)
        head = self._linear([plan.head], is_head=True, first_output=first)
        if tied:
            lookup = head
        start: dict[str, Any] = {}
        if plan.projection is not None:
            start["projection"] = self._linear([plan.projection.linear], kind=FORMATS[plan.dtype])
            if norms := [self._norm_weight(name) for name in plan.projection.norms]:
                start["feature_norm"] = self._keep(torch.cat(norms)).data_ptr()
                start["feature_part"] = len(norms[0])
            start["context_norm"] = self._norm(plan.projection.context_norm)
        if (fusion := plan.fusion) is not None:
            start["fusion"] = self._linear([fusion.linear])
            start["fusion_norm"] = self._norm(fusion.embedding_norm)
            start["state_norm"] = self._norm(fusion.state_norm)
        positions = None
        if plan.positions is not None:
            positions = self._keep(self._small(plan.positions)[plan.position_offset :].clone()).data_ptr()
        return CDecoder(
            **{name: getattr(plan, name) for name in SAME},
            num_layers=len(plan.layers),
            format=self._format,
            kv_format=FORMATS[plan.dtype],
            cache_format=FORMATS[plan.dtype],
            embedding=address(embedding),
            final_norm=self._norm(plan.final_norm),
            layers=self.layers,
            head=head,
            lookup=lookup,
            all_heads=plan.heads if share is None else share.whole.heads,
            first_head=0 if share is None else share.first_head,
            logit_cap=plan.logit_cap or 0.0,
            positions=positions,
            unplaced=NO_TOKEN if plan.unplaced is None else plan.unplaced,
            start_norm=self._norm(plan.start_norm),
            **start,
        )

    def _layer(self, layer: LayerBlueprint) -> CLayer:
        hidden, mlp = 0, 0
        if self._share is not None:
            hidden = self._share.hidden.start
            mlp = 0 if layer.down is None else self._share.columns(layer.down.inputs).start
        packed = CLayer(
            **{name: self._norm(getattr(layer, name)) for name in NORMS},
            gate_size=layer.gate_size,
            window=layer.window or 0,
            rope=NO_ROPE if layer.rope is None else layer.rope,
            is_normed_residual=layer.is_normed_residual,
            is_beside=layer.is_beside,
            sees_block=layer.sees_block,
            scaling=layer.scaling,
            score_cap=layer.score_cap or 0.0,
            sinks=None if layer.sinks is None else self._keep(self._small(layer.sinks)).data_ptr(),
        )
        if layer.output is not None:
            packed.qkv = self._linear(layer.inputs)
            self._add_latents(packed, layer)
            packed.output = self._linear(layer.outputs, is_joint=True, first_output=hidden)
        if layer.state is not None:
            recurrence = self._recurrence(layer.state)
            if layer.beside is not None:
                recurrence.first_input = sum(filled_up(linear.outputs) for linear in layer.qkv)
            self._structures.append(recurrence)
            packed.recurrence = ctypes.addressof(recurrence)
        if layer.source is not None:
            packed.source_norm = self._norm(layer.source.norm)
            packed.source_query = self._linear([layer.source.query])
            packed.source_output = self._linear([layer.source.output])
            packed.source_scaling = layer.source.scaling
        if layer.experts is not None:
            experts, arrays = packed_experts(
                layer.experts,
                self._linear,
                FORMATS[self._blueprint.dtype],
                is_gated=self._blueprint.is_gated,
                share=self._share,
            )
            if layer.experts.choice_bias is not None:
                bias = self._weights.get(layer.experts.choice_bias).to(torch.float32, copy=True).contiguous()
                experts.choice_bias = self._keep(bias).data_ptr()
            self._structures += [experts, *arrays]
            packed.experts = ctypes.addressof(experts)
            kept = {name for linear in layer.experts.unquantized for name in linear.names}  # small, needed by checks
            for name in dict.fromkeys(name for linear in layer.experts.linears for name in linear.names):
                if name not in kept:
                    self._weights.release(name)
        elif layer.down is not None:
            packed.gate_up = self._linear(layer.gate_up, in_turns=self._blueprint.is_gated, first_output=mlp)
            packed.down = self._linear([layer.down], first_output=hidden)
        self.layer_ends.append(self.used_bytes)
        if self._after_layer is not None:
            self._after_layer(self.used_bytes)
        return packed

    def _add_latents(self, packed: CLayer, layer: LayerBlueprint) -> None:
        """Set the latents of a layer, whose results follow other inputs of the mixer."""
        plan = self._blueprint
        packed.width = plan.width_before_mixer(layer)
        start = packed.first_input = sum(filled_up(latent.vector.outputs) for latent in layer.latents)
        place = sum(filled_up(linear.outputs) for linear in layer.inputs)
        latents, vector = [], 0
        for latent in layer.latents:
            if latent is layer.latents[-1] and layer.has_latent_keys:  # after the room for queries, keys and values
                place = start + 3 * plan.heads * plan.head_dim
            product = self._linear([latent.product], first_output=place)
            latents.append(CLatent(vector, self._norm(latent.norm), latent.epsilon, product))
            place += filled_up(product.outputs)
            vector += filled_up(latent.vector.outputs)
        if latents:
            array = (CLatent * len(latents))(*latents)
            self._structures.append(array)
            packed.latents, packed.num_latents = ctypes.addressof(array), len(latents)

    def _recurrence(self, plan: Recurrence) -> CRecurrence:
        """Return the structure of a recurrence; passes set where its states are."""
        # the weights are small, and needed by checks: they are not released
        taps = self._keep(self._rounded(plan.convolution).squeeze(1).t().contiguous())
        bias = None if plan.bias is None else self._keep(self._rounded(plan.bias))
        return CRecurrence(
            **(self._linear_recurrence(plan) if isinstance(plan, LinearRecurrence) else {}),
            kind=plan.kind,
            taps=plan.taps,
            channels=plan.channels,
            width=plan.width,
            state_size=plan.state_size,
            first_result=0 if plan.place is None else plan.place.first,
            all_results=plan.num_results if plan.place is None else plan.place.of,
            convolution=taps.data_ptr(),
            convolution_bias=address(bias),
        )

    def _linear_recurrence(self, plan: LinearRecurrence) -> dict[str, Any]:
        def of_heads(weight: Tensor) -> int:
            return self._keep(torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % LANES))).data_ptr()

        norm = None
        if plan.norm is not None:
            weight = self._rounded(plan.norm)
            size = plan.num_results if plan.place is None or not plan.has_joint_norm else plan.place.of
            norm = self._keep(weight.repeat(size // len(weight))).data_ptr()
        same = ("heads", "groups", "heads_of_group", "key_dim", "value_dim", "norm_groups", "is_norm_first", "is_tiled")
        return {
            **{name: getattr(plan, name) for name in (*same, "has_joint_norm", "norm_epsilon", "factor_scale")},
            **{name: getattr(plan, name) for name in ("decays", "is_logistic")},
            "decay_rate": of_heads(-self._exact(plan.decay).flatten().exp().repeat_interleave(plan.decays)),
            "step_bias": of_heads(self._exact(plan.step_bias)),
            "skip": None if plan.skip is None else of_heads(self._exact(plan.skip)),
            "norm": norm,
            "least_step": plan.step_limits[0],
            "most_step": plan.step_limits[1],
        }

    def _exact(self, name: str) -> Tensor:
        """Return a small weight in float32 that is not rounded to the model's dtype."""
        return self._weights.get(name).to(torch.float32, copy=True)

    def _embedding(self, plan: Blueprint) -> Tensor:
        weight, is_lent = self._weights.get(plan.embedding), self._weights.lends(plan.embedding)
        if is_lent and weight.dtype == self._dtype and weight.is_contiguous():
            self._lent.append(weight)
            return weight
        copy = self._keep(weight.to(self._dtype, copy=True).contiguous())
        if not plan.is_tied:
            self._weights.release(plan.embedding)
        return copy

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        end = tensor.data_ptr() + tensor.numel() * tensor.element_size() - self.arena.data_ptr()
        if self.used_bytes < end <= len(self.arena):
            self.used_bytes = -(-end // PAGE) * PAGE
        return tensor

    def _norm(self, name: str | None) -> int | None:
        """Keep a norm, which sublayers may share."""
        if name is None:
            return None
        if name not in self._norms:
            self._norms[name] = self._keep(self._norm_weight(name)).data_ptr()
        return self._norms[name]

    def _norm_weight(self, name: str) -> Tensor:
        """Return the weights of a norm, and after them the biases of one with a mean."""
        weight, bias = self._small(name), self._blueprint.bias_of_norm(name)
        if self._blueprint.norm != LAYER_NORM:
            return weight
        return torch.cat([weight, torch.zeros_like(weight) if bias is None else self._small(bias)])

    def _small(self, name: str) -> Tensor:
        weight = self._rounded(name)
        self._weights.release(name)
        return weight

    def _rounded(self, name: str) -> Tensor:
        return self._weights.get(name).to(self._dtype).to(torch.float32, copy=True).contiguous()

    def _linear(
        self, linears: Sequence[LinearBlueprint], *, kind: int | None = None, release: bool = True, **options: Any
    ) -> CLinear:
        """Pack layers with the options of `Packer.pack`, by default in the decoder's format; release their weights."""
        packed = self._packer.pack(linears, self._format if kind is None else kind, **options)
        for name in dict.fromkeys(name for linear in linears if release for name in linear.names):
            if name not in self._shared:
                self._weights.release(name)
        return packed

    def _room(self, num_bytes: int) -> Tensor:
        """Return the next bytes of the arena, which are in use from when they are kept."""
        return self.arena[self.used_bytes : self.used_bytes + num_bytes]


def read_bytes(library: Library, decoder: CDecoder) -> int:
    """Return the size of the products that a pass over one row reads at least, in bytes.

    Of the experts of a layer, these are as many as a row uses, the smallest ones, and the shared one. Embedding, norms,
    biases and scales of int8 outputs are not counted.
    """
    total = sum(library.product_bytes(product) for product in (decoder.head, decoder.projection, decoder.fusion))
    for layer in decoder.layers[: decoder.num_layers]:
        products = [layer.qkv, layer.output, layer.source_query, layer.source_output]
        products += [latent.product for latent in latents_of(layer)]
        if layer.experts is None:
            products += [layer.gate_up, layer.down]
        else:
            experts = CExperts.from_address(layer.experts)
            both = zip(expert_products(experts, "gate_up"), expert_products(experts, "down"), strict=True)
            sizes = [library.product_bytes(first) + library.product_bytes(last) for first, last in both]
            total += sum(sorted(sizes[: experts.count])[: experts.chosen]) + sum(sizes[experts.count :])
            products.append(experts.router)
        total += sum(library.product_bytes(product) for product in products)
    return total
