"""Loading of a model by several processes, each with its share.

Rank 0 gets a `ParallelModel`; the other ranks repeat what it does until it stops.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from draftree.core.errors import ConfigurationError, DraftreeError, RankError, UnsupportedModelError, require_extra
from draftree.core.files import code_named_in
from draftree.loading.encoder_decoder import is_encoder_decoder
from draftree.loading.loaded import LoadedModel
from draftree.loading.options import resolve_device, resolve_dtype
from draftree.loading.references import in_float32, whole_reference
from draftree.loading.resolve import resolve_model
from draftree.loading.transformers_model import eos_ids_in, first_line, read_model, row_buckets
from draftree.models.check import (
    EXACT_LENGTHS,
    NATIVE_LENGTHS,
    QUANTIZED_TOLERANCE,
    ReferenceLogits,
    check,
    reference_logits,
    rounds_alike,
)
from draftree.models.kv.slotted import SlottedModel
from draftree.models.memory import Footprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.describe import plan_lowering
from draftree.models.native.model import NativeModel
from draftree.models.native.shares import TeamMemory, divide
from draftree.models.native.weights import ModelWeights
from draftree.models.torch.attention import ProbePass
from draftree.models.torch.hf import HFModel
from draftree.models.torch.inspection import fingerprint_of, samples_of
from draftree.models.torch.static import Shapes
from draftree.options import ModelOptions
from draftree.parallel.channel import FAILED, GRACE_SECONDS, Leader, Member
from draftree.parallel.model import ParallelModel, follow, signals_ignored
from draftree.parallel.world import World, current_world, group_rank

# Tensor-parallel plans for the modules of one stage.
#
# transformers resolves the plan of the whole model and applies it after a pipeline has replaced the layers of other
# stages; version 5.23 then fails at the first module that is not there. Here the plan is reduced to the modules of the
# stage before it is applied.

REPLACED = "PipelineIdentityLayer"  # class of transformers that stands for a module of another stage
APPLY = "apply_tensor_parallelism"


def own_part(model: Any, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of a plan, styles by name, whose modules or parameters this process has."""
    modules = {name for name, module in model.named_modules() if type(module).__name__ != REPLACED}
    known = modules | {name for name, _ in model.named_parameters()}
    return {name: style for name, style in plan.items() if name in known}


@contextmanager
def plans_of_stages() -> Iterator[None]:
    """Let models that are loaded inside have tensor-parallel stages."""
    import transformers
    from transformers.distributed import mixin

    apply = getattr(mixin, APPLY, None)
    if apply is None:
        raise ConfigurationError(
            f"tp and pp together are not known to work with transformers {transformers.__version__}: use tp or pp "
            "alone, or transformers 5.23"
        )

    def apply_own(model: Any, mesh: Any, plan: Mapping[str, str]) -> Any:
        return apply(model, mesh, own_part(model, plan))

    setattr(mixin, APPLY, apply_own)
    try:
        yield
    finally:
        setattr(mixin, APPLY, apply)


# Stages of a pipeline: each runs its layers, and only the last one the head.
#
# transformers divides the layers and wraps the model's forward so that the last stage sends all logits to the others.
# Here rank 0 has the last stage, so logits stay where they are read, and hidden states are all that is sent. The
# division is private in transformers: with a version that is not known, its own forward runs, and the logits are sent.

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("5.23.", "5.24.")  # versions of transformers whose division of layers is known
PARTS = ("communicate", "pp_is_first_stage", "pp_is_last_stage", "pp_rank", "pp_size")


class Stage:
    def __init__(self, model: Any, version: str) -> None:
        self._model = model
        self._stage: Any = getattr(model, "_pp_stage", None)
        self._whole: Any = getattr(model.forward, "__wrapped__", None)
        is_complete = self._whole is not None and all(hasattr(self._stage, name) for name in PARTS)
        # whether the passes are ours; if not, transformers' own forward runs, which sends the logits
        self.is_own = version.startswith(KNOWN_VERSIONS) and is_complete
        if not self.is_own:
            logger.info("stages of transformers %s are not known: every pass sends its logits", version)

    @property
    def sends_logits(self) -> bool:
        return not self.is_own or bool(self._stage.pp_is_last_stage)

    def logits(self, **arguments: Any) -> Tensor | None:
        """Run one pass through all stages; None where the logits are not computed."""
        if not self.is_own:
            return self._model(**arguments).logits
        stage, model = self._stage, self._model
        parameter = next(model.parameters())
        place = {"device": parameter.device, "dtype": parameter.dtype}
        if not stage.pp_is_first_stage:
            tokens = arguments.pop("input_ids")
            shape = (*tokens.shape[:2], model.config.get_text_config().hidden_size)
            arguments["inputs_embeds"] = stage.communicate("recv_forward", shape=shape, **place)
        if stage.pp_is_last_stage:
            return self._whole(**arguments).logits
        arguments.pop("logits_to_keep", None)
        hidden = getattr(model, model.base_model_prefix)(**arguments).last_hidden_state
        stage.communicate("send_forward", tensor=hidden, **place)
        return None


# Sums of partial products in the order of the ranks.
#
# An all-reduce adds the ranks' parts in an order that depends on the size of the message, so with more than two ranks
# the sum of a row depends on how many rows a pass has. Here every rank gathers the parts, in the dtype of the weights,
# and adds them in float32 from rank 0 up. The cost is tp times the bytes of the parts.

ORDERED = ("rowwise", "rowwise_rep", "rowwise_split_input")  # styles of transformers whose sums are replaced
COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "embedding_colwise")
WITHOUT_SUMS = (*COLUMNS, "replicated_with_grad_allreduce", "replicate", "local_params", "embedding_rowwise")
"""Styles that add nothing, or one number and zeros."""


def ordered_sum(part: Tensor, group: Any) -> Tensor:
    """Return the sum of all ranks' parts, added in float32 in the order of the ranks, in the parts' dtype."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    wide = torch.float64 if part.dtype == torch.float64 else torch.float32
    return functools.reduce(torch.add, (other.to(wide) for other in parts)).to(part.dtype)


@contextmanager
def ordered_sums() -> Iterator[None]:
    """Let models that are loaded inside add their partial products in the order of the ranks."""
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import RowwiseParallel

    class Ordered(RowwiseParallel):
        def transform_output_post_forward(self, module: Any, output: Tensor, mesh: Any) -> Tensor:
            total = ordered_sum(output, mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp"))
            bias = module._parameters.get("bias")
            return total if bias is None else total + (bias.to_local() if hasattr(bias, "to_local") else bias)

    before = {name: ALL_PARALLEL_STYLES[name] for name in ORDERED}
    for name, style in before.items():
        ALL_PARALLEL_STYLES[name] = Ordered(input_layouts=style.input_layouts)
    try:
        yield
    finally:
        for name in before:
            del ALL_PARALLEL_STYLES[name]


def require_divisible(config: Any, options: ModelOptions) -> None:
    """Check that the heads and layers of a model can be divided; loads nothing."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    plan = getattr(text, "base_model_tp_plan", None)
    if options.tp > 1 and not plan:
        raise ConfigurationError(
            f"transformers has no tensor-parallel plan for '{options.model}' of type '{text.model_type}': use tp=1"
        )
    for what, count in (("key-value heads", kv_heads), ("attention heads", heads)):
        if count % options.tp:
            possible = [size for size in range(1, kv_heads + 1) if not kv_heads % size and not heads % size]
            raise ConfigurationError(
                f"'{options.model}' has {count} {what}, which cannot be divided evenly among tp={options.tp} processes"
                f": use tp of {', '.join(map(str, possible))}"
            )
    if options.pp > 1 and not getattr(text, "base_model_pp_plan", None):
        raise ConfigurationError(
            f"transformers cannot divide the layers of '{options.model}' of type '{text.model_type}' into stages: "
            "use pp=1"
        )
    if options.pp > int(text.num_hidden_layers):
        raise ConfigurationError(
            f"'{options.model}' has {text.num_hidden_layers} layers, fewer than pp={options.pp} stages: use a "
            "smaller pp"
        )
    strange = sorted({*(plan or {}).values()}.difference(ORDERED, WITHOUT_SUMS))
    if options.strict_sums and strange:
        raise UnsupportedModelError(
            f"strict_sums cannot order the sums of '{options.model}' (style {strange[0]}): leave strict_sums out"
        )


class ShardedReader:
    """Reads a process's share of a model, in place of a class of transformers."""

    def __init__(self, options: ModelOptions) -> None:
        self._options = options

    def from_pretrained(self, folder: Any, *, trust_remote_code: bool = False, **settings: Any) -> Any:
        """Load the share; arguments and result are those of `AutoModelForCausalLM.from_pretrained`."""
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        division = DistributedConfig(tp_size=self._options.tp, pp_size=self._options.pp)
        loader: Any = AutoModelForCausalLM
        with ExitStack() as changes:
            if self._options.strict_sums:
                changes.enter_context(ordered_sums())
            if self._options.tp > 1 and self._options.pp > 1:
                changes.enter_context(plans_of_stages())
            return loader.from_pretrained(
                folder, distributed_config=division, trust_remote_code=trust_remote_code, **settings
            )


class ShardedModel(HFModel):
    """Share of a transformers model as a `LanguageModel`; its passes are those of all processes together."""

    def __init__(
        self, model: Any, options: ModelOptions, *, row_buckets: Sequence[int] = (), shapes: Shapes | None = None
    ) -> None:
        import transformers

        self._stage = Stage(model, transformers.__version__) if options.pp > 1 else None
        super().__init__(model, row_buckets=row_buckets, shapes=shapes)

    @property
    def footprint(self) -> Footprint:
        local = (getattr(weight, "to_local", lambda weight=weight: weight)() for weight in self.model.parameters())
        return replace(super().footprint, weights=sum(tensor.numel() * tensor.element_size() for tensor in local))

    def _require_calls(self, probe: ProbePass, num_layers: int) -> None:
        if self._stage is None:
            super()._require_calls(probe, num_layers)
            return
        has_states = self._mixers is not None and bool(self._mixers.mixers)
        if not (probe.shapes or has_states) or not probe.windows_of_calls <= probe.windows_of_masks:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} calls the registered attention in none of the layers of a stage, or with "
                "other windows than its masks have"
            )

    def _model_logits(self, arguments: dict[str, Any]) -> Tensor | None:
        return super()._model_logits(arguments) if self._stage is None else self._stage.logits(**arguments)


@dataclass(frozen=True, slots=True)
class LoadedShare:
    model: SlottedModel  # the share
    folder: Path  # folder of the model's files
    reference: ReferenceLogits  # logits of the self-check
    # what rank 0 needs to know of this share, and "samples" of its weights in hexadecimal digits if the fingerprint
    # has to be put together
    facts: dict[str, Any]
    eos_ids: tuple[int, ...]  # tokens that end a text
    is_fixed: bool  # whether passes are native or have fixed shapes, so that rows may have the same bits in every pass
    kernels: str  # name of the kernels
    quantization: str | None = None  # of the weights
    tolerance: float | None = None  # of the self-check; None for that of the dtype
    releases: tuple[Callable[[], None], ...] = ()  # functions that let a pass return that waits for an ended process

    @property
    def is_native(self) -> bool:
        return isinstance(self.model, NativeModel)


def load_share(world: World, options: ModelOptions) -> LoadedShare:
    """Load this process's share; all processes call it."""
    require_possible(world, options)
    device = local_device(options.device, world)
    folder = resolve_model(options.model, reason="processes that share a model read plain weights")
    if is_encoder_decoder(folder):
        raise ConfigurationError(
            f"'{options.model}' is an encoder-decoder model, which one process runs: leave {options.division} out"
        )
    return _loaded(world, folder, options, device)


def _loaded(world: World, folder: Path, options: ModelOptions, device: torch.device) -> LoadedShare:
    if options.kernels in ("auto", "native") and device.type == "cpu":
        try:
            return _load_native(world, folder, options, device)
        except NativeUnavailableError as reason:
            if options.kernels == "native" or options.quantization is not None:
                raise NativeUnavailableError(
                    f"model '{options.model}' cannot run on native kernels: {reason}"
                ) from reason
            logger.info("%s: passes run in PyTorch: %s", options.model, reason)
    return _load_torch(world, folder, options, device)


def _load_native(world: World, folder: Path, options: ModelOptions, device: torch.device) -> LoadedShare:
    """Load this process's share of a native model."""
    if options.pp > 1:
        raise NativeUnavailableError("native kernels have no stages: use tp")
    if not world.is_one_machine:
        raise NativeUnavailableError("native kernels share memory, and the processes run on several machines")
    dtype = resolve_dtype(options.dtype, device)
    if options.trust_remote_code and code_named_in(folder):
        raise NativeUnavailableError("it runs code of its own")
    model = read_model(folder, dtype, device, trust_remote_code=options.trust_remote_code)
    model.eval().requires_grad_(False)
    with in_float32(model):  # as for one process
        reference = reference_logits(model)
    blueprint, eos_ids = plan_lowering(HFModel(model)), eos_ids_in(model)
    memory = team_memory(world)
    share = divide(blueprint, world.rank, world.size, memory)
    tolerance = QUANTIZED_TOLERANCE.get(options.quantization or "")
    if options.quantization == "int4" and world.rank == 0:
        reference, tolerance = whole_reference(model, blueprint, reference)
    ours = NativeModel(blueprint, ModelWeights(model), quantization=options.quantization, share=share)
    return LoadedShare(
        ours,
        folder,
        reference,
        facts_of(ours),
        eos_ids,
        is_fixed=True,
        kernels=f"native ({ours.instructions})",
        quantization=options.quantization,
        tolerance=tolerance,
        releases=(memory.release,),
    )


def facts_of(model: SlottedModel) -> dict[str, Any]:
    """Return what rank 0 needs to know of a share."""
    return {"max_length": model.max_length, "state": model.footprint.state, "node": model.footprint.node}


def team_memory(world: World) -> TeamMemory:
    """Return memory that all processes of this machine share; all processes call it."""
    TeamMemory.require_possible()
    key = world.next_name("memory")
    if world.rank == 0:
        memory = TeamMemory.create()
        world.store.set(key, memory.path)
        return memory
    return TeamMemory.opened(world.store.get(key).decode())


def require_possible(world: World, options: ModelOptions) -> None:
    if world.size != options.num_processes:
        raise ConfigurationError(
            f"{options.division} needs {options.num_processes} processes, and {world.size} were started: start "
            f"torchrun with --nproc-per-node {options.num_processes}, or change tp and pp so that their product is "
            f"{world.size}"
        )
    if options.kernels == "graphs" and options.pp > 1:
        raise ConfigurationError("kernels 'graphs' have no stages: use pp=1, or other kernels")


def _load_torch(world: World, folder: Path, options: ModelOptions, device: torch.device) -> LoadedShare:
    from transformers import AutoConfig

    if options.kernels == "graphs" and device.type == "cuda":
        raise ConfigurationError("kernels 'graphs' do not capture exchanges between GPUs: use tp=1, or other kernels")
    require_extra("parallel", "models divided among processes need", error=ConfigurationError)
    require_distributed()
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=options.trust_remote_code)
    require_divisible(config, options)
    require_group(world, options, device)
    dtype = resolve_dtype(options.dtype, device)
    model = read_model(
        folder, dtype, device, trust_remote_code=options.trust_remote_code, reader=ShardedReader(options)
    )
    model.eval().requires_grad_(False)
    reference = reference_logits(model)  # before the attention is replaced
    shapes = Shapes() if options.kernels == "graphs" else None
    ours = ShardedModel(model, options, row_buckets=row_buckets(model), shapes=shapes)
    facts = facts_of(ours)
    if options.pp > 1:
        facts["samples"] = {key: value.hex() for key, value in samples_of(model).items()}
    return LoadedShare(ours, folder, reference, facts, eos_ids_in(model), shapes is not None, "torch")


def require_distributed() -> None:
    """Raise if the installed transformers cannot divide models."""
    import transformers

    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        DistributedConfig = None  # type: ignore[assignment,misc]
    fields = getattr(DistributedConfig, "__dataclass_fields__", {})
    if not {"tp_size", "pp_size"} <= set(fields):
        raise ConfigurationError(
            f"transformers {transformers.__version__} cannot divide a model into tp and pp: install transformers 5.23 "
            "or newer"
        )


def load_together(options: ModelOptions) -> LoadedModel:
    """Load a model in all processes of the job.

    On rank 0 the model is returned. On the other ranks this function runs the passes of their shares until rank 0 has
    ended, and then ends the process.
    """
    if not isinstance(options.model, str | os.PathLike):
        raise ConfigurationError(
            f"{options.division} needs the name or the folder of a model: each process loads its own share"
        )
    world = current_world(options)
    if world.rank == 0:
        if world.is_divided:
            raise ConfigurationError(
                "this job has divided a model already, and its other processes belong to that one: start another job"
            )
        world.is_divided = True
        return lead(world, options)
    member = Member(world)
    with signals_ignored():
        attend(world, member, options)
    raise SystemExit(0)


def lead(world: World, options: ModelOptions) -> LoadedModel:
    """Load rank 0's share, and check the model together with the other ranks."""
    leader = Leader(world)
    try:
        share = load_share(world, options)
        leader.lifelines.releases.extend(share.releases)
        facts = [share.facts, *(json.loads(data) for data in leader.reports())]
        return _checked(share, leader, options, facts)
    except RankError:
        raise
    except DraftreeError:
        leader.drop()
        raise
    except Exception as error:  # often one of a collective operation, which another rank left
        leader.give_up(error)
    except BaseException:
        leader.drop()
        raise


def attend(world: World, member: Member, options: ModelOptions) -> None:
    """Load another rank's share and run its passes until rank 0 stops; on failure the process ends with status 1."""
    try:
        share = load_share(world, options)
        member.lifelines.releases.extend(share.releases)
        member.report(json.dumps(share.facts).encode())
        follow(share.model, member, has_parts=share.is_native)
        member.close()
        return
    except RankError as error:
        logger.info("%s", error)
    except DraftreeError as error:
        logger.info("rank %d cannot run its share: %s", world.rank, error)
        # mostly one that rank 0 raises as well, and shows; it must not be ended before
        member.lifelines.wait(GRACE_SECONDS)
        member.lifelines.fail(str(error))
    except Exception as error:
        lost = member.lifelines.noticed()
        if lost is not None:  # then this is the error of a collective operation that another rank left
            logger.info("%s, so rank %d ends", lost, world.rank)
        else:
            logger.exception("rank %d failed", world.rank)
            member.lifelines.fail(first_line(error))
    _leave()


def _leave() -> NoReturn:
    """End the process at once: threads of a broken collective operation may never end."""
    logging.shutdown()
    os._exit(FAILED)


def _checked(share: LoadedShare, leader: Leader, options: ModelOptions, facts: Sequence[dict[str, Any]]) -> LoadedModel:
    """Check the whole model, which all ranks run by now."""
    shard = share.model
    shard.max_length = min(int(each["max_length"]) for each in facts)
    if "samples" in share.facts:
        samples = {key: bytes.fromhex(text) for each in facts for key, text in each["samples"].items()}
        shard.fingerprint = fingerprint_of(shard.kind, samples)
    model = ParallelModel(
        shard,
        leader,
        has_embeddings=options.pp == 1,
        has_parts=share.is_native,
        state=max(int(each["state"]) for each in facts),
        node=max(int(each["node"]) for each in facts),
    )
    result = check(model, share.reference, tolerance=share.tolerance)
    if not result.chains_ok or (share.is_native and not result.trees_ok):
        error = result.error if share.is_native else result.chain_error
        raise UnsupportedModelError(
            f"{shard.kind} gives other logits when it is divided (error {error:.1e} of their spread): use one process"
            + (", or kernels 'torch'" if share.is_native else "")
        )
    model.supports_trees = shard.supports_trees = result.trees_ok
    model.self_check = result
    # the order of other sums depends on the number of rows
    has_order = share.is_native or options.tp == 1 or options.strict_sums
    lengths = NATIVE_LENGTHS if share.is_native else EXACT_LENGTHS
    model.is_exact = share.is_fixed and has_order and result.is_exact and rounds_alike(model, lengths)
    return LoadedModel(model, share.folder, share.eos_ids, str(options.model), share.kernels, share.quantization)


ABORT_OPERATIONS = "2"  # value of torch that ends operations and not the process
TIMEOUT = timedelta(hours=2)  # reading large weights takes long; lifelines notice ended processes within seconds


def local_device(device: str, world: World) -> torch.device:
    """Return the device of this process: the GPU with its local rank, or the CPU."""
    resolved = resolve_device(device)
    if resolved.type == "cpu" and torch.cuda.is_available():
        raise ConfigurationError(
            "device 'cpu' with several processes needs a machine without visible GPUs: set CUDA_VISIBLE_DEVICES=''"
        )
    if resolved.type != "cuda":
        return resolved
    if resolved.index is not None and ":" in device:
        raise ConfigurationError(f"device is '{device}': each process has its own GPU, so use cuda or auto")
    if world.local_rank >= torch.cuda.device_count():
        raise ConfigurationError(
            f"this machine has {torch.cuda.device_count()} GPUs for {world.local_size} processes: start at most one "
            "process for each GPU"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def require_group(world: World, options: ModelOptions, device: torch.device) -> None:
    """Create the process group, or check that the existing one has this order of ranks."""
    rank = group_rank(world.rank, options)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world.size):
            raise ConfigurationError(
                f"this process is rank {dist.get_rank()} of a process group, and {options.division} needs rank {rank}: "
                "start a new job, and leave torch.distributed.init_process_group out"
            )
        return
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    # after an error of NCCL only its operations end: the process has to tell its clients first
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", ABORT_OPERATIONS)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"draftree/group/{options.pp}", world.store),
        rank=rank,
        world_size=world.size,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
