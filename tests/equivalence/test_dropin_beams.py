"""`generate(num_beams=…)` through the drop-in equals transformers': tokens, scores and beam indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList, TopKLogitsWarper
from transformers.generation.stopping_criteria import StoppingCriteria

import draftree
from beam_oracles import VOCAB_SIZE, peer
from draftree.core.errors import ConfigurationError
from dropin_samples import padded, plain
from spelling import tokenizer

BATCH = padded(8, 3, 5)


def both(inputs: dict[str, Any], family: str = "gpt2", **settings: Any) -> tuple[Any, Any]:
    given = {"num_beams": 3, "return_dict_in_generate": True, "eos_token_id": [2, 11, 40]} | settings
    model = peer(family)
    expected = plain(model, inputs, **given, output_scores=bool(given["return_dict_in_generate"]))
    return plain(model, inputs, custom_generate=draftree.generate, **given), expected


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_batches_with_padding(family: str, early_stopping: bool | str) -> None:
    for settings in (
        {"num_return_sequences": 3, "length_penalty": 0.4},
        {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
        {"eos_token_id": None, "min_new_tokens": 3},
        {"max_length": 20, "max_new_tokens": None, "pad_token_id": 5},
    ):
        got, expected = both(BATCH, family, early_stopping=early_stopping, **settings)
        assert torch.equal(got.sequences, expected.sequences)
        assert torch.allclose(got.sequences_scores, expected.sequences_scores, atol=1e-4)
        assert torch.equal(got.beam_indices, expected.beam_indices)


def test_plain_tensor() -> None:
    got, expected = both(BATCH, return_dict_in_generate=False)
    assert torch.equal(got, expected)


def test_function_of_the_prompt() -> None:
    def allowed(index: int, ids: torch.Tensor) -> list[int]:
        return [2, *range((int(ids[-1]) + index) % 4, VOCAB_SIZE, 4)]

    got, expected = both(BATCH, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(got.sequences, expected.sequences)


class EndsAfter(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids[:, -1] % 7 == 0) & (input_ids.shape[1] > 11)


def test_criteria_and_processors_of_the_call() -> None:
    given = {"stopping_criteria": StoppingCriteriaList([EndsAfter()])}
    processors = {"logits_processor": LogitsProcessorList([TopKLogitsWarper(20)])}
    got, expected = both({key: value[:1] for key, value in BATCH.items()}, **given, **processors)
    assert torch.equal(got.sequences, expected.sequences)


def test_sampling_is_reproducible_and_filtered() -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        got = plain(peer("gpt2"), BATCH, custom_generate=draftree.generate, num_beams=3, do_sample=True, top_k=5)
        texts.append(got.tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft": "ngram"}, "draft was given with num_beams=2"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"output_logits": True, "return_dict_in_generate": True}, "output_logits"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plain(peer("gpt2"), BATCH, custom_generate=draftree.generate, num_beams=2, **settings)


def test_stop_strings() -> None:
    import functools

    bound = functools.partial(draftree.generate, tokenizer=tokenizer().backend, stop_strings=["a"])
    expected = plain(peer("gpt2"), BATCH, num_beams=2, tokenizer=tokenizer().backend, stop_strings=["a"])
    assert torch.equal(plain(peer("gpt2"), BATCH, num_beams=2, custom_generate=bound), expected)
