"""Loading of a model by name as a `LanguageModel`: files, dtype, device, packing, self-check."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from draftree.core.errors import ConfigurationError, ModelLoadError, UnsupportedModelError
from draftree.core.files import code_named_in
from draftree.core.host import address_space_limit, parse_size
from draftree.loading.blocks import load_gguf, load_packed_checkpoint
from draftree.loading.encoder_decoder import is_encoder_decoder, reader_class, refuse_options
from draftree.loading.loaded import LoadedModel, sampling_of
from draftree.loading.native_start import PackedStart, start_key
from draftree.loading.options import plain_reason, resolve_place, shapes_of
from draftree.loading.resolve import is_block_file, resolve_model
from draftree.loading.transformers_model import eos_ids_in, read_model, require_graphs, wrap_model
from draftree.models.base import LanguageModel
from draftree.models.memory import free_memory
from draftree.models.native.build import NativeMismatchError, NativeUnavailableError
from draftree.models.native.model import NativeModel
from draftree.options import ModelOptions, takes_arguments_of
from draftree.remote.address import is_remote
from draftree.sampling.params import NEUTRAL
from draftree.weights.cache import Cache, is_distrusted, steps
from draftree.weights.packed_checkpoint import quantization_of

logger = logging.getLogger(__name__)

NO_STREAMING = "PyTorch was requested, or native kernels are not available here"


def with_kv_dtype(loaded: LoadedModel, kv_dtype: str) -> LoadedModel:
    model = loaded.model
    if not isinstance(model, NativeModel):
        where = "on another machine" if loaded.kernels == "remote" else "in PyTorch"
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


@takes_arguments_of(ModelOptions)
def load_model(options: ModelOptions) -> LoadedModel:
    """Load the model that the options name, or wrap the one that they hold.

    Raises:
        ConfigurationError: an option is not possible here, or for this kind of model.
        ModelNotFoundError: there is no such model, or it is not available here.
        ModelLoadError: its files are damaged, it needs Python code, or this process may map too little memory.
        UnsupportedModelError: its architecture is not supported.
    """
    if not isinstance(options.model, str | os.PathLike):
        return _wrap(options)
    limit = address_space_limit()
    if limit is not None and limit < LEAST_ADDRESS_SPACE:
        raise ModelLoadError(
            f"this process may map {limit >> 20} MiB of memory, and loading a model takes at least "
            f"{LEAST_ADDRESS_SPACE >> 20} MiB: raise the limit (ulimit -v)"
        )
    if limit is not None:
        torch.ones(1 << 20).sum()  # starts threads: libgomp ends the process where there is no memory for them later
    if is_remote(options.model):
        from draftree.loading.remote import load_remote

        loaded = load_remote(options)
    else:
        loaded = _LocalLoad(options).run()
    return loaded if options.kv_dtype is None else with_kv_dtype(loaded, options.kv_dtype)


class _LocalLoad:
    """One load of a model on this machine. Its loaders share the folder, the start and the transformers model."""

    def __init__(self, options: ModelOptions) -> None:
        self._name: str | os.PathLike[str] = options.model
        self._options = options
        self._device, self._dtype = resolve_place(options)
        self._reason: str | None = None  # why the loader before could not load the model
        self._start: PackedStart | None = None
        self._runs_code = False
        self._model: Any = None

    def run(self) -> LoadedModel:
        """Return the model of the first loader that can load it; the last one can, or raises."""
        for load in (self._gguf, self._packed_checkpoint, self._later_start, self._native, self._torch):
            loaded = load()
            if isinstance(loaded, LoadedModel):
                return loaded
            self._reason = loaded
        raise AssertionError("the last loader returns a model or raises")

    def _gguf(self) -> LoadedModel | str | None:
        reason = plain_reason(self._options, self._device)
        if reason is None and is_block_file(self._name):
            try:
                return load_gguf(self._name, self._dtype)
            except NativeUnavailableError as error:
                return str(error)
        return reason

    def _packed_checkpoint(self) -> LoadedModel | None:
        self._folder = resolve_model(self._name, reason=self._reason or "")
        if self._device.type != "cpu":
            return None  # transformers has kernels for them
        reason = plain_reason(self._options, self._device)
        return load_packed_checkpoint(self._name, self._folder, self._dtype, plain_reason=reason)

    def _later_start(self) -> LoadedModel | None:
        options = self._options
        self._has_encoder = is_encoder_decoder(self._folder)
        if self._has_encoder:
            refuse_options(options)
            return None
        self._runs_code = options.trust_remote_code and bool(code_named_in(self._folder))
        self._start = self._recorded_start()
        if self._start is not None and (start := self._start.load()) is not None:
            model, record = start
            name, quantization = str(self._name), options.quantization
            return LoadedModel.native(model, self._folder, record.eos_ids, name=name, quantization=quantization)
        if self._start is not None and is_distrusted(self._folder, Cache().root):
            self._folder = resolve_model(self._name)  # compares files with their sums: installs them again, or raises
            self._start = self._recorded_start()
        return None

    def _recorded_start(self) -> PackedStart | None:
        options = self._options
        if not options.allows_native or self._device.type != "cpu" or self._runs_code:
            return None
        key = start_key(self._folder, self._dtype, options.quantization, is_needed=options.offload is not None)
        return None if key is None else PackedStart(key, options.offload)

    def _read(self, placement: Mapping[str, Any] | None = None) -> Any:
        if self._model is None:
            from draftree.loading.image_text import image_text_reader  # later starts do not need it

            steps.info("%s: reading weights through transformers", self._name)
            if placement is None and self._device.type != "cpu" and quantization_of(self._folder) is not None:
                placement = {"device_map": {"": self._device}}  # quantized weights are made where they stay
            self._model = read_model(
                self._folder,
                self._dtype,
                self._device,
                trust_remote_code=self._options.trust_remote_code,
                reader=reader_class(self._folder) if self._has_encoder else image_text_reader(self._folder),
                placement=placement,
            )
        return self._model

    def _native(self) -> LoadedModel | str | None:
        from draftree.loading.lowering import lower_encoder_decoder, lower_model  # later starts do not need it

        name, options = str(self._name), self._options
        streams = options.offload is not None
        if not (streams or options.allows_native):
            return None
        try:
            if streams and self._start is None:
                raise NativeUnavailableError(NO_STREAMING)
            model = self._read()
            if self._has_encoder:
                ours = lower_encoder_decoder(model, name, quantization=options.quantization)
                eos_ids = eos_ids_in(model)
                return LoadedModel.native(ours, self._folder, eos_ids, name=name, quantization=options.quantization)
            lowered = lower_model(
                model, folder=self._folder, name=name, quantization=options.quantization, start=self._start
            )
            return replace(lowered, runs_code=self._runs_code)
        except NativeUnavailableError as reason:
            if options.requires_native:
                does = "stream its weights to" if streams else "run on"
                raise NativeUnavailableError(f"model '{name}' cannot {does} native kernels: {reason}") from reason
            logger.info("%s: passes run in PyTorch: %s", name, reason)
            if streams or isinstance(reason, NativeMismatchError):
                self._model = None  # other places of its weights, or they were released
            return str(reason)

    def _torch(self) -> LoadedModel:
        options = self._options
        placement = None if options.offload is None else torch_placement(self._device, options.offload)
        is_on_gpu = self._device.type == "cuda" and options.offload is None  # offloaded weights move
        model = self._read(placement)
        if model.device.type == "meta":  # tokens go where the embedding is
            raise ConfigurationError(
                f"offload is {options.offload!r}, which in PyTorch is too little for the embedding beside the largest "
                f"layer of '{self._name}': give more"
            )
        loaded = wrap_model(
            model,
            folder=self._folder,
            name=str(self._name),
            packed=options.offload is None,
            shapes=shapes_of(options, self._device, by_default=is_on_gpu),
        )
        if options.kernels == "graphs":
            require_graphs(loaded)
        reason = loaded.fallback_reason if self._reason is None else self._reason
        return replace(loaded, fallback_reason=reason, runs_code=self._runs_code)


def torch_placement(device: torch.device, offload: str | int) -> Mapping[str, Any]:
    """Return the arguments of `from_pretrained` with which accelerate keeps `offload` bytes on the device."""
    if find_spec("accelerate") is None:
        raise ConfigurationError(
            f"offload is {offload!r}, and passes run in PyTorch, which needs the package 'accelerate': install it, "
            "or use a model and a device with native kernels"
        )
    budget = parse_size(offload)
    memory: dict[Any, int] = {"cpu": budget}
    if device.type == "cuda":
        memory = {device.index or 0: budget, "cpu": free_memory(torch.device("cpu")) or budget}
    folder = Cache().root / "offloaded"  # for weights that fit nowhere else and are in no safetensors file
    folder.mkdir(parents=True, exist_ok=True)
    return {"device_map": "auto", "max_memory": memory, "offload_folder": str(folder)}


def _wrap(options: ModelOptions) -> LoadedModel:
    """Return a model that was loaded before; raises for options that are chosen when a model is loaded."""
    model = options.model
    for name in ("offload", "kv_dtype"):
        if getattr(options, name) is not None:
            raise ConfigurationError(
                f"{name} is chosen when a model is loaded, and this one is already loaded: give its name or its folder"
            )
    is_wrapped = isinstance(model, LoadedModel | LanguageModel)
    if options.kernels == "native" or options.quantization is not None or (options.kernels == "graphs" and is_wrapped):
        raise ConfigurationError(
            "kernels and quantization are chosen when a model is loaded, and this one is already loaded: "
            "give its name or its folder"
        )
    if options.dtype != "auto" or options.device != "auto":
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
    loaded = replace(wrap_model(model, shapes=shapes_of(options, model.device, by_default=False)), sampling=sampling)
    if options.kernels == "graphs":
        return require_graphs(loaded)
    why = None if options.kernels == "torch" else "it was loaded before, and its weights stay unchanged"
    return replace(loaded, fallback_reason=why)
