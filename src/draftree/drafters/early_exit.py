"""Early exit: drafts with the target's first layers, its final norm and its head.

It needs no second model. The first layers draft on the target's slots, and the target's pass over the drafted tokens
continues from their keys, values and hidden states. Under `coupled` the text is the target's; with native kernels,
logits are bit-identical.

Source: LayerSkip, Elhoushi et al., arXiv 2404.16710, whose training is needed for a gain; Draft & Verify,
arXiv 2309.08168. Costs a pass of n layers and the head for every level, and nothing for prefill. Loses with models that
were not trained to exit early, because their first layers rarely predict the output, and with large heads. With
learning (`--learn`) a correction of the exit's logits follows the verified tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import DraftContext, DraftTraits
from draftree.drafters.learning.corrections import HeadCorrections
from draftree.drafters.tree_builder.builder import TreeBuildingDrafter, TreeOptions
from draftree.drafters.tree_builder.target_stepper import PartialStepper
from draftree.heads.vocabulary import DraftVocabulary
from draftree.models.base import LayerSubset
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import library


@final
class EarlyExitDrafter(TreeBuildingDrafter):
    """Drafter that grows trees with the first layers of the target."""

    @dataclass(frozen=True, slots=True)
    class Config(TreeOptions):
        """`early-exit:N`: the first N layers draft.

        `k`: maximum number of levels; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1.
        """

        layers: int = field(metadata={"argument": True})
        k: int | None = None
        tree: str = "chain"

        def __post_init__(self) -> None:
            if self.layers < 1:
                raise ConfigurationError(f"drafter 'early-exit' has layers={self.layers}: at least one layer must run")
            TreeOptions.__post_init__(self)

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        return replace(super().describe(config), learns=True)

    def __init__(self, config: Config, context: DraftContext) -> None:
        target, store = context.target, context.learning
        if store is not None and store.learning.options.rate:
            self._corrections = HeadCorrections.shared(
                store,
                ("exit", f"{store.fingerprint} exit {config.layers}"),
                target.vocab_size,
                target.input_embedding().shape[1],
                device=target.device,
                native=target.device.type == "cpu" and _has_kernels(),
            )
        stepper = PartialStepper(target, LayerSubset(end=config.layers), answers=self._corrections is not None)
        self._build(stepper, config.shape, context, DraftVocabulary.full(target.vocab_size))


def _has_kernels() -> bool:
    """Return whether the kernels in C are available."""
    try:
        library()
    except NativeUnavailableError:
        return False
    return True
