"""Options of a model that several processes load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftree.core.errors import ConfigurationError

__all__ = ["LoadSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Options of a model that several processes load; all processes have the same.

    Attributes:
        dtype: as for `load_model`.
        device: as for `load_model`; each process has its own GPU.
        kernels: as for `load_model`.
        quantization: as for `load_model`.
        trust_remote_code: as for `load_model`.
        offload: must be None: each process keeps its share in memory.
        kv_dtype: must be None: the slots of a share have the model's dtype.

    Raises:
        ConfigurationError: offload or kv_dtype was requested.
    """

    dtype: Any = "auto"
    device: str = "auto"
    kernels: str = "auto"
    quantization: str | None = None
    trust_remote_code: bool = False
    offload: str | int | None = None
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.offload is not None:
            raise ConfigurationError(
                f"offload is {self.offload!r}, but a model that processes share stays in their memory: leave out "
                "offload, or tp and pp"
            )
        if self.kv_dtype is not None:
            raise ConfigurationError(
                f"kv_dtype is '{self.kv_dtype}', but processes that share a model store keys and values in its dtype: "
                "leave out kv_dtype, or tp and pp"
            )
