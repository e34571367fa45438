"""Quantized copy: drafts with the target's own layers in fewer bits, kept in memory.

It needs no second model and no training. The copy drafts on the target's slots: it reads the keys and values that the
target computed for the text, and the target's pass computes the drafted tokens again. It is meant for targets whose
weights are streamed from a file (`offload`): the copy stays in memory, and every pass of the target over many drafted
tokens reads the file once.

Source: SubSpec, arXiv 2509.18344. Costs the copy's memory (half of a bfloat16 target with int8, 28% with int4) and
one pass of it for every level. Loses where the target is in memory, unless a pass of the copy costs much less than the
target's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from draftree.core.errors import ConfigurationError, UnsupportedModelError, suggestion
from draftree.drafters.base import DraftContext
from draftree.drafters.tree_builder.builder import Shape, TreeBuildingDrafter, TreeOptions, parse_shape
from draftree.drafters.tree_builder.target_stepper import PartialStepper
from draftree.models.base import ALL_LAYERS
from draftree.models.memory import Footprint
from draftree.options import QUANTIZATIONS

DEPTH = 16
"""Default number of levels of a chain: a copy is wrong about once in thirty tokens."""


@final
class QuantizedDrafter(TreeBuildingDrafter):
    """Drafter that grows trees with a quantized copy of the target."""

    @dataclass(frozen=True, slots=True)
    class Config(TreeOptions):
        """`quantized:int8`: weights of the copy, int8 for 8 bits or int4 for 4 bits.

        `k`: maximum number of levels; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1.
        """

        bits: str = field(default="int8", metadata={"argument": True})
        k: int | None = None
        tree: str = "chain"

        def __post_init__(self) -> None:
            if self.bits not in QUANTIZATIONS:
                known = list(QUANTIZATIONS)
                raise ConfigurationError(
                    f"drafter 'quantized' has weights of kind '{self.bits}': {suggestion(self.bits, known)}"
                )
            TreeOptions.__post_init__(self)

        @property
        def shape(self) -> Shape:
            """Shape given by `tree` and `k`."""
            return parse_shape(self.tree, DEPTH if self.k is None and self.tree == "chain" else self.k)

    def __init__(self, config: Config, context: DraftContext) -> None:
        try:
            self._copy = context.target.quantized_copy(config.bits)
        except UnsupportedModelError as error:
            raise ConfigurationError(f"drafter 'quantized': {error}") from error
        self._build(PartialStepper(self._copy, ALL_LAYERS), config.shape, context)

    @property
    def footprint(self) -> Footprint:
        return self._copy.footprint
