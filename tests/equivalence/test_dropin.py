"""The drop-in writes the same tokens as `generate` of transformers, for all of its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.stats
import torch
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput

from draftree.core.errors import ConfigurationError
from dropin_samples import PAD, EndsAt, Listener, Recorder, assistant_of, model_of, ours, padded, plain
from families import CACHED, SLOTTED, fresh
from spelling import tokenizer
from text_backends import byte_level

ONE = padded(14)
BATCH = padded(14, 9, 3)
EOS = [7, 21, 40, 63, 88]

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_length": {"max_length": 30, "max_new_tokens": None},
    "min_length": {"min_length": 26, "eos_token_id": EOS},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": EOS},
    "eos": {"eos_token_id": EOS},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[5], [9, 11], *([token] for token in range(30, 60))]},
    "sequence_bias": {"sequence_bias": [[[12], 4.0], [[13, 14], -3.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 50))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(20, 90))},
    "forced_bos_token_id": {"forced_bos_token_id": 17},
    "forced_eos_token_id": {"forced_eos_token_id": 33},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": EOS},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "guidance_scale": {"guidance_scale": 1.5},
    "prefix": {"prefix_allowed_tokens_fn": lambda place, ids: [3 + place, 10, 20, int(ids[-1]) % 90 + 1]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.0)},
    "max_time": {"max_time": 600.0},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "eos_token_id": EOS, "min_new_tokens": 4},
}


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_gives_the_tokens_of_generate(name: str, inputs: dict[str, Any]) -> None:
    settings = SETTINGS[name]
    torch.testing.assert_close(ours(model_of(), inputs, **settings), plain(model_of(), inputs, **settings))


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_ngram_scope(inputs: dict[str, Any]) -> None:
    """The text equals that of a processor which gives transformers' own one the generated ids alone."""
    length, blocks = inputs["input_ids"].shape[1], NoRepeatNGramLogitsProcessor(1)

    def of_generated(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return blocks(ids[:, length:], scores)

    model = model_of()
    wanted = plain(model, inputs, logits_processor=LogitsProcessorList([of_generated]))
    settings = {"no_repeat_ngram_size": 1, "ngram_scope": "generated", "return_dict_in_generate": True}
    done = ours(model, inputs, **settings)
    assert torch.equal(done.sequences, wanted)
    assert not torch.equal(wanted, plain(model, inputs, no_repeat_ngram_size=1))
    assert not torch.equal(wanted, plain(model, inputs))
    assert sum(stats.accepted_tokens for stats in done.stats) > 0


def test_ngram_scopes_without_effect_or_meaning_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="ngram_scope='generated' needs no_repeat_ngram_size"):
        ours(model_of(), ONE, ngram_scope="generated")
    with pytest.raises(ConfigurationError, match="ngram_scope='prompt' is unknown"):
        ours(model_of(), ONE, no_repeat_ngram_size=2, ngram_scope="prompt")


@pytest.mark.parametrize("name", ["qwen2-window", "gemma2", "gemma3_text", "gpt2", "opt", "gpt_oss", "phi3", "roberta"])
def test_families_with_our_attention(name: str) -> None:
    assert name in SLOTTED
    model, settings = model_of(name), {"eos_token_id": EOS, "repetition_penalty": 1.1}
    assistant = assistant_of(name)
    wanted = plain(model, BATCH, **settings)
    assert torch.equal(ours(model, BATCH, **settings, assistant_model=assistant), wanted)
    assert torch.equal(ours(model, BATCH, **settings, draft="ngram,min=1"), wanted)


@pytest.mark.parametrize("name", ["gptj", "bloom", "bart", "pegasus", "mpt"])
def test_families_with_their_own_cache(name: str) -> None:
    assert name in CACHED
    model = model_of(name)
    assert torch.equal(ours(model, BATCH, draft="ngram,min=1"), plain(model, BATCH))


@pytest.mark.parametrize("draft", ["none", "ngram", "ngram,max=1,min=1,k=6"])
def test_drafters_by_their_spec(draft: str) -> None:
    assert torch.equal(ours(model_of(), BATCH, draft=draft), plain(model_of(), BATCH))


def test_prompt_lookup_is_requested_as_in_transformers() -> None:
    wanted = plain(model_of(), ONE, prompt_lookup_num_tokens=3)
    assert torch.equal(ours(model_of(), ONE, prompt_lookup_num_tokens=3, max_matching_ngram_size=1), wanted)


def test_the_assistant_may_have_another_tokenizer() -> None:
    """It reads the text in its own tokens; without the tokenizers there is no telling how."""
    model, assistant = model_of(), fresh("llama", vocab_size=len(byte_level()) + 5)
    tokenizers = {"tokenizer": tokenizer().backend, "assistant_tokenizer": byte_level()}
    done = ours(model, ONE, assistant_model=assistant, **tokenizers, plan="fixed,k=4", return_dict_in_generate=True)
    assert torch.equal(done.sequences, plain(model, ONE))
    assert done.stats[0].draft_tokens > 20
    with pytest.raises(ConfigurationError, match="tokenizers to compare or to map"):
        ours(model, ONE, assistant_model=assistant)


def test_the_assistant_drafts_and_is_right_now_and_then() -> None:
    done = ours(model_of(), BATCH, return_dict_in_generate=True)
    assert all(stats.draft_tokens > stats.accepted_tokens > 0 for stats in done.stats)


def test_a_model_may_assist_itself_and_is_always_right() -> None:
    model = model_of()
    done = ours(model, ONE, assistant_model=model, plan="fixed,k=5", return_dict_in_generate=True)
    assert torch.equal(done.sequences, plain(model, ONE))
    assert done.stats[0].accepted_tokens == done.stats[0].draft_tokens > 0


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_users_processors_see_every_step_once_and_in_order(inputs: dict[str, Any]) -> None:
    wanted, seen = Recorder(), Recorder()
    expected = plain(model_of(), inputs, logits_processor=LogitsProcessorList([wanted]))
    written = ours(model_of(), inputs, logits_processor=LogitsProcessorList([seen]))
    assert torch.equal(written, expected)
    assert [ids for ids, _ in seen.calls] == [ids for ids, _ in wanted.calls]
    for (_, scores), (_, others) in zip(seen.calls, wanted.calls, strict=True):
        torch.testing.assert_close(scores, others, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("eos", [None, EOS], ids=["no-eos", "eos"])
@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_users_criteria_see_every_token_and_cut_after_the_stop(inputs: dict[str, Any], eos: Any) -> None:
    wanted, seen = EndsAt(12), EndsAt(12)
    settings = {"eos_token_id": eos, "min_new_tokens": 3}
    expected = plain(model_of(), inputs, stopping_criteria=StoppingCriteriaList([wanted]), **settings)
    written = ours(model_of(), inputs, stopping_criteria=StoppingCriteriaList([seen]), **settings)
    assert expected.shape[1] < inputs["input_ids"].shape[1] + 24
    assert torch.equal(written, expected)
    assert seen.calls == wanted.calls


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_a_bound_streamer_gets_what_generate_puts(inputs: dict[str, Any]) -> None:
    wanted, received = Listener(), Listener()
    plain(model_of(), inputs, streamer=wanted, eos_token_id=EOS)
    ours(model_of(), inputs, streamer=received, eos_token_id=EOS)
    assert received.calls == wanted.calls
    assert received.calls[-1] == "end"


def test_a_users_own_maximum_takes_precedence() -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=22)])
    wanted = plain(model_of(), ONE, stopping_criteria=criteria)
    assert wanted.shape[1] == 22
    assert torch.equal(ours(model_of(), ONE, stopping_criteria=criteria), wanted)


@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_scores_and_logits_of_every_step(inputs: dict[str, Any]) -> None:
    settings = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.3,
        "eos_token_id": EOS,
    }
    wanted, got = plain(model_of(), inputs, **settings), ours(model_of(), inputs, **settings)
    assert isinstance(got, GenerateDecoderOnlyOutput)
    assert torch.equal(got.sequences, wanted.sequences)
    prompt = inputs["input_ids"].shape[1]
    for name in ("scores", "logits"):
        assert len(got[name]) == len(wanted[name])
        for step, (values, others) in enumerate(zip(got[name], wanted[name], strict=True)):
            assert values.shape == others.shape
            for row, tokens in enumerate(wanted.sequences):
                if any(token in EOS for token in tokens[prompt : prompt + step].tolist()):
                    assert not values[row].any(), "nothing is scored after the end of a row"
                else:
                    torch.testing.assert_close(values[row], others[row], atol=1e-4, rtol=1e-4)


def test_a_tensor_without_dictionaries_and_scores_only_on_request() -> None:
    assert isinstance(ours(model_of(), ONE), torch.Tensor)
    done = ours(model_of(), ONE, return_dict_in_generate=True)
    assert done.scores is None
    assert done.logits is None


def test_rows_that_end_early_are_padded_to_the_longest() -> None:
    wanted = plain(model_of(), BATCH, eos_token_id=EOS, pad_token_id=2)
    got = ours(model_of(), BATCH, eos_token_id=EOS, pad_token_id=2)
    assert (wanted[:, 14:] == 2).any(), "no row ends before another: the test shows nothing"
    assert torch.equal(got, wanted)


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6, "top_k": 0},
    "min_p": {"min_p": 0.3, "top_k": 0},
    "typical_p": {"typical_p": 0.6, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.1, "top_k": 0},
    "eta": {"eta_cutoff": 0.1, "top_k": 0},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_samples_do_not_depend_on_the_drafter_and_stay_in_what_is_kept(name: str) -> None:
    settings = {"do_sample": True, **SAMPLED[name], "return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(5)
    alone = ours(model_of(), BATCH, draft="none", **settings)
    torch.manual_seed(5)
    drafted = ours(model_of(), BATCH, **settings)
    assert torch.equal(drafted.sequences, alone.sequences)
    assert sum(stats.accepted_tokens for stats in drafted.stats) > 0
    for step, scores in enumerate(drafted.scores):
        assert scores.gather(1, drafted.sequences[:, 14 + step, None]).isfinite().all()
    if name != "temperature":
        assert any(scores.isneginf().any() for scores in drafted.scores)


def test_sampled_tokens_follow_the_distribution_of_generate() -> None:
    """Pairs of tokens of 1,000 rows against their probabilities, by the filters of transformers, at level 1e-5."""
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 12, "num_return_sequences": 1_000, "max_new_tokens": 2}
    inputs, model = padded(6), model_of()
    torch.manual_seed(2)
    rows = ours(model, inputs, draft="none", **settings)[:, 6:]

    def probabilities(ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[:, -1]
        return TopKLogitsWarper(12)(ids, TemperatureLogitsWarper(1.3)(ids, logits)).softmax(dim=-1).double()

    first = probabilities(inputs["input_ids"])[0]
    tokens = first.nonzero()[:, 0]
    prompts = torch.cat([inputs["input_ids"].expand(len(tokens), -1), tokens[:, None]], dim=1)
    expected = 1_000 * first[tokens, None] * probabilities(prompts)
    counts = torch.stack([rows[rows[:, 0] == token, 1].bincount(minlength=expected.shape[1]) for token in tokens])
    assert counts.sum() == 1_000
    assert not counts[expected == 0].any()
    is_frequent = expected >= 5
    rest = expected[~is_frequent].sum(), counts[~is_frequent].sum()
    statistic = ((counts - expected) ** 2 / expected)[is_frequent].sum() + (rest[1] - rest[0]) ** 2 / rest[0]
    assert is_frequent.sum() > 10
    assert scipy.stats.chi2.sf(float(statistic), int(is_frequent.sum())) > 1e-5


def test_torchs_seed_decides_the_draw_and_greedy_decoding_takes_none() -> None:
    settings = {"do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(9)
    first, state = ours(model_of(), ONE, draft="ngram", **settings), torch.get_rng_state()
    torch.manual_seed(9)
    assert torch.equal(ours(model_of(), ONE, draft="ngram", **settings), first)
    assert not torch.equal(ours(model_of(), ONE, draft="ngram", **settings), first)
    assert len({tuple(row) for row in first.tolist()}) == 3
    torch.set_rng_state(state)
    ours(model_of(), ONE)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_long_and_short_prompts_stay_in_step_where_they_must() -> None:
    model = fresh("llama", max_position_embeddings=1024)  # the first prompt takes more than one pass to read
    ids = torch.randint(3, 90, (2, 530), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    ids[1, :525], mask[1, :525] = PAD, 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    wanted, received = Listener(), Listener()
    expected = plain(model, inputs, streamer=wanted, max_new_tokens=6)
    assert torch.equal(ours(model, inputs, streamer=received, draft="ngram", max_new_tokens=6), expected)
    assert received.calls == wanted.calls
