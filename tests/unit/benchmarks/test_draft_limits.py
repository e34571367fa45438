"""Limits of a head's drafts: closed forms against sums over all tokens, and against the text's own noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmark_scripts import script
from draftree.train.head_trainee import HeadTrainee
from draftree.train.losses import coupled_acceptance, overlap
from train_samples import perturbed, settings, target_parts, texts, tiny_head

limits = script("draft_limits")
TOKENS, INSIDE = 12, 9


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """Target on the draft vocabulary, drafter, and log of the target's mass outside."""
    generator = torch.Generator().manual_seed(1)
    log_p = (2 * torch.randn(5, TOKENS, generator=generator)).log_softmax(-1)
    log_q = (2 * torch.randn(5, INSIDE, generator=generator)).log_softmax(-1)
    return log_p[:, :INSIDE], log_q, log_p[:, INSIDE:].logsumexp(-1).double()


@pytest.mark.parametrize("rule", ["coupled", "overlap"])
def test_the_chance_given_the_token_adds_up_to_the_chance(rule: str) -> None:
    log_p, log_q, outside = distributions()
    total = torch.zeros(5, dtype=torch.float64)
    for token in range(INSIDE):
        places = torch.full((5,), token)
        judged = (
            limits._coupled(log_p, log_q, outside, places)
            if rule == "coupled"
            else limits._overlapping(log_p, log_q, places)
        )
        total += log_p[:, token].double().exp() * judged[1]
    wanted = coupled_acceptance(log_p, log_q, outside) if rule == "coupled" else overlap(log_p, log_q).double()
    assert torch.allclose(total, wanted, atol=1e-6)


def test_a_token_outside_the_vocabulary_is_never_accepted() -> None:
    log_p, log_q, outside = distributions()
    places = torch.full((5,), -1)
    assert not limits._coupled(log_p, log_q, outside, places)[1].any()
    assert not limits._overlapping(log_p, log_q, places)[1].any()


def facts_of(temperature: float, count: int) -> dict[str, dict[str, object]]:
    head = perturbed(tiny_head(draft_vocab=56), scale=0.1)
    data = texts(count, temperature)
    trainee = HeadTrainee(head, target_parts(), list(data), range(1), range(count), settings())
    (tally,) = limits.Judge(trainee, target_parts(), 3).tallies(None).values()
    assert tally.texts == count
    return tally.facts()["rules"]


def test_closed_forms_agree_with_the_noise_of_the_texts() -> None:
    rules = facts_of(0.8, 60)
    for name in ("coupled", "coupled, all tokens", "logits x 1.4"):
        counted = name.replace("coupled", "measured") if name.startswith("coupled") else f"{name}, measured"
        pairs = zip(rules[name]["conditional"], rules[counted]["conditional"], strict=True)
        # 1,320 drafts: four deviations at the first depth, fewer drafts below it
        for depth, (closed, measured) in enumerate(pairs):
            assert math.isclose(closed, measured, abs_tol=0.055 * (1 + depth)), (name, depth)
    for depth in range(3):
        assert rules["coupled"]["conditional"][depth] <= rules["overlap"]["conditional"][depth] + 1e-9
    assert rules["overlap"]["conditional"][0] <= rules["vocabulary"]["conditional"][0]


def test_more_candidates_are_accepted_more_often() -> None:
    for rules in (facts_of(0.0, 20), facts_of(0.8, 20)):
        lengths = [rules[name]["acceptance_length"] for name in ("measured", "best 2", "best 4")]
        assert lengths == sorted(lengths)
        assert lengths[0] < lengths[2]
    assert "overlap" not in facts_of(0.0, 20), "a greedy target has no distribution"


def test_the_table_has_a_row_for_every_rule() -> None:
    chains = limits.Tally(2)
    one, half = torch.ones(4).double(), torch.full((4,), 0.5).double()
    chains.add([{"measured": (half, half)}, {"measured": (one, one)}])
    chains.texts = 1
    lines = limits.table({"0.8": chains.facts()})
    # half of the drafts are accepted at the first depth, and all of those at the second
    assert lines[-2] == "| measured | 0.500 | 1.000 | 2.000 |"
