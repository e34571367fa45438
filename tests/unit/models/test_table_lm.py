"""TableLM: rows depend on the path alone, slots hold what was committed, and misuse is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.models.base import Extend, Pass
from draftree.models.table import TableLM, hashed, listed, near

torch.set_num_threads(1)


def model(**options: object) -> TableLM:
    return TableLM(hashed(6, seed=3), **options)  # type: ignore[arg-type]


def test_rows_depend_on_all_tokens_before() -> None:
    lm = model()
    slot = lm.open()
    scores = lm.run(Pass([Extend(slot, [1, 2, 3, 2], [-1, 0, 1, 0])]))
    for row, context in enumerate([[1], [1, 2], [1, 2, 3], [1, 2]]):
        assert torch.equal(scores.logits.tensor()[row], lm.logits(context))
    assert scores.logits.tensor().dtype == torch.float64
    assert not torch.equal(lm.logits([1, 2]), lm.logits([2, 1]))
    assert not torch.equal(lm.logits([0]), lm.logits([0, 0]))


def test_order_hides_all_but_the_last_tokens() -> None:
    lm = model(order=2)
    assert torch.equal(lm.logits([5, 4, 1, 2]), lm.logits([0, 1, 2]))
    assert not torch.equal(lm.logits([4, 1, 2]), lm.logits([4, 0, 2]))
    assert torch.equal(model(order=0).logits([1, 2]), model(order=0).logits([]))


def test_seed_names_the_table() -> None:
    assert torch.equal(TableLM(hashed(6, 3)).logits([1]), TableLM(hashed(6, 3)).logits([1]))
    assert not torch.equal(TableLM(hashed(6, 3)).logits([1]), TableLM(hashed(6, 4)).logits([1]))


def test_near_lies_at_its_distance() -> None:
    table = hashed(6, 3)
    assert torch.equal(near(table, 9, distance=0.0)((1,)), table((1,)))
    shift = near(table, 9, distance=0.5)((1,)) - table((1,))
    assert torch.allclose(shift, hashed(6, 9, scale=0.5)((1,)), rtol=0, atol=1e-15)


def test_listed_distributions_come_back() -> None:
    lm = TableLM(listed({(1,): [0.5, 0.5, 0.0]}, otherwise=[0.2, 0.3, 0.5]), order=1)
    assert torch.softmax(lm.logits([1]), dim=-1).tolist() == pytest.approx([0.5, 0.5, 0.0], abs=1e-15)
    assert torch.softmax(lm.logits([2]), dim=-1).tolist() == pytest.approx([0.2, 0.3, 0.5], abs=1e-15)


def test_commit_keeps_a_path_and_drops_the_rest() -> None:
    lm = model()
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2, 3, 4], [-1, 0, 0, 2])]))
    lm.commit(slot, [0, 2, 3])
    assert (slot.length, slot.num_tentative) == (3, 0)
    assert torch.equal(lm.run(Pass([Extend(slot, [5], [-1])])).logits.tensor()[0], lm.logits([1, 3, 4, 5]))
    lm.commit(slot, [])
    assert (slot.length, slot.num_tentative) == (3, 0)


def test_kept_nodes_are_renumbered() -> None:
    lm = model()
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2, 3, 4], [-1, 0, 0, 2])]))
    lm.commit(slot, [], [0, 2, 3])
    assert slot.num_tentative == 3
    assert torch.equal(lm.run(Pass([Extend(slot, [5], [2])])).logits.tensor()[0], lm.logits([1, 3, 4, 5]))


def test_extend_grows_an_earlier_tree() -> None:
    lm = model()
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2], [-1, -1])]))
    scores = lm.run(Pass([Extend(slot, [3, 4], [1, 2])]))
    assert torch.equal(scores.logits.tensor()[1], lm.logits([2, 3, 4]))


def test_fork_shares_the_prefix_and_nothing_else() -> None:
    lm = model()
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2], [-1, 0])]))
    lm.commit(slot, [0])
    lm.run(Pass([Extend(slot, [4], [-1])]))
    other = lm.fork(slot)
    assert (other.length, other.num_tentative, slot.num_tentative) == (1, 0, 1)
    lm.run(Pass([Extend(other, [3], [-1])]))
    lm.commit(other, [0])
    assert (other.length, slot.length) == (2, 1)


def test_batch_returns_the_requested_rows_of_each_job() -> None:
    lm = model()
    first, second = lm.open(), lm.open()
    scores = lm.run(Pass([Extend(first, [1, 2, 3], [-1, 0, 1], logits_at=[2]), Extend(second, [4], [-1])]))
    assert scores.starts == (0, 1, 2)
    assert torch.equal(scores.of(0).tensor()[0], lm.logits([1, 2, 3]))
    assert torch.equal(scores.of(1).tensor()[0], lm.logits([4]))


def test_a_pass_may_ask_for_nothing() -> None:
    lm = model()
    assert lm.run(Pass([Extend(lm.open(), [1], [-1], logits_at=[])])).logits.tensor().shape == (0, 6)
    assert lm.run(Pass([])).starts == (0,)


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12).flatmap(
        lambda tokens: st.tuples(st.just(tokens), st.tuples(*[st.integers(-1, i - 1) for i in range(len(tokens))]))
    )
)
def test_a_tree_scores_as_its_branches_alone(drawn: tuple[list[int], tuple[int, ...]]) -> None:
    tokens, parents = drawn
    lm = model()
    together = lm.run(Pass([Extend(lm.open(), tokens, parents)])).logits.tensor()
    for node in range(len(tokens)):
        branch, at = [], node
        while at != -1:
            branch.insert(0, tokens[at])
            at = parents[at]
        alone = lm.run(Pass([Extend(lm.open(), branch, list(range(-1, len(branch) - 1)))])).logits.tensor()[-1]
        assert torch.equal(together[node], alone)


@pytest.mark.parametrize(
    ("tokens", "parents", "says"),
    [
        ([], [], "0 tokens"),
        ([1, 2], [-1], "1 parents"),
        ([1, 2], [-1, 1], "parent of tentative node 1"),
        ([1, 2], [-1, -2], "parent of tentative node 1"),
        ([6], [-1], "vocabulary"),
        ([-1], [-1], "vocabulary"),
    ],
)
def test_bad_jobs_are_refused_and_change_nothing(tokens: list[int], parents: list[int], says: str) -> None:
    lm = model()
    slot = lm.open()
    with pytest.raises(ValueError, match=says):
        lm.run(Pass([Extend(slot, tokens, parents)]))
    assert slot.num_tentative == 0


@pytest.mark.parametrize("wanted", [[1, 0], [0, 0], [2], [-1]])
def test_bad_logits_at_is_refused(wanted: list[int]) -> None:
    lm = model()
    with pytest.raises(ValueError, match="logits_at"):
        lm.run(Pass([Extend(lm.open(), [1, 2], [-1, 0], logits_at=wanted)]))


def test_one_slot_in_two_jobs_is_refused() -> None:
    lm = model()
    slot = lm.open()
    with pytest.raises(ValueError, match="two jobs"):
        lm.run(Pass([Extend(slot, [1], [-1]), Extend(slot, [1], [-1])]))


def test_chains_only_refuses_branches_over_the_whole_tentative_tree() -> None:
    lm = model(supports_trees=False)
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2], [-1, 0])]))
    with pytest.raises(ValueError, match="chains only"):
        lm.run(Pass([Extend(slot, [3], [0])]))
    lm.run(Pass([Extend(slot, [3], [1])]))


@pytest.mark.parametrize("path", [[1], [0, 0], [0, 3], [4], [-1], [0, 2, 1]])
def test_commit_of_nodes_that_are_not_a_path_is_refused(path: list[int]) -> None:
    lm = model()
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2, 3, 4], [-1, 0, 0, 2])]))
    with pytest.raises(ValueError, match="commit"):
        lm.commit(slot, path)
    assert (slot.length, slot.num_tentative) == (0, 4)


@pytest.mark.parametrize("keep", [[1], [0, 3], [4]])
def test_keeping_orphans_is_refused(keep: list[int]) -> None:
    lm = model()
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2, 3, 4], [-1, 0, 0, 2])]))
    with pytest.raises(ValueError, match="its parent is not kept"):
        lm.commit(slot, [], keep)


def test_limits_are_kept() -> None:
    lm = model(max_length=3)
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2, 3], [-1, -1, -1])]))
    with pytest.raises(ValueError, match="max_length"):
        lm.run(Pass([Extend(slot, [1, 2, 3], [0, 3, 4])]))


def test_reserved_room_is_kept() -> None:
    lm = model()
    lm.reserve(1, 3)
    slot = lm.open()
    with pytest.raises(ValueError, match="1 reserved"):
        lm.fork(slot)
    with pytest.raises(ValueError, match="4 tokens"):
        lm.run(Pass([Extend(slot, [1, 2, 3, 4], [-1, -1, -1, -1])]))
    lm.reserve(2, 2)
    lm.run(Pass([Extend(lm.open(), [1, 2, 3], [-1, -1, -1])]))
    lm.close(slot)
    lm.open()


def test_closed_and_foreign_slots_are_refused() -> None:
    lm, other = model(), model()
    slot = lm.open()
    with pytest.raises(ValueError, match="another model"):
        other.run(Pass([Extend(slot, [1], [-1])]))
    lm.close(slot)
    for use in (lm.close, lm.fork, lambda s: lm.commit(s, []), lambda s: lm.truncate(s, 0)):
        with pytest.raises(ValueError, match="closed"):
            use(slot)


def test_negative_order_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="order"):
        model(order=-1)


def test_features_are_captured_for_every_row() -> None:
    lm = model(num_features=3)
    slot, other = lm.open(), lm.open()
    jobs = [Extend(slot, [1, 2, 3], [-1, 0, 0], logits_at=[2]), Extend(other, [4], [-1], logits_at=())]
    result = lm.run(Pass(jobs, capture=(2, 0)))
    assert result.hidden is not None
    assert (result.hidden.shape, result.logits.num_rows) == ((4, 2, 6), 1)
    for row, context in enumerate([[1], [1, 2], [1, 3]]):
        assert torch.equal(result.hidden_of(0)[row], torch.stack([lm.logits(context) + 2, lm.logits(context)]))
    assert torch.equal(result.hidden_of(1)[0, 1], lm.logits([4]))


def test_features_that_there_are_not_are_refused() -> None:
    lm = model(num_features=3)
    with pytest.raises(UnsupportedModelError, match="hidden states"):
        lm.run(Pass([Extend(lm.open(), [1], [-1])], capture=(3,)))
    for wrong in ((-1,), (1, 1)):
        with pytest.raises(ValueError, match="different layers"):
            Pass([], capture=wrong)
