"""Synthetic acceptance, for measurements only: drafts the target's own continuation with random errors.

When a request joins the batch, the target generates its plain text in a separate slot. This time is not part of any
round, so the statistics show the speed of a drafter without costs and with the configured acceptance. `accept=0` needs
no text: its tokens are wrong except by chance. For timing rounds, planners and servers; useless as a drafter, because
all work is done in advance.

Source: ours; synthetic acceptance as in load generators, which separates costs from the quality of a drafter.
Costs plain decoding of every request before its first round, and a second slot of the target. With a verifier that does
not generate the text of plain decoding, the continuation is generated again after each difference, within the round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch

from draftree.core.errors import ConfigurationError
from draftree.core.noise import Noise
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import MAX_NODES, Budget
from draftree.drafters.base import DraftContext, Drafter, DraftTraits, SequenceView, require_range
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.source import EncoderDecoder, TokenSource
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History

CHUNK = 512
"""Maximum number of prompt tokens per pass."""


@dataclass(slots=True)
class Ahead:
    """Sequence and its text by plain decoding. Mutated when the sequence differs from it."""

    view: SequenceView
    limit: int
    tokens: list[int] = field(default_factory=list)


@final
class SyntheticDrafter(Drafter[Ahead]):
    """Drafter with a configured acceptance rate."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`accept`: probability that a token is right, from 0 to 1; `seed`: seed of the errors.

        `k`: maximum number of levels; `width`: number of tokens at every position, of which the first has children;
        each is right with probability `accept` if those before it are wrong.
        """

        accept: float = 0.8
        seed: int = 0
        k: int = 8
        width: int = 1

        def __post_init__(self) -> None:
            require_range("synthetic", self, "accept", least=0, most=1)
            if self.k < 1 or self.width < 1 or self.k * self.width > MAX_NODES:
                raise ConfigurationError(
                    f"drafter 'synthetic' has k={self.k} and width={self.width}: they must be at least 1, "
                    f"and make {MAX_NODES} nodes at most"
                )

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        return DraftTraits(
            draws=frozenset({Draw.FREE}), depth=config.k, nodes=config.k * config.width, branches=config.width > 1
        )

    def __init__(self, config: Config, context: DraftContext) -> None:
        super().__init__(config, context)
        self._target = context.target

    def reserve(self, num_sequences: int, length: int) -> None:
        if self._config.accept:
            self._target.reserve(num_sequences + 1, length)

    def open(self, sequence: SequenceView) -> Ahead:
        """Generate the text in advance, up to the maximum length of the sequence."""
        state = Ahead(sequence, sequence.history.capacity)
        if self._config.accept:
            state.tokens = written_ahead(self._target, sequence, state.limit)
        return state

    def draft_one(self, state: Ahead, budget: Budget) -> TokenTree:
        depth = min(self._config.k, budget.depth, budget.num_nodes)
        output = state.view.history.output.tolist()
        right = list[int]()
        if self._config.accept:
            if state.tokens[: len(output)] != output:
                state.tokens = output + written_ahead(self._target, state.view, state.limit)
            right = state.tokens[len(output) : len(output) + depth]
        noise = state.view.controls.noise.stream("synthetic", self._config.seed)
        start = len(state.view.history)
        tokens: list[int] = []
        parents: list[int] = []
        spine = ROOT
        for level in range(depth):
            room = min(self._config.width, budget.num_nodes - len(tokens))
            if room < 1:
                break
            guesses = self._guesses(noise, start + level, right[level] if level < len(right) else None)[:room]
            parents += [spine] * len(guesses)
            spine = len(tokens)
            tokens += guesses
        return TokenTree(tuple(tokens), tuple(parents))

    def _guesses(self, noise: Noise, position: int, right: int | None) -> list[int]:
        """Return different tokens; after the end of the text all are wrong."""
        size = self._target.vocab_size
        hits = (noise.uniform(position, rank) < self._config.accept for rank in range(self._config.width))
        place = None if right is None else next((rank for rank, is_right in enumerate(hits) if is_right), None)
        guesses: list[int] = []
        for rank in range(min(self._config.width, size - 1)):
            token = int(noise.uniform(position, self._config.width + rank) * size)
            while token == right or token in guesses:
                token = (token + 1) % size
            guesses.append(right if rank == place and right is not None else token)
        return guesses


@torch.inference_mode()
def written_ahead(model: LanguageModel, view: SequenceView, limit: int) -> list[int]:
    """Return the continuation of a sequence by plain decoding, up to its end, a failure or `limit` tokens in total."""
    history = History(view.history.tokens[: view.history.prompt_length].tolist(), capacity=limit)
    history.append(view.history.output.tolist())
    # the engine makes room as texts grow, but this one is generated to its end at once
    model.reserve(model.num_open + 1, limit)
    source = TokenSource(view.source)
    slot = model.open_on(source) if isinstance(model, EncoderDecoder) else model.open()
    pending = history.tokens.tolist()
    written = list[int]()
    while len(history) < limit:
        chunk, pending = pending[:CHUNK], pending[CHUNK:]
        last = len(chunk) - 1
        rows = () if pending else (last,)
        job = Extend(slot, chunk, range(-1, last), logits_at=rows, settled=len(chunk))
        result = model.run(Pass([job]))
        model.commit(slot, range(len(chunk)))
        if pending:
            continue
        distributions = Distributions(result.logits, [DistributionRows(history, view.controls, [()])])
        if not distributions.finite()[0]:
            break  # the text fails at this point, if it gets here
        token = distributions.of(0).picks()[0]
        history.append([token])
        written.append(token)
        pending = [token]
        if token in view.controls.stop_ids:
            break
    model.close(slot)
    return written
