"""How a model is divided among processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftree.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """Division of one model among the processes that torchrun started."""

    tp: int = 1  # processes that share each layer: its heads and the columns of its perceptron (tensor parallel)
    pp: int = 1  # stages, each with a part of the layers (pipeline parallel)
    # whether partial sums are gathered and added in the order of the ranks, so that the sum of a row does not
    # depend on the number of rows in a pass
    strict_sums: bool = False

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("pp", self.pp)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigurationError(f"{name} is {size!r}: it must be an integer of at least 1")
        if self.strict_sums and self.tp == 1:
            raise ConfigurationError("strict_sums orders the sums of several processes, and tp is 1: leave it out")

    @property
    def num_processes(self) -> int:
        return self.tp * self.pp

    @property
    def is_parallel(self) -> bool:
        return self.num_processes > 1

    def __str__(self) -> str:
        return f"tp={self.tp}, pp={self.pp}"


SINGLE = ParallelOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """Options of a model that several processes load; all processes have the same."""

    dtype: Any = "auto"  # as for `load_model`
    device: str = "auto"  # as for `load_model`; each process has its own GPU
    kernels: str = "auto"  # as for `load_model`
    quantization: str | None = None  # as for `load_model`
    trust_remote_code: bool = False  # as for `load_model`
    offload: str | int | None = None  # must be None: each process keeps its share in memory
    kv_dtype: str | None = None  # must be None: the slots of a share have the model's dtype

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
