"""Loading of a model by name as a `LanguageModel`: files, dtype, device, packing, self-check."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import (
    ConfigurationError,
    ModelLoadError,
    UnsupportedModelError,
)
from draftree.core.files import code_named_in
from draftree.core.host import address_space_limit
from draftree.loading.blocks import InBlocks, WeightChoice, load_in_blocks
from draftree.loading.encoder_decoder import (
    is_encoder_decoder,
    reader_class,
    refuse_kernels,
    refuse_offload,
)
from draftree.loading.loaded import LoadedModel, sampling_of
from draftree.loading.native_start import PackedStart, start_key
from draftree.loading.options import require_known, require_kv_dtype, resolve_device, resolve_dtype
from draftree.loading.resolve import resolve_model
from draftree.loading.transformers_model import eos_ids_in, read_model, wrap_model
from draftree.models.base import LanguageModel
from draftree.models.memory import free_memory
from draftree.models.native.build import NativeMismatchError, NativeUnavailableError
from draftree.models.native.model import NativeModel
from draftree.models.native.streaming.model import parse_size
from draftree.models.torch.static import Shapes
from draftree.remote.address import is_remote
from draftree.sampling.params import NEUTRAL
from draftree.weights.cache import Cache, is_distrusted, steps

logger = logging.getLogger(__name__)

NO_STREAMING = "passes through torch were requested, or native kernels are not available here"


@dataclass(frozen=True, slots=True)
class Offload:
    """Options of a target whose weights are read in every pass.

    Attributes:
        memory: memory for its weights, such as "8GB".
        kernels: as for `load_model`.
        quantization: as for `load_model`.
        trust_remote_code: as for `load_model`.

    Raises:
        ConfigurationError: malformed memory, or kernels that cannot read weights in a pass.
    """

    memory: str | int
    kernels: str
    quantization: str | None
    trust_remote_code: bool

    def __post_init__(self) -> None:
        parse_size(self.memory)
        if self.kernels == "graphs":
            raise ConfigurationError(
                "kernels 'graphs' replay fixed addresses, and offloaded weights move: use 'auto', or leave offload out"
            )


def torch_placement(device: torch.device, offload: str | int, folder: Path) -> Mapping[str, Any]:
    """Return the arguments of `from_pretrained` with which accelerate places the modules of a model.

    Args:
        device: device of the passes.
        offload: memory for weights on it, such as "8GB".
        folder: an existing folder for weights that fit nowhere else and are in no safetensors file.

    Raises:
        ConfigurationError: malformed memory, or accelerate is not installed.
    """
    budget = parse_size(offload)
    if find_spec("accelerate") is None:
        raise ConfigurationError(
            f"offload is {offload!r}, and passes run through torch, which needs the package 'accelerate': install it, "
            "or use a model and a device with native kernels"
        )
    memory: dict[Any, int] = {"cpu": budget}
    if device.type == "cuda":
        memory = {device.index or 0: budget, "cpu": free_memory(torch.device("cpu")) or budget}
    return {"device_map": "auto", "max_memory": memory, "offload_folder": str(folder)}


def offload_folder() -> Path:
    """Return the folder of the cache in which accelerate may write weights; creates it."""
    place = Cache().root / "offloaded"
    place.mkdir(parents=True, exist_ok=True)
    return place


def with_kv_dtype(loaded: LoadedModel, kv_dtype: str) -> LoadedModel:
    """Return a model whose slots store keys and values in this format.

    Args:
        loaded: a model without open slots.
        kv_dtype: "int8".

    Raises:
        NativeUnavailableError: its passes do not run in C.
        UnsupportedModelError: it is an encoder-decoder model.
    """
    model = loaded.model
    if not isinstance(model, NativeModel):
        where = "on another machine" if loaded.kernels == "remote" else "through torch"
        why = loaded.fallback_reason or f"they run {where}"
        raise NativeUnavailableError(
            f"kv_dtype is '{kv_dtype}', which needs native kernels, and '{loaded.name}' has none here: {why}"
        )
    try:
        model.use_kv_dtype(kv_dtype)
    except UnsupportedModelError as error:
        raise ConfigurationError(str(error)) from error
    return loaded


LEAST_ADDRESS_SPACE = 1 << 30
"""Bytes that the imports of torch and transformers take: 1,008 MiB with one thread of OpenBLAS on x86-64 without CUDA.

With less, OpenBLAS may try again for ever to allocate its buffers.
"""


def load_model(
    name: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    kernels: str = "auto",
    quantization: str | None = None,
    packed: bool = True,
    trust_remote_code: bool = False,
    offload: str | int | None = None,
    kv_dtype: str | None = None,
) -> LoadedModel:
    """Load a model by catalogue name, folder, GGUF file or hub id.

    Args:
        name: the model.
        dtype: "auto", "float32", "bfloat16", "float16" or "float64".
        device: "auto", "cpu", "cuda", "cuda:N".
        kernels: "native" for native kernels, "torch" for PyTorch, "auto" for native if available;
            "graphs" for passes through torch in fixed shapes, as CUDA graphs on a GPU.
        quantization: "int8" or "int4" for weights of 8 or 4 bits with native kernels; None for no quantization.
        packed: whether float32 weights on a CPU are prepacked for torch.
        trust_remote_code: whether Python code in the model's folder may run.
        offload: memory for weights, such as "8GB"; the other weights are read in every pass. None for all in memory.
        kv_dtype: "int8" for keys and values of 8 bits with native kernels; None for the model's dtype.

    Raises:
        ConfigurationError: unknown options, or native kernels were requested but are not available.
        ModelNotFoundError: there is no such model, or it is not available here.
        ModelLoadError: its files are damaged, it needs Python code, or this process may map too little memory.
        UnsupportedModelError: its architecture is not supported.
    """
    limit = address_space_limit()
    if limit is not None and limit < LEAST_ADDRESS_SPACE:
        raise ModelLoadError(
            f"this process may map {limit >> 20} MiB of memory, and loading a model takes at least "
            f"{LEAST_ADDRESS_SPACE >> 20} MiB: raise the limit (ulimit -v)"
        )
    require_known(kernels, quantization)
    require_kv_dtype(kv_dtype, kernels, device)
    if kv_dtype is not None:
        load = partial(load_model, dtype=dtype, device=device, kernels=kernels, quantization=quantization)
        load = partial(load, packed=packed, trust_remote_code=trust_remote_code, offload=offload)
        return with_kv_dtype(load(name), kv_dtype)
    if is_remote(name):
        from draftree.loading.remote import load_remote

        return load_remote(
            str(name), dtype=dtype, device=device, kernels=kernels, quantization=quantization, offload=offload
        )
    options = None if offload is None else Offload(offload, kernels, quantization, trust_remote_code)
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    resolved = load_in_blocks(name, kind, WeightChoice(kernels, quantization, offload, where))
    if isinstance(resolved, InBlocks):
        return LoadedModel.native(
            resolved.model, resolved.folder, resolved.eos_ids, name=str(name), quantization=resolved.kind
        )
    folder = resolved
    if is_encoder_decoder(folder):
        refuse_kernels(str(name), kernels, quantization)
        refuse_offload(offload, str(name))
        read = partial(read_model, folder, kind, where, trust_remote_code=trust_remote_code)
        read = partial(read, reader=reader_class(folder))
        return _load_encoder_decoder(read, folder, str(name), kernels=kernels, quantization=quantization, packed=packed)
    runs_code = trust_remote_code and bool(code_named_in(folder))
    lowers = kernels in ("auto", "native") and where.type == "cpu" and not runs_code
    key = start_key(folder, kind, quantization, is_needed=offload is not None) if lowers else None
    start = None if key is None else PackedStart(key, offload)
    if start is not None and (found := start.load()) is not None:
        return LoadedModel.native(found[0], folder, found[1].eos_ids, name=str(name), quantization=quantization)
    if start is not None and is_distrusted(folder, Cache().root):
        folder = resolve_model(name)  # compares its files with their sums: installs it again, or raises
        key = start_key(folder, kind, quantization, is_needed=offload is not None)
        start = None if key is None else PackedStart(key, offload)
    if options is not None:
        return _load_offloaded(options, folder, name=str(name), kind=kind, where=where, start=start)
    steps.info("%s: reading weights through transformers", name)
    why, model = None, read_model(folder, kind, where, trust_remote_code=trust_remote_code)
    if kernels in ("auto", "native"):
        from draftree.loading.lowering import lower_model  # later starts do not need it

        try:
            ours = lower_model(model, folder=folder, name=str(name), quantization=quantization, start=start)
            return replace(ours, runs_code=runs_code)
        except NativeUnavailableError as reason:
            why = str(reason)
            if kernels == "native" or quantization is not None:
                raise NativeUnavailableError(f"model '{name}' cannot run on native kernels: {why}") from reason
            logger.info("%s: passes run through torch: %s", name, why)
            if isinstance(reason, NativeMismatchError):
                model = read_model(
                    folder, kind, where, trust_remote_code=trust_remote_code
                )  # its weights were released
    shapes = Shapes() if kernels == "graphs" else None
    wrapped = wrap_model(model, folder=folder, name=str(name), packed=packed, shapes=shapes)
    return replace(wrapped, fallback_reason=wrapped.fallback_reason if why is None else why, runs_code=runs_code)


def _load_encoder_decoder(
    read: Callable[[], Any], folder: Path, name: str, *, kernels: str, quantization: str | None, packed: bool
) -> LoadedModel:
    """Load an encoder-decoder model whose decoder runs in C if possible, else through torch.

    Args:
        read: reads it as a model of transformers.
        folder: folder of its files.
        name: name in messages.
        kernels: as for `load_model`.
        quantization: as for `load_model`.
        packed: as for `load_model`.
    """
    model, why = read(), None
    if kernels in ("auto", "native"):
        from draftree.loading.lowering import lower_encoder_decoder  # later starts do not need it

        eos_ids = eos_ids_in(model)
        try:
            ours = lower_encoder_decoder(model, name, quantization=quantization)
            return LoadedModel.native(ours, folder, eos_ids, name=name, quantization=quantization)
        except NativeUnavailableError as reason:
            why = str(reason)
            if kernels == "native" or quantization is not None:
                raise NativeUnavailableError(f"model '{name}' cannot run on native kernels: {why}") from reason
            logger.info("%s: passes run through torch: %s", name, why)
            if isinstance(reason, NativeMismatchError):
                model = read()  # its weights were released
    return replace(wrap_model(model, folder=folder, name=name, packed=packed), fallback_reason=why)


def _load_offloaded(
    options: Offload, folder: Path, *, name: str, kind: torch.dtype, where: torch.device, start: PackedStart | None
) -> LoadedModel:
    """Load a model whose weights are read in every pass: through native kernels, else through accelerate."""
    trusts, why = options.trust_remote_code, None
    if start is not None:
        model = read_model(folder, kind, where, trust_remote_code=trusts)
        from draftree.loading.lowering import lower_model  # later starts do not need it

        try:
            return lower_model(model, folder=folder, name=name, quantization=options.quantization, start=start)
        except NativeUnavailableError as reason:
            why = str(reason)
            del model
    if options.kernels == "native" or options.quantization is not None:
        raise NativeUnavailableError(
            f"model '{name}' cannot stream its weights to native kernels: {why or NO_STREAMING}"
        )
    placement = torch_placement(where, options.memory, offload_folder())
    model = read_model(folder, kind, where, trust_remote_code=trusts, placement=placement)
    return replace(wrap_model(model, folder=folder, name=name), fallback_reason=why or NO_STREAMING)


def load_target(
    model: Any,
    dtype: Any,
    device: str,
    *,
    kernels: str,
    quantization: str | None,
    trust_remote_code: bool = False,
    offload: str | int | None = None,
    kv_dtype: str | None = None,
) -> LoadedModel:
    """Load or wrap the target model.

    Raises:
        ConfigurationError: an option is not possible for this kind of model.
        ModelError: the model cannot be found or used.
    """
    require_known(kernels, quantization)
    require_kv_dtype(kv_dtype, kernels, device)
    if isinstance(model, str | os.PathLike):
        return load_model(
            model,
            dtype=dtype,
            device=device,
            kernels=kernels,
            quantization=quantization,
            trust_remote_code=trust_remote_code,
            offload=offload,
            kv_dtype=kv_dtype,
        )
    if offload is not None:
        raise ConfigurationError(
            "offload is chosen when a model is loaded, and this one is already loaded: give its name or its folder"
        )
    if kv_dtype is not None:
        raise ConfigurationError(
            "kv_dtype is chosen when a model is loaded, and this one is already loaded: give its name or its folder"
        )
    is_wrapped = isinstance(model, LoadedModel | LanguageModel)
    if kernels == "native" or quantization is not None or (kernels == "graphs" and is_wrapped):
        raise ConfigurationError(
            "kernels and quantization are chosen when a model is loaded, and this one is already loaded: "
            "give its name or its folder"
        )
    if dtype != "auto" or device != "auto":
        raise ConfigurationError("dtype and device belong to a loaded model already: leave them at 'auto'")
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, LanguageModel):
        return LoadedModel(model, None, (), type(model).__name__, fallback_reason="it implements its own passes")
    if not hasattr(model, "config") or not callable(model):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: give a name, a path, a transformers model or a LanguageModel"
        )
    settings = getattr(model, "generation_config", None)
    sampling = NEUTRAL if settings is None else sampling_of(settings.to_diff_dict(), "its generation_config")
    if kernels == "graphs":
        return replace(wrap_model(model, shapes=Shapes()), sampling=sampling)
    why = None if kernels == "torch" else "it was loaded before, and its weights stay unchanged"
    return replace(wrap_model(model), fallback_reason=why, sampling=sampling)
