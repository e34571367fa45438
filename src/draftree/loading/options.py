"""The device and the dtype of a model by its options."""

from __future__ import annotations

import platform

import torch

from draftree.core.errors import ConfigurationError, suggestion
from draftree.models.torch.static import Shapes
from draftree.options import ModelOptions

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def resolve_device(device: str) -> torch.device:
    """Return the torch device; "auto" is CUDA if such a GPU is available, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(
            f"device '{device}' is not known to torch: use auto, cpu, cuda, cuda:N, xpu or mps"
        ) from error
    if resolved.type not in ("cpu", "cuda", "xpu", "mps"):
        raise ConfigurationError(f"device '{device}' is not supported: use auto, cpu, cuda, xpu or mps")
    if resolved.type != "cpu":
        count = getattr(torch, resolved.type).device_count()
        if (resolved.index or 0) >= count:
            raise ConfigurationError(
                f"device '{device}' does not exist: this machine has {count} devices of type {resolved.type}; use cpu"
            )
    return resolved


def has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    if device.type != "cpu":
        return bool(getattr(torch, device.type).is_bf16_supported(including_emulation=False))
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, lambda: False)()) for probe in probes)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the torch dtype; "auto" is bfloat16 if the device has it, else float16 on a GPU and float32 on a CPU."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        narrow = torch.float32 if device.type == "cpu" else torch.float16
        return torch.bfloat16 if has_native_bfloat16(device) else narrow
    if dtype not in DTYPES:
        raise ConfigurationError(f"unknown dtype '{dtype}': {suggestion(str(dtype), ['auto', *DTYPES])}")
    return DTYPES[dtype]


def resolve_place(options: ModelOptions) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype of a model; raise for options that the device does not have."""
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    if options.kv_dtype is not None and device.type != "cpu":
        raise ConfigurationError(
            f"kv_dtype '{options.kv_dtype}' needs native kernels, which run on a CPU: use device 'cpu', or leave "
            "kv_dtype out"
        )
    if options.exact and device.type == "cuda" and (options.kernels == "torch" or options.offload is not None):
        raise ConfigurationError("exact on a GPU needs kernels 'graphs' or 'auto' and no offload, or use device 'cpu'")
    return device, dtype


def shapes_of(options: ModelOptions, device: torch.device, *, by_default: bool) -> Shapes | None:
    """Return the shapes of passes in PyTorch; None for dynamic ones. `by_default`: whether "auto" is static."""
    is_exact = options.exact and device.type == "cuda"
    is_static = options.kernels == "graphs" or (options.kernels == "auto" and by_default)
    return Shapes(exact=is_exact) if is_static or is_exact else None


def plain_reason(options: ModelOptions, device: torch.device) -> str | None:
    """Return the option that needs plain weights; None if a model may run on the blocks of its files."""
    if options.quantization is not None:
        return f"quantization '{options.quantization}' needs plain weights"
    if options.offload is not None:
        return "offload needs plain weights"
    if not options.allows_native:
        return f"kernels '{options.kernels}' need plain weights"
    return None if device.type == "cpu" else f"device '{device}' needs plain weights"
