"""How a model is divided among processes."""

from __future__ import annotations

from dataclasses import dataclass

from draftree.core.errors import ConfigurationError

__all__ = ["SINGLE", "ParallelOptions"]


@dataclass(frozen=True, slots=True)
class ParallelOptions:
    """Division of one model among the processes that torchrun started.

    Attributes:
        tp: processes that share each layer: its heads and the columns of its perceptron (tensor parallel).
        pp: stages, each with a part of the layers (pipeline parallel).
        strict_sums: whether partial sums are gathered and added in the order of the ranks, so that the sum of a row
            does not depend on the number of rows in a pass.

    Raises:
        ConfigurationError: a size is not a positive integer, or `strict_sums` has no sums to order.
    """

    tp: int = 1
    pp: int = 1
    strict_sums: bool = False

    def __post_init__(self) -> None:
        for name, size in (("tp", self.tp), ("pp", self.pp)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigurationError(f"{name} is {size!r}: it must be an integer of at least 1")
        if self.strict_sums and self.tp == 1:
            raise ConfigurationError("strict_sums orders the sums of several processes, and tp is 1: leave it out")

    @property
    def num_processes(self) -> int:
        """Number of processes."""
        return self.tp * self.pp

    @property
    def is_parallel(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    def __str__(self) -> str:
        return f"tp={self.tp}, pp={self.pp}"


SINGLE = ParallelOptions()
