"""Losses of training: values by brute force, the acceptance of `coupled` by simulation, gradients, rare tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftree.core.noise import Noise, gumbel
from draftree.train.losses import LEAST_LOG, LOSSES, Rows, condensed, coupled_acceptance, loss_named, overlap
from draftree.train.teacher import LogProbsAt, Teacher

VOCAB = 20
DRAFTS = 400_000


def distributions(seed: int, *, rows: int = 3, tokens: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Random p and q that are alike, in double precision."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(rows, tokens, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    other = torch.randn(rows, tokens, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    return p, 0.6 * p + 0.4 * other


def subset(p: Tensor, q: Tensor, size: int) -> Rows:
    """A draft vocabulary of the first tokens."""
    inside = p[:, :size]
    q = q[:, :size] / q[:, :size].sum(-1, keepdim=True)
    return Rows(inside.log(), q.log(), (1 - inside.sum(-1)).log(), q.log().amax(-1))


def by_definition(p: list[float], q: list[float]) -> float:
    """The sum of the module's docstring over pairs; q is 0 outside the draft vocabulary."""
    drafted = [i for i in range(len(p)) if q[i] > 0]
    return sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p))) for i in drafted)


def simulated(p: Tensor, q: Tensor) -> float:
    """Share of equal choices with shared noise; q is 0 outside the draft vocabulary."""
    noise = gumbel([Noise(5).keys(position) for position in range(DRAFTS)], torch.arange(len(p)))
    return float(((p.log() + noise).argmax(-1) == (q.log() + noise).argmax(-1)).double().mean())


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_is_the_sum_over_pairs(seed: int) -> None:
    p, q = distributions(seed)
    found = coupled_acceptance(p.log(), q.log())
    for row in range(len(p)):
        assert found[row].item() == pytest.approx(by_definition(p[row].tolist(), q[row].tolist()), rel=1e-12)


@pytest.mark.parametrize("size", [1, 2, 12, VOCAB - 1])
def test_acceptance_on_a_part_of_the_vocabulary_counts_the_mass_outside(size: int) -> None:
    p, q = distributions(7)
    rows = subset(p, q, size)
    found = coupled_acceptance(rows.log_p, rows.log_q, rows.log_outside)
    for row in range(len(p)):
        drafted = rows.log_q.exp()[row].tolist() + [0.0] * (VOCAB - size)
        assert found[row].item() == pytest.approx(by_definition(p[row].tolist(), drafted), rel=1e-9)


@pytest.mark.parametrize("size", [VOCAB, 8])
def test_acceptance_is_the_rate_of_equal_choices_with_shared_noise(size: int) -> None:
    p, q = distributions(11, rows=1)
    rows = subset(p, q, size) if size < VOCAB else Rows(p.log(), q.log(), torch.full((1,), -math.inf), q.log().amax(-1))
    drafted = torch.zeros(VOCAB, dtype=torch.float64)
    drafted[:size] = rows.log_q[0].exp()
    found = coupled_acceptance(rows.log_p, rows.log_q, rows.log_outside).item()
    deviation = math.sqrt(found * (1 - found) / DRAFTS)
    assert abs(simulated(p[0], drafted) - found) < 4.5 * deviation


def test_acceptance_lies_between_its_bounds() -> None:
    p, q = distributions(13, rows=200)
    shared = overlap(p.log(), q.log())
    found = coupled_acceptance(p.log(), q.log())
    assert (found <= shared + 1e-12).all()
    assert (found >= shared / (2 - shared) - 1e-12).all()
    assert coupled_acceptance(p.log(), p.log()).allclose(torch.ones(200, dtype=torch.float64))


BRUTE: dict[str, Callable[[list[float], list[float]], float]] = {
    "kl": lambda p, q: sum(a / sum(p) * math.log(a / sum(p) / b) for a, b in zip(p, q, strict=True)),
    "reverse_kl": lambda p, q: sum(b * math.log(b / (a / sum(p))) for a, b in zip(p, q, strict=True)),
    "tv": lambda p, q: 1 - sum(map(min, p, q)),
    "lk": lambda p, q: -math.log(sum(map(min, p, q))),
    "lk_hybrid": lambda p, q: (
        math.exp(-3 * sum(map(min, p, q))) * BRUTE["kl"](p, q)
        + (1 - math.exp(-3 * sum(map(min, p, q)))) * BRUTE["tv"](p, q)
    ),
    "coupled_miss": lambda p, q: 1 - by_definition([*p, 1 - sum(p)], [*q, 0.0]),
    "coupled": lambda p, q: -math.log(by_definition([*p, 1 - sum(p)], [*q, 0.0])),
    "cross_entropy": lambda p, q: -math.log(q[p.index(max(p))]),
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_values_by_brute_force(name: str) -> None:
    rows = subset(*distributions(17), 12)
    found = loss_named(name)(rows)
    assert found.shape == (3,)
    for row in range(3):
        wanted = BRUTE[name](rows.log_p[row].exp().tolist(), rows.log_q[row].exp().tolist())
        assert found[row].item() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradients_are_the_differences(name: str) -> None:
    """For `lk_hybrid` with the share of each part held, as its definition says."""
    p, start = distributions(19)
    teacher = Teacher(p[:, :9].log(), (1 - p[:, :9].sum(-1)).log())

    def loss(logits: Tensor) -> Tensor:
        rows = teacher.rows(logits)
        if name != "lk_hybrid":
            return LOSSES[name](rows)
        share = (-3 * overlap(*(value.detach() for value in (rows.log_p, fixed)))).exp()
        return share * LOSSES["kl"](rows) + (1 - share) * LOSSES["tv"](rows)

    logits = start[:, :9].log().requires_grad_()
    fixed = teacher.rows(logits).log_q.detach()
    assert torch.autograd.gradcheck(loss, (logits,))
    direct = torch.autograd.grad(LOSSES[name](teacher.rows(logits)).sum(), logits)[0]
    assert direct.allclose(torch.autograd.grad(loss(logits).sum(), logits)[0])


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_and_impossible_tokens_have_finite_gradients(name: str, dtype: torch.dtype) -> None:
    target = torch.tensor([[200.0, 0.0, -200.0, -300.0], [0.0, 0.0, -500.0, 500.0], [0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    logits = torch.tensor([[-300.0, 0.0, 90.0, 300.0], [80.0, 0.0, -80.0, -80.0], [0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    logits.requires_grad_()
    # the third row of the target is almost wholly outside the draft vocabulary
    outside = target.logsumexp(-1) + torch.tensor([-torch.inf, 0.0, 60.0], dtype=dtype)
    total = torch.logaddexp(target.logsumexp(-1), outside)
    log_p = (target - total[:, None]).clamp_min(LEAST_LOG)
    found = LOSSES[name](Teacher(log_p, (outside - total).clamp_min(LEAST_LOG)).rows(logits))
    found.sum().backward()
    assert found.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"cross_entropy", "reverse_kl"}))
def test_descent_reaches_the_target(name: str) -> None:
    """From near the target; a loss whose optimum is elsewhere, or whose sign is wrong, moves away."""
    p, start = distributions(23)
    teacher = Teacher(p.log(), torch.full((3,), -60.0, dtype=torch.float64))
    logits = start.log().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.02)
    before = overlap(p.log(), teacher.rows(logits).log_q).mean()
    for _ in range(300):
        optimizer.zero_grad()
        LOSSES[name](teacher.rows(logits)).mean().backward()
        optimizer.step()
    after = overlap(p.log(), teacher.rows(logits).log_q).mean()
    assert after > before + 0.7 * (1 - before)


def test_most_likely_tokens_and_the_rest_give_nearly_the_full_rows() -> None:
    """All tokens but the rarest: the rest is one column, so acceptance is at most its mass too high."""
    p, q = distributions(29, tokens=64)
    full = Teacher(p.log(), torch.full((3,), -69.0, dtype=torch.float64)).rows(q.log())
    values, tokens = p.log().topk(40, dim=-1)
    top = Teacher(values, ids=tokens).rows(q.log())
    rest = 1 - values.exp().sum(-1)
    assert top.log_p.exp().sum(-1).allclose(torch.ones(3, dtype=torch.float64))
    assert top.log_q.exp().sum(-1).allclose(torch.ones(3, dtype=torch.float64))
    exact, found = (coupled_acceptance(rows.log_p, rows.log_q, rows.log_outside) for rows in (full, top))
    assert (found - exact).abs().max() <= rest.max()
    assert (LOSSES["kl"](full) >= LOSSES["kl"](top) - 1e-12).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_some_tokens_and_their_gradient(temperature: float) -> None:
    _, q = distributions(47, rows=4, tokens=20)
    logits = q.log().requires_grad_()
    places = torch.tensor([[0, 3, 3], [19, 0, 1], [5, 6, 7], [2, 2, 2]])
    found, best = LogProbsAt.apply(logits, places, temperature)
    wanted = (logits / temperature).log_softmax(-1)
    assert found.allclose(wanted.gather(-1, places))
    assert best.allclose(wanted.amax(-1))
    assert not best.requires_grad
    assert torch.autograd.gradcheck(lambda x: LogProbsAt.apply(x, places, temperature)[0], (logits,))


def test_kept_tokens_and_the_known_mass_outside() -> None:
    """The rest is the mass of the draft vocabulary without the kept tokens."""
    p, q = distributions(53)
    values, ids = p[:, :10].log().topk(6, dim=-1)
    outside = p[:, 10:].sum(-1)
    rows = Teacher(values, outside.log(), ids).rows(q[:, :10].log())
    assert rows.log_outside.exp().allclose(outside)
    assert rows.log_p[:, -1].exp().allclose(p[:, :10].sum(-1) - values.exp().sum(-1))
    assert rows.log_p.exp().sum(-1).allclose(1 - outside)
    assert rows.log_best.allclose(q[:, :10].log().log_softmax(-1).amax(-1))


def test_most_likely_tokens_outside_the_draft_vocabulary_are_mass_outside() -> None:
    p, q = distributions(31, rows=1)
    values, tokens = p.log().topk(VOCAB - 1, dim=-1)
    draft_ids = torch.where(tokens < 12, tokens, -1)
    rows = Teacher(values, ids=draft_ids).rows(q[:, :12].log())
    assert rows.log_outside.exp().item() == pytest.approx(p[0, tokens[0][tokens[0] >= 12]].sum().item(), rel=1e-9)
    assert rows.log_p.exp().sum().item() + rows.log_outside.exp().item() == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("size", [VOCAB, 64])
def test_condensed_rows_have_nearly_the_same_acceptance_and_gradient(size: int) -> None:
    p, q = distributions(41, rows=50, tokens=size)
    logits = q.log().requires_grad_()
    exact = coupled_acceptance(p.log(), logits.log_softmax(-1))
    wanted = torch.autograd.grad(exact.sum(), logits)[0]
    log_p, log_q = condensed(p.log(), logits.log_softmax(-1), 24)
    assert log_p.shape[-1] == min(size, 25)
    assert log_p.exp().sum(-1).allclose(p.sum(-1))
    found = coupled_acceptance(log_p, log_q)
    rest = torch.minimum(p, q).sort(-1).values[:, : max(0, size - 24)].sum(-1)
    assert (found - exact >= -1e-9).all()
    assert (found - exact <= rest + 1e-7).all()
    gradient = torch.autograd.grad(found.sum(), logits)[0]
    assert (gradient - wanted).abs().max() < 0.1 * wanted.abs().max() + 1e-9


def test_the_loss_condenses_large_vocabularies_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = subset(*distributions(43, tokens=64), 40)
    exact = LOSSES["coupled"](rows)
    monkeypatch.setattr("draftree.train.losses.MOST_TOKENS", 20)
    close = LOSSES["coupled"](rows)
    assert not torch.equal(exact, close)
    assert close.allclose(exact, atol=0.1)
