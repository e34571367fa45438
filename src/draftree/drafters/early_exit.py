"""The target's own first layers, with its final norm and head, guess a chain or a tree of next tokens.

No second model, and nothing held twice: the first layers draft on the target's own slots, and the target's pass over
the drafted tokens goes on from the keys, values and hidden states that are there. Under `coupled` the text is the
target's, as with every drafter; passes in C give the same bits.

Source: LayerSkip, Elhoushi et al., arXiv 2404.16710, whose training is not needed to run this, but to gain by it; Draft
& Verify, arXiv 2309.08168. Costs a pass of n layers and the head for every level, and nothing for reading prompts.
Loses with models that were not trained to exit early: their first layers seldom say what the last ones will, and a
large head makes every level dear however few the layers are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import DraftContext
from draftree.drafters.growing.model_drafter import GrowingDrafter
from draftree.drafters.growing.shapes import Shape, parse_shape
from draftree.drafters.growing.tree_growth import Growth
from draftree.models.base import LayerSubset


@final
class EarlyExitDrafter(GrowingDrafter):
    """Grows trees with the first layers of the target."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`early-exit:N`: the first N layers draft.

        `k`: levels at most; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1.
        """

        layers: int = field(metadata={"argument": True})
        k: int | None = None
        tree: str = "chain"

        def __post_init__(self) -> None:
            if self.layers < 1:
                raise ConfigurationError(f"drafter 'early-exit' has layers={self.layers}: at least one layer must run")
            parse_shape(self.tree, self.k)

        @property
        def shape(self) -> Shape:
            """The shape that `tree` and `k` name."""
            return parse_shape(self.tree, self.k)

    def __init__(self, config: Config, context: DraftContext) -> None:
        self._growth = Growth(
            context.target,
            shape=config.shape,
            draw=context.draw,
            shares_noise=context.shares_noise,
            part=LayerSubset(end=config.layers),
            place=context.place,
        )
