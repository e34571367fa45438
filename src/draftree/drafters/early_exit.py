"""Early exit: drafts with the target's first layers, its final norm and its head.

It needs no second model. The first layers draft on the target's slots, and the target's pass over the drafted tokens
continues from their keys, values and hidden states. Under `coupled` the text is the target's; with passes in C, logits
are bit-identical.

Source: LayerSkip, Elhoushi et al., arXiv 2404.16710, whose training is needed for a gain; Draft & Verify,
arXiv 2309.08168. Costs a pass of n layers and the head for every level, and nothing for prefill. Loses with models that
were not trained to exit early, because their first layers rarely predict the output, and with large heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import DraftContext
from draftree.drafters.growing.model_drafter import GrowingDrafter
from draftree.drafters.growing.partial import PartialStepper
from draftree.drafters.growing.shapes import Shape, parse_shape
from draftree.drafters.growing.tree_growth import Growth
from draftree.models.base import LayerSubset


@final
class EarlyExitDrafter(GrowingDrafter):
    """Drafter that grows trees with the first layers of the target."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`early-exit:N`: the first N layers draft.

        `k`: maximum number of levels; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1.
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
            """Shape given by `tree` and `k`."""
            return parse_shape(self.tree, self.k)

    def __init__(self, config: Config, context: DraftContext) -> None:
        self._growth = Growth(
            PartialStepper(context.target, LayerSubset(end=config.layers)),
            shape=config.shape,
            draw=context.draw,
            shares_noise=context.shares_noise,
            place=context.place,
        )
