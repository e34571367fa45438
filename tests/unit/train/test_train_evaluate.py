"""Acceptance on unseen texts: counts by hand, drafts ranked with the noise of the text, and the sum of survival."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftree.core.noise import Noise, gumbel
from draftree.train.batches import Batch, collate
from draftree.train.evaluate import DepthCounts, Evaluation, evaluate, judge, runs_of, table, walk
from train_samples import ANSWER, PROMPT, VOCAB, perturbed, settings, texts, tiny_head, trainee

CPU = torch.device("cpu")


def test_rates_by_depth_from_counted_drafts() -> None:
    counts = DepthCounts(3)
    counts.add([0, 0, 1, 3, 3, 2, 0, 1])
    assert counts.drafts == 8
    assert counts.reached == [8, 5, 3]
    assert counts.conditional == [5 / 8, 3 / 5, 2 / 3]
    assert counts.survival == [5 / 8, 3 / 8, 2 / 8]
    assert counts.acceptance_length == 1 + 10 / 8


def test_no_drafts_give_no_division_by_zero() -> None:
    assert DepthCounts(2).conditional == [0.0, 0.0]
    assert DepthCounts(2).acceptance_length == 1.0
    assert Evaluation().score == 1.0


def test_runs_end_at_the_first_miss() -> None:
    assert runs_of([[True, True], [False, True], [True, False], []]) == [2, 0, 1, 0]


def test_a_walk_visits_the_places_of_decoding() -> None:
    assert walk([2, 9, 9, 0, 1, 9, 0]) == [0, 3, 4, 6]
    assert walk([]) == []


def steps_of(batch: Batch, drafts: list[Tensor]):  # type: ignore[no-untyped-def]
    return [lambda chains, rows=rows: rows[chains] for rows in drafts]


def one_hot(tokens: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, VOCAB).float() * 50


def test_drafts_of_a_perfect_drafter_are_all_accepted() -> None:
    batch = collate(texts(3), device=CPU, dtype=torch.float32)
    perfect = [one_hot(batch.picks[batch.step_chains(step)]) for step in range(3)]
    head = tiny_head()
    found = evaluate([batch], lambda _, depth: steps_of(batch, perfect[:depth]), head.vocabulary, 3)
    mode = found.modes[0.0]
    assert mode.starts.acceptance_length == 4
    assert mode.starts.drafts == 3 * (ANSWER - 2)
    # decoding starts after the first token of the answer and writes 4 tokens a round
    assert mode.rounds.drafts == 3 * len(range(1, ANSWER - 2, 4))
    assert mode.covered == mode.first == 3 * ANSWER
    assert found.score == 4


def test_a_miss_at_a_depth_ends_the_draft() -> None:
    batch = collate(texts(2), device=CPU, dtype=torch.float32)
    picks = [batch.picks[batch.step_chains(step)] for step in range(3)]
    drafts = [one_hot(picks[0]), one_hot((picks[1] + 1) % VOCAB), one_hot(picks[2])]
    found = evaluate([batch], lambda *_: steps_of(batch, drafts), tiny_head().vocabulary, 3)
    mode = found.modes[0.0]
    assert mode.starts.conditional == [1.0, 0.0, 0.0]
    assert mode.rounds.acceptance_length == 2


def test_ranks_use_the_noise_of_the_text_by_target_id() -> None:
    """With the target's own logits, the draft is the target's pick: only with the right seed, position and ids."""
    own = texts(3, 0.8, seed=2)
    batch = collate(own, device=CPU, dtype=torch.float32)
    vocabulary = tiny_head(draft_vocab=50).vocabulary
    from train_samples import states_of

    logits = torch.cat([states_of(text.tokens[None])[2][0, PROMPT - 1 : -1] for text in own])
    (judged,) = judge(batch, steps_of(batch, [logits[:, :50]]), vocabulary)
    assert judged.is_covered.tolist() == (batch.picks < 50).tolist()
    # tokens outside the draft vocabulary may win in the target; inside, the draft is the pick
    assert (judged.match[judged.is_covered] == 0).all()
    assert (judged.match[~judged.is_covered] == -1).all()
    assert 0.3 < judged.is_covered.float().mean() < 1
    probs = (logits[:, :50] / 0.8).log_softmax(-1)
    chain = 5
    noise = gumbel([Noise(own[0].seed).keys(PROMPT + chain)], torch.arange(50))[0]
    scores = (probs[chain] + noise).log_softmax(-1)
    assert torch.allclose(judged.log_shares[chain], scores.topk(4).values, atol=1e-5)


def test_facts_hold_every_rate_and_the_table_every_depth() -> None:
    own = trainee(perturbed(tiny_head()), settings(), data=[*texts(20), *texts(6), *texts(6, 0.8, seed=1)])
    found = own.evaluate(None)
    facts = found.facts()
    assert facts.keys() == {"0", "0.8"}
    for mode in facts.values():
        assert mode["texts"] == 6
        assert mode["coverage"] == 1.0
        assert 0 <= mode["top"]["1"] <= mode["top"]["2"] <= mode["top"]["4"] <= 1
        assert mode["top"]["1"] == pytest.approx(mode["starts"]["conditional"][0], abs=0.1)
        rounds = mode["rounds"]["all"]
        assert sum(rounds["survival"]) == pytest.approx(rounds["acceptance_length"] - 1)
    assert len(table(facts)) == 2 + 2 * 3


def test_a_limit_takes_the_first_unseen_texts() -> None:
    own = trainee(tiny_head(), settings())
    assert own.evaluate(5).modes[0.0].texts == 5
    assert own.evaluate(None).modes[0.0].texts == 12
