"""Self-check at load: compares a small tree scored in one pass with each of its branches scored alone.

The reference is the model's own forward pass in transformers, without a cache. Families whose attention derives
positions from key indices fail on trees and are limited to chains; families that fail on chains are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftree.core.tree import path
from draftree.models.base import CheckResult, Extend, LanguageModel, LayerSubset, Pass
from draftree.models.torch.inspection import prompt_inputs

PREFIX_LENGTH = 5
TREE_PARENTS = (-1, 0, 0, -1, 1)
BRANCHES = ((0, 1, 4), (0, 2), (3,))
EXACT_LENGTHS = (60, 124, 250)  # prefix lengths of the bitwise comparison, each just below a block boundary of keys
NATIVE_LENGTHS = EXACT_LENGTHS[:2]  # prefix lengths for native kernels, which read keys in blocks of 64
EXACT_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5, 7, 8, -1, 10)
WIDE_PARENTS = (-1, *((node - 1) // 3 for node in range(1, 52)))
"""Number of rows above the largest row block of any kernel (48)."""
EXACT_TREES = (EXACT_PARENTS, WIDE_PARENTS, EXACT_PARENTS)  # parents of the tree after each of these prefixes
PIECES = (1, 24)  # ends of the first prefill chunks, in tokens
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 8e-2, torch.float16: 3e-2}
"""Maximum accepted difference, relative to the range of the logits."""
QUANTIZED_TOLERANCE = {"int8": 0.4, "int4": 0.6}
"""Maximum accepted difference for quantized weights, which are an approximation of the model; about 0.7 for unrelated
logits."""


@dataclass(frozen=True, slots=True)
class ReferenceLogits:
    """Logits of every branch by the model's own forward pass, before the model is changed."""

    ids: tuple[int, ...]  # the prefix, then the nodes of the tree
    logits: dict[tuple[int, ...], Tensor]  # for each branch the rows from the end of the prefix on

    @property
    def prefix(self) -> tuple[int, ...]:
        return self.ids[:PREFIX_LENGTH]

    @property
    def nodes(self) -> tuple[int, ...]:
        return self.ids[PREFIX_LENGTH:]

    @property
    def spread(self) -> float:
        """Largest minus smallest logit; errors are relative to it."""
        return max(float(row.amax() - row.amin()) for rows in self.logits.values() for row in rows) or 1.0


def tokens_of_check(vocab: int) -> tuple[int, ...]:
    """Return the scored tokens for a vocabulary of this size: the prefix, then the nodes of the tree."""
    return tuple((7 + max(1, vocab // 17) * i) % vocab for i in range(PREFIX_LENGTH + len(TREE_PARENTS)))


@torch.inference_mode()
def reference_logits(model: Any) -> ReferenceLogits:
    """Score every branch alone, without a cache, with the inputs that `generate` prepares."""
    ids = tokens_of_check(int(model.config.get_text_config().vocab_size))

    def score(tokens: Tensor) -> Tensor:
        return model(**prompt_inputs(model, tokens.to(model.device), use_cache=False)).logits

    return branch_logits(ids, score)


def branch_logits(ids: tuple[int, ...], score: Callable[[Tensor], Tensor]) -> ReferenceLogits:
    """Return the reference of a function from tokens, shape (1, length), to logits, shape (1, length, vocab)."""
    logits: dict[tuple[int, ...], Tensor] = {}
    for branch in map(tuple, BRANCHES):
        tokens = torch.tensor([[*ids[:PREFIX_LENGTH], *(ids[PREFIX_LENGTH + node] for node in branch)]])
        rows = score(tokens)[0, PREFIX_LENGTH - 1 :]
        logits[branch] = rows if rows.dtype == torch.float64 else rows.float()
    return ReferenceLogits(ids, logits)


@torch.inference_mode()
def check(
    model: LanguageModel,
    reference: ReferenceLogits,
    *,
    tolerance: float | None = None,
    compares_tokens: bool = True,
) -> CheckResult:
    """Compare a tree scored in one pass, and a chain, with the reference.

    `tolerance`: maximum accepted difference; None for the dtype's. `compares_tokens`: whether `is_exact` compares
    the tree with its branches token by token; otherwise it is set for every model that scores trees, and the caller
    compares by `rounds_alike`.
    """
    slot = model.open_probe()
    branch = BRANCHES[0]
    first = _prefilled(model, slot, reference.prefix)
    model.close(_filled(model, reference.prefix[::-1]))  # a model that keeps states outside of its slots mixes them up
    rest = _chain(model, slot, [reference.nodes[node] for node in branch])
    chain_error = float((torch.cat([first, rest]) - reference.logits[branch]).abs().max()) / reference.spread
    tree_error, is_exact = float("inf"), False
    if model.supports_trees:
        scores = model.run(Pass([Extend(slot, reference.nodes, TREE_PARENTS)])).logits.tensor()
        tree_error = (
            max(float((scores[list(b)] - reference.logits[b][1:]).abs().max()) for b in BRANCHES) / reference.spread
        )
        is_exact = True
        for nodes in map(list, BRANCHES if compares_tokens else ()):
            other = _filled(model, reference.prefix)
            rows = _token_by_token(model, other, [reference.nodes[node] for node in nodes])
            is_exact &= torch.equal(scores[nodes], rows)
            model.close(other)
    model.close(slot)
    if model.footprint.state:
        chain_error = max(chain_error, _state_error(model, reference))
        tree_error = max(tree_error, _tree_state_error(model, reference)) if model.supports_trees else tree_error
    accepted = TOLERANCE[model.dtype] if tolerance is None else tolerance
    return CheckResult(_comparable(chain_error), _comparable(tree_error), accepted, is_exact)


def _state_error(model: LanguageModel, reference: ReferenceLogits) -> float:
    """Return the difference of a text whose recurrent states were read in pieces, copied, drafted and cut."""
    branch = BRANCHES[0]
    text = [*reference.prefix, *(reference.nodes[node] for node in branch)]
    start = PREFIX_LENGTH - 1
    slot = _filled(model, text[:start])
    other = model.fork(slot)
    model.run(Pass([Extend(other, text[start : start + 3], [-1, 0, 1], logits_at=(), settled=1)]))
    model.commit(other, [0, 1])
    rows = [_prefilled(model, slot, text[start:]), _prefilled(model, other, text[start + 2 :])]
    cut = model.cut_length(slot, PREFIX_LENGTH)
    model.truncate(slot, cut)
    rows.append(_prefilled(model, slot, text[cut:]))
    model.close(slot)
    model.close(other)
    return _comparable(float((torch.cat(rows) - reference.logits[branch][-1]).abs().max()) / reference.spread)


def _tree_state_error(model: LanguageModel, reference: ReferenceLogits) -> float:
    """Return the difference of a tree beside a chain of another slot, and of what follows after a part is committed."""
    (root, middle, last), (_, side), _ = BRANCHES
    wanted = reference.logits
    slot = _filled(model, reference.prefix)
    other = model.fork(slot)
    chain = Extend(other, [reference.nodes[root]], [-1], settled=1)
    result = model.run(Pass([Extend(slot, reference.nodes, TREE_PARENTS), chain]))
    rows = result.logits.tensor().clone()
    alike = [(rows[branch[-1]], wanted[branch][-1]) for branch in BRANCHES]
    alike.append((rows[root], rows[len(reference.nodes)]))
    model.commit(slot, [root], keep=[middle])
    model.commit(other, [0])
    jobs = [Extend(slot, [reference.nodes[last]], [0]), Extend(other, [reference.nodes[side]], [-1], settled=1)]
    after = model.run(Pass(jobs)).logits.tensor()
    alike += [(after[0], wanted[BRANCHES[0]][-1]), (after[1], wanted[BRANCHES[1]][-1])]
    model.close(slot)
    model.close(other)
    return max(_comparable(float((row - like).abs().max())) for row, like in alike) / reference.spread


@torch.inference_mode()
def partial_error(model: LanguageModel) -> float:
    """Return the maximum difference between a whole pass over a small tree and one that continues partial nodes."""
    if model.num_layers < 2:
        return 0.0
    ids = tokens_of_check(model.vocab_size)
    prefix, nodes = ids[:PREFIX_LENGTH], ids[PREFIX_LENGTH:]
    parents: Sequence[int] = TREE_PARENTS if model.supports_trees else range(-1, len(nodes) - 1)
    partial = [0, 1, 3] if model.supports_trees else [0, 1]
    slot = _filled(model, prefix)
    whole = model.run(Pass([Extend(slot, nodes, parents)])).logits.tensor()
    model.commit(slot, ())
    renumbered = [partial.index(parents[n]) if parents[n] in partial else -1 for n in partial]
    model.run(Pass([Extend(slot, [nodes[n] for n in partial], renumbered)], LayerSubset(end=model.num_layers // 2)))
    resumed = model.run(Pass([Extend(slot, nodes, parents)])).logits.tensor()
    model.close(slot)
    return _comparable(float((whole - resumed).abs().max() / (whole.amax() - whole.amin())))


@torch.inference_mode()
def rounds_alike(model: LanguageModel, lengths: Sequence[int] = EXACT_LENGTHS) -> bool:
    """Return whether rows have the same bits in passes of many shapes.

    After each prefix a tree is scored alone, beside other sequences, after the same prefix prefilled in chunks, branch
    by branch, and one branch token by token. Stops at the first difference.

    `lengths`: prefix lengths in tokens, ascending; limited to the model's context.
    """
    room = model.max_length - max(map(len, EXACT_TREES))
    ids = exact_tokens(model.vocab_size)
    whole, pieces = model.open_probe(), model.open_probe()
    is_same = True
    for length, tree in zip(sorted({max(1, min(length, room)) for length in lengths}), EXACT_TREES, strict=False):
        chain = range(-1, min(len(tree), model.max_length - length) - 1)
        parents: Sequence[int] = tree if model.supports_trees else chain
        _read(model, whole, ids[whole.length : length])
        for end in (*(pieces.length + size for size in PIECES), length):
            _read(model, pieces, ids[pieces.length : min(end, length)])
        is_same = _is_as_alone(model, whole, pieces, job=Extend(whole, ids[-len(parents) :], parents))
        if not is_same:
            break
    model.close(whole)
    model.close(pieces)
    return is_same


def exact_tokens(vocab: int) -> list[int]:
    """Return the tokens of the bitwise comparison: the prefix from the front, the tree's nodes from the end."""
    step = max(1, vocab // 17)
    return [(3 + step * place + place // 17) % vocab for place in range(max(EXACT_LENGTHS) + len(WIDE_PARENTS))]


def _read(model: LanguageModel, slot: Any, tokens: Sequence[int]) -> None:
    if tokens:
        _prefilled(model, slot, tokens)


def _is_as_alone(model: LanguageModel, slot: Any, pieces: Any, *, job: Extend) -> bool:
    """Return whether a tree's rows have the same bits alone, beside others in `pieces`, by branch and by token."""
    nodes, parents = job.tokens, job.parents
    reference = model.run(Pass([job])).logits.tensor().clone()
    model.commit(slot, ())
    if not torch.equal(_beside_others(model, Extend(pieces, nodes, parents)), reference):
        return False
    ends = [node for node in range(len(nodes)) if node not in parents]
    deepest = max(ends, key=lambda end: len(path(parents, end)))
    for end in {ends[0], ends[-1], deepest}:
        way = path(parents, end)
        if not torch.equal(_chain(model, slot, [nodes[node] for node in way]), reference[way]):
            return False
    way, other = path(parents, deepest), model.fork(slot)
    rows = _token_by_token(model, other, [nodes[node] for node in way])
    model.close(other)
    return torch.equal(rows, reference[way])


def _beside_others(model: LanguageModel, job: Extend) -> Tensor:
    """Return logits of a job between one that reads several tokens and one that reads one."""
    ids, length = exact_tokens(model.vocab_size), job.slot.length
    before, after = (model.fork(job.slot, model.cut_length(job.slot, length // share)) for share in (8, 2))
    jobs = [Extend(before, ids[:5], range(-1, 4)), job, Extend(after, ids[:1], [-1])]
    rows = model.run(Pass(jobs)).of(1).tensor().clone()
    model.commit(job.slot, ())
    for other in (before, after):
        model.close(other)
    return rows


def _chain(model: LanguageModel, slot: Any, tokens: Sequence[int]) -> Tensor:
    rows = model.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1))])).logits.tensor().clone()
    model.commit(slot, ())
    return rows


def _token_by_token(model: LanguageModel, slot: Any, tokens: Sequence[int]) -> Tensor:
    """Commit tokens one by one, and return the logits after each, shape (tokens, vocab)."""
    return torch.cat([_prefilled(model, slot, [token]) for token in tokens])


def _comparable(error: float) -> float:
    # comparisons with NaN are false: it must count as an error
    return float("inf") if error != error else error


def _filled(model: LanguageModel, prefix: Sequence[int]) -> Any:
    slot = model.open_probe()
    _prefilled(model, slot, prefix)
    return slot


def _prefilled(model: LanguageModel, slot: Any, tokens: Sequence[int]) -> Tensor:
    """Commit tokens to a slot, and return the logits after the last one, shape (1, vocab)."""
    count = len(tokens)
    job = Extend(slot, tokens, range(-1, count - 1), logits_at=[count - 1], settled=count)
    row = model.run(Pass([job])).logits.tensor().clone()
    model.commit(slot, range(count))
    return row
