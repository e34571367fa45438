"""Every drafter of the folder with specs, budgets and texts, and a rig that runs one over tables. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Budget, Verdict
from draftree.drafters import DRAFTERS
from draftree.drafters.base import DraftContext, Drafter, LoadedDraftModel, Observation, SequenceView
from draftree.models.base import Extend, Pass
from draftree.models.table import TableLM, hashed, near
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams
from head_samples import saved_head
from observed import observed

VOCAB = 9
TABLE = hashed(VOCAB, seed=1, scale=2.0)
HEAD = saved_head(
    target_hidden=VOCAB,
    hidden=VOCAB,
    vocab_size=VOCAB,
    draft_vocab_size=7,
    features=(0,),
    own_embedding=True,
    max_length=128,
)
"""Folder of a head that reads the tables' hidden states."""
SPECS = {
    "early-exit": [
        "early-exit:1",
        "early-exit:3,k=2",
        "early-exit:2,tree=1-2-3",
        "early-exit:2,tree=best-9,k=4",
        "early-exit:2,tree=iid-2-2",
        "early-exit:2,tree=wor-3-1-1",
    ],
    "grammar": ["grammar", "grammar,k=3"],
    "layer-skip": [
        "layer-skip,attention=1-2,mlp=3",
        "layer-skip,mlp=0,k=2",
        "layer-skip,attention=5,tree=best-9,k=4",
        "layer-skip,attention=5,tree=iid-2-2",
        "layer-skip,attention=5,tree=wor-3-1-1",
    ],
    "head": [
        f"head:{HEAD}",
        f"head:{HEAD},k=2",
        f"head:{HEAD},tree=1-2-3",
        f"head:{HEAD},tree=best-9,k=4",
        f"head:{HEAD},tree=iid-2-2",
        f"head:{HEAD},tree=wor-3-1-1",
    ],
    "lookahead": [
        "lookahead",
        "lookahead,window=0",
        "lookahead,window=0,random=4,n=3",
        "lookahead,window=0,candidates=1",
        "lookahead,window=5,n=2,candidates=1",
        "lookahead,window=4,n=3,candidates=2,random=5",
        "lookahead,window=12,n=5,candidates=6",
    ],
    "model": [
        "model:any",
        "model:any,k=2",
        "model:any,tree=1-2-3",
        "model:any,tree=best-9,k=4",
        "model:any,tree=iid-2-2",
        "model:any,tree=wor-3-1-1",
    ],
    "ngram": ["ngram", "ngram,min=1", "ngram,min=2,max=6,k=3"],
    "prediction": ["prediction", "prediction,width=1,k=5", "prediction,k=3,nodes=9,width=4,floor=0"],
    "quantized": [
        "quantized",
        "quantized:int8,k=2",
        "quantized:int8,tree=1-2-3",
        "quantized:int8,tree=best-9,k=4",
        "quantized:int8,tree=iid-2-2",
        "quantized:int8,tree=wor-3-1-1",
    ],
    "suffix": ["suffix", "suffix,min=2,width=1,k=5", "suffix,k=3,nodes=9,width=4,floor=0", "suffix,memory=0"],
    "synthetic": ["synthetic", "synthetic,accept=0,k=3", "synthetic,accept=1", "synthetic,accept=0.5,k=5,width=3"],
}
"""Specs of each drafter that its name alone does not give: add those of a new one, its shapes and limits included."""
SELF_DRAFTING = ("early-exit", "layer-skip", "quantized")
NAMES = DRAFTERS.names()
BUDGETS = [Budget(0, 0), Budget(0, 4), Budget(4, 0), Budget(1, 1), Budget(3, 2), Budget(2, 9), Budget(60, 60)]
PREDICTION = [5, 1, 5, 2, 2, 5, 8, 0, 5, 5, 1, 3, 7, 6]
"""What a drafter that reads predictions finds in every request; the others must not care."""
TEXTS = [[3], [1, 2, 1, 2, 1], [4, 5, 6, 7, 4, 5], [8] * 12, [0, 1, 2, 3, 4, 5, 6, 7, 8] * 3]


def specs() -> list[str]:
    return [spec for name in NAMES for spec in SPECS.get(name, [name])]


def read_unread(target: TableLM, view: SequenceView, features: tuple[int, ...]) -> Tensor | None:
    """The target reads all but the last token: hidden states of those that it had not read; None for none."""
    slot = view.slot
    if slot is None or not features or slot.length >= len(view.history) - 1:
        return None
    tokens = view.history.tokens[slot.length : -1].tolist()
    job = Extend(slot, tokens, range(-1, len(tokens) - 1), logits_at=())
    hidden = target.run(Pass([job], capture=features)).hidden
    target.commit(slot, range(len(tokens)))
    return hidden


class Rig:
    """A drafter built as the front builds it, over tables."""

    def __init__(self, spec: str, draw: Draw, *, shares_noise: bool = True) -> None:
        (parsed,) = DRAFTERS.parse(spec)
        try:
            cls, config = DRAFTERS.configure(parsed)
        except ConfigurationError as error:
            pytest.fail(f"drafter '{spec}' cannot be built by this name alone: add specs of it to SPECS here ({error})")
        self.models: list[TableLM] = []
        self.features = cls.describe(config).features
        num_features = 1 + max(self.features, default=-1)
        self.target = TableLM(TABLE, partial=near(TABLE, seed=2, distance=1.0), num_features=num_features)
        context = DraftContext(self.target, None, draw, shares_noise, self._load)
        self.drafter: Drafter[Any] = cls(config, context)
        self.states: list[Any] = []
        self.views: list[SequenceView] = []

    def _load(self, name: str) -> LoadedDraftModel:
        self.models.append(TableLM(near(TABLE, seed=2, distance=1.0)))
        return LoadedDraftModel(self.models[-1], None, name)

    def open(self, texts: Sequence[Sequence[int]], *, temperature: float = 1.0) -> Rig:
        params = SamplingParams(temperature=temperature, prediction=PREDICTION)
        self.drafter.reserve(len(texts), 200)
        for seed, text in enumerate(texts):
            controls = build_controls(params, vocab_size=VOCAB, seed=seed)
            self.views.append(SequenceView(History(text), controls, self.target.open()))
            self.states.append(self.drafter.open(self.views[-1]))
        self.tell(self.states, self.views)
        return self

    def tell(self, states: Sequence[Any], views: Sequence[SequenceView]) -> None:
        """The target reads all but the last token; nothing for drafters that read no hidden states of it."""
        if self.features:
            hidden = [self._read(view) for view in views]
            told = [(state, rows) for state, rows in zip(states, hidden, strict=True) if rows is not None]
            self.drafter.observe([Observation(state, len(rows), hidden=rows) for state, rows in told])

    def _read(self, view: SequenceView) -> Tensor | None:
        return read_unread(self.target, view, self.features)

    def draft(self, budgets: Sequence[Budget]) -> list[TokenTree]:
        return self.drafter.draft(self.states, budgets)

    def write(self, trees: Sequence[TokenTree], num_kept: int) -> None:
        """The first way down is accepted, as far as asked; then a bonus."""
        verdicts = []
        for view, tree in zip(self.views, trees, strict=True):
            way = tree.path(len(tree) - 1)[:num_kept] if len(tree) else []
            view.history.append([*(tree.tokens[node] for node in way), 5])
            verdicts.append(Verdict(tuple(way), 5))
        self.drafter.observe(observed(self.states, trees, verdicts, [self._read(view) for view in self.views]))

    def close(self) -> None:
        for view, state in zip(self.views, self.states, strict=True):
            self.drafter.close(state)
            if view.slot is not None:
                self.target.close(view.slot)


def draws_of(spec: str) -> list[Draw]:
    (parsed,) = DRAFTERS.parse(spec)
    cls, config = DRAFTERS.configure(parsed)
    return sorted(cls.describe(config).draws, key=lambda draw: draw.value)


CASES = [pytest.param(spec, draw, id=f"{spec}-{draw.value}") for spec in specs() for draw in draws_of(spec)]
every_case = pytest.mark.parametrize(("spec", "draw"), CASES)


def same(one: TokenTree, other: TokenTree) -> bool:
    distributions = (one.distributions is None) == (other.distributions is None)
    if one.distributions is not None and other.distributions is not None:
        # the last bits of products depend on the number of rows
        distributions = torch.allclose(one.distributions, other.distributions, rtol=1e-9, atol=1e-12)
    return distributions and (one.tokens, one.parents, one.draw) == (other.tokens, other.parents, other.draw)
