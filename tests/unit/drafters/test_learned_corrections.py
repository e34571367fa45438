"""Corrections of a head's logits: their equations, in torch and in C, the comparison, the pace, and files."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.drafters.learning.corrections import Comparison, Correction, HeadCorrections, Pace
from draftree.drafters.learning.store import DamagedStateError, LearningStore, parse_learning

CPU = torch.device("cpu")
IMPLEMENTATIONS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(shutil.which("cc") is None, reason="C needs a compiler")),
]


def correction(*, rank: int = 3, native: bool = False, tokens: int = 37, hidden: int = 21) -> Correction:
    return Correction(tokens, hidden, rank=rank, device=CPU, native=native)


def samples(count: int, *, tokens: int = 37, hidden: int = 21) -> tuple[Tensor, Tensor, list[int]]:
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(count, tokens, generator=generator)
    states = 5 * torch.randn(count, hidden, generator=generator)
    return logits, states, torch.randint(tokens, (count,), generator=generator).tolist()


def learn_some(found: Correction, count: int = 20, temperature: float = 0.8) -> None:
    logits, states, columns = samples(count)
    for row in range(count):
        found.update(
            logits[row : row + 1].clone(),
            states[row : row + 1],
            columns=columns[row : row + 1],
            temperatures=[temperature],
            rate=0.1,
        )


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_an_untrained_correction_changes_nothing(native: bool) -> None:
    logits, states, _ = samples(5)
    corrected = logits.clone()
    correction(native=native).apply(corrected, states)
    assert torch.equal(corrected, logits)


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
@pytest.mark.parametrize("rank", [0, 3, 8])
def test_logits_are_corrected_by_the_equation(native: bool, rank: int) -> None:
    found = correction(rank=rank, native=native)
    learn_some(found)
    logits, states, _ = samples(4)
    wanted = logits.double() + found.bias.double()
    scaled = states.double() / states.double().square().mean(dim=-1, keepdim=True).sqrt()
    wanted += scaled @ found.mix.double().T @ found.rows.double()
    found.apply(logits, states)
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_step_follows_the_gradient_of_the_cross_entropy(native: bool, temperature: float) -> None:
    found = correction(native=native)
    learn_some(found, temperature=temperature)
    logits, states, columns = samples(1)
    parameters = {name: getattr(found, name).clone().requires_grad_() for name in ("bias", "rows", "mix")}
    squares = {name: torch.from_numpy(found.state()[f"{name}_squares"]).clone() for name in parameters}
    scaled = states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + 1e-6)
    corrected = logits + parameters["bias"] + scaled @ parameters["mix"].T @ parameters["rows"]
    loss = temperature * torch.nn.functional.cross_entropy(corrected / temperature, torch.tensor(columns))
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    found.update(logits.clone(), states, columns=columns, temperatures=[temperature], rate=0.1)
    for (name, before), gradient in zip(parameters.items(), gradients, strict=True):
        wanted = before.detach() - 0.1 * gradient / (squares[name] + gradient.square()).sqrt()
        # tokens of low probability are left out
        torch.testing.assert_close(getattr(found, name), wanted, rtol=1e-3, atol=2e-3)


@pytest.mark.skipif(shutil.which("cc") is None, reason="C needs a compiler")
@pytest.mark.parametrize("tokens", [37, 64, 5000])
def test_c_learns_what_torch_learns(tokens: int) -> None:
    one, other = correction(tokens=tokens), correction(tokens=tokens, native=True)
    logits, states, columns = samples(12, tokens=tokens)
    for row in range(12):
        part = slice(row, row + 1)
        one.update(logits[part].clone(), states[part], columns=columns[part], temperatures=[0.7], rate=0.1)
    other.update(logits.clone(), states, columns=columns, temperatures=[0.7] * 12, rate=0.1)
    for name, value in one.state().items():
        np.testing.assert_allclose(other.state()[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
def test_a_shift_of_frequencies_is_learned(native: bool) -> None:
    generator = torch.Generator().manual_seed(9)
    found, hits = correction(native=native), []
    for _ in range(300):
        logits, states = torch.randn(1, 37, generator=generator), torch.randn(1, 21, generator=generator)
        token = 5 if float(states[0, 0]) > 0 else 6
        corrected = logits.clone()
        found.apply(corrected, states)
        hits.append(int(corrected.argmax()) == token)
        found.update(logits.clone(), states, columns=[token], temperatures=[1.0], rate=0.1)
    assert sum(hits[:20]) < 10
    assert sum(hits[-100:]) > 70, "a bias alone is right half of the time"


@pytest.mark.skipif(shutil.which("cc") is None, reason="C needs a compiler")
def test_logits_without_a_finite_one_leave_c_unchanged() -> None:
    found = correction(native=True)
    before = found.state()
    found.update(torch.full((1, 37), -torch.inf), torch.ones(1, 21), columns=[3], temperatures=[1.0], rate=0.1)
    for name, value in found.state().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("native", IMPLEMENTATIONS)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_state_is_restored(native: bool, rank: int) -> None:
    found, other = correction(rank=rank, native=native), correction(rank=rank, native=native)
    learn_some(found)
    for _ in range(100):
        found.comparison.add(False, True)
    other.restore(found.state())
    for name, value in found.state().items():
        np.testing.assert_array_equal(other.state()[name], value)
    assert other.comparison.is_better
    logits, states, _ = samples(2)
    one, same = logits.clone(), logits.clone()
    found.apply(one, states)
    other.apply(same, states)
    assert torch.equal(one, same)


@pytest.mark.parametrize("damage", ["missing", "shape", "nan"])
def test_a_damaged_state_is_refused(damage: str) -> None:
    state = dict(correction().state())
    if damage == "missing":
        del state["bias"]
    else:
        state["bias"] = state["bias"][1:] if damage == "shape" else np.full_like(state["bias"], np.nan)
    with pytest.raises(DamagedStateError):
        correction().restore(state)


def test_a_correction_is_used_while_it_is_better() -> None:
    found = Comparison()
    assert found.shares is None
    for _ in range(63):
        found.add(False, True)
    assert not found.is_better, "too few outcomes"
    for _ in range(20):
        found.add(False, True)
    assert found.is_better
    for _ in range(150):
        found.add(True, False)
    assert not found.is_better
    assert found.shares is not None


def test_equal_choices_are_no_gain() -> None:
    found = Comparison()
    for outcome in [True, False] * 200:
        found.add(outcome, outcome)
    assert not found.is_better
    assert found.shares == pytest.approx((0.5, 0.5), abs=0.01)


def test_learning_takes_its_share_of_the_time() -> None:
    now = [0.0]
    pace, num_learned = Pace(0.1, lambda: now[0]), 0
    for _ in range(1000):
        if pace.allows():
            num_learned += 1
            start = now[0]
            now[0] += 0.5
            pace.spend(start)
        now[0] += 0.5
    assert pace.spent <= 0.1 * now[0] + 0.5
    assert num_learned == pytest.approx(0.1 * now[0] / 0.5, rel=0.05)


def test_idle_time_is_not_time_of_generation() -> None:
    now = [0.0]
    pace = Pace(0.5, lambda: now[0])
    assert pace.allows()
    now[0] += 10
    pace.spend(0.0)
    now[0] += 1000
    assert not pace.allows()


def learned(scope: str = "key") -> HeadCorrections:
    store = LearningStore(parse_learning(f"{scope},rank=2,rate=0.1,share=1"), "f00d")
    return HeadCorrections(store, 37, 21, identity="abc", device=CPU)


def test_owners_have_corrections_of_their_own() -> None:
    found = learned()
    logits, states, columns = samples(3)
    found.learn("a", logits, states, columns=columns, temperatures=[1.0] * 3)
    found.open("b")
    one, other = found.find("a"), found.find("b")
    assert one is not None
    assert other is not None
    assert bool(one.bias.any())
    assert not bool(other.bias.any())
    assert found.named("a") == "a"
    assert learned("server").named("a") == ""
    assert found.named(None) is None
    assert (found.stats.tokens, found.stats.scopes) == (3, 2)


def test_corrections_of_many_owners_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = learned()
    monkeypatch.setattr("draftree.drafters.learning.corrections.MAX_BYTES", 3 * found.open("0").num_bytes)
    for owner in range(6):
        found.open(str(owner))
    assert [found.find(str(owner)) is not None for owner in range(6)] == [False] * 3 + [True] * 3


def test_states_of_owners_are_restored_and_forgotten() -> None:
    found, again = learned(), learned()
    logits, states, columns = samples(3)
    found.learn("a", logits, states, columns=columns, temperatures=[1.0] * 3)
    again.restore(found.state())
    assert list(again.state()) == ["a"]
    np.testing.assert_array_equal(again.state()["a"]["bias"], found.state()["a"]["bias"])
    again.forget()
    assert not again.state()
    with pytest.raises(DamagedStateError, match="owners"):
        learned("server").restore(found.state())
