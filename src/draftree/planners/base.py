"""Plan seam: a planner sets how much each sequence may draft in the next round."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from draftree.core.errors import ConfigurationError
from draftree.core.tree import TokenTree
from draftree.core.types import MAX_NODES, Budget, DraftPart, RoundRecord

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Standing:
    """How a merged drafter that runs a model has done so far."""

    part: int  # its place among the merged drafters
    is_on: bool  # whether it pays, and more than the others
    num_drafts: int
    num_hits: int  # drafts whose first token was right
    num_lost: int  # trials since it last drafted otherwise, each of which took longer than the round without it


class Planner(ABC, Generic[State]):
    """Planner: decides budgets. Built as `cls(config, default_depth=…)`; state of a sequence is in its state object.

    Args:
        config: configuration of the planner.
        default_depth: the drafter's depth, used if the configuration sets none.
        default_nodes: number of nodes of the drafter's tree at that depth; more than the depth if it branches.
        parts: the merged drafters, or the only one.
    """

    Config: ClassVar[type]
    wants_costs: ClassVar[bool] = False
    """Whether `learn_costs` must be called before the first budget."""

    def __init__(
        self,
        config: Any,
        *,
        default_depth: int,
        default_nodes: int | None = None,
        parts: Sequence[DraftPart] = (),
    ) -> None:
        self.config = config
        self.default_depth = default_depth
        self.default_nodes = default_depth if default_nodes is None else default_nodes
        self.pass_seconds: Mapping[int, float] = {}
        self.parts = tuple(parts) or (DraftPart("", self.default_depth, self.default_nodes),)

    @property
    def needs_confidence(self) -> bool:
        """Whether budgets have a minimum confidence."""
        return False

    def ahead(self, depth: int, *, min_confidence: float = 0.0) -> Budget:
        """Return a budget of this depth; if the drafter branches, with the number of nodes of its tree."""
        branches = self.default_nodes > self.default_depth
        return Budget(max(depth, self.default_nodes) if branches and depth else depth, depth, min_confidence)

    def learn_costs(self, pass_seconds: Mapping[int, float]) -> None:
        """Set measured seconds of target passes by number of rows; for planners that need them."""
        self.pass_seconds = dict(pass_seconds)

    def explain(self) -> str:
        """Return the reason for the last budgets, in numbers; empty for planners that compare nothing."""
        return ""

    def standings(self) -> Sequence[Standing]:
        """Return how the drafters did that run a model and are not released; empty for planners that do not compare."""
        return ()

    def release(self, part: int, reason: str) -> None:
        """Plan nothing for one of several merged drafters from now on; `explain` gives the reason."""
        raise NotImplementedError(f"{type(self).__name__} compares no drafters")

    def note_others(self, num_sequences: int, num_rows: int) -> None:
        """Note the sequences of the round that this planner does not plan; called before `budgets` and `observe`.

        Args:
            num_sequences: their number.
            num_rows: their rows in the target's pass, drafts included where they are known.
        """

    @abstractmethod
    def open(self, *, is_sampled: bool = False) -> State:
        """Return the state of a new sequence.

        Args:
            is_sampled: whether the text is sampled with a temperature, for planners with other estimates then.
        """

    @abstractmethod
    def budgets(self, states: Sequence[State]) -> list[Budget]:
        """Return a budget for every sequence; the engine limits it to the remaining room."""

    def needs_states(self) -> bool:
        """Return whether a drafter that reads the target's hidden states may draft soon; asked after `budgets`."""
        return True

    def idle_rounds(self) -> int:
        """Return in how many rounds after the planned one nothing will be drafted, and no hidden states are needed."""
        return 0

    def trim(
        self, states: Sequence[State], trees: Sequence[TokenTree], *, draft_seconds: float
    ) -> list[Sequence[int] | None]:
        """Return the nodes of the drafted trees to score; the parent of a kept node must be kept.

        Not called if children are draws from a distribution: a draw that was inspected must count.

        Args:
            states: states of all sequences of the round.
            trees: the drafted trees; empty for a sequence without a draft.
            draft_seconds: time for drafting them.

        Returns:
            For every tree the nodes to keep, ascending, or None for all.
        """
        return [None] * len(trees)

    def observe(self, states: Sequence[State], record: RoundRecord) -> None:
        """Learn from the outcome of a round; `record.sequences` has the order of `states`."""


@dataclass(slots=True)
class Length:
    """Draft length of a sequence. Mutated by `LengthPlanner`."""

    k: int


class LengthPlanner(Planner[Length]):
    """Planner whose draft lengths grow by `growth` after full acceptance, and shrink by one otherwise."""

    growth: ClassVar[int]

    def open(self, *, is_sampled: bool = False) -> Length:
        """Return the initial length."""
        return Length(self.default_depth if self.config.start is None else self.config.start)

    def budgets(self, states: Sequence[Length]) -> list[Budget]:
        """Return budgets of the current lengths."""
        return [self.ahead(state.k) for state in states]

    def observe(self, states: Sequence[Length], record: RoundRecord) -> None:
        """Adapt the lengths; rounds without a draft are ignored."""
        for state, row in zip(states, record.sequences, strict=True):
            if row.num_drafted and row.num_in_path == row.draft_depth:
                # a shorter draft than allowed is no test of this length
                state.k = max(state.k, min(state.k, row.draft_depth) + self.growth)
            elif row.num_drafted:
                state.k = max(1, state.k - 1)


def check_length(planner: str, name: str, value: int | None, *, least: int = 1) -> None:
    """Raise ConfigurationError unless a draft length is absent, or fits in a pass."""
    if value is not None and not least <= value <= MAX_NODES:
        raise ConfigurationError(f"planner '{planner}' has {name}={value}: it must be from {least} to {MAX_NODES}")


def require_effect(planner: Planner[Any], *, plan: str, draft: str) -> None:
    """Check that no option of a planner is without effect on the drafter.

    Fields of a configuration that limit a draft have the metadata `limits`: "depth" or "nodes".

    Args:
        planner: the planner, built for the drafter.
        plan: spec of the planner, for messages.
        draft: spec of the drafter, for messages.

    Raises:
        ConfigurationError: a length above the drafter's, or a confidence with a drafter that has none.
    """
    most = {"depth": planner.default_depth, "nodes": planner.default_nodes}
    units = {"depth": "tokens ahead", "nodes": "nodes"}
    for option in dataclasses.fields(planner.config):
        of, value = option.metadata.get("limits"), getattr(planner.config, option.name)
        if of is not None and value is not None and value > most[of]:
            raise ConfigurationError(
                f"planner '{plan}' asks for {value} {units[of]}, but drafter '{draft}' drafts {most[of]} at most: "
                f"lower the planner's {option.name}, or raise the drafter's limit"
            )
    without = [part.name for part in planner.parts if not part.gives_confidence]
    if planner.needs_confidence and without:
        raise ConfigurationError(
            f"planner '{plan}' stops at low confidence, but drafter '{without[0]}' has no probabilities: "
            "use planner fixed, heuristic or adaptive, or another drafter"
        )
