"""The drop-in refuses what it does not support, and arguments that transformers drops unless they are bound."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation import logits_process as theirs

import draftree
from draftree.core.errors import (
    ConfigurationError,
    DraftreeError,
    InvalidRequestError,
    MissingTokenizerError,
)
from draftree.dropin import refusals
from draftree.dropin.inputs import draft_controls
from draftree.dropin.refusals import refuse_sync
from draftree.models.torch.inspection import cache_name
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import TensorLogits
from dropin_samples import PAD, Listener, assistant_of, model_of, ours, padded, plain
from families import fresh
from spelling import tokenizer

ONE = padded(8)
CACHE = cache_name(GenerationMixin.prepare_inputs_for_generation)

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beams with a drafter": ({"num_beams": 2}, "num_beams=2"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
    "early exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "changes the distribution"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "chunks": ({"prefill_chunk_size": 4}, "prefill_chunk_size=4"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states are not kept"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    "two drafters": ({"draft": "ngram", "prompt_lookup_num_tokens": 3}, "draft and prompt_lookup_num_tokens"),
    "unknown drafter": ({"draft": "ngramm"}, "did you mean 'ngram'"),
    "no prediction": ({"draft": "ngram+prediction"}, "from the prediction of a request, and generate takes none"),
    "no grammar": ({"draft": "grammar"}, "from the grammar of a request, and generate takes none"),
    "target lookbehind": ({"target_lookbehind": 3}, "target_lookbehind=3"),
    "assistant lookbehind": ({"assistant_lookbehind": 4}, "assistant_lookbehind=4"),
    "planner alone": ({"draft": "none", "plan": "fixed"}, "there is no drafter"),
    "healing": ({"token_healing": True}, r"model\.heal_tokens"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "cache": ({CACHE: DynamicCache()}, CACHE),
    "too long": ({"max_new_tokens": 500}, "set max_new_tokens to 152 at most"),
    "prompt too long": ({"input_ids": torch.ones(1, 170, dtype=torch.long), "attention_mask": None}, "shorten"),
    "no rows": ({"input_ids": torch.ones(0, 3, dtype=torch.long), "attention_mask": None}, "input_ids has shape"),
    "positions": ({"position_ids": torch.arange(3, 11)[None]}, "position_ids"),
    "logits_to_keep": ({"logits_to_keep": 2}, "logits_to_keep"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 7 + [0]])}, "padding_side='left'"),
    "hole": ({"attention_mask": torch.tensor([[1, 0] + [1] * 6])}, "padding_side='left'"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_arguments_are_refused_by_name(name: str) -> None:
    settings, message = REFUSED[name]
    before = model_of().config._attn_implementation
    drafting = {} if {"draft", "prompt_lookup_num_tokens"} & settings.keys() else {"draft": "ngram"}
    inputs = {key: value for key, value in (ONE | settings).items() if value is not None}
    rest = {key: inputs.pop(key) for key in list(inputs) if key not in ONE}
    with pytest.raises(DraftreeError, match=message):
        ours(model_of(), inputs, **drafting, **rest)
    assert model_of().config._attn_implementation == before


def test_a_model_in_training_mode_is_refused_and_stays_in_it() -> None:
    model = fresh("llama").train()
    with pytest.raises(ConfigurationError, match=r"model\.eval\(\)"):
        ours(model, ONE, draft="ngram")
    assert model.training


def test_embeddings_in_the_place_of_tokens_are_refused() -> None:
    embedded = model_of().get_input_embeddings()(ONE["input_ids"])
    with pytest.raises(InvalidRequestError, match="inputs_embeds"):
        ours(model_of(), {"inputs_embeds": embedded}, draft="ngram")


@pytest.mark.parametrize("name", ["streamer", "assistant_model"])
def test_an_argument_that_transformers_drops_is_refused_unless_bound(name: str) -> None:
    """If transformers passes it some day, `refuse_unbound` is to be removed."""
    got: dict[str, Any] = {}

    def notes(model: Any, input_ids: Any, streamer: Any = None, assistant_model: Any = None, **rest: Any) -> Any:
        got.update(streamer=streamer, assistant_model=assistant_model)
        return input_ids

    given = {"streamer": Listener(), "assistant_model": assistant_of()}[name]
    plain(model_of(), ONE, custom_generate=notes, **{name: given})
    assert got[name] is None
    with pytest.raises(ConfigurationError, match=rf"{name} was given .*partial\(draftree\.generate, {name}=\.\.\.\)"):
        plain(model_of(), ONE, custom_generate=draftree.generate, **{name: given})
    twice = functools.partial(draftree.generate, **{name: given})
    with pytest.raises(ConfigurationError, match=f"{name} was given to generate"):
        plain(model_of(), ONE, custom_generate=twice, **{name: given})


def test_the_check_sees_only_the_generate_of_its_own_model() -> None:
    """Our texts within a call of transformers' own, for another model, are no business of that call."""
    inner: list[Any] = []

    def writes(input_ids: Any, scores: Any) -> Any:
        inner.append(plain(model_of(), ONE, custom_generate=draftree.generate))
        return scores

    plain(assistant_of(), ONE, streamer=Listener(), logits_processor=[writes], max_new_tokens=2)
    assert len(inner) == 2
    assert torch.equal(inner[0], plain(model_of(), ONE))


def test_stop_strings_without_a_bound_tokenizer_are_refused() -> None:
    given = {"stop_strings": ["ab"], "tokenizer": tokenizer().backend}
    with pytest.raises(MissingTokenizerError, match=r"stop_strings need the tokenizer.*tokenizer=\.\.\.\)"):
        plain(model_of(), ONE, custom_generate=draftree.generate, **given)


def test_sharded_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_sync(model_of(), asked=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    refuse_sync(model_of(), asked=False)
    monkeypatch.setattr(refusals, "is_fsdp_managed_module", lambda model: True)
    with pytest.raises(ConfigurationError, match="synced_gpus=True"):
        refuse_sync(model_of(), asked=False)


def test_settings_may_be_bound_beforehand() -> None:
    bound = functools.partial(draftree.generate, draft="ngram,min=1", plan="fixed")
    done = plain(model_of(), ONE, custom_generate=bound, return_dict_in_generate=True)
    assert torch.equal(done.sequences, plain(model_of(), ONE))
    assert done.stats[0].draft_tokens > 0


def test_an_error_of_the_users_code_passes_through_and_leaves_the_model_whole() -> None:
    class Failing(Listener):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.calls) == 3:
                raise RuntimeError("pipe closed")

    with pytest.raises(RuntimeError, match="pipe closed"):
        ours(model_of(), ONE, streamer=Failing())
    assert torch.equal(ours(model_of(), ONE), plain(model_of(), ONE))


def test_an_assistant_of_another_vocabulary_needs_tokenizers() -> None:
    with pytest.raises(ConfigurationError, match="tokens"):
        ours(model_of(), ONE, assistant_model=fresh("llama", vocab_size=50))


def test_a_named_model_of_another_vocabulary_asks_for_the_tokenizer(tmp_path: Path) -> None:
    fresh("llama", vocab_size=50).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"50 tokens and the target 96.*partial\(draftree\.generate, tokenizer=\.\.\.\)"
    ):
        ours(model_of(), ONE, draft=f"model:{tmp_path}")
    with pytest.raises(ConfigurationError, match=r"tokenizer=\.\.\., assistant_tokenizer=\.\.\.\)"):
        ours(model_of(), ONE, assistant_model=fresh("llama", vocab_size=50))


def test_lookbehind_of_the_assistant_is_refused() -> None:
    assistant = fresh("llama")
    assistant.generation_config.target_lookbehind = 3
    with pytest.raises(ConfigurationError, match=r"target_lookbehind=3 of assistant_model\.generation_config"):
        ours(model_of(), ONE, assistant_model=assistant)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_text_beyond_the_valid_positions_is_left_to_transformers(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 20}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if kind == "longrope" else {}
    name = "phi3" if kind == "longrope" else "llama"
    settings = {"rope_parameters": rope | factors, "max_position_embeddings": 160 if factors else 20}
    settings |= {"original_max_position_embeddings": 20} if factors else {}
    model, other = fresh(name, **settings), fresh(name, **settings)
    inputs = padded(14, 9)
    for extra in ({}, {"do_sample": True}):
        torch.manual_seed(3)
        wanted = plain(other, inputs, **extra)
        torch.manual_seed(3)
        assert torch.equal(ours(model, inputs, draft="ngram", **extra), wanted)
    assert "beyond 20 positions are written by transformers alone" in caplog.text
    done = ours(model, inputs, draft="ngram", return_dict_in_generate=True)
    assert done.stats is None
    short = ours(model, inputs, draft="ngram", max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(short.sequences, plain(model, inputs, max_new_tokens=5))
    assert len(short.stats) == 2


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient", "constant"])
def test_the_assistants_own_settings_decide_the_draft_length(schedule: str) -> None:
    assistant = fresh("llama")
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    assistant.generation_config.assistant_confidence_threshold = 0.0
    done = ours(model_of(), ONE, assistant_model=assistant, return_dict_in_generate=True)
    depths = len(done.stats[0].drafted_by_depth)
    assert depths == 3 if schedule == "constant" else depths > 3


def test_padding_is_not_part_of_the_text() -> None:
    assert (ours(model_of(), ONE, draft="none")[:, 8:] != PAD).any()


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
