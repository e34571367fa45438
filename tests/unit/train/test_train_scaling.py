"""Hidden states of size 1 in training, and heads that read them as they are."""

from __future__ import annotations

import torch

from draftree.train.batches import collate
from draftree.train.data.texts import Text
from draftree.train.head_trainee import HeadTrainee
from draftree.train.scaling import ScaledTexts, feature_sizes, fold, sizes_for, unfold
from draftree.train.unroll import unroll
from train_samples import ANSWER, FEATURES, HIDDEN, perturbed, settings, target_parts, texts, tiny_head


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
