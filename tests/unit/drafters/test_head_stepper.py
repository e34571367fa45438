"""A head's passes over texts and trees are those of its equations, whatever was drafted, dropped, copied or batched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.core.tree import path
from draftree.drafters.tree_builder.head_stepper import MAX_UNREAD, HeadStepper
from draftree.drafters.tree_builder.model_stepper import IDLE_ROUNDS
from draftree.heads.base import FeatureHead, TargetParts
from draftree.heads.passes import RowJob, RowResult, TorchPasses
from head_samples import VARIANTS, VOCAB, head_config, random_head, random_parts, reference_logits
from head_texts import HeadText, grown, hidden_states

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TREE = ([7, 8, 9, 7, 30, 31], [-1, -1, 0, 0, 1, 3], (2, 3, 1))
"""Tokens, parents and sizes of levels."""


def parts() -> TargetParts:
    found = random_parts()
    return replace(found, embedding=found.embedding.double(), output=found.output.double())


def built(variant: str = "eagle3", **values: int) -> tuple[FeatureHead, HeadStepper]:
    head = random_head(head_config(variant, **values)).double()
    head.bind(parts())
    return head, HeadStepper(TorchPasses(head, torch.device("cpu")))


def wanted(head: FeatureHead, tokens: list[int], drafted: list[int]) -> Tensor:
    return reference_logits(head, parts(), tokens, hidden_states(head, tokens[:-1]), drafted)


def near(head: FeatureHead, found: Tensor, reference: Tensor) -> None:
    """Logits of the whole vocabulary against those of the draft vocabulary."""
    ids = head.vocabulary.ids
    torch.testing.assert_close(found[ids].double(), reference, rtol=1e-5, atol=1e-5)
    assert bool(found[~head.vocabulary.mask()].isneginf().all())


def check_tree(head: FeatureHead, text: HeadText, found: list[Tensor]) -> None:
    tokens, parents, _ = TREE
    rows = torch.cat(found)
    near(head, rows[0], wanted(head, text.tokens, [])[0])
    for node in range(len(tokens)):
        near(head, rows[1 + node], wanted(head, text.tokens, [tokens[one] for one in path(parents, node)])[-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_depth_after_rejections_and_rebuilding(variant: str) -> None:
    head, stepper = built(variant)
    text = HeadText(stepper, head, PROMPT).read(3).read()
    for accepted, bonus in (((), 12), ((0, 2), 13), ((1, 4), 14), ((0, 3, 5), 15), ((0,), 16)):
        check_tree(head, text, text.levels(*TREE))
        stepper.check_integrity([text.state])
        text.write([*(TREE[0][node] for node in accepted), bonus], accepted)
        stepper.check_integrity([text.state])


@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3-qwen3"])
def test_a_batch_of_texts_of_other_lengths(variant: str) -> None:
    head, stepper = built(variant)
    texts = [HeadText(stepper, head, [*PROMPT[: 2 + 2 * i], i]).read() for i in range(4)]
    stepper.close(texts.pop(1).state)  # the slots are not neighbours
    for round_ in range(3):
        order = texts if round_ else texts[::-1]
        tokens, parents, sizes = TREE
        for text, found in zip(order, grown(order, [tokens] * 3, [parents] * 3, sizes), strict=True):
            check_tree(head, text, found)
        for place, text in enumerate(texts):
            accepted = (0, 2)[:place]
            text.write([*(tokens[node] for node in accepted), 20 + round_], accepted)
        stepper.check_integrity([text.state for text in texts])


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("shared", [1, 2, 5, 8, 10, 11])
def test_copies_and_cached_prefixes_hold_the_common_text(shared: int, *, is_cached: bool) -> None:
    head, stepper = built()
    source = HeadText(stepper, head, PROMPT).read()
    source.levels(*TREE)
    source.write([7, 9, 12], (0, 2))
    source.levels(*TREE)
    tokens = [*source.tokens[:shared], 21, 22]
    state = stepper.detach(source.state) if is_cached else source.state
    assert state is not None
    # a target has not read the last token of a text when it is cached
    read = min(shared, source.slot.length)
    text = HeadText(stepper, head, tokens, read=read, state=state, consumes=is_cached)
    stepper.check_integrity([text.state] if is_cached else [text.state, state])
    text.read()
    assert stepper.is_ready(text.state)
    check_tree(head, text, text.levels(*TREE))
    if not is_cached:  # the source is unchanged
        stepper.keep([state], [()])
        check_tree(head, source, source.levels(*TREE))


def test_a_round_without_news_reads_the_last_row_again() -> None:
    head, stepper = built()
    text = HeadText(stepper, head, PROMPT).read()
    text.levels(*TREE)
    stepper.keep([text.state], [()])
    check_tree(head, text, text.levels(*TREE))


def test_hidden_states_that_are_unknown_are_left_out() -> None:
    head, stepper = built()
    text = HeadText(stepper, head, PROMPT, read=4)
    assert not stepper.is_ready(text.state)
    text.read()
    assert stepper.is_ready(text.state)
    (found,) = text.levels([], [], [])
    # rows attend by distance: a text without the unread tokens has the same ones
    rest = reference_logits(head, parts(), PROMPT[4:], hidden_states(head, PROMPT[:-1])[4:], [])
    near(head, found[0], rest[0])


def test_rounds_without_states_leave_a_gap() -> None:
    """The head drafts again once states of the last token are there."""
    head, stepper = built()
    text = HeadText(stepper, head, PROMPT).read()
    text.levels(*TREE)
    for token in (5, 3, 5):
        text.view.history.append([token])
        text.slot.length += 1
        stepper.learn([text.state], [None])
        stepper.keep([text.state], [()])
        assert not stepper.is_ready(text.state)
    text.write([8]).write([9])
    assert stepper.is_ready(text.state)
    assert all(bool(row.isfinite().any()) for row in text.levels(*TREE))
    assert [position for position in text.state.positions if position > len(PROMPT) - 1] == [11, 12]
    stepper.check_integrity([text.state])


@pytest.mark.parametrize("chunk", [1, 3, 7, 50])
def test_windows_depend_on_the_text_only(chunk: int) -> None:
    head, stepper = built(max_length=16)
    tokens = [(7 * i + i // 5) % VOCAB for i in range(50)]
    text = HeadText(stepper, head, tokens)
    while text.slot.length < len(tokens) - 1:
        text.read(min(chunk, len(tokens) - 1 - text.slot.length))
        stepper.check_integrity([text.state])
    for bonus in range(20):
        found = text.levels([5], [-1], [1])
        position = len(text.tokens) - 1
        start = max(1, (position // 8 - 1) * 8)
        hidden = hidden_states(head, text.tokens[:-1])[start - 1 :]
        reference = reference_logits(head, parts(), text.tokens[start - 1 :], hidden, [5])
        near(head, found[0][0], reference[0])
        near(head, found[1][0], reference[1])
        text.write([bonus])
        stepper.check_integrity([text.state])


def test_nothing_runs_while_no_trees_are_requested() -> None:
    head, stepper = built(max_length=4096)
    text = HeadText(stepper, head, PROMPT).read()
    rows = len(text.state.positions)
    calls = []
    head.register_forward_pre_hook(lambda *_: calls.append(1))
    for round_ in range(IDLE_ROUNDS + 5):
        text.write([round_ % VOCAB])
    assert len(text.state.positions) == rows
    late = HeadText(stepper, head, [1, 2] * 400).read()
    assert not late.state.positions
    assert late.state.end - late.state.unread[0].first == MAX_UNREAD
    assert stepper.is_ready(late.state)
    check_tree(head, text, text.levels(*TREE))
    late.levels(*TREE)
    stepper.check_integrity([text.state, late.state])


def test_rows_of_many_rounds_are_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds without a tree leave one piece each; texts of a batch may end in different windows."""
    head, stepper = built(max_length=32)
    texts = [HeadText(stepper, head, PROMPT[:count]).read() for count in (8, 3)]
    for text in texts:
        for token in range(10, 22):
            text.write([token])
    passes, run = [], TorchPasses.run

    def counted(self: TorchPasses, slots: Any, nodes: Any, jobs: Sequence[RowJob]) -> RowResult:
        passes.append([len(job.tokens) for job in jobs])
        return run(self, slots, nodes, jobs)

    monkeypatch.setattr(TorchPasses, "run", counted)
    logits = stepper.catch_up([text.state for text in texts], [1, 1]).tensor()
    # the first text has rows in two windows of 16
    assert passes == [[9], [4, 13]]
    for row, text in zip(logits, texts, strict=True):
        near(head, row, wanted(head, text.tokens, [])[0])
        stepper.check_integrity([text.state])


def test_closing_frees_every_slot() -> None:
    head, stepper = built()
    texts = [HeadText(stepper, head, PROMPT).read() for _ in range(3)]
    for text in texts:
        text.levels(*TREE)
        stepper.close(text.state)
    assert stepper._passes.pool.num_open == 0
    stepper.check_integrity([])


def test_the_footprint_counts_weights_and_rows() -> None:
    head, stepper = built()
    sizes = stepper.footprint
    assert sizes.weights == sum(tensor.numel() * 8 for tensor in head.state_dict().values())
    assert sizes.token == 8 * (head.config.hidden + 2 * head.config.num_kv_heads * head.config.head_dim)
