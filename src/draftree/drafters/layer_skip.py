"""Layer skipping: drafts with the target without some of its attentions and perceptrons.

`draftree tune layers MODEL --prompts FILE` searches the set to skip once for each model by measured seconds per token
and stores it; a set can also be given: `layer-skip,attention=3-5-8,mlp=4-9`. Passes use the target's slots and weights,
so they take no memory. Under `coupled` the text is the target's.

Source: Draft & Verify, Zhang et al., arXiv 2309.08168 (its stopping threshold is the planner `threshold`). Costs a
pass of the remaining sublayers and the head for every level; the target's pass runs all layers. Loses with small
models: without half of the sublayers a pass still costs half, so nearly every draft token would have to be accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import DraftContext
from draftree.drafters.tree_builder.builder import TreeBuildingDrafter, TreeOptions
from draftree.drafters.tree_builder.target_stepper import PartialStepper
from draftree.loading.layer_sets import numbers_of, stored_set
from draftree.models.base import LayerSubset


@final
class LayerSkipDrafter(TreeBuildingDrafter):
    """Drafter that grows trees with a subset of the target's sublayers."""

    @dataclass(frozen=True, slots=True)
    class Config(TreeOptions):
        """`layer-skip`: the set stored by tuning for this model, or a given set.

        `attention`: layers whose attention is skipped, such as 3-5-8; `mlp`: layers whose multilayer perceptron is
        skipped; `k`: maximum number of levels; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1.
        """

        attention: str = ""
        mlp: str = ""
        k: int | None = None
        tree: str = "chain"

        def __post_init__(self) -> None:
            for name, text in (("attention", self.attention), ("mlp", self.mlp)):
                try:
                    numbers_of(text)
                except ValueError as error:
                    raise ConfigurationError(
                        f"drafter 'layer-skip' has {name}={text}: write layers, counted from 0, such as {name}=3-5-8"
                    ) from error
            TreeOptions.__post_init__(self)

        @property
        def part(self) -> LayerSubset | None:
            """Subset without the given sublayers; None if none are given."""
            if not (self.attention or self.mlp):
                return None
            return LayerSubset(attention=numbers_of(self.attention), mlp=numbers_of(self.mlp))

    def __init__(self, config: Config, context: DraftContext) -> None:
        part = config.part
        if part is None:
            stored = stored_set(context.target.fingerprint)
            part, self._note = stored.part, str(stored)
        self._build(PartialStepper(context.target, part), config.shape, context)
