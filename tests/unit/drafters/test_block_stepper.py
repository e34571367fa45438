"""Trees of heads that draft in one pass, whatever was drafted, dropped, copied or batched before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from block_samples import FLASH, MEDUSA, PARALLEL, SPARK, VOCABULARY, config_of, random_head, random_parts
from draftree.drafters.growing.block_stepper import BlockStepper
from draftree.drafters.growing.kept_rows import BlockPass, KeptRows
from draftree.drafters.growing.stepping import IDLE_ROUNDS
from draftree.drafters.growing.unread import MAX_UNREAD
from draftree.heads.blocks import BlockHead, BlockRows
from draftree.heads.peagle import ParallelEagle, PEagleHead
from head_texts import HeadText, grown, hidden_states

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TREE = ([7, 8, 9, 7, 30, 31], [-1, -1, 0, 0, 1, 3], (2, 3, 1))
"""Tokens, parents and sizes of levels."""
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {**FLASH, "block_size": 5},
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
    return block, BlockStepper(block, torch.device("cpu"))


def wanted(head: BlockHead, tokens: list[int], path: list[int]) -> Tensor:
    """Logits after a path, from one pass over the whole text."""
    features = hidden_states(head, tokens[:-1])  # type: ignore[arg-type]
    rows = BlockRows(features, torch.tensor(tokens[1:]), torch.arange(1, len(tokens)), [len(tokens) - 1])
    states = head.run(rows, BlockPass([KeptRows()], rows.counts))
    slot = len(path) + head.first_slot
    found = head.logits(states)[0, slot]
    if not head.has_bias:
        return found
    memory = head.start(states, torch.tensor(tokens[-1:]))
    for level, token in enumerate([tokens[-1], *path]):
        bias, memory = head.follow(memory, torch.tensor([token]), states[:, level + head.first_slot])
    return found + bias[0]


def near(head: BlockHead, found: Tensor, reference: Tensor) -> None:
    ids = head.vocabulary.ids
    torch.testing.assert_close(found[ids].double(), reference.double(), rtol=1e-4, atol=1e-4)
    assert bool(found[~head.vocabulary.mask()].isneginf().all())


def check_tree(head: BlockHead, tokens: list[int], found: list[Tensor]) -> None:
    rows = torch.cat(found)
    near(head, rows[0], wanted(head, tokens, []))
    for node in range(len(TREE[0])):
        path, place = [], node
        while place >= 0:
            path.insert(0, TREE[0][place])
            place = TREE[1][place]
        near(head, rows[1 + node], wanted(head, tokens, path))


def text_of(stepper: Any, head: Any, tokens: list[int], **more: Any) -> HeadText:
    return HeadText(stepper, head, tokens, **more)


@pytest.mark.parametrize("name", HEADS)
def test_every_depth_after_rejections(name: str) -> None:
    head, stepper = built(name)
    text: Any = text_of(stepper, head, PROMPT).read(3).read()
    for path, bonus in (((), 12), ((0, 2), 13), ((1, 4), 14), ((0, 3, 5), 15), ((0,), 16)):
        check_tree(head, text.tokens, text.levels(*TREE))
        stepper.check_integrity([text.state])
        text.write([*(TREE[0][node] for node in path), bonus], path)
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
            path = (0, 2)[:place]
            text.write([*(tokens[node] for node in path), 20 + round_], path)
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
    text: Any = text_of(stepper, head, tokens, read=min(shared, source.slot.count), state=state, consumes=True)
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
    kept = text.state.kept.length
    text.write([token % VOCABULARY for token in range(MAX_UNREAD + 9)])
    assert text.state.kept.length == kept
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
