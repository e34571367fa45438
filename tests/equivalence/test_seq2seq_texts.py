"""Texts of encoder-decoder models: equal to `generate` of transformers, with and without drafts."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.core.errors import ConfigurationError, GenerationError, InvalidRequestError, UnsupportedModelError
from draftree.core.types import Budget
from seq2seq_samples import TEXT_FAMILIES, sample, sources

LENGTH = 24
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)


def generated(model: Any, ids: list[int], **given: Any) -> list[int]:
    """Return the tokens of greedy `generate` after the decoder's start, without the end of text."""
    given = {"max_new_tokens": LENGTH, **given}
    found = model.generate(torch.tensor([ids]), do_sample=False, num_beams=1, **given)[0].tolist()
    return found[1:]


def texts(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY, **given: Any) -> list[list[int]]:
    done = llm.generate(prompts, params, **given)
    llm.engine.check_integrity()
    return [[*llm.model.rules.prompt[1:], *one.token_ids] for one in done]


def closed(llm: LLM) -> bool:
    llm.engine.forget()
    return llm.model.num_open == 0 == llm.model.num_sources


@functools.cache
def wanted_texts(name: str) -> list[list[int]]:
    return [generated(sample(name), ids) for ids in sources(4)]


@pytest.mark.parametrize("draft", [None, "ngram", "suffix"])
@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_greedy_texts_equal_generate(name: str, draft: str | None) -> None:
    llm = LLM(sample(name), draft=draft)
    assert texts(llm, sources(4)) == wanted_texts(name)
    assert closed(llm)


@pytest.mark.parametrize(
    "draft", ["ngram,min=1", "suffix", "suffix+ngram", "lookahead", "synthetic,accept=0.8,width=2"]
)
def test_sampled_texts_of_a_seed_do_not_depend_on_drafts(draft: str) -> None:
    prompts = sources(4)
    params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=LENGTH, seed=11, n=2)
    plain = LLM(sample("bart"), "none").generate(prompts, params)
    llm = LLM(sample("bart"), draft=draft, plan="fixed")
    drafted = llm.generate(prompts, params)
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert sum(one.stats.draft_tokens for one in drafted)
    assert closed(llm)


def test_drafts_copy_from_the_source() -> None:
    """Tokens that occur in the source only are drafted after a match with it."""
    for draft in ("ngram", "suffix"):
        llm = LLM(sample("t5"), draft=draft)
        (sequence,) = llm.requests.sequences([9, 20, 21, 22, 23, 24, 1], GREEDY, decoder_prompt=[20, 21])
        drafter = llm.engine.parts.drafters[0].drafter
        (tree,) = drafter.draft([drafter.open(sequence.view)], [Budget(num_nodes=6, depth=6, room=20)])
        assert list(tree.tokens[:2]) == [22, 23]
        assert -1 not in tree.tokens


def test_a_source_is_encoded_once_for_all_texts_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, count = LLM(sample("marian"), "none"), []
    run = llm.model._encode
    monkeypatch.setattr(llm.model, "_encode", lambda source: count.append(source) or run(source))
    llm.generate([sources(2)[1]], SamplingParams(n=6, max_tokens=LENGTH, seed=2))
    assert len(count) == 1


def test_cached_prefixes_belong_to_one_source() -> None:
    model = sample("bart")
    llm, prompts = LLM(model, "none"), sources(3)
    params = SamplingParams(temperature=0, max_tokens=8)
    start = [5 + place for place in range(20)]
    sequences = []
    for ids in (prompts[1], prompts[1], prompts[2]):
        (sequence,) = llm.requests.sequences(ids, params, decoder_prompt=start)
        list(llm.engine.stream(sequence))
        sequences.append(sequence)
        given = torch.tensor([[*llm.model.rules.start_ids, *start]])
        wanted = sample("bart").generate(
            torch.tensor([ids]), decoder_input_ids=given, max_new_tokens=8, do_sample=False, num_beams=1
        )
        assert sequence.history.tokens.tolist() == wanted[0].tolist()
    assert [one.counts.cached_tokens > 0 for one in sequences] == [False, True, False]
    assert closed(llm)


RULES: dict[str, dict[str, Any]] = {
    "forced_bos": {"forced_bos_token_id": 9},
    "forced_eos": {"forced_eos_token_id": 2},
    "suppressed": {"suppress_tokens": [4, 7, 9, 12, 20, 31, 33, 40]},
    "begin_suppressed": {"begin_suppress_tokens": list(range(3, 30)), "forced_bos_token_id": 9},
    "bad_words": {"bad_words_ids": [*([token] for token in range(3, 60, 2)), [8, 10], [2]]},
    "ngrams": {"no_repeat_ngram_size": 2},
    "source_ngrams": {"encoder_no_repeat_ngram_size": 1},
    "repetition": {"repetition_penalty": 1.7},
    "min_length": {"min_length": 9, "eos_token_id": list(range(2, 40))},
}


@pytest.mark.parametrize("draft", [None, "suffix"])
@pytest.mark.parametrize("rule", RULES)
def test_settings_of_the_generation_configuration_are_honoured(rule: str, draft: str | None) -> None:
    prompts, wanted, differ = sources(3), [], False
    for ids in prompts:
        own = sample("mbart")
        plain = generated(own, ids)
        own.generation_config.update(**RULES[rule])
        wanted.append(generated(own, ids))
        differ = differ or wanted[-1] != plain
    assert differ, "the setting has an effect"
    model = sample("mbart")
    model.generation_config.update(**RULES[rule])
    # the forced first token belongs to the decoder's prompt
    length = LENGTH - ("forced_bos_token_id" in RULES[rule])
    found = texts(LLM(model, draft=draft), prompts, SamplingParams(temperature=0, max_tokens=length))
    assert found == wanted


def test_a_request_without_a_limit_ends_at_the_configured_length() -> None:
    model = sample("bart")
    model.generation_config.update(max_length=13, eos_token_id=None)
    model.config.eos_token_id = None
    (done,) = LLM(model, "none").generate([sources(1)[0]], SamplingParams(temperature=0, max_tokens=None))
    assert len(done.token_ids) == 12


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_request_without_a_limit_fills_the_context_beside_any_source(share: float) -> None:
    model = sample("bart")
    model.generation_config.update(max_length=None, eos_token_id=None)
    model.config.eos_token_id = None
    llm = LLM(model, "none")
    source = [5] * int(share * llm.model.max_source_length)  # type: ignore[attr-defined]
    (done,) = llm.generate([source], SamplingParams(temperature=0, max_tokens=None))
    assert len(done.token_ids) == llm.model.max_length - len(llm.model.rules.start_ids)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["encoder_repetition_penalty", "guidance_scale", "renormalize_logits"])
def test_settings_that_are_not_supported_are_refused(name: str) -> None:
    model = sample("t5")
    setattr(model.generation_config, name, 2.0)
    with pytest.raises(UnsupportedModelError, match=name):
        LLM(model, "none")


def test_settings_of_beam_search_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = sample("t5")
    model.generation_config.num_beams = 4
    with caplog.at_level("WARNING"):
        LLM(model, "none")
    assert "num_beams=4" in caplog.text


def test_statistics_count_the_tokens_of_the_source() -> None:
    (done,) = LLM(sample("t5"), "none").generate([sources(3)[2]], GREEDY)
    assert done.stats.prompt_tokens == 11


@pytest.mark.parametrize("draft", ["early-exit,layers=1", "layer-skip,attention=1"])
def test_drafters_that_run_a_model_are_refused_before_weights_are_read(draft: str, tmp_path: Any) -> None:
    sample("t5").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="source"):
        LLM(tmp_path, draft=draft)


def test_folders_are_read_and_auto_chooses_a_drafter_without_a_model(tmp_path: Any) -> None:
    sample("marian").save_pretrained(tmp_path)
    llm = LLM(tmp_path, draft="auto", dtype="float32")
    assert "suffix" in llm.draft_note
    assert texts(llm, sources(2)) == [generated(sample("marian"), ids) for ids in sources(2)]
    # the heads of this model are smaller than a block of numbers
    for options in ({"kernels": "native"}, {"quantization": "int8"}):
        with pytest.raises(ConfigurationError, match="cannot run on native kernels: its size of a head of 8"):
            LLM(tmp_path, **options)
    with pytest.raises(ConfigurationError, match="no fixed shapes"):
        LLM(tmp_path, "none", kernels="graphs")


def test_streams_and_batches_that_change_keep_their_sources() -> None:
    prompts = sources(4)
    wanted = [generated(sample("umt5"), ids) for ids in prompts]
    llm = LLM(sample("umt5"), draft="suffix", max_batch_size=2)
    streams = [llm.stream_updates(ids, GREEDY) for ids in prompts]
    found: list[list[int]] = [[] for _ in streams]
    live = set(range(len(streams)))
    while live:
        for place in sorted(live):
            update = next(streams[place], None)
            if update is None:
                live.discard(place)
            else:
                found[place] += update.token_ids
    assert found == wanted
    assert closed(llm)


def test_prompts_of_the_wrong_kind_are_refused() -> None:
    llm = LLM(sample("bart"), "none")
    with pytest.raises(InvalidRequestError, match="encoder reads 64 at most"):
        llm.generate([[5] * 65], GREEDY)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        llm.generate([[5] * 3], SamplingParams(prompt_logprobs=1))
    with pytest.raises(InvalidRequestError, match="vocabulary ends at 59"):
        llm.requests.sequences([5], GREEDY, decoder_prompt=[60])
    with pytest.raises(InvalidRequestError, match="decoder prompt of 1 tokens"):
        llm.generate([[5] * 3], SamplingParams(max_tokens=64))


def test_asynchronous_requests_continue_a_decoder_prompt() -> None:
    prompts, start = sources(3), [7, 9]
    wanted = LLM(sample("m2m100"), "none").generate(prompts, GREEDY, decoder_prompt=start)

    async def run() -> list[list[int]]:
        async with AsyncLLM(sample("m2m100"), draft="suffix") as llm:
            submitted = [await llm.submit(ids, GREEDY, decoder_prompt=start) for ids in prompts]
            found = []
            for one in submitted:
                found.append([token async for update in one for token in update.token_ids])
            return found

    assert asyncio.run(run()) == [list(one.token_ids) for one in wanted]


def test_aborted_and_failed_requests_leave_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, prompts = LLM(sample("marian"), draft="suffix"), sources(3)
    stream = llm.stream_updates(prompts[2], GREEDY)
    next(stream)
    assert llm.model.num_sources == 1
    stream.close()
    assert closed(llm)
    run = llm.model._encode

    def fails_once(source: Any) -> Any:
        if source.tokens == tuple(prompts[1]):
            raise RuntimeError("the encoder fails")
        return run(source)

    monkeypatch.setattr(llm.model, "_encode", fails_once)
    with pytest.raises(GenerationError, match="the encoder fails") as failure:
        llm.generate(prompts, GREEDY)
    assert [list(one.token_ids) for one in failure.value.completions] == [
        generated(sample("marian"), prompts[place]) for place in (0, 2)
    ]
    assert closed(llm)


def test_preempted_texts_continue_on_their_sources() -> None:
    prompts = sources(4)
    wanted = [generated(sample("t5"), ids) for ids in prompts]
    llm = LLM(sample("t5"), draft="suffix")
    made = [llm.requests.sequences(ids, GREEDY)[0] for ids in prompts]
    llm.engine.add(*made)
    llm.engine.step()
    llm.engine.step()
    # as if the others had grown into the memory of the youngest
    youngest = llm.engine._scheduler.running[-1]
    llm.engine._allocator.leave(youngest, may_keep=False)
    llm.engine._scheduler.put_back(youngest)
    assert llm.model.num_sources == 3
    while not llm.engine.is_idle:
        llm.engine.step()
    assert [one.history.output.tolist() for one in made] == wanted
    assert closed(llm)
