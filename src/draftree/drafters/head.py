"""Learned head: a small network reads the target's hidden states and drafts a chain or a tree.

The head was trained for one target. EAGLE-1, 2, 3 and 3.1 and MTP run one pass per level: rows of the text use hidden
states that the target's own passes return; nodes of a tree use the head's states, and are read again from the target's
after the round. P-EAGLE, DFlash, DSpark and Medusa give the logits of all levels in one pass. With a
reduced vocabulary some tokens are never proposed. Candidates are ranked with the request's noise of their token ids if
the verifier allows it. The default depth is the number of levels that it was trained for.

Source: EAGLE, Li et al., arXiv 2401.15077; EAGLE-3, arXiv 2503.01840. Costs a pass of one layer and of the rows of the
draft vocabulary for every level, and one row for every token of the text. Loses with targets that are hardly slower
than such a pass, with texts unlike those that it was trained on, and with other weights than its target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import DraftContext, DraftTraits, Observation
from draftree.drafters.growing.block_stepper import BlockStepper
from draftree.drafters.growing.head_stepper import HeadStepper
from draftree.drafters.growing.model_drafter import GrowingDrafter
from draftree.drafters.growing.shapes import Shape, parse_shape
from draftree.drafters.growing.tree_growth import Growth
from draftree.heads.base import FeatureHead, Head
from draftree.heads.blocks import BlockHead
from draftree.heads.calibration import read_calibration
from draftree.heads.config import HeadConfig
from draftree.heads.folders import read_config, read_head
from draftree.heads.native_passes import passes_of
from draftree.heads.peagle import ParallelEagle, PEagleHead
from draftree.heads.shipped.catalogue import head_folder
from draftree.heads.target_parts import TargetParts
from draftree.models.base import LanguageModel
from draftree.models.memory import Footprint


@final
class HeadDrafter(GrowingDrafter):
    """Drafter that grows trees with a head of the target."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`head:PATH`: the folder of a head in any layout of the guide on heads of others; for MTP, that of the target;
        or the name of a head of this package, as `draft="auto"` shows it.

        `k`: maximum number of levels; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1.
        """

        path: str = field(metadata={"argument": True})
        k: int | None = None
        tree: str = "chain"

        def __post_init__(self) -> None:
            parse_shape(self.tree, self.k)

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        """Return the traits of the shape, and the hidden states that the head reads; reads its `config.json` only."""
        head = read_config(head_folder(config.path))
        shape = _shape(config, head)
        return DraftTraits(
            draws=shape.draws,
            depth=shape.depth,
            nodes=shape.num_nodes,
            branches=not shape.is_chain,
            gives_confidence=True,
            runs_model=True,
            features=head.features,
        )

    def __init__(self, config: Config, context: DraftContext) -> None:
        target = context.target
        folder = head_folder(config.path)
        head = read_head(folder, dtype=target.dtype, device=target.device)
        head.bind(TargetParts.of(target))
        self._stepper = _stepper(head, target)
        self._growth = Growth(
            self._stepper,
            shape=_shape(config, head.config),
            draw=context.draw,
            shares_noise=context.shares_noise,
            place=context.place,
            calibration=read_calibration(folder),
        )

    @property
    def footprint(self) -> Footprint:
        """Memory of the head in bytes."""
        return self._stepper.footprint

    def observe(self, observations: Sequence[Observation[Any]]) -> None:
        """Note the target's hidden states, and drop the trees."""
        self._stepper.learn([o.state for o in observations], [o.hidden for o in observations])
        super().observe(observations)


def _stepper(head: Head, target: LanguageModel) -> HeadStepper | BlockStepper:
    """Return the stepper of a head: for one pass per level, or one pass for all levels."""
    if isinstance(head, PEagleHead):
        return BlockStepper(ParallelEagle(head), target.device)
    if isinstance(head, BlockHead):
        return BlockStepper(head, target.device)
    if isinstance(head, FeatureHead):
        return HeadStepper(passes_of(head, target))
    raise ConfigurationError(f"drafter 'head': heads of kind '{head.config.kind}' cannot draft")


def _shape(config: HeadDrafter.Config, head: HeadConfig) -> Shape:
    """Return the shape; chains and best nodes have as many levels as the head was trained for unless `k` is set."""
    has_levels = not (config.tree == "chain" or config.tree.startswith("best"))
    return parse_shape(config.tree, config.k if config.k is not None or has_levels else head.depth)
