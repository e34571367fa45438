"""The target itself, with some of its attentions and perceptrons left out, guesses a chain or a tree of next tokens.

Which ones can go is found once for each model by `draftree tune layers MODEL --prompts FILE`, which measures seconds
per token and keeps what it found beside the cache; or it is said by hand: `layer-skip,attention=3-5-8,mlp=4-9`. Such
a pass runs on the target's own slots with the target's weights, so it takes no memory. Under `coupled` the text is
the target's, as with every drafter.

Source: Draft & Verify, Zhang et al., arXiv 2309.08168 (its threshold for going on is the planner `threshold`). Costs a
pass of what is not left out, with the head, for every level; the target's pass runs whole. Loses with small models:
with half of the sublayers gone a pass still costs half, so nearly every guess would have to be right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import DraftContext
from draftree.drafters.growing.model_drafter import GrowingDrafter
from draftree.drafters.growing.shapes import Shape, parse_shape
from draftree.drafters.growing.tree_growth import Growth
from draftree.loading.layer_sets import numbers_of, stored_set
from draftree.models.base import LayerSubset


@final
class LayerSkipDrafter(GrowingDrafter):
    """Grows trees with the target, some sublayers left out."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`layer-skip`: the set that tuning found for this model; or a set by hand.

        `attention`: layers whose attention is left out, such as 3-5-8; `mlp`: layers whose multilayer perceptron is;
        `k`: levels at most; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1.
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
            parse_shape(self.tree, self.k)

        @property
        def part(self) -> LayerSubset | None:
            """What is left when the layers named by hand are left out; None if none are named."""
            if not (self.attention or self.mlp):
                return None
            return LayerSubset(attention=numbers_of(self.attention), mlp=numbers_of(self.mlp))

        @property
        def shape(self) -> Shape:
            """The shape that `tree` and `k` name."""
            return parse_shape(self.tree, self.k)

    def __init__(self, config: Config, context: DraftContext) -> None:
        part = config.part
        if part is None:
            stored = stored_set(context.target.fingerprint)
            part, self._note = stored.part, str(stored)
        self._growth = Growth(
            context.target,
            shape=config.shape,
            draw=context.draw,
            shares_noise=context.shares_noise,
            part=part,
            place=context.place,
        )
