"""Multi-step training: rows, attention, teacher rows, gradients and scaled states compared with direct computations."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.drafters.tree_builder.head_stepper import HeadStepper
from draftree.heads.base import FeatureHead, TargetParts
from draftree.heads.passes import TorchPasses
from draftree.train.batches import Batch, collate, cut, is_usable, pack
from draftree.train.data.shards import Text
from draftree.train.head_trainee import HeadTrainee, ScaledTexts, feature_sizes, fold, sizes_for, unfold
from draftree.train.losses import LOSSES, overlap
from draftree.train.teacher import TargetRows
from draftree.train.unroll import StepWeights, backward, unroll
from head_samples import head_config, random_head, random_parts
from head_texts import HeadText, hidden_states
from train_samples import (
    ANSWER,
    FEATURES,
    HIDDEN,
    PROMPT,
    VOCAB,
    perturbed,
    settings,
    shorter,
    states_of,
    target_parts,
    texts,
    tiny_head,
)

STEPS = 4
CPU = torch.device("cpu")


def mixed_batch() -> Batch:
    """Texts of several lengths; one has room for fewer steps than are unrolled."""
    found = texts(4)
    chosen = [found[0], shorter(found[1], PROMPT + 3), shorter(found[2], PROMPT + 11)]
    return collate(chosen, device=CPU, dtype=torch.float32)


class DenseAttention:
    """Attention of one chain: keys of the true rows up to its start, then of its own rows."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert layer == 0
        self.keys.extend(key.unbind(0))
        self.values.extend(value.unbind(0))
        known = len(self.keys) - len(query)
        found = []
        for row, one in enumerate(query):
            keys, values = (torch.stack(part[: known + row + 1]) for part in (self.keys, self.values))
            heads = one.shape[0] // keys.shape[1]
            keys, values = (part.repeat_interleave(heads, dim=1) for part in (keys, values))
            scores = torch.einsum("hd,khd->hk", one, keys) / math.sqrt(one.shape[-1])
            found.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
        return torch.stack(found)


def chain_states(head: FeatureHead, batch: Batch, text: int, start: int) -> list[Tensor]:
    """States of the chain that starts at a token of a text, as decoding makes them one after another."""
    own = batch.texts[text]
    attend = DenseAttention()
    before = head.project(own.features[:start])
    states = head.run(own.tokens[1 : start + 1], before, torch.arange(1, start + 1), attend)[-1:]
    found = [states[0]]
    for step in range(1, STEPS):
        if start + step >= own.num_rows:
            break
        token = own.tokens[start + step : start + step + 1]
        states = head.run(token, head.recycle(states), torch.tensor([start + step]), attend)
        found.append(states[0])
    return found


@pytest.mark.parametrize("norm_output", [False, True])
@torch.no_grad()
def test_states_of_every_step_are_those_of_decoding(norm_output: bool) -> None:
    head, batch = perturbed(tiny_head(norm_output=norm_output)), mixed_batch()
    steps = list(unroll(head, batch, STEPS))
    chain = 0
    for text, own in enumerate(batch.texts):
        for start in range(PROMPT - 1, own.num_rows):
            wanted = chain_states(head, batch, text, start)
            assert int(batch.room[chain]) == own.num_rows - start
            for step, state in enumerate(wanted):
                assert torch.allclose(steps[step][chain], state, atol=2e-5)
            chain += 1
    assert chain == batch.num_chains


def test_rows_and_picks_are_those_of_the_texts() -> None:
    batch = mixed_batch()
    chain = 0
    for own in batch.texts:
        for start in range(PROMPT - 1, own.num_rows):
            assert batch.tokens[batch.chains[chain]] == own.tokens[start]
            assert batch.positions[batch.chains[chain]] == start
            assert batch.picks[chain] == own.tokens[start + 1]
            for step in range(int(batch.room[chain])):
                rows, has_room = batch.step_rows(step)
                assert has_room[chain]
                assert batch.tokens[rows[chain]] == own.tokens[start + step]
                assert batch.picks[batch.step_chains(step)[chain]] == own.tokens[start + step + 1]
            assert not batch.step_rows(int(batch.room[chain]))[1][chain]
            chain += 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [VOCAB, 40])
def test_teacher_rows_are_the_target_s_distributions(temperature: float, size: int) -> None:
    head, batch = tiny_head(draft_vocab=size), mixed_batch()
    found = TargetRows(target_parts(), head.vocabulary, temperature).of(batch.texts, [0, 1, 2])
    rows = found.rows(torch.zeros(batch.num_chains, size))
    chain = 0
    for own in batch.texts:
        probs = (states_of(own.tokens[None])[2][0] / temperature).softmax(-1)
        for start in range(PROMPT - 1, own.num_rows):
            assert torch.allclose(rows.log_p[chain].exp(), probs[start, :size], atol=1e-5)
            outside = rows.log_outside[chain].exp()
            assert torch.allclose(outside, probs[start, size:].sum(), atol=1e-5)
            chain += 1


def test_parts_in_bfloat16_give_nearly_the_same_rows() -> None:
    """The final norm of a model returns float32 whatever the dtype of its weights."""
    head, batch = tiny_head(draft_vocab=40), mixed_batch()
    exact = target_parts()
    low = replace(exact, output=exact.output.bfloat16(), finish=lambda states: exact.finish(states.float()))
    one, two = (
        TargetRows(parts, head.vocabulary, 1.0).of(batch.texts, [0, 1, 2]).rows(torch.zeros(batch.num_chains, 40))
        for parts in (exact, low)
    )
    assert (one.log_p.exp() - two.log_p.exp()).abs().max() < 0.03
    assert (one.log_outside.exp() - two.log_outside.exp()).abs().max() < 0.03


def test_kept_sums_are_those_of_the_text_in_any_batch() -> None:
    head, batch = tiny_head(draft_vocab=30), mixed_batch()
    rows = TargetRows(target_parts(), head.vocabulary, 1.0)
    first = rows.of(batch.texts, [5, 6, 7]).rows(torch.zeros(batch.num_chains, 30)).log_outside
    last = rows.of(batch.texts[2:], [7]).rows(torch.zeros(batch.num_chains, 30)[-11:]).log_outside
    assert torch.equal(first[-len(last) :], last)


def test_written_distributions_are_read_again(tmp_path: Path) -> None:
    head, batch = tiny_head(draft_vocab=30), mixed_batch()
    rows = TargetRows(target_parts(), head.vocabulary, 1.0)
    logits = torch.zeros(batch.num_chains, 30)
    wanted = rows.of(batch.texts, [5, 6, 7]).rows(logits)
    rows.of(batch.texts[:1], [8])
    rows.save(tmp_path / "rows", range(5, 8))
    broken = replace(target_parts(), finish=lambda states: states * float("nan"))
    again = TargetRows(broken, head.vocabulary, 1.0)
    again.load(tmp_path / "rows", 20)
    assert len(again) == 3
    found = again.of(batch.texts, [20, 21, 22]).rows(logits)
    assert torch.equal(found.log_p, wanted.log_p)
    assert torch.equal(found.log_outside, wanted.log_outside)
    assert rows.digest() == again.digest() != TargetRows(target_parts(), head.vocabulary, 0.9).digest()


def test_kept_tokens_of_a_large_vocabulary_are_its_most_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    head, batch = tiny_head(draft_vocab=40), mixed_batch()
    logits = torch.randn(batch.num_chains, 40, generator=torch.Generator().manual_seed(3))
    full = TargetRows(target_parts(), head.vocabulary, 1.0).of(batch.texts, [0, 1, 2]).rows(logits)
    monkeypatch.setattr("draftree.train.teacher.MOST_EXACT", 8)
    monkeypatch.setattr("draftree.train.teacher.KEPT_TOKENS", 8)
    kept = TargetRows(target_parts(), head.vocabulary, 1.0).of(batch.texts, [0, 1, 2]).rows(logits)
    values, ids = full.log_p.topk(8, dim=-1)
    assert kept.log_p[:, :8].allclose(values, atol=2e-3)
    assert kept.log_q[:, :8].allclose(full.log_q.gather(-1, ids), atol=1e-5)
    assert kept.log_p[:, 8].exp().allclose(full.log_p.exp().sum(-1) - values.exp().sum(-1), atol=2e-3)
    assert kept.log_outside.equal(full.log_outside)
    assert kept.log_best.allclose(full.log_best, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_most_likely_tokens_as_teacher_are_close_to_all(temperature: float) -> None:
    full, top = (collate(texts(3, top=top), device=CPU, dtype=torch.float32) for top in (0, 48))
    head = tiny_head(draft_vocab=40)
    logits = torch.randn(full.num_chains, 40, generator=torch.Generator().manual_seed(1))
    exact, close = (
        TargetRows(target_parts(), head.vocabulary, temperature).of(batch.texts, [0, 1, 2]).rows(logits)
        for batch in (full, top)
    )
    mean = [overlap(rows.log_p, rows.log_q).mean().item() for rows in (exact, close)]
    assert mean[1] == pytest.approx(mean[0], abs=0.02)
    total = close.log_p.exp().sum(-1) + close.log_outside.exp()
    assert torch.allclose(total, torch.ones_like(total), atol=1e-4)


@pytest.mark.parametrize("loss", ["kl", "coupled"])
@pytest.mark.parametrize("weights", [StepWeights(), StepWeights(decay=0.8), StepWeights(smoothing=0.0)])
def test_gradients_in_chunks_are_those_of_the_whole_loss(
    loss: str, weights: StepWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.train.unroll.CHUNK_ROWS", 7)
    head, batch = perturbed(tiny_head(draft_vocab=40)), mixed_batch()
    teacher = TargetRows(target_parts(), head.vocabulary, 0.9).of(batch.texts, [0, 1, 2])
    token_weights = torch.rand(batch.num_chains, generator=torch.Generator().manual_seed(2))
    sums = backward(
        unroll(head, batch, STEPS),
        lambda step, chains, states: head.logits(states),
        batch,
        teacher,
        loss=LOSSES[loss],
        weights=weights,
        total=10.0,
        token_weights=token_weights,
    )
    found = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad()

    total = torch.zeros(())
    scale = torch.ones(batch.num_chains)
    for step, states in enumerate(unroll(head, batch, STEPS)):
        chains = [chain for chain in range(batch.num_chains) if batch.room[chain] > step]
        targets = torch.tensor([chain + step for chain in chains])
        rows = teacher.part(targets).rows(head.logits(states[chains]))
        total = total + (LOSSES[loss](rows) * scale[chains] * token_weights[targets]).sum() / 10
        assert sums[step].count == len(chains)
        accepted = torch.zeros(batch.num_chains)
        accepted[chains] = overlap(rows.log_p, rows.log_q).detach()
        assert sums[step].accepted == pytest.approx(float(accepted.sum()), rel=1e-4)
        scale = scale * (
            weights.decay if weights.decay is not None else weights.smoothing + (1 - weights.smoothing) * accepted
        )
    total.backward()
    wanted = {name: p.grad for name, p in head.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys() >= {"fc.weight", "layers.0.self_attn.q_proj.weight"}
    assert "lm_head.weight" not in found
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, atol=1e-5, rtol=1e-4), name


def test_texts_without_room_for_a_step_end_the_unroll() -> None:
    head = tiny_head()
    batch = collate([shorter(texts(1)[0], PROMPT + 2)], device=CPU, dtype=torch.float32)
    teacher = TargetRows(target_parts(), head.vocabulary, 1.0).of(batch.texts, [0])
    sums = backward(
        unroll(head, batch, STEPS),
        lambda step, chains, states: head.logits(states),
        batch,
        teacher,
        loss=LOSSES["kl"],
        weights=StepWeights(),
        total=1.0,
    )
    assert [one.count for one in sums] == [2, 1]


def test_batches_hold_every_text_once_and_stay_within_their_size() -> None:
    lengths = [5 + (17 * index) % 90 for index in range(200)] + [500]
    for epoch in range(2):
        batches = list(pack(lengths, 256, seed=1, epoch=epoch))
        assert sorted(text for batch in batches for text in batch) == list(range(201))
        assert all(len(batch) * max(lengths[text] for text in batch) <= 256 for batch in batches if 200 not in batch)
    assert list(pack(lengths, 256, seed=1, epoch=0)) == list(pack(lengths, 256, seed=1, epoch=0))
    assert list(pack(lengths, 256, seed=1, epoch=0)) != list(pack(lengths, 256, seed=1, epoch=1))
    padded = sum(len(batch) * max(lengths[text] for text in batch) for batch in batches)
    assert padded < 1.25 * sum(lengths)


def test_a_cut_text_is_its_beginning() -> None:
    text = texts(1)[0]
    found = cut(text, PROMPT + 4)
    assert found.tokens.equal(text.tokens[: PROMPT + 4])
    assert found.num_rows == PROMPT + 3
    assert found.features.equal(text.features[: PROMPT + 3])
    assert cut(text, None) is text
    assert not is_usable(cut(text, PROMPT))


@pytest.mark.parametrize("name", ["decay", "smoothing"])
def test_weights_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} of steps is 1.5: it must be from 0 to 1"):
        StepWeights(**{name: 1.5})


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
READ = 5


def parts() -> TargetParts:
    found = random_parts()
    return replace(found, embedding=found.embedding.double(), output=found.output.double())


@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3.1", "eagle3-qwen3", "eagle3-full"])
@torch.no_grad()
def test_logits_of_a_level_are_those_of_the_drafter(variant: str) -> None:
    head = random_head(head_config(variant)).double()
    head.bind(parts())
    features = hidden_states(head, TOKENS[:-1])
    text = Text(torch.tensor(TOKENS), READ, features, features[:, 0], None, 0.0, 0, 0)
    batch = collate([text], device=torch.device("cpu"), dtype=torch.float64)
    levels = [head.logits(states) for states in unroll(head, batch, STEPS)]

    drafted = HeadText(HeadStepper(TorchPasses(head, torch.device("cpu"))), head, TOKENS[:READ]).read()
    for chain, start in enumerate(range(READ - 1, text.num_rows)):
        own = TOKENS[start + 1 : start + STEPS]
        room = min(STEPS, text.num_rows - start)
        # a sibling of the first node is drafted and rejected in every round
        tokens = [own[0] ^ 1, *own] if own else []
        tree = [-1, -1, *range(1, len(own))][: len(tokens)]
        sizes = [2, *[1] * (len(own) - 1)] if own else []
        found = drafted.levels(tokens, tree, sizes)
        for level in range(room):
            row = found[level][0 if level == 0 else -1][head.vocabulary.ids]
            torch.testing.assert_close(levels[level][chain].double(), row.double(), rtol=1e-4, atol=1e-4)
        drafted.write([TOKENS[start + 1]] if start + 1 < len(TOKENS) else [], ())


def test_scaled_hidden_states_have_size_one() -> None:
    own = texts(20)
    scaled = ScaledTexts(own, [2, 0], feature_sizes(own, [2, 0]))
    rows = torch.cat([scaled[index].features for index in range(20)])
    assert rows.shape[1] == 2
    assert torch.allclose(rows.square().mean(0).sqrt(), torch.ones(()), atol=1e-4)
    assert torch.allclose(scaled[3].features[:, 1] * scaled.sizes[1], own[3].features[:, 0], atol=1e-5)


@torch.no_grad()
def test_a_folded_head_has_the_states_of_training() -> None:
    own = texts(6)
    places = list(range(len(FEATURES)))
    head = perturbed(tiny_head())
    scaled = ScaledTexts(own, places, 3.0 * feature_sizes(own, places))
    trained = collate([scaled[index] for index in range(6)], device=torch.device("cpu"), dtype=torch.float32)
    served = collate(own, device=torch.device("cpu"), dtype=torch.float32)
    wanted = list(unroll(head, trained, 3))
    before = head.fc.weight.clone()
    fold(head, scaled.sizes)
    assert not torch.allclose(head.fc.weight, before)
    for one, two in zip(wanted, unroll(head, served, 3), strict=True):
        assert torch.allclose(one, two, atol=1e-4)
    unfold(head, scaled.sizes)
    assert torch.allclose(head.fc.weight, before, atol=1e-6)


def test_heads_with_norms_of_their_own_read_hidden_states_as_they_are() -> None:
    own = texts(4)
    head = tiny_head(fc_norm=True)
    sizes = sizes_for(head.config, own, [0, 1, 2])
    assert torch.equal(sizes, torch.ones_like(sizes))
    before = head.fc.weight.clone()
    fold(head, 2 * sizes)
    assert torch.equal(head.fc.weight, before)


def test_elements_that_are_never_used_have_a_size() -> None:
    from dataclasses import replace

    text = texts(1)[0]
    features = text.features.clone()
    features[:, 0, 3] = 0
    sizes = feature_sizes([replace(text, features=features)], [0])
    assert (sizes > 0).all()
    assert sizes[0, 3] < sizes[0].median()


def test_a_trainee_does_not_compute_hidden_states_before_it_trains() -> None:
    """Nor are those of all texts in memory at once: with 1.6 million tokens they had 6 GB."""
    own = texts(12)

    class Counted(ScaledTexts):
        read = 0

        def __getitem__(self, index: int) -> Text:
            Counted.read += 1
            return super().__getitem__(index)

    data = Counted(own, [0, 1, 2], torch.ones(3, HIDDEN))
    found = HeadTrainee(tiny_head(), target_parts(), data, range(10), range(10, 12), settings())
    assert Counted.read == 0
    assert found.lengths == [text.num_rows for text in own[:10]]
    assert found.count([0, 1]) == 2 * ANSWER
    found.batch([0, 1])
    assert Counted.read == 2
