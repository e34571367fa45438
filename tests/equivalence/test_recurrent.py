"""Recurrent models with slots of ours: each token's logits are those of transformers' pass over the text alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from draftree.models.base import Commit, Edit, Extend, Pass, Slot
from families import VOCAB_SIZE
from recurrent_samples import RECURRENT, last_logits, slotted

TOLERANCE = 2e-5  # maximum difference, relative to the range of the logits
NUM_ROUNDS = 12


@dataclass
class Text:
    """A slot, the tokens of its prefix, and of each tentative node the tokens from the first one on."""

    slot: Slot
    tokens: list[int]
    nodes: list[list[int]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    settled: int = 0

    def job(self, chooser: random.Random, *, settled: int, drafted: int) -> Extend:
        """Append a settled chain, if there is no tree, and random nodes after it."""
        first = len(self.nodes)
        self.settled = self.settled if first else settled
        for place in range(settled + drafted):
            node = first + place
            allowed = [-1, *range(node)] if not self.settled else range(self.settled - 1, node)
            parent = node - 1 if place < settled else chooser.choice(list(allowed))
            before = self.tokens if parent < 0 else self.nodes[parent]
            self.nodes.append([*before, chooser.randrange(VOCAB_SIZE)])
            self.parents.append(parent)
        added = [nodes[-1] for nodes in self.nodes[first:]]
        return Extend(self.slot, added, self.parents[first:], settled=settled)

    def commit(self, chooser: random.Random) -> Commit:
        """Accept a random path after the settled tokens, and keep part of what hangs at its end."""
        path = list(range(self.settled))
        while children := [node for node, parent in enumerate(self.parents) if parent == (path[-1] if path else -1)]:
            if len(path) > self.settled and chooser.random() < 0.3:
                break
            path.append(chooser.choice(children))
        end = path[-1] if path else -1
        keep: list[int] = []
        for node, parent in enumerate(self.parents):
            if node > end and (parent == end or parent in keep) and chooser.random() < 0.5:
                keep.append(node)
        if path:
            self.tokens = self.nodes[end]
        numbers = {node: number for number, node in enumerate(keep)}
        self.nodes, self.parents = [self.nodes[n] for n in keep], [numbers.get(self.parents[n], -1) for n in keep]
        self.settled = 0
        return Commit(self.slot, path, keep)

    def drop(self) -> None:
        self.nodes, self.parents, self.settled = [], [], 0


def require_logits(family: str, texts: list[list[int]], rows: torch.Tensor) -> None:
    for tokens, row in zip(texts, rows, strict=True):
        wanted = last_logits(family, tokens)
        error = float((row - wanted).abs().max() / (wanted.amax() - wanted.amin()))
        assert error < TOLERANCE, f"{family}: error {error:.1e} after {len(tokens)} tokens"


@pytest.mark.parametrize("family", RECURRENT)
def test_every_node_of_every_pass_has_the_logits_of_its_own_text(family: str) -> None:
    model, chooser = slotted(family), random.Random(7)
    texts = [Text(model.open(), []) for _ in range(3)]
    for number in range(NUM_ROUNDS):
        jobs, wanted = [], []
        for text in texts[: 1 + number % 3]:
            first = len(text.nodes)
            settled = 0 if first else chooser.choice([0, 1, 1, 2, 7] if number % 5 else [1])
            jobs.append(text.job(chooser, settled=settled, drafted=chooser.choice([1, 3, 6])))
            wanted += text.nodes[first:]
        require_logits(family, wanted, model.run(Pass(jobs)).logits.tensor())
        edits: list[Edit] = [text.commit(chooser) for text in texts if text.nodes and chooser.random() < 0.8]
        model.apply(edits)
        model.check_integrity()
        if number % 4 == 3:  # a fork, in place of another text
            source = chooser.choice(texts)
            length = model.cut_length(source.slot, source.slot.length)
            model.close(texts[0].slot if texts[0] is not source else texts[1].slot)
            place = 0 if texts[0] is not source else 1
            texts[place] = Text(model.fork(source.slot, length), source.tokens[:length])
    for text in texts:
        model.close(text.slot)
    assert model._states is not None
    assert model._states.num_rows_in_use == 0, "closed slots leave no rows"
