"""Loading of this process's share of a model: for passes in C, or for passes through torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import ConfigurationError, require_extra
from draftree.core.files import code_named_in
from draftree.loading.choices import require_known, resolve_dtype
from draftree.loading.encoder_decoder import is_encoder_decoder
from draftree.loading.endings import eos_ids_in
from draftree.loading.packed_reference import ROUNDED_TOLERANCE, whole_reference
from draftree.loading.reading import read_model
from draftree.loading.resolve import resolve_model
from draftree.loading.upcast import in_float32
from draftree.loading.wrapping import row_buckets
from draftree.models.check import QUANTIZED_TOLERANCE, ReferenceLogits, reference_logits
from draftree.models.kv.slotted import SlottedModel
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.lowering import plan_lowering
from draftree.models.native.model import NativeModel
from draftree.models.native.shares import TeamMemory, divide
from draftree.models.native.weights import ModelWeights
from draftree.models.torch.hf import HFModel
from draftree.models.torch.identity import samples_of
from draftree.models.torch.static.buckets import Shapes
from draftree.parallel.groups import local_device, require_group
from draftree.parallel.options import ParallelOptions
from draftree.parallel.settings import LoadSettings
from draftree.parallel.sharded import ShardedModel, ShardedReader, require_divisible
from draftree.parallel.world import World

__all__ = ["LoadedShare", "load_share"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedShare:
    """Share of a model in this process.

    Attributes:
        model: the share.
        folder: folder of the model's files.
        reference: logits of the self-check.
        facts: what rank 0 needs to know of this share: "max_length", and "samples" of its weights in hexadecimal
            digits if the fingerprint has to be put together.
        eos_ids: tokens that end a text.
        is_fixed: whether passes run in C or have fixed shapes, so that rows may have the same bits in every pass.
        kernels: name of the kernels.
        quantization: of the weights.
        tolerance: of the self-check; None for that of the dtype.
        releases: functions that let a pass return that waits for an ended process.
    """

    model: SlottedModel
    folder: Path
    reference: ReferenceLogits
    facts: dict[str, Any]
    eos_ids: tuple[int, ...]
    is_fixed: bool
    kernels: str
    quantization: str | None = None
    tolerance: float | None = None
    releases: tuple[Callable[[], None], ...] = ()

    @property
    def is_native(self) -> bool:
        """Whether passes run in C."""
        return isinstance(self.model, NativeModel)


def load_share(
    world: World, name: str | os.PathLike[str], options: ParallelOptions, settings: LoadSettings
) -> LoadedShare:
    """Load this process's share; all processes call it.

    Raises:
        DraftreeError: as `load_together`.
    """
    require_possible(world, options, settings)
    device = local_device(settings.device, world)
    folder = resolve_model(name, reason="processes that share a model read plain weights")
    if is_encoder_decoder(folder):
        raise ConfigurationError(f"'{name}' is an encoder-decoder model, which one process runs: leave {options} out")
    if settings.kernels in ("auto", "native") and device.type == "cpu":
        try:
            return _load_native(world, folder, options, settings, device)
        except NativeUnavailableError as reason:
            if settings.kernels == "native" or settings.quantization is not None:
                raise NativeUnavailableError(f"model '{name}' cannot run on native kernels: {reason}") from reason
            logger.info("%s: passes run through torch: %s", name, reason)
    return _load_torch(world, name, folder, options, settings, device)


def _load_native(
    world: World, folder: Path, options: ParallelOptions, settings: LoadSettings, device: torch.device
) -> LoadedShare:
    """Load this process's share of a model whose passes run in C.

    Raises:
        NativeUnavailableError: the model, the division or this machine has no native kernels.
    """
    if options.pp > 1:
        raise NativeUnavailableError("passes in C have no stages: use tp")
    if not world.is_one_machine:
        raise NativeUnavailableError("passes in C share memory, and the processes run on several machines")
    dtype = resolve_dtype(settings.dtype, device)
    if settings.trust_remote_code and code_named_in(folder):
        raise NativeUnavailableError("it runs code of its own")
    model = read_model(folder, dtype, device, trust_remote_code=settings.trust_remote_code)
    model.eval().requires_grad_(False)
    with in_float32(model):  # as for one process
        reference = reference_logits(model)
    blueprint, eos_ids = plan_lowering(HFModel(model)), eos_ids_in(model)
    memory = team_memory(world)
    share = divide(blueprint, world.rank, world.size, memory)
    tolerance = QUANTIZED_TOLERANCE.get(settings.quantization or "")
    if settings.quantization == "int4" and world.rank == 0:
        reference, tolerance = whole_reference(model, blueprint, reference), ROUNDED_TOLERANCE
    ours = NativeModel(blueprint, ModelWeights(model), quantization=settings.quantization, share=share)
    facts = {"max_length": ours.max_length}
    kernels = f"native ({ours.instructions})"
    how = (True, kernels, settings.quantization, tolerance, (memory.release,))
    return LoadedShare(ours, folder, reference, facts, eos_ids, *how)


def team_memory(world: World) -> TeamMemory:
    """Return memory that all processes of this machine share; all processes call it.

    Raises:
        NativeUnavailableError: the system has none.
    """
    TeamMemory.require_possible()
    key = world.next_name("memory")
    if world.rank == 0:
        memory = TeamMemory.create()
        world.store.set(key, memory.path)
        return memory
    return TeamMemory.opened(world.store.get(key).decode())


def require_possible(world: World, options: ParallelOptions, settings: LoadSettings) -> None:
    """Check the options before anything is loaded.

    Raises:
        ConfigurationError: they do not fit together, or to the number of processes.
    """
    require_known(settings.kernels, settings.quantization)
    if world.size != options.num_processes:
        raise ConfigurationError(
            f"{options} needs {options.num_processes} processes, and {world.size} were started: start torchrun with "
            f"--nproc-per-node {options.num_processes}, or change tp and pp so that their product is {world.size}"
        )
    if settings.kernels == "graphs" and options.pp > 1:
        raise ConfigurationError("kernels 'graphs' have no stages: use pp=1, or other kernels")


def _load_torch(
    world: World,
    name: str | os.PathLike[str],
    folder: Path,
    options: ParallelOptions,
    settings: LoadSettings,
    device: torch.device,
) -> LoadedShare:
    from transformers import AutoConfig

    if settings.kernels == "graphs" and device.type == "cuda":
        raise ConfigurationError("kernels 'graphs' do not capture exchanges between GPUs: use tp=1, or other kernels")
    require_extra("parallel", "models divided among processes need", error=ConfigurationError)
    require_distributed()
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=settings.trust_remote_code)
    require_divisible(str(name), config, options)
    require_group(world, options, device)
    dtype = resolve_dtype(settings.dtype, device)
    model = read_model(
        folder, dtype, device, trust_remote_code=settings.trust_remote_code, reader=ShardedReader(options)
    )
    model.eval().requires_grad_(False)
    reference = reference_logits(model)  # before the attention is replaced
    shapes = Shapes() if settings.kernels == "graphs" else None
    ours = ShardedModel(model, options, row_buckets=row_buckets(model), shapes=shapes)
    facts: dict[str, Any] = {"max_length": ours.max_length}
    if options.pp > 1:
        facts["samples"] = {key: value.hex() for key, value in samples_of(model).items()}
    return LoadedShare(ours, folder, reference, facts, eos_ids_in(model), shapes is not None, "torch")


def require_distributed() -> None:
    """Raise if the installed transformers cannot divide models.

    Raises:
        ConfigurationError: it cannot.
    """
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
