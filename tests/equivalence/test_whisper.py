"""Whisper against `generate` of transformers: language and task tokens, suppressed tokens, timestamps, prompts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError
from seq2seq_samples import sample
from whispers import RATE, SHAPE, features, samples, saved, token, tokenizer, whisper

LENGTH = 30
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)


def generated(model: Any, given: np.ndarray, **options: Any) -> list[int]:
    """Return what transformers writes after the decoder's prompt, without the end of text."""
    parts = model.generate(
        torch.from_numpy(given)[None],
        max_new_tokens=LENGTH,
        do_sample=False,
        num_beams=1,
        return_segments=True,
        **options,
    )["segments"][0]
    # later parts come from later windows, which begin at the last timestamp; ours is the first window
    result = parts[0]["result"]
    found: list[int] = (result["sequences"] if isinstance(result, dict) else result).tolist()
    while found and found[-1] == token("endoftext"):
        found.pop()
    prompt = [token("startoftranscript"), token("de"), token(options.get("task", "transcribe"))]
    if not options.get("return_timestamps"):
        prompt.append(token("notimestamps"))
    place = next(start for start in range(len(found)) if found[start : start + len(prompt)] == prompt)
    return found[place + len(prompt) :]


def ours(llm: LLM, given: list[np.ndarray], **options: Any) -> list[list[int]]:
    done = llm.transcribe(given, GREEDY, language="de", **options)
    llm.engine.check_integrity()
    rows = [list(one.token_ids) for one in done]
    return [row[:-1] if row[-1] == token("endoftext") else row for row in rows]


@functools.cache
def wanted_texts(seed: int, task: str, timestamps: bool) -> list[list[int]]:
    options = {"return_timestamps": True} if timestamps else {}
    return [generated(whisper(seed=seed), one, language="de", task=task, **options) for one in features(4)]


@pytest.mark.parametrize("draft", [None, "suffix", "ngram,min=1"])
@pytest.mark.parametrize("timestamps", [False, True])
def test_texts_equal_generate(timestamps: bool, draft: str | None) -> None:
    count = 0
    for seed in range(3):
        llm = LLM(whisper(seed=seed), draft, tokenizer=tokenizer())
        for task in ("transcribe", "translate"):
            wanted = wanted_texts(seed, task, timestamps)
            assert ours(llm, features(4), task=task, timestamps=timestamps) == wanted
            count += sum(one > token("notimestamps") for row in wanted for one in row)
    assert count > 20 or not timestamps


@pytest.mark.parametrize("timestamps", [False, True])
def test_a_text_before_the_audio_equals_prompt_ids(timestamps: bool) -> None:
    (given,) = features(1)
    ids = [token("startofprev"), *tokenizer().encode(" a fox", add_special_tokens=False)]
    wanted = generated(
        whisper(), given, language="de", prompt_ids=torch.tensor(ids), return_timestamps=timestamps or None
    )
    found = ours(LLM(whisper(), "none", tokenizer=tokenizer()), [given], prompt="a fox", timestamps=timestamps)
    assert found == [wanted]
    assert found != ours(LLM(whisper(), "none", tokenizer=tokenizer()), [given], timestamps=timestamps)


def test_samples_are_read_by_the_feature_extractor_of_the_folder(tmp_path: Any) -> None:
    llm, sound = LLM(saved(tmp_path), "none", dtype="float32"), samples(0.6)
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path)
    given = extractor(sound, sampling_rate=RATE, return_tensors="np")["input_features"][0]
    assert ours(llm, [sound]) == ours(llm, [given]) == [generated(whisper(), given, language="de")]
    with pytest.raises(InvalidRequestError, match="cut it into parts"):
        llm.transcribe(samples(1.01), GREEDY)


def test_texts_are_greedy_and_unlimited_by_default() -> None:
    llm, given = LLM(whisper(), "none", tokenizer=tokenizer()), features(1)
    (whole,) = llm.transcribe(given, SamplingParams(temperature=0, max_tokens=None), language="de")
    (done,) = llm.transcribe(given, language="de")
    (limited,) = llm.transcribe(given, SamplingParams(max_tokens=LENGTH), language="de")
    assert len(whole.token_ids) > LENGTH
    assert (done.token_ids, limited.token_ids) == (whole.token_ids, whole.token_ids[:LENGTH])


def test_the_language_is_detected() -> None:
    llm, model = LLM(whisper(), "none", tokenizer=tokenizer()), whisper()
    for given in features(3):
        (spoken,) = model.detect_language(input_features=torch.from_numpy(given)[None]).tolist()
        wanted = llm.transcribe(given, GREEDY, language=tokenizer().decode(spoken))
        assert llm.transcribe(given, GREEDY)[0].token_ids == wanted[0].token_ids


def test_a_language_is_named_by_code_token_or_english_name() -> None:
    llm, given = LLM(whisper(), "none", tokenizer=tokenizer()), features(1)
    texts = [llm.transcribe(given, GREEDY, language=name)[0].token_ids for name in ("de", "<|de|>", "German")]
    assert texts[0] == texts[1] == texts[2]


def test_sampled_texts_with_timestamps_keep_the_rules() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=3, n=6)
    plain = LLM(whisper(), "none", tokenizer=tokenizer()).transcribe(
        features(2), params, language="en", timestamps=True
    )
    drafted = LLM(whisper(), "suffix", tokenizer=tokenizer()).transcribe(
        features(2), params, language="en", timestamps=True
    )
    assert [one.token_ids for one in plain] == [one.token_ids for one in drafted]
    first = token("notimestamps") + 1
    for one in plain:
        times = [id for id in one.token_ids if id >= first]
        assert times == sorted(times)
        assert first <= one.token_ids[0] <= first + 10
        assert all(not (a >= first and b >= first and c >= first) for a, b, c in _threes(one.token_ids))


def _threes(ids: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return list(zip(ids, ids[1:], ids[2:], strict=False))


def test_segments_are_the_parts_between_timestamps(tmp_path: Any) -> None:
    llm = LLM(saved(tmp_path), "none", dtype="float32")
    first, text = token("notimestamps") + 1, tokenizer().encode("ab", add_special_tokens=False)
    ids = [first, *text, first + 5, first + 5, *text, first + 20, first + 25, *text, token("endoftext")]
    found = llm.transcriber.segments(ids, seconds=0.9)
    assert [(round(one.start, 6), round(one.end, 6), one.text) for one in found] == [
        (0.0, 0.1, "ab"),
        (0.1, 0.4, "ab"),
        (0.5, 0.9, "ab"),
    ]
    assert [ids[one.first : one.last] for one in found] == [text] * 3
    (done,) = llm.transcribe(features(1), GREEDY, language="en", timestamps=True)
    assert "".join(one.text for one in llm.segments(done)) == llm.transcriber.text(done.token_ids)


def test_what_cannot_be_transcribed_is_refused() -> None:
    llm, (given,) = LLM(whisper(), "none", tokenizer=tokenizer()), features(1)
    with pytest.raises(InvalidRequestError, match="unknown language 'dd'"):
        llm.transcribe(given, GREEDY, language="dd")
    with pytest.raises(InvalidRequestError, match="unknown task 'sing'"):
        llm.transcribe(given, GREEDY, language="de", task="sing")
    with pytest.raises(InvalidRequestError, match=r"\(4, 100\)"):
        llm.transcribe(np.zeros((4, 99), np.float32), GREEDY)
    with pytest.raises(ConfigurationError, match=r"preprocessor_config\.json"):
        llm.transcribe(np.zeros(1000, np.float32), GREEDY)
    with pytest.raises(InvalidRequestError, match="use transcribe"):
        llm.generate([[5, 6]], GREEDY)
    with pytest.raises(ConfigurationError, match="use generate"):
        LLM(sample("t5"), "none").transcribe(given, GREEDY)
    english = sample("whisper")
    english.generation_config.no_timestamps_token_id, english.generation_config.is_multilingual = 55, False
    with pytest.raises(InvalidRequestError, match="English only"):
        LLM(english, "none").transcribe(given, GREEDY, language="de")


def test_settings_without_a_token_are_refused() -> None:
    llm, given = LLM(sample("whisper"), "none"), [np.zeros(SHAPE, np.float32)]
    with pytest.raises(InvalidRequestError, match="writes no timestamps"):
        llm.transcribe(given, GREEDY, timestamps=True)
    with pytest.raises(InvalidRequestError, match="no token for a prompt"):
        llm.transcribe(given, GREEDY, prompt="a fox")
    with pytest.raises(InvalidRequestError, match="writes no timestamps"):
        llm.transcriber.segments([5])
