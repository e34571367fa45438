"""The sampling settings that a drafter of the drop-in uses: those of `generate`, in its order."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as theirs

from draftree.dropin.drafting import draft_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits

VOCAB = 50


@pytest.mark.parametrize("seed", range(10))
def test_filters_come_in_the_order_of_generate(seed: int) -> None:
    config = GenerationConfig(do_sample=True, temperature=0.8, top_k=20, top_p=0.7, min_p=0.1)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    chain = theirs.LogitsProcessorList(
        [
            theirs.TemperatureLogitsWarper(0.8),
            theirs.TopKLogitsWarper(20),
            theirs.TopPLogitsWarper(0.7),
            theirs.MinPLogitsWarper(0.1),
        ]
    )
    controls = draft_controls(config, vocab_size=VOCAB, seed=1)
    found = Distributions(TensorLogits(logits.clone()), [DistributionRows(History([1]), controls, [[]])]).logits
    assert torch.equal(found, chain(torch.tensor([[1]]), logits.clone()))


def test_settings_without_filters_have_none() -> None:
    config = GenerationConfig(do_sample=False, min_p=0.1)
    assert draft_controls(config, vocab_size=VOCAB, seed=1).filters == ()
