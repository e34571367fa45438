"""Loading of a model by name as a `LanguageModel`: files, dtype, device, packing, self-check."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import OUT_OF_MEMORY, ModelLoadError, is_out_of_memory
from draftree.core.files import code_named_in
from draftree.core.host import address_space_limit, return_free_memory
from draftree.loading.choices import require_known, resolve_device, resolve_dtype
from draftree.loading.encoder_decoder import (
    is_encoder_decoder,
    reader_class,
    refuse_kernels,
    refuse_offload,
)
from draftree.loading.endings import eos_ids_in
from draftree.loading.in_blocks import InBlocks, WeightChoice, load_in_blocks
from draftree.loading.kv_dtype import require_kv_dtype, with_kv_dtype
from draftree.loading.loaded import LoadedModel
from draftree.loading.offloading import (
    NO_STREAM,
    Offload,
    offload_folder,
    torch_placement,
)
from draftree.loading.packed_start import PackedStart
from draftree.loading.reading import first_line, read_model
from draftree.loading.resolve import resolve_model
from draftree.loading.warm_start.native_start import start_key
from draftree.loading.wrapping import wrap_model
from draftree.models.check import NATIVE_LENGTHS, QUANTIZED_TOLERANCE, check, reference_logits, rounds_alike
from draftree.models.native.build import NativeMismatchError, NativeUnavailableError
from draftree.models.native.model import NativeModel
from draftree.models.native.streaming.model import BudgetError
from draftree.models.native.weights import ModelWeights, places_in_files
from draftree.models.torch.static import Shapes
from draftree.remote.address import is_remote
from draftree.weights.cache import Cache
from draftree.weights.progress import steps
from draftree.weights.sums import is_distrusted

__all__ = ["LoadedModel", "eos_ids_in", "load_model", "lower_model", "wrap_model"]

LEAST_ADDRESS_SPACE = 1 << 30
"""Bytes that the imports of torch and transformers take: 1,008 MiB with one thread of OpenBLAS on x86-64 without CUDA.

With less, OpenBLAS may try again for ever to allocate its buffers.
"""

logger = logging.getLogger(__name__)


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
        kernels: "native" for passes in C, "torch" for passes through torch, "auto" for native if available;
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
        return _lowered(resolved.model, resolved.folder, resolved.eos_ids, name=str(name), quantization=resolved.kind)
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
        return _lowered(found[0], folder, found[1].eos_ids, name=str(name), quantization=quantization)
    if start is not None and is_distrusted(folder, Cache().root):
        folder = resolve_model(name)  # compares its files with their sums: installs it again, or raises
        key = start_key(folder, kind, quantization, is_needed=offload is not None)
        start = None if key is None else PackedStart(key, offload)
    if options is not None:
        return _load_offloaded(options, folder, name=str(name), kind=kind, where=where, start=start)
    steps.info("%s: reading weights through transformers", name)
    why, model = None, read_model(folder, kind, where, trust_remote_code=trust_remote_code)
    if kernels in ("auto", "native"):
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
    return replace(wrapped, why_torch=wrapped.why_torch if why is None else why, runs_code=runs_code)


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
        from draftree.loading.lowering_seq2seq import lower_encoder_decoder

        eos_ids = eos_ids_in(model)
        try:
            ours = lower_encoder_decoder(model, name, quantization=quantization)
            return _lowered(ours, folder, eos_ids, name=name, quantization=quantization)
        except NativeUnavailableError as reason:
            why = str(reason)
            if kernels == "native" or quantization is not None:
                raise NativeUnavailableError(f"model '{name}' cannot run on native kernels: {why}") from reason
            logger.info("%s: passes run through torch: %s", name, why)
            if isinstance(reason, NativeMismatchError):
                model = read()  # its weights were released
    return replace(wrap_model(model, folder=folder, name=name, packed=packed), why_torch=why)


def _load_offloaded(
    options: Offload, folder: Path, *, name: str, kind: torch.dtype, where: torch.device, start: PackedStart | None
) -> LoadedModel:
    """Load a model whose weights are read in every pass: through passes in C, else through accelerate."""
    trusts, why = options.trust_remote_code, None
    if start is not None:
        model = read_model(folder, kind, where, trust_remote_code=trusts)
        try:
            return lower_model(model, folder=folder, name=name, quantization=options.quantization, start=start)
        except NativeUnavailableError as reason:
            why = str(reason)
            del model
    if options.kernels == "native" or options.quantization is not None:
        raise NativeUnavailableError(f"model '{name}' cannot stream its weights to native kernels: {why or NO_STREAM}")
    placement = torch_placement(where, options.memory, offload_folder())
    model = read_model(folder, kind, where, trust_remote_code=trusts, placement=placement)
    return replace(wrap_model(model, folder=folder, name=name), why_torch=why or NO_STREAM)


def lower_model(
    model: Any,
    *,
    folder: Path | None = None,
    name: str = "",
    quantization: str | None = None,
    start: PackedStart | None = None,
) -> LoadedModel:
    """Convert a transformers model to native kernels and check it. The model's own weights are released.

    Args:
        model: a `…ForCausalLM`.
        folder: folder of its files, if it was loaded from files.
        name: name in messages.
        quantization: "int8" or "int4" for weights of 8 or 4 bits, None for the model's own.
        start: keeps what later starts need; None keeps nothing.

    Raises:
        NativeUnavailableError: its architecture or this machine has no native kernels; the model is intact.
        NativeMismatchError: the native model computes other logits; the model's weights were released.
    """
    # later starts need none of these
    from draftree.loading.packed_reference import checked_packed
    from draftree.loading.upcast import in_float32
    from draftree.models.native.describe import plan_model

    model.eval().requires_grad_(False)
    implementation = model.config._attn_implementation
    eos_ids, found = eos_ids_in(model), name or type(model).__name__
    try:
        with in_float32(
            model
        ):  # a reference with as much rounding error as the tolerance would reject more accurate logits
            reference = reference_logits(model)
        blueprint = plan_model(model)
        steps.info("%s: packing weights for native kernels", found)
        if start is None:
            ours = NativeModel(blueprint, ModelWeights(model), quantization=quantization)
            places = None
        else:
            # streamed weights are larger than memory, and reading them once more takes long
            places = None if start.streams else places_in_files(model, blueprint.names, start.key.folder)
            ours = start.build(blueprint, ModelWeights(model))
    except (ModelLoadError, BudgetError):
        raise
    except NativeUnavailableError:
        model.set_attn_implementation(implementation)
        raise
    except Exception as error:  # a model's own code may raise anything
        if is_out_of_memory(error):
            raise ModelLoadError(f"model '{found}' could not be packed: {OUT_OF_MEMORY}") from error
        raise NativeUnavailableError(first_line(error)) from error
    steps.info("%s: comparing logits with those of transformers", found)
    tolerance, compares = QUANTIZED_TOLERANCE.get(quantization or ""), start is None or not start.streams
    result = check(ours, reference, tolerance=tolerance, compares_tokens=compares)
    if not (result.chains_ok and result.trees_ok):
        raise NativeMismatchError(f"its logits differ there (error {max(result.chain_error, result.tree_error):.1e})")
    if quantization == "int4":
        result = checked_packed(model, ours, result)
    is_alike = start.is_exact if start is not None and start.streams else rounds_alike(ours, NATIVE_LENGTHS)
    result = replace(result, is_exact=result.is_exact and is_alike)
    ours.is_exact, ours.self_check = result.is_exact, result
    if start is not None:
        start.record(ours, eos_ids, places)
    if quantization is not None:
        ours.free_slots()  # of the comparisons
        return_free_memory()  # of the weights before rounding
    return _lowered(ours, folder, eos_ids, name=found, quantization=quantization)


def _lowered(
    model: NativeModel, folder: Path | None, eos_ids: tuple[int, ...], *, name: str, quantization: str | None
) -> LoadedModel:
    return LoadedModel(model, folder, eos_ids, name, f"native ({model.instructions})", quantization)
