"""TableLM: its tables, its limits and the messages of its refusals. The contract of models covers the rest."""

from __future__ import annotations

import pytest
import torch

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.models.base import Extend, Pass
from draftree.models.table import TableLM, hashed, listed, near


def model(**options: object) -> TableLM:
    return TableLM(hashed(6, seed=3), **options)  # type: ignore[arg-type]


def test_rows_depend_on_every_token_before_in_double_precision() -> None:
    lm = model()
    assert lm.logits([1, 2]).dtype == torch.float64
    assert not torch.equal(lm.logits([1, 2]), lm.logits([2, 1]))
    assert not torch.equal(lm.logits([0]), lm.logits([0, 0]))


def test_order_hides_all_but_the_last_tokens() -> None:
    lm = model(order=2)
    assert torch.equal(lm.logits([5, 4, 1, 2]), lm.logits([0, 1, 2]))
    assert not torch.equal(lm.logits([4, 1, 2]), lm.logits([4, 0, 2]))
    assert torch.equal(model(order=0).logits([1, 2]), model(order=0).logits([]))
    with pytest.raises(ConfigurationError, match="order"):
        model(order=-1)


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


def test_a_pass_may_ask_for_nothing() -> None:
    lm = model()
    assert lm.run(Pass([Extend(lm.open(), [1], [-1], logits_at=[])])).logits.tensor().shape == (0, 6)
    assert lm.run(Pass([])).starts == (0,)


@pytest.mark.parametrize(
    ("tokens", "parents", "at", "message"),
    [
        ([], [], None, "0 tokens"),
        ([1, 2], [-1], None, "1 parents"),
        ([1, 2], [-1, 1], None, "parent of tentative node 1"),
        ([1, 2], [-1, -2], None, "parent of tentative node 1"),
        ([6], [-1], None, "vocabulary"),
        ([-1], [-1], None, "vocabulary"),
        ([1, 2], [-1, 0], [1, 0], "logits_at"),
        ([1, 2], [-1, 0], [0, 0], "logits_at"),
        ([1, 2], [-1, 0], [2], "logits_at"),
        ([1, 2], [-1, 0], [-1], "logits_at"),
    ],
)
def test_bad_jobs_are_refused_and_change_nothing(
    tokens: list[int], parents: list[int], at: list[int] | None, message: str
) -> None:
    lm = model()
    slot = lm.open()
    with pytest.raises(ValueError, match=message):
        lm.run(Pass([Extend(slot, tokens, parents, logits_at=at)]))
    assert slot.num_tentative == 0


def test_chains_only_refuses_branches_over_the_whole_tentative_tree() -> None:
    lm = model(supports_trees=False)
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2], [-1, 0])]))
    with pytest.raises(ValueError, match="chains only"):
        lm.run(Pass([Extend(slot, [3], [0])]))
    lm.run(Pass([Extend(slot, [3], [1])]))


def test_misused_slots_are_refused_with_a_reason() -> None:
    lm, other = model(), model()
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2, 3, 4], [-1, 0, 0, 2])]))
    with pytest.raises(ValueError, match="commit"):
        lm.commit(slot, [0, 3])
    with pytest.raises(ValueError, match="its parent is not kept"):
        lm.commit(slot, [], [0, 3])
    assert (slot.length, slot.num_tentative) == (0, 4)
    with pytest.raises(ValueError, match="two jobs"):
        lm.run(Pass([Extend(slot, [1], [-1]), Extend(slot, [1], [-1])]))
    with pytest.raises(ValueError, match="another model"):
        other.run(Pass([Extend(slot, [1], [-1])]))
    lm.close(slot)
    with pytest.raises(ValueError, match="closed"):
        lm.fork(slot)


def test_limits_are_kept() -> None:
    lm = model(max_length=3)
    slot = lm.open()
    lm.run(Pass([Extend(slot, [1, 2, 3], [-1, -1, -1])]))
    with pytest.raises(ValueError, match="max_length"):
        lm.run(Pass([Extend(slot, [1, 2, 3], [0, 3, 4])]))


def test_reserved_memory_is_a_limit() -> None:
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


def test_missing_features_are_refused() -> None:
    lm = model(num_features=3)
    with pytest.raises(UnsupportedModelError, match="hidden states"):
        lm.run(Pass([Extend(lm.open(), [1], [-1])], capture=(3,)))
    for wrong in ((-1,), (1, 1)):
        with pytest.raises(ValueError, match="different layers"):
            Pass([], capture=wrong)
