"""Drafters of a beam search: guesses of the next beams of a sequence, which one pass scores together.

A draft is a token tree after a live beam. One pass of the model scores the newest token of every beam and all drafted
nodes. Then ordinary steps are made as long as the beams that they need are scored. Drafts change the number of passes,
and no step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from draftree.beam.forest import Forest, Tip
from draftree.beam.scoring import next_logprobs, run_pass
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.core.tensors import to_device, to_host, widened
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Budget
from draftree.drafters import DRAFTERS
from draftree.drafters.base import DraftContext, Drafter, SequenceView
from draftree.drafters.model import ModelDrafter
from draftree.models.base import LanguageModel
from draftree.options import NO_DRAFT
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from draftree.beam.params import BeamSearchParams
    from draftree.beam.sequence import SequenceSearch
    from draftree.beam.strategies import Beam

MAX_NODES = 128  # maximum number of drafted nodes of a search that one pass scores
MAX_DEPTH = 8  # maximum number of drafted levels
PATIENCE = 3  # failed drafts in a row after which drafting pauses
LONGEST_PAUSE = 16

Draft = tuple["Beam", TokenTree]  # a live beam and the tree after it


class BeamDrafter(ABC):
    """Drafter of a beam search. Has state for each search."""

    model: LanguageModel | None = None  # its own model; None if it has none

    def start(self, search: SequenceSearch, *, capacity: int, length: int) -> None:  # noqa: B027
        """Prepare for a search.

        `search`: the search, before its first pass. `capacity`: maximum number of live nodes in one slot. `length`:
        expected maximum number of tokens in a slot.
        """

    def forests(self, search: SequenceSearch) -> Sequence[Forest]:
        """Return its own trees of a search, which follow the live beams; empty without a model."""
        return ()

    @abstractmethod
    def propose(self, depths: Mapping[SequenceSearch, int]) -> list[list[Draft]]:
        """Return drafts for each search.

        `depths`: maximum number of levels for each search, at least 1.
        """

    def finish(self, search: SequenceSearch) -> None:  # noqa: B027
        """Free what belongs to a search; may be called twice."""


@dataclass(slots=True)
class Pace:
    """Depth of the next draft of a sequence: doubled after success, less after failure, and none for some passes."""

    depth: int = 4
    failures: int = 0
    pause: int = 0
    is_drafting: bool = False

    def next_depth(self) -> int:
        """Return the levels of the next draft; 0 during a pause."""
        if self.pause:
            self.pause -= 1
            return 0
        return self.depth

    def note(self, steps: int) -> None:
        """Record how many steps the last pass made possible."""
        if not self.is_drafting:
            return
        if steps > 1:
            self.failures = 0
            self.depth = min(MAX_DEPTH, 2 * self.depth) if steps > self.depth else max(2, steps)
            return
        self.failures += 1
        self.depth = max(1, self.depth // 2)
        if self.failures >= PATIENCE:
            self.pause = min(LONGEST_PAUSE, 2 ** (self.failures - PATIENCE))


def require_draftable(model: LanguageModel, params: BeamSearchParams) -> None:
    """Check that drafts can be scored, and that a score bounds the continuations of a beam."""
    for name in ("unk_penalty", "diversity_penalty", "sibling_penalty", "lm_weight"):
        if getattr(params, name) < 0:
            raise InvalidRequestError(
                f"{name}={getattr(params, name)} can raise the score of a sequence, so no score bounds what follows a "
                f"beam, and drafts cannot be used: set {name} to 0 or more, or draft to 'none'",
                param=name,
            )
    for name, models in (("draft", [model]), ("models", params.models), ("lm_model", [params.lm_model])):
        if any(model is not None and not model.supports_trees for model in models):
            raise InvalidRequestError(
                f"{name}: a model accepts chains only, and drafts of several beams are a tree: set draft to 'none'",
                param=name,
            )


@final
class RunnersUp(BeamDrafter):
    """The last step's other candidates: tokens that almost continued a beam's parent often continue the beam.

    They cost nothing and need no model. A beam is one token longer than its parent, so only one level is drafted.
    """

    def __init__(self, count: int = 2) -> None:
        self._count = count

    def propose(self, depths: Mapping[SequenceSearch, int]) -> list[list[Draft]]:
        """Return the candidates that continued the same parent, best first, after each beam."""
        return [[(beam, tree) for beam in search.live if len(tree := self._tree(search, beam))] for search in depths]

    def _tree(self, search: SequenceSearch, beam: Beam) -> TokenTree:
        others = [
            candidate.token
            for candidate in search.last_candidates
            if candidate.parent.tokens == beam.tokens[:-1] and candidate.token not in (beam.tokens[-1], *search.ends)
        ]
        tokens = tuple(dict.fromkeys(others))[: self._count]
        return TokenTree(tokens, (ROOT,) * len(tokens))


@final
class SequenceDrafts(BeamDrafter):
    """Drafts of a drafter that reads sequences only: no model passes, hidden states or target tokens.

    The source of an encoder-decoder model is read too.
    """

    def __init__(self, drafter: Drafter[Any], vocab_size: int) -> None:
        self._drafter = drafter
        self._controls: Controls = build_controls(SamplingParams(temperature=0), vocab_size=vocab_size, seed=0)

    def propose(self, depths: Mapping[SequenceSearch, int]) -> list[list[Draft]]:
        beams = [(search, beam) for search in depths for beam in search.live]
        states, budgets = [], []
        for search, beam in beams:
            source = () if search.opening.source is None else search.opening.source.tokens
            history = History([*search.prompt, *beam.tokens])
            states.append(self._drafter.open(SequenceView(history, self._controls, owner=None, source=source)))
            nodes = max(1, MAX_NODES // len(search.live))
            budgets.append(Budget(min(nodes, 2 * depths[search]), depths[search]))
        trees = self._drafter.draft(states, budgets)
        drafts: dict[SequenceSearch, list[Draft]] = {search: [] for search in depths}
        for (search, beam), tree in zip(beams, trees, strict=True):
            if len(tree):
                drafts[search].append((beam, tree))
        return list(drafts.values())


@dataclass(frozen=True, slots=True)
class _Node:
    """A live beam, or node `index` of the tree after it, whose `tokens` and `parents` grow."""

    beam: Beam
    tokens: list[int]
    parents: list[int]
    index: int
    tip: Tip
    score: float


@final
class ModelBeams(BeamDrafter):
    """Drafts by a model with the same vocabulary: an ordinary beam search of some levels after the live beams.

    A level holds more nodes than the search has beams, since all next beams must be drafted for a further step.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model: LanguageModel = model
        self._forests: dict[SequenceSearch, Forest] = {}

    def start(self, search: SequenceSearch, *, capacity: int, length: int) -> None:
        forest = self._forests[search] = Forest(self.model, search.opening, capacity=capacity, length=length)
        for beam in search.live:
            beam.draft_tips = [forest.root]

    def forests(self, search: SequenceSearch) -> Sequence[Forest]:
        return (self._forests[search],)

    def finish(self, search: SequenceSearch) -> None:
        if forest := self._forests.pop(search, None):
            forest.close()

    def propose(self, depths: Mapping[SequenceSearch, int]) -> list[list[Draft]]:
        """Return trees of the best continuations, one pass for each level."""
        roots = {
            search: [_Node(beam, [], [], ROOT, beam.draft_tips[0], beam.score) for beam in search.live]
            for search in depths
        }
        nodes = dict(roots)
        widths = {search: search.params.beam_width + max(2, search.params.beam_width // 2) for search in depths}
        levels = {search: max(1, min(depth, MAX_NODES // widths[search])) for search, depth in depths.items()}
        for level in range(max(levels.values())):
            live = [search for search in depths if level < levels[search] and nodes[search]]
            while unread := [self._forests[search] for search in live if not self._forests[search].is_complete]:
                run_pass(self.model, unread)
                self._settle_prompts(live)
            for search in live:
                nodes[search] = self._grow(search, nodes[search], widths[search], is_last=level + 1 == levels[search])
        return [
            [(root.beam, TokenTree(tuple(root.tokens), tuple(root.parents))) for root in search_roots if root.tokens]
            for search_roots in roots.values()
        ]

    def _settle_prompts(self, searches: Sequence[SequenceSearch]) -> None:
        """Commit the parts of long prompts that were read."""
        for search in searches:
            forest = self._forests[search]
            if not forest.is_read:
                forest.settle([forest.root, *(beam.draft_tips[0] for beam in search.live)])

    @staticmethod
    def _grow(search: SequenceSearch, nodes: Sequence[_Node], count: int, *, is_last: bool) -> list[_Node]:
        """Append the best continuations of all nodes; only nodes that a next level needs are put into the forest."""
        rows = [row for node in nodes if (row := node.tip.row) is not None]
        logprobs = next_logprobs(rows, [search.params.temperature] * len(rows))
        logprobs[:, search.end_ids.to(logprobs.device)] = -math.inf
        totals = logprobs + to_device([node.score for node in nodes], logprobs.device, dtype=logprobs.dtype)[:, None]
        best = totals.reshape(-1).topk(min(count, totals.numel()))
        level = []
        places = (best.indices // totals.shape[1], best.indices % totals.shape[1])
        for score, row, column in to_host(torch.stack([widened(part) for part in (best.values, *places)], dim=1)):
            if score == -math.inf or math.isnan(score):
                continue
            parent, token = nodes[int(row)], int(column)
            parent.tokens.append(token)
            parent.parents.append(parent.index)
            if not is_last:
                place = len(parent.tokens) - 1
                child = parent.tip.child(token)
                level.append(_Node(parent.beam, parent.tokens, parent.parents, place, child, score))
        return level


RUNNERS_UP = "runners-up"
LoadModel = Callable[[str], LanguageModel]


def beam_drafters(
    draft: Any, *, target: LanguageModel, tokenizer: Tokenizer | None, load: LoadModel
) -> list[BeamDrafter]:
    """Return the drafters of a spec such as `runners-up`, `suffix` or `ngram+model:NAME`, or of a loaded model.

    None or "none" disables drafting; `load` loads the model that a spec names, at most one.
    """
    if draft is None or draft == NO_DRAFT:
        return []
    if not isinstance(draft, str):
        return [ModelBeams(_fitting(getattr(draft, "model", draft), target))]
    try:
        drafters = [_drafter_of(part.strip(), target, tokenizer, load) for part in draft.split("+")]
    except ConfigurationError as error:
        raise InvalidRequestError(f"draft: {error}", param="draft") from error
    if sum(isinstance(drafter, ModelBeams) for drafter in drafters) > 1:
        raise InvalidRequestError(f"draft '{draft}' names two models: name one", param="draft")
    return drafters


def _drafter_of(spec: str, target: LanguageModel, tokenizer: Tokenizer | None, load: LoadModel) -> BeamDrafter:
    if spec == RUNNERS_UP:
        return RunnersUp()
    kind, config = DRAFTERS.configure(DRAFTERS.parse(spec)[0])
    if issubclass(kind, ModelDrafter):
        if config != kind.Config(config.name):
            raise ConfigurationError(
                f"'{spec}' has options, but beam search with a draft model takes none: name only the model"
            )
        return ModelBeams(_fitting(load(config.name), target))
    traits = kind.describe(config)
    for needed, what in (
        (traits.features, "hidden states of the model"),
        (traits.runs_model, "a part of the model, or a model that drafts for one sequence"),
        (traits.wants_picks or traits.works_ahead, "the target tokens of earlier passes"),
        (traits.reads_predictions, "the prediction of a request"),
        (traits.reads_grammars, "the grammar of a request"),
    ):
        if needed:
            raise ConfigurationError(
                f"'{spec}' needs {what}, which a beam search does not have: use ngram, suffix, {RUNNERS_UP} or "
                "model:NAME"
            )

    def refuse(name: str) -> Any:
        raise ConfigurationError(f"'{spec}' loads the model '{name}': use model:NAME")

    draw = next(draw for draw in (Draw.FREE, Draw.POINT, *traits.draws) if draw in traits.draws)
    reader = kind(config, DraftContext(target, tokenizer, draw, shares_noise=False, load_model=refuse))
    return SequenceDrafts(reader, target.vocab_size)


def _fitting(model: object, target: LanguageModel) -> LanguageModel:
    if not isinstance(model, LanguageModel):
        raise InvalidRequestError(
            f"draft is a {type(model).__name__}: give a spec, an LLM or a LanguageModel", param="draft"
        )
    if model.vocab_size != target.vocab_size:
        raise InvalidRequestError(
            f"draft: the draft model has {model.vocab_size} tokens, and the model that is searched has "
            f"{target.vocab_size}: its beams need the same vocabulary",
            param="draft",
        )
    if not model.supports_trees:
        raise InvalidRequestError(
            "draft: the draft model accepts chains only, and several beams are a tree: choose another", param="draft"
        )
    return model
