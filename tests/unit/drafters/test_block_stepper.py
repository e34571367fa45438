"""Heads that draft in one pass: trees, whatever was drafted, dropped, copied or batched before, and confidence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from block_samples import (
    FLASH,
    MEDUSA,
    PARALLEL,
    PRESS,
    SECOND,
    SPARK,
    VOCABULARY,
    BlockTexts,
    config_of,
    random_head,
    random_parts,
)
from draftree import LLM, SamplingParams
from draftree.core.tree import Draw, TokenTree, path
from draftree.core.types import Budget, RoundRecord
from draftree.drafters.tree_builder.block_stepper import BlockStepper
from draftree.drafters.tree_builder.builder import TreeBuilder, parse_shape
from draftree.drafters.tree_builder.head_stepper import MAX_UNREAD
from draftree.drafters.tree_builder.model_stepper import IDLE_ROUNDS
from draftree.heads.base import BlockHead, BlockNodes, BlockRows
from draftree.heads.block_passes import TorchBlockPasses
from draftree.heads.calibration import Calibration, with_confidence, write_calibration
from draftree.heads.dflash import DFlashHead
from draftree.heads.folders import write_head
from draftree.heads.peagle import ParallelEagle, PEagleHead
from families import VOCAB_SIZE, drafter_folder
from head_texts import HeadText, grown, hidden_states

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TREE = ([7, 8, 9, 7, 30, 31], [-1, -1, 0, 0, 1, 3], (2, 3, 1))
"""Tokens, parents and sizes of levels."""
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {**FLASH, "block_size": 5},
    "dflash2": {**SECOND, "block_size": 5},
    "xpress": {**PRESS, "block_size": 5},
    "xpress-anchor": {**PRESS, "anchor_predicts": True},
    "dspark": SPARK,
    "dspark-rnn": {**SPARK, "markov_type": "rnn", "anchor_predicts": False, "block_size": 5},
    "dspark-gated": {**SPARK, "markov_type": "gated"},
    "peagle": {**PARALLEL, "depth": 4},
    "medusa": {**MEDUSA, "block_size": 4, "depth": 4},
}


def built(name: str, **others: Any) -> tuple[BlockHead, BlockStepper]:
    config = config_of(HEADS[name], **others)
    head: Any = random_head(config).double()
    parts = random_parts(config)
    head.bind(type(parts)(parts.embedding.double(), parts.output.double(), parts.facts, parts.finish, 6))
    block = ParallelEagle(head) if isinstance(head, PEagleHead) else head
    assert isinstance(block, BlockHead)
    return block, BlockStepper(TorchBlockPasses(block, torch.device("cpu")))


def wanted(head: BlockHead, tokens: list[int], drafted: list[int]) -> Tensor:
    """Logits after a path, from one pass over the whole text."""
    features = hidden_states(head, tokens[:-1])  # type: ignore[arg-type]
    rows = BlockRows(features, torch.tensor(tokens[1:]), torch.arange(1, len(tokens)), [len(tokens) - 1])
    states = BlockTexts(head).run(rows).states
    slot = len(drafted) + head.first_slot
    found = head.logits(states)[0, slot]
    if not head.has_bias:
        return found
    memory = head.start(states, torch.tensor(tokens[-1:]), torch.tensor(tokens[-2:-1]))
    for level, token in enumerate([tokens[-1], *drafted]):
        slot = states[:, level + head.first_slot]
        nodes = BlockNodes(torch.tensor([token]), torch.tensor([level]), slot, head.logits(slot[None])[0], memory)
        found, memory = head.follow(nodes)
    return found[0]


def near(head: BlockHead, found: Tensor, reference: Tensor) -> None:
    ids = head.vocabulary.ids
    torch.testing.assert_close(found[ids].double(), reference.double(), rtol=1e-4, atol=1e-4)
    assert bool(found[~head.vocabulary.mask()].isneginf().all())


def check_tree(head: BlockHead, tokens: list[int], found: list[Tensor]) -> None:
    rows = torch.cat(found)
    near(head, rows[0], wanted(head, tokens, []))
    for node in range(len(TREE[0])):
        near(head, rows[1 + node], wanted(head, tokens, [TREE[0][one] for one in path(TREE[1], node)]))


def text_of(stepper: Any, head: Any, tokens: list[int], **more: Any) -> HeadText:
    return HeadText(stepper, head, tokens, **more)


@pytest.mark.parametrize("name", HEADS)
def test_every_depth_after_rejections(name: str) -> None:
    head, stepper = built(name)
    text: Any = text_of(stepper, head, PROMPT).read(3).read()
    for accepted, bonus in (((), 12), ((0, 2), 13), ((1, 4), 14), ((0, 3, 5), 15), ((0,), 16)):
        check_tree(head, text.tokens, text.levels(*TREE))
        stepper.check_integrity([text.state])
        text.write([*(TREE[0][node] for node in accepted), bonus], accepted)
        stepper.check_integrity([text.state])


@pytest.mark.parametrize("name", HEADS)
def test_a_batch_of_texts_of_other_lengths(name: str) -> None:
    head, stepper = built(name)
    texts: Any = [text_of(stepper, head, [*PROMPT[: 2 + 2 * i], i]).read() for i in range(3)]
    tokens, parents, sizes = TREE
    for round_ in range(3):
        order = texts if round_ else texts[::-1]
        for text, found in zip(order, grown(order, [tokens] * 3, [parents] * 3, sizes), strict=True):
            check_tree(head, text.tokens, found)
        for place, text in enumerate(texts):
            accepted = (0, 2)[:place]
            text.write([*(tokens[node] for node in accepted), 20 + round_], accepted)
        stepper.check_integrity([text.state for text in texts])


@pytest.mark.parametrize("name", ["dspark-rnn", "peagle"])
def test_a_copy_of_a_prompt_drafts_as_the_original(name: str) -> None:
    head, stepper = built(name)
    source: Any = text_of(stepper, head, PROMPT).read()
    copy: Any = text_of(stepper, head, PROMPT, read=len(PROMPT) - 1, state=source.state)
    assert stepper.is_ready(copy.state)
    check_tree(head, PROMPT, copy.levels(*TREE))
    copy.write([12])
    check_tree(head, PROMPT, source.levels(*TREE))
    check_tree(head, copy.tokens, copy.levels(*TREE))
    stepper.check_integrity([copy.state, source.state])


@pytest.mark.parametrize("shared", [1, 5, 8, 10])
def test_a_cached_prefix_is_cut_to_the_common_text(shared: int) -> None:
    head, stepper = built("dflash")
    source: Any = text_of(stepper, head, PROMPT).read()
    source.levels(*TREE)
    source.write([7, 9, 12], (0, 2))
    source.levels(*TREE)
    state: Any = stepper.detach(source.state)
    tokens = [*source.tokens[:shared], 21, 22, 23]
    text: Any = text_of(stepper, head, tokens, read=min(shared, source.slot.length), state=state, consumes=True)
    stepper.check_integrity([text.state])
    text.read()
    assert stepper.is_ready(text.state)
    # the row whose hidden state was read before the cache is left out
    assert set(range(1, len(tokens))) - {shared} <= {*text.state.positions, *unread(text.state)}
    assert max(unread(text.state)) == len(tokens) - 1


def unread(state: Any) -> list[int]:
    return [place for piece in state.unread for place in range(piece.first, piece.end)]


def test_a_round_without_news_uses_the_last_pass() -> None:
    head, stepper = built("dspark")
    text: Any = text_of(stepper, head, PROMPT).read()
    check_tree(head, text.tokens, text.levels(*TREE))
    stepper.keep([text.state], [()])
    assert stepper.is_ready(text.state)
    check_tree(head, text.tokens, text.levels(*TREE))


def test_nothing_is_read_while_no_trees_are_requested() -> None:
    head, stepper = built("dflash", max_length=4 * MAX_UNREAD)
    text: Any = text_of(stepper, head, [*PROMPT]).read()
    for _ in range(IDLE_ROUNDS + 1):
        text.write([5])
    kept = text.state.slot.length
    text.write([token % VOCABULARY for token in range(MAX_UNREAD + 9)])
    assert text.state.slot.length == kept
    assert sum(len(piece.hidden) for piece in text.state.unread) == MAX_UNREAD
    assert stepper.is_ready(text.state)
    text.levels(*TREE)
    stepper.check_integrity([text.state])


def test_texts_beyond_the_trained_positions_are_not_drafted() -> None:
    head, stepper = built("dflash", max_length=9)
    text: Any = text_of(stepper, head, PROMPT).read()
    assert stepper.is_ready(text.state)
    text.write([5])
    assert not stepper.is_ready(text.state)


def test_levels_and_memory() -> None:
    head, stepper = built("dflash")
    assert (stepper.max_depth, stepper.max_length) == (4, head.config.max_length)
    assert stepper.footprint.weights == sum(part.numel() * 8 for part in head.state_dict().values())


SHARES = [math.log(share) for share in (0.6, 0.3, 0.05)]
OWN = Calibration(((0.5, -0.3),), ((0.4, 0.1),))
OTHERS: dict[str, dict[str, Any]] = {
    "with token": {},
    "without token": {"confidence_with_markov": False},
    "without bias": {"confidence_with_markov": False, "markov_rank": 0},
    "anchor does not predict": {"anchor_predicts": False, "block_size": 5},
}


def drafted(
    head: DFlashHead,
    shape: str,
    *,
    calibration: Calibration | None = None,
    temperature: float = 0.0,
    budget: Budget | None = None,
    shares_noise: bool = True,
) -> TokenTree:
    stepper: Any = BlockStepper(TorchBlockPasses(head, torch.device("cpu")))
    params = SamplingParams(temperature=temperature)
    text: Any = HeadText(stepper, head, PROMPT, params=params).read()  # type: ignore[arg-type]
    growth = TreeBuilder(
        stepper, shape=parse_shape(shape, None), draw=Draw.FREE, shares_noise=shares_noise, calibration=calibration
    )
    (tree,) = growth.grow([text.state], [budget or Budget(12, 4)])
    return tree


@torch.inference_mode()
def estimate(head: DFlashHead, way: list[int]) -> float:
    """Probability of acceptance of the first child after a path, by the equation of the head."""
    features = hidden_states(head, PROMPT[:-1])  # type: ignore[arg-type]
    rows = BlockRows(features, torch.tensor(PROMPT[1:]), torch.arange(1, len(PROMPT)), [len(PROMPT) - 1])
    states = BlockTexts(head).run(rows).states[0, head.first_slot + len(way)]
    weights = head.state_dict()
    if head.config.confidence_with_markov:
        states = torch.cat((states, weights["markov_head.markov_w1.weight"][[PROMPT[-1], *way][-1]]))
    found = states @ weights["confidence_head.proj.weight"][0] + weights["confidence_head.proj.bias"][0]
    return float(torch.sigmoid(found))


def test_the_first_child_has_the_estimated_probability_and_the_order_stays() -> None:
    for confidence in (0.02, 0.6, 0.98):
        found = [math.exp(value) for value in with_confidence(SHARES, confidence)]
        assert found[0] == pytest.approx(confidence)
        assert found == sorted(found, reverse=True)
        odds = [p / (1 - p) for p in found]
        assert odds[1] / odds[0] == pytest.approx((0.3 / 0.7) / (0.6 / 0.4))
    assert with_confidence(SHARES, 0.6) == pytest.approx(SHARES)
    assert all(map(math.isfinite, (*with_confidence(SHARES, 0.0), *with_confidence([0.0, -20.0], 1.0))))


def test_missing_children_stay_missing() -> None:
    assert with_confidence([], 0.5) == []
    assert with_confidence([SHARES[0], -math.inf], 0.5)[1] == -math.inf
    assert with_confidence([-math.inf], 0.5) == [-math.inf]
    assert math.isnan(with_confidence([math.nan], 0.5)[0])
    assert not any(value > -math.inf for value in with_confidence(SHARES, math.nan))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", OTHERS)
def test_scores_of_first_children_are_the_heads_estimates(name: str, temperature: float) -> None:
    head = built("dspark", **OTHERS[name])[0]
    tree = drafted(head, "2-2-1", temperature=temperature)
    assert len(tree) == 10
    seen = set()
    for node, parent in enumerate(tree.parents):
        if parent in seen:
            continue
        seen.add(parent)
        before = tree.scores[parent] if parent >= 0 else 0.0
        way = [tree.tokens[one] for one in path(tree.parents, parent)] if parent >= 0 else []
        assert math.exp(tree.scores[node] - before) == pytest.approx(estimate(head, way), abs=1e-5)


def test_tokens_are_those_without_the_estimate() -> None:
    with_it, without = built("dspark")[0], built("dspark", has_confidence=False, confidence_with_markov=False)[0]
    without.load_state_dict({n: t for n, t in with_it.state_dict().items() if not n.startswith("confidence")})
    found, plain = drafted(with_it, "2-2-1"), drafted(without, "2-2-1")
    assert (found.tokens, found.parents) == (plain.tokens, plain.parents)
    assert found.scores != plain.scores


def test_a_fitted_map_takes_precedence_and_other_noise_uses_neither() -> None:
    head = built("dspark")[0]
    raw = drafted(head, "chain", shares_noise=False)
    assert drafted(head, "chain", shares_noise=False, calibration=OWN).scores == raw.scores
    assert math.exp(raw.scores[0]) != pytest.approx(estimate(head, []), abs=1e-3)
    mapped = drafted(head, "chain", calibration=OWN)
    assert mapped.scores[0] == pytest.approx(OWN.log_probability(raw.scores[0], 0, is_sampled=False))


def test_a_minimum_confidence_is_compared_with_the_estimate() -> None:
    head = built("dspark")[0]
    for bias, length in ((-9.0, 1), (9.0, 4)):
        assert head.confidence_head is not None
        head.confidence_head.proj.bias.fill_(bias)
        head.confidence_head.proj.weight.fill_(0.0)
        assert len(drafted(head, "chain", budget=Budget(4, 4, min_confidence=0.4))) == length


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 6}
WIDE: dict[str, Any] = {"target_hidden": 64, "hidden": 64, "vocab_size": VOCAB_SIZE, "draft_vocab_size": 60}


@pytest.mark.parametrize(("bias", "has_map", "longest"), [(-9.0, False, 1), (9.0, False, 4), (-9.0, True, 4)])
def test_a_planner_stops_drafts_by_the_estimate(bias: float, has_map: bool, longest: int, tmp_path: Path) -> None:
    """The threshold planner ends each draft after its first token if the head is never sure; texts stay."""
    target = drafter_folder("llama", tmp_path, distance=0.0, **SIZES)
    head: Any = random_head(config_of(SPARK, **WIDE, max_length=128))
    head.confidence_head.proj.bias.fill_(bias)
    head.confidence_head.proj.weight.fill_(0.0)
    write_head(head, tmp_path / "head")
    if has_map:
        write_calibration(Calibration(((0.01, 9.0),), ((0.01, 9.0),)), tmp_path / "head")
    records: list[RoundRecord] = []
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=4)
    llm = LLM(target, f"head:{tmp_path / 'head'}", plan="threshold:0.4", dtype="float32", on_round=records.append)
    assert (
        llm.generate([PROMPT], params)[0].token_ids
        == LLM(target, "none", dtype="float32").generate([PROMPT], params)[0].token_ids
    )
    drafts = [len(row.drafted) for record in records for row in record.sequences if len(row.drafted)]
    assert max(drafts) == longest


@torch.inference_mode()
@pytest.mark.parametrize("name", ["dflash", "xpress"])
def test_the_best_tree_has_the_likeliest_paths(name: str) -> None:
    """Best-first over the marginals of the levels, or over what the bias makes of them."""
    head, _ = built(name)
    assert isinstance(head, DFlashHead)
    head.norm.weight.mul_(8)  # flat distributions have no deep paths
    tree = drafted(head, "best-12", budget=Budget(12, 3))
    found = {tuple(tree.tokens[node] for node in path(tree.parents, end)) for end in range(12)}
    likely: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for length in range(3):
        for share, way in [pair for pair in likely if len(pair[1]) == length]:
            rows = wanted(head, PROMPT, list(way)).log_softmax(-1)
            likely += [(share + float(rows[token]), (*way, token)) for token in rows.topk(12).indices.tolist()]
    likely = sorted((pair for pair in likely if pair[1]), reverse=True)[:12]
    assert found == {way for _, way in likely}
    assert max(map(len, found)) > 1
