"""Native forward passes of EAGLE-3 heads, beside the target's own.

States are float32; stored ones have the head's dtype.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from draftree.heads.base import FeatureHead
from draftree.heads.config import EAGLE3, HeadConfig
from draftree.heads.eagle import Eagle3Head
from draftree.heads.passes import STATES, HeadPasses, RowJob, RowResult, TorchPasses, joined_before, requested_rows
from draftree.models.base import LanguageModel
from draftree.models.kv.slots import KVSlot, LayerRange, Leftovers, RangeOutput
from draftree.models.native.blueprint import (
    GELU_TANH,
    SILU,
    Blueprint,
    LayerBlueprint,
    LinearBlueprint,
    ProjectionBlueprint,
    Rope,
)
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.decoder import NativeDecoder, NativeTrees, Rows, plan_rows
from draftree.models.native.describe import DTYPES
from draftree.models.native.logits import NativeLogits, NativeSubset, NativeSubsetLogits
from draftree.models.native.model import NativeModel
from draftree.models.native.weights import Weights
from draftree.models.torch.hf import HFModel
from draftree.sampling.logits import Logits
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}
EMBEDDING, NORM, OUTPUT = "embed_tokens.weight", "norm.weight", "lm_head.weight"


def plan_head(head: FeatureHead) -> Blueprint:
    """Return the blueprint of a head; NativeUnavailableError says what is not supported.

    The first layer is a joined layer: its attention reads the normed embedding and the normed state before a row. The
    residual stream starts at that state, or at the product of the target's hidden states, `fc`.
    """
    if not isinstance(head, Eagle3Head) or head.config.kind != EAGLE3:
        raise NativeUnavailableError(f"native kernels support heads of kind 'eagle3', not '{head.config.kind}'")
    config = head.config
    dtype = str(head.dtype).removeprefix("torch.")
    device = next(head.parameters()).device
    if device.type != "cpu" or dtype not in DTYPES:
        raise NativeUnavailableError(f"native kernels support float32 and bfloat16 on CPUs, not {dtype} on {device}")
    if not config.num_layers:
        raise NativeUnavailableError("it has no layers")
    if config.activation not in ACTIVATIONS:
        raise NativeUnavailableError(
            f"its activation is {config.activation}: native kernels support {', '.join(ACTIVATIONS)}"
        )
    units = {
        "hidden size": (config.hidden, 16),
        "target's hidden size": (config.target_hidden, 16),
        "size of a head": (config.head_dim, 16),
    }
    for name, (size, unit) in {**units, "inner size": (config.intermediate, 32)}.items():
        if size % unit:
            raise NativeUnavailableError(f"its {name} of {size} is no multiple of {unit}")
    return Blueprint(
        kind=config.kind,
        fingerprint="",
        context=config.max_length,
        dtype=dtype,
        hidden=config.hidden,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        mlp=config.intermediate,
        vocab=config.draft_vocab_size,
        activation=ACTIVATIONS[config.activation],
        epsilon=config.epsilon,
        norm_offset=0.0,
        embedding_scale=1.0,
        residual_scale=1.0,
        logit_scale=1.0,
        embedding=EMBEDDING,
        final_norm=NORM,
        head=LinearBlueprint(OUTPUT, None, config.hidden, config.draft_vocab_size),
        ropes=(Rope(head.rotary.frequencies, head.rotary.scaling),),
        layers=tuple(_layer(head, index) for index in range(config.num_layers)),
        projection=_projection(config),
    )


def _projection(config: HeadConfig) -> ProjectionBlueprint:
    count = len(config.features)
    bias = "fc.bias" if config.fc_bias else None
    norms = [f"fc_norm.{i}.weight" for i in range(count)] if config.fc_norm else []
    norms = ["input_norm.weight"] if config.norm_before_fc else norms
    return ProjectionBlueprint(
        LinearBlueprint("fc.weight", bias, count * config.target_hidden, config.hidden), tuple(norms)
    )


def _layer(head: Eagle3Head, index: int) -> LayerBlueprint:
    config = head.config
    name = f"layers.{index}"
    joins = index == 0
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = 2 * config.hidden if joins else config.hidden

    def linear(part: str, inputs: int, outputs: int, *, has_bias: bool = False) -> LinearBlueprint:
        bias = f"{name}.{part}.bias" if has_bias else None
        return LinearBlueprint(f"{name}.{part}.weight", bias, inputs, outputs)

    qkv = (("q", queries), ("k", keys), ("v", keys))
    return LayerBlueprint(
        attention_norm=f"{name}.hidden_norm.weight" if joins else f"{name}.input_layernorm.weight",
        attention_post_norm=None,
        mlp_norm=f"{name}.post_attention_layernorm.weight",
        mlp_post_norm=None,
        query_norm=f"{name}.self_attn.q_norm.weight" if config.qk_norm else None,
        key_norm=f"{name}.self_attn.k_norm.weight" if config.qk_norm else None,
        qkv=tuple(linear(f"self_attn.{p}_proj", width, size, has_bias=config.attention_bias) for p, size in qkv),
        output=linear("self_attn.o_proj", queries, config.hidden, has_bias=config.output_bias),
        gate_up=tuple(
            linear(f"mlp.{p}_proj", config.hidden, config.intermediate, has_bias=config.mlp_bias)
            for p in ("gate", "up")
        ),
        down=linear("mlp.down_proj", config.intermediate, config.hidden, has_bias=config.mlp_bias),
        window=None,
        scaling=config.head_dim**-0.5,
        rope=0,
        embedding_norm=f"{name}.input_layernorm.weight" if joins else None,
        is_normed_residual=joins and config.norm_before_residual,
    )


@final
class HeadWeights(Weights):
    """Weights of a head and of what it shares with its target. Own ones are emptied once they are packed."""

    def __init__(self, head: Eagle3Head) -> None:
        self._head = head
        self._own: dict[str, Tensor] = dict(head.named_parameters())

    def get(self, name: str) -> Tensor:
        if name in self._own:
            return self._own[name].detach()
        return self._head.embedding_weight() if name == EMBEDDING else self._head.output_weight()

    def release(self, name: str) -> None:
        weight = self._own.pop(name, None)
        if weight is None:
            if name == OUTPUT:
                self._head.forget_output()
            return
        owner, _, attribute = name.rpartition(".")
        empty = nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)
        setattr(self._head.get_submodule(owner), attribute, empty)

    def lends(self, name: str) -> bool:
        return name == EMBEDDING and name not in self._own


logger = logging.getLogger(__name__)


def passes_of(head: FeatureHead, target: LanguageModel) -> HeadPasses:
    """Return native passes if the target's are and they support the head; else PyTorch ones, whose reason is logged.

    Native passes take the weights of the head, which cannot run in PyTorch afterwards. Unless the target is unquantized
    float32, the head has 8-bit weights: a level takes half the time, and drafts are accepted almost as often.
    """
    if isinstance(model := target.here, NativeModel):
        is_exact = model.quantization is None and model.dtype == torch.float32
        try:
            return NativePasses(head, quantization=None if is_exact else "int8")
        except NativeUnavailableError as reason:
            logger.warning("head of kind '%s': kernels: torch (%s)", head.config.kind, reason)
    static = model.static if isinstance(model, HFModel) else None
    return TorchPasses(head, target.device, None if static is None else static.shapes)


@final
class NativePasses(HeadPasses):
    """Native forward passes. The head's weights are packed, and its module cannot run afterwards.

    Raises NativeUnavailableError if the native kernels are unavailable or do not support the head, which is then
    unchanged.
    """

    def __init__(self, head: FeatureHead, *, quantization: str | None = None) -> None:
        super().__init__(head, torch.device("cpu"), Leftovers.UNREAD)
        plan = plan_head(head)
        assert isinstance(head, Eagle3Head), "other heads have no plan"
        self.quantization = quantization
        self._norms_output = head.config.norm_output
        self._decoder = NativeDecoder(plan, HeadWeights(head), quantization=quantization)
        self._subset = None if self.tokens is None else NativeSubset(self.tokens)

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes + super().weight_bytes

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        """Return the states before the tokens that follow, float32 with the values of the head's dtype."""
        # no layer runs, and nothing of the rows is read
        rows = Rows(array("q", [0]), (0,) * 8, len(features), 0, 1)
        flat = features.float().flatten(1).contiguous()
        output = self._decoder.run(None, rows, (), layer_range=LayerRange(0, 0, keeps_hidden=True), features=flat)
        assert output.hidden is not None, "states are captured"
        return output.hidden

    @torch.inference_mode()
    def recycle(self, states: Tensor) -> Tensor:
        """Return the states before the children of rows, float32."""
        return self._decoder.final_norm(states) if self._norms_output else states

    @torch.inference_mode()
    def run(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]], jobs: Sequence[RowJob]) -> RowResult:
        """Run a pass over new rows; states are float32, projected ones with values of the head's dtype."""
        tokens = [job.tokens for job in jobs]
        end = self._decoder.num_layers
        requested = requested_rows(jobs)
        joined = joined_before(jobs).float().contiguous()
        if jobs[0].is_projected:
            layer_range = LayerRange(0, end, keeps_hidden=True, capture=(0,))
            features = joined.flatten(1)
        else:
            layer_range = LayerRange(0, end, hidden=joined, keeps_hidden=True)
            features = None
        output = self._decoder.run(
            self.pool.memory,
            plan_rows(slots, tokens, nodes, rows_of_chunk=self._decoder.rows_of_chunk(sum(map(len, tokens)))),
            requested,
            layer_range=layer_range,
            features=features,
            rope_positions=[position for job in jobs for position in job.positions],
        )
        assert output.hidden is not None, "states are captured"
        before = joined if output.captured is None else output.captured[:, 0]
        return RowResult(before, output.hidden, requested, self._answered(output))

    @property
    def most_children(self) -> int:
        return self._decoder.library.max_count

    def trees(
        self,
        slots: Sequence[KVSlot],
        nodes: Sequence[Sequence[int]],
        jobs: Sequence[RowJob],
        shape: TreeWidths,
        searches: Sequence[TreeSearch],
    ) -> list[FoundTree]:
        """Run a pass over new rows, and grow trees after them in the same call."""
        tokens = [job.tokens for job in jobs]
        memory = self.pool.memory
        states = memory.keys[STATES]
        before = joined_before(jobs)
        if before.dtype != torch.float32 or not before.is_contiguous():
            before = before.float().contiguous()
        places = [slot.length + len(row) for slot, row in zip(slots, tokens, strict=True)]
        trees = NativeTrees(shape, searches, slots, places, [job.positions[-1] + 1 for job in jobs])
        structure = trees.structure
        structure.ids = None if self._subset is None else self._subset.address
        structure.is_normed = self._norms_output
        structure.kept = states.data_ptr()
        structure.kept_step = states.stride(0)
        rows = plan_rows(slots, tokens, nodes, rows_of_chunk=self._decoder.rows_of_chunk(sum(map(len, tokens))))
        rope_positions = [position for job in jobs for position in job.positions]
        self._decoder.grow_trees(
            memory, rows, requested_rows(jobs), trees, before=before, rope_positions=rope_positions
        )
        return trees.trees()

    def _answered(self, output: RangeOutput) -> Logits:
        columns = output.logits
        assert isinstance(columns, NativeLogits), "native passes return native logits"
        return columns if self._subset is None else NativeSubsetLogits(columns, self._subset)
