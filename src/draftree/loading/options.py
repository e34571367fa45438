"""User options of execution: device, dtype, kernels, quantization, format of keys and values."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from draftree.core.errors import ConfigurationError, suggestion
from draftree.models.native.streaming.model import parse_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
KERNELS = ("auto", "native", "torch", "graphs")
QUANTIZATIONS = ("int8", "int4")
KV_DTYPES = ("int8",)


def resolve_device(device: str) -> torch.device:
    """Return the torch device; "auto" is CUDA if a GPU is available."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"device '{device}' is not known to torch: use auto, cpu, cuda or cuda:N") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ConfigurationError(f"device '{device}' does not exist: this machine has {count} CUDA devices; use cpu")
    if found.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device '{device}' is not supported: use auto, cpu or cuda")
    return found


def has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, lambda: False)()) for probe in probes)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the torch dtype; "auto" is bfloat16 if the device has native bfloat16, else float32."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        return torch.bfloat16 if has_native_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise ConfigurationError(f"unknown dtype '{dtype}': {suggestion(str(dtype), ['auto', *DTYPES])}")
    return DTYPES[dtype]


def require_known(kernels: str, quantization: str | None) -> None:
    if kernels not in KERNELS:
        raise ConfigurationError(f"unknown kernels '{kernels}': {suggestion(str(kernels), list(KERNELS))}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        known = list(QUANTIZATIONS)
        raise ConfigurationError(f"unknown quantization '{quantization}': {suggestion(str(quantization), known)}")
    if quantization is not None and kernels in ("torch", "graphs"):
        raise ConfigurationError(f"quantization '{quantization}' needs native kernels: leave kernels at 'auto'")


def require_kv_dtype(kv_dtype: str | None, kernels: str, device: str = "auto") -> None:
    """Raise for an unknown format of keys and values, and for options with which it cannot be used.

    Args:
        kv_dtype: "int8" for 8 bits, None for the model's dtype.
    """
    if kv_dtype is None:
        return
    if kv_dtype not in KV_DTYPES:
        raise ConfigurationError(f"unknown kv_dtype '{kv_dtype}': {suggestion(str(kv_dtype), list(KV_DTYPES))}")
    if kernels in ("torch", "graphs"):
        raise ConfigurationError(f"kv_dtype '{kv_dtype}' needs native kernels: leave kernels at 'auto'")
    if resolve_device(device).type != "cpu":
        raise ConfigurationError(
            f"kv_dtype '{kv_dtype}' needs native kernels, which run on a CPU: use device 'cpu', or leave kv_dtype out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What the user chose about a model's weights and passes: the arguments of `load_model`.

    Raises:
        ConfigurationError: unknown options, or options that exclude each other.
    """

    dtype: str | torch.dtype = "auto"
    device: str = "auto"
    kernels: str = "auto"
    quantization: str | None = None
    packed: bool = True
    trust_remote_code: bool = False
    offload: str | int | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        require_known(self.kernels, self.quantization)
        require_kv_dtype(self.kv_dtype, self.kernels, self.device)
        if self.offload is not None:
            parse_size(self.offload)
        if self.offload is not None and self.kernels == "graphs":
            raise ConfigurationError(
                "kernels 'graphs' replay fixed addresses, and offloaded weights move: use 'auto', or leave offload out"
            )

    @property
    def allows_native(self) -> bool:
        return self.kernels in ("auto", "native")

    @property
    def requires_native(self) -> bool:
        """Whether a model without native kernels is refused."""
        return self.kernels == "native" or self.quantization is not None

    def plain_reason(self, device: torch.device) -> str | None:
        """Return the option that needs plain weights; None if a model may run on the blocks of its files."""
        if self.quantization is not None:
            return f"quantization '{self.quantization}' needs plain weights"
        if self.offload is not None:
            return "offload needs plain weights"
        if not self.allows_native:
            return f"kernels '{self.kernels}' need plain weights"
        return None if device.type == "cpu" else f"device '{device}' needs plain weights"
