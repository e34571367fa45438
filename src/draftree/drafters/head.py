"""Learned head: a small network reads the target's hidden states and drafts a chain or a tree.

The head was trained for one target. EAGLE-1, 2, 3 and 3.1 and MTP run one pass per level: rows of the text use hidden
states that the target's own passes return; nodes of a tree use the head's states, and are read again from the target's
after the round. Assistants of Gemma 4 run one pass per level on the target's keys and values. P-EAGLE, DFlash and its
variants and Medusa give the logits of all levels in one pass. With a reduced vocabulary some tokens are never proposed.
Candidates are ranked with the request's noise of their token ids if the verifier allows it. The default depth is the
number of levels that it was trained for.

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
from draftree.drafters.learning.corrections import HeadCorrections
from draftree.drafters.tree_builder.assistant_stepper import AssistantStepper
from draftree.drafters.tree_builder.block_stepper import BlockStepper
from draftree.drafters.tree_builder.builder import Shape, TreeBuildingDrafter, parse_shape
from draftree.drafters.tree_builder.head_stepper import HeadStepper
from draftree.heads.base import BlockHead, FeatureHead, Head, TargetParts
from draftree.heads.calibration import read_calibration, read_rates
from draftree.heads.config import EAGLE, EAGLE3, MTP, HeadConfig
from draftree.heads.folders import read_config, read_head
from draftree.heads.gemma4 import AssistantHead
from draftree.heads.native_passes import block_passes_of, passes_of
from draftree.heads.peagle import ParallelEagle, PEagleHead
from draftree.heads.shipped import head_folder
from draftree.models.base import LanguageModel
from draftree.models.memory import Footprint
from draftree.models.native.model import NativeModel
from draftree.models.torch.inspection import fingerprint

LEARNING_KINDS = (EAGLE, EAGLE3, MTP)
"""Kinds that learn from verified texts: those that draft level by level."""
MOST_SHARP = 10.0
"""Largest factor of logits; the smallest one is its inverse."""


@final
class HeadDrafter(TreeBuildingDrafter):
    """Drafter that grows trees with a head of the target."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`head:PATH`: the folder of a head in any layout of the guide on heads of others; for MTP, that of the target;
        or the name of a head of this package, as `draft="auto"` shows it.

        `k`: maximum number of levels; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1;
        `sharpness`: factor of the head's logits in sampled texts, above 1 for more confident drafts.
        """

        path: str = field(metadata={"argument": True})
        k: int | None = None
        tree: str = "chain"
        sharpness: float = 1.0

        def __post_init__(self) -> None:
            parse_shape(self.tree, self.k)
            if not MOST_SHARP**-1 <= self.sharpness <= MOST_SHARP:
                raise ConfigurationError(
                    f"drafter 'head': sharpness is {self.sharpness:g}: it must be from {1 / MOST_SHARP:g} to "
                    f"{MOST_SHARP:g}"
                )

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        """Return the traits of the shape, the hidden states that the head reads and its measured acceptance.

        Reads the JSON files of the folder only.
        """
        folder = head_folder(config.path)
        head, rates = read_config(folder), read_rates(folder)
        shape = _shape(config, head)
        return DraftTraits(
            draws=shape.draws,
            depth=shape.depth,
            nodes=shape.num_nodes,
            branches=not shape.is_chain,
            gives_confidence=True,
            is_calibrated=read_calibration(folder) is not None,
            greedy_rates=rates.greedy,
            sampled_rates=rates.sampled,
            runs_model=True,
            features=head.features,
            learns=head.kind in LEARNING_KINDS,
        )

    def __init__(self, config: Config, context: DraftContext) -> None:
        target = context.target
        folder = head_folder(config.path)
        head = read_head(folder, dtype=target.dtype, device=target.device)
        head.bind(TargetParts.of(target))
        store = context.learning
        if store is not None and store.learning.options.rate and head.config.kind in LEARNING_KINDS:
            self._corrections = HeadCorrections.shared(
                store,
                # before the passes take the weights
                ("head", f"{store.fingerprint} {fingerprint(head)}"),
                head.config.draft_vocab_size,
                head.config.hidden,
                device=target.device,
                native=isinstance(target.here, NativeModel),
            )
        self._stepper = _stepper(head, target)
        self._build(
            self._stepper,
            _shape(config, head.config),
            context,
            head.vocabulary,
            calibration=read_calibration(folder),
            sharpness=config.sharpness,
        )

    @property
    def footprint(self) -> Footprint:
        return self._stepper.footprint

    def observe(self, observations: Sequence[Observation[Any]]) -> None:
        """Note the target's hidden states, and drop the trees."""
        self._stepper.learn([o.state for o in observations], [o.hidden for o in observations])
        super().observe(observations)


def _stepper(head: Head, target: LanguageModel) -> HeadStepper | BlockStepper | AssistantStepper:
    """Return the stepper of a head: for one pass per level, or one pass for all levels."""
    if isinstance(head, PEagleHead):
        return BlockStepper(block_passes_of(ParallelEagle(head), target))
    if isinstance(head, AssistantHead):
        return AssistantStepper(head, target)
    if isinstance(head, BlockHead):
        return BlockStepper(block_passes_of(head, target))
    if isinstance(head, FeatureHead):
        return HeadStepper(passes_of(head, target))
    raise ConfigurationError(f"drafter 'head': heads of kind '{head.config.kind}' cannot draft")


def _shape(config: HeadDrafter.Config, head: HeadConfig) -> Shape:
    """Return the shape; chains and best nodes have as many levels as the head was trained for unless `k` is set."""
    has_levels = not (config.tree == "chain" or config.tree.startswith("best"))
    return parse_shape(config.tree, config.k if config.k is not None or has_levels else head.depth)
