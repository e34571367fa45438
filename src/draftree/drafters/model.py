"""A smaller model with the same vocabulary guesses a chain or a tree of next tokens, one pass a level.

It ranks its candidates with the request's own noise where the verifier allows it, which makes its guess the
target's pick more often than an independent draw would. The vocabularies are compared token by token.

Source: Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318; shared noise: Daliri et al.,
arXiv 2408.07978. Costs one pass of the small model for every level; loses when that is not small beside a pass
of the target, or when the two models rarely agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import DraftContext, Drafter, SequenceView
from draftree.drafters.growth import Growth
from draftree.drafters.shapes import Shape, parse_shape
from draftree.drafters.stepping import SteppedSequence
from draftree.text.vocab import require_same


@final
class ModelDrafter(Drafter[SteppedSequence]):
    """Grows trees with a loaded model."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`model:NAME`: a catalogue name, a folder, a GGUF file or a hub id.

        `k`: levels at most; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1.
        """

        name: str = field(metadata={"argument": True, "names_model": True})
        k: int | None = None
        tree: str = "chain"

        def __post_init__(self) -> None:
            parse_shape(self.tree, self.k)

        @property
        def shape(self) -> Shape:
            """The shape that `tree` and `k` name."""
            return parse_shape(self.tree, self.k)

    @classmethod
    def draws(cls, config: Config) -> frozenset[Draw]:
        """As the shape allows."""
        return config.shape.draws

    @classmethod
    def default_depth(cls, config: Config) -> int:
        """As deep as the shape."""
        return config.shape.depth

    @classmethod
    def default_nodes(cls, config: Config) -> int:
        """As many as the shape has."""
        return config.shape.num_nodes

    @classmethod
    def branches(cls, config: Config) -> bool:
        """Whether the shape has a node with two children."""
        return not config.shape.is_chain

    def __init__(self, config: Config, context: DraftContext) -> None:
        loaded = context.load_model(config.name)
        if context.tokenizer is not None and loaded.tokenizer is not None:
            require_same(context.tokenizer.vocabulary(), loaded.tokenizer.vocabulary(), "the target", loaded.name)
        elif loaded.model.vocab_size != context.target.vocab_size:
            raise ConfigurationError(
                f"drafter '{loaded.name}' has {loaded.model.vocab_size} tokens and the target "
                f"{context.target.vocab_size}, and there are no tokenizers to compare: take one of the same family"
            )
        self._growth = Growth(
            loaded.model,
            shape=config.shape,
            draw=context.draw,
            shares_noise=context.shares_noise,
            vocab_size=context.target.vocab_size,
        )

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in the small model's slots."""
        self._growth.reserve(num_sequences, length)

    def open(self, sequence: SequenceView) -> SteppedSequence:
        """A slot of the small model."""
        return self._growth.open(sequence)

    def draft(self, states: Sequence[SteppedSequence], budgets: Sequence[Budget]) -> list[TokenTree]:
        """A tree for every sequence, all sequences in one pass a level."""
        return self._growth.grow(states, budgets)

    def observe(
        self, states: Sequence[SteppedSequence], trees: Sequence[TokenTree], verdicts: Sequence[Verdict]
    ) -> None:
        """Keep the accepted tokens in the slots."""
        self._growth.observe(states, verdicts)

    def close(self, state: SteppedSequence) -> None:
        """Free the slot."""
        self._growth.close(state)
