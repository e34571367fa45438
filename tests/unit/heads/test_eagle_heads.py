"""EAGLE heads: batches, training, and targets that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.heads.base import FeatureHead
from draftree.heads.folders import head_class
from draftree.heads.vocabulary import DraftVocabulary
from head_samples import HIDDEN, LAYERS, VOCAB, causal, head_config, random_head, random_parts


def rows_of(head: FeatureHead, tokens: Tensor, features: Tensor) -> Tensor:
    before, positions = head.project(features), torch.arange(1, tokens.shape[-1]).expand(tokens[..., 1:].shape)
    return head.run(tokens[..., 1:], before, positions, causal)


@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3.1"])
def test_a_batch_dimension_changes_nothing(variant: str) -> None:
    config = head_config(variant)
    head = random_head(config)
    head.bind(random_parts())
    tokens = torch.randint(VOCAB, (3, 7))
    features = torch.randn(3, 6, len(config.features), HIDDEN)
    together = rows_of(head, tokens, features)
    for row in range(3):
        torch.testing.assert_close(together[row], rows_of(head, tokens[row], features[row]), rtol=1e-4, atol=1e-5)


def test_training_reaches_all_parameters_but_shared_parts() -> None:
    head, parts = random_head(head_config("eagle3-full")), random_parts()
    head.bind(parts)
    with torch.inference_mode():  # what decoding leaves behind must not break training
        rows_of(head, torch.arange(5), torch.randn(4, 3, HIDDEN))
    for parameter in head.parameters():
        parameter.requires_grad_(True)
    head.logits(rows_of(head, torch.arange(5), torch.randn(4, 3, HIDDEN))).logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(head.state_dict())
    assert parts.output.grad is None


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (random_parts(hidden=HIDDEN + 2), "hidden states of 16"),
        (random_parts(vocab=VOCAB + 1), "a vocabulary of 40"),
        (random_parts(num_layers=2), "reads hidden state 3"),
    ],
)
def test_other_targets_are_refused(parts: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        random_head(head_config()).bind(parts)  # type: ignore[arg-type]


def test_a_shared_part_of_another_width_is_refused() -> None:
    head = random_head(head_config(hidden=HIDDEN + 4))
    with pytest.raises(ConfigurationError, match="no embedding of its own"):
        head.bind(random_parts())


def test_features_are_counted_from_the_end_too() -> None:
    random_head(head_config(features=(0, 2, -1 - LAYERS))).bind(random_parts())
    with pytest.raises(ConfigurationError, match="reads hidden state -6"):
        random_head(head_config(features=(0, 2, -2 - LAYERS))).bind(random_parts())


def test_a_vocabulary_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="24 of 40 tokens"):
        head_class("eagle3")(head_config(), DraftVocabulary.full(VOCAB))
