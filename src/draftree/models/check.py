"""The load-time self-check: a small tree scored in one pass against each of its branches scored alone.

The model itself, with transformers' own cacheless forward, is the judge. Families whose attention knows
positions by key index fail on trees and keep chains; those that fail on chains are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.core.tree import path
from draftree.models.base import Extend, LanguageModel, Part
from draftree.models.own_forward import prompt_inputs

PREFIX_LENGTH = 5
TREE_PARENTS = (-1, 0, 0, -1, 1)
BRANCHES = ((0, 1, 4), (0, 2), (3,))
EXACT_LENGTHS = (60, 120, 250)
"""Prefixes in which bits are compared: some end just before passes read more keys."""
EXACT_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 7, 8, -1, 10)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 8e-2, torch.float16: 3e-2}
"""Largest accepted difference, as a share of the spread of the logits."""
QUANTIZED_TOLERANCE = 0.4
"""The same for weights of 8 bits: what is computed is another model, which must not be a wrong one."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Largest difference from the judge, as a share of the spread of the logits.

    `is_exact`: whether every node of the tree had the very bits that it has when its branch is read token by token.
    """

    chain_error: float
    tree_error: float
    tolerance: float
    is_exact: bool = False

    @property
    def chains_ok(self) -> bool:
        """Whether a chain scored in our slots is right."""
        return self.chain_error <= self.tolerance

    @property
    def trees_ok(self) -> bool:
        """Whether a tree scored in one pass is right."""
        return self.tree_error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the model itself says of every branch, before anything of it was changed.

    Attributes:
        ids: the prefix, then the nodes of the tree.
        logits: for each branch the rows from the end of the prefix on.
    """

    ids: tuple[int, ...]
    logits: dict[tuple[int, ...], Tensor]

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens before the tree."""
        return self.ids[:PREFIX_LENGTH]

    @property
    def nodes(self) -> tuple[int, ...]:
        """The tokens of the tree."""
        return self.ids[PREFIX_LENGTH:]

    @property
    def spread(self) -> float:
        """Largest minus smallest logit, the scale of all errors."""
        return max(float(row.amax() - row.amin()) for rows in self.logits.values() for row in rows) or 1.0


def tokens_of_check(vocab: int) -> tuple[int, ...]:
    """The tokens that are scored, out of so many: the prefix, then the nodes of the tree."""
    return tuple((7 + max(1, vocab // 17) * i) % vocab for i in range(PREFIX_LENGTH + len(TREE_PARENTS)))


@torch.inference_mode()
def judge(model: Any) -> Judgement:
    """Score every branch alone, without a cache, with the inputs that `generate` makes.

    Args:
        model: the transformers model.
    """
    vocab = int(model.config.get_text_config().vocab_size)
    ids = tokens_of_check(vocab)
    logits: dict[tuple[int, ...], Tensor] = {}
    branch: tuple[int, ...]
    for branch in BRANCHES:
        tokens = torch.tensor([[*ids[:PREFIX_LENGTH], *(ids[PREFIX_LENGTH + n] for n in branch)]], device=model.device)
        rows = model(**prompt_inputs(model, tokens, use_cache=False)).logits[0, PREFIX_LENGTH - 1 :]
        logits[branch] = rows if rows.dtype == torch.float64 else rows.float()
    return Judgement(ids, logits)


@torch.inference_mode()
def check(model: LanguageModel, wanted: Judgement, *, tolerance: float | None = None) -> CheckResult:
    """Score the tree in one pass, and a chain, and compare; a tolerance of None is the dtype's."""
    chain_error = _chain_error(model, wanted) / wanted.spread
    tree_error, is_exact = float("inf"), False
    if model.supports_trees:
        slot = _filled(model, wanted.prefix)
        scores = model.extend([Extend(slot, wanted.nodes, TREE_PARENTS)]).logits
        model.close(slot)
        tree_error = max(float((scores[list(b)] - wanted.logits[b][1:]).abs().max()) for b in BRANCHES) / wanted.spread
        is_exact = all(torch.equal(scores[list(b)], _token_by_token(model, wanted, b)) for b in BRANCHES)
    accepted = TOLERANCE[model.dtype] if tolerance is None else tolerance
    return CheckResult(_comparable(chain_error), _comparable(tree_error), accepted, is_exact)


@torch.inference_mode()
def sketch_error(model: LanguageModel) -> float:
    """Largest difference between a whole pass over a small tree and one that goes on from a sketch of some of it.

    Returns:
        The difference as a share of the spread of the logits.
    """
    if model.num_layers < 2:
        return 0.0
    ids = tokens_of_check(model.vocab_size)
    prefix, nodes = ids[:PREFIX_LENGTH], ids[PREFIX_LENGTH:]
    parents: Sequence[int] = TREE_PARENTS if model.supports_trees else range(-1, len(nodes) - 1)
    sketched = [0, 1, 3] if model.supports_trees else [0, 1]
    slot = _filled(model, prefix)
    whole = model.extend([Extend(slot, nodes, parents)]).logits
    model.commit(slot, ())
    own = [sketched.index(parents[n]) if parents[n] in sketched else -1 for n in sketched]
    model.sketch([Extend(slot, [nodes[n] for n in sketched], own)], Part(end=model.num_layers // 2))
    resumed = model.extend([Extend(slot, nodes, parents)]).logits
    model.close(slot)
    return _comparable(float((whole - resumed).abs().max() / (whole.amax() - whole.amin())))


@torch.inference_mode()
def rounds_alike(model: LanguageModel) -> bool:
    """Whether rows have the very same bits in passes of many shapes: longer texts, wider trees, and in company.

    Stops at the first bit that differs, so it costs much only where it succeeds.
    """
    step = max(1, model.vocab_size // 17)
    ids = [(3 + step * i) % model.vocab_size for i in range(max(EXACT_LENGTHS) + len(EXACT_PARENTS))]
    lengths = [length for length in EXACT_LENGTHS if length + len(EXACT_PARENTS) < model.max_length]
    parents: Sequence[int] = EXACT_PARENTS if model.supports_trees else range(-1, len(EXACT_PARENTS) - 1)
    return all(
        _is_as_alone(model, ids[:length], ids[length : length + len(parents)], parents=parents) for length in lengths
    )


def _is_as_alone(model: LanguageModel, prefix: Sequence[int], nodes: Sequence[int], *, parents: Sequence[int]) -> bool:
    """Whether all nodes of a tree, alone and beside others, have the bits that their paths have token by token."""
    slot, others = _filled(model, prefix), [_filled(model, prefix[: len(prefix) // 2]) for _ in range(2)]
    whole = model.extend([Extend(slot, nodes, parents)]).logits
    model.commit(slot, ())
    beside = model.extend([Extend(slot, nodes, parents), *(Extend(other, [nodes[0]], [-1]) for other in others)]).of(0)
    model.commit(slot, ())
    is_same = torch.equal(whole, beside)
    ends = [node for node in range(len(nodes)) if node not in parents]
    for end in ends:
        way, length = path(parents, end), slot.length
        for node in way if is_same else ():
            row = model.extend([Extend(slot, [nodes[node]], [-1])]).logits[0]
            model.commit(slot, [0])
            is_same = is_same and torch.equal(whole[node], row)
        model.truncate(slot, length)
    for opened in (slot, *others):
        model.close(opened)
    return is_same


def _token_by_token(model: LanguageModel, wanted: Judgement, branch: Sequence[int]) -> Tensor:
    slot = _filled(model, wanted.prefix)
    rows = []
    for node in branch:
        rows.append(model.extend([Extend(slot, [wanted.nodes[node]], [-1])]).logits)
        model.commit(slot, [0])
    model.close(slot)
    return torch.cat(rows)


def _comparable(error: float) -> float:
    # NaN compares false with everything: it must count as an error, not as none
    return float("inf") if error != error else error


def _filled(model: LanguageModel, prefix: Sequence[int]) -> Any:
    slot = model.open()
    model.extend([Extend(slot, prefix, range(-1, len(prefix) - 1), logits_at=[len(prefix) - 1])])
    model.commit(slot, range(len(prefix)))
    return slot


def _chain_error(model: LanguageModel, wanted: Judgement) -> float:
    branch = BRANCHES[0]
    slot = model.open()
    last = len(wanted.prefix) - 1
    first = model.extend([Extend(slot, wanted.prefix, range(-1, last), logits_at=[last])]).logits
    model.commit(slot, range(last + 1))
    rest = model.extend([Extend(slot, [wanted.nodes[n] for n in branch], range(-1, len(branch) - 1))]).logits
    model.close(slot)
    return float((torch.cat([first, rest]) - wanted.logits[branch]).abs().max())
