"""Long-form transcription against `generate` of transformers, greedy: tokens, segments and their times."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.sampling.decoding_rules import cut_window
from draftree.speech.windows import Transcript
from seq2seq_samples import sample
from whispers import RATE, SHAPE, samples, saved, token, tokenizer, whisper

LENGTH = 24
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
FIRST = 100


def long_features(frames: int, *, seed: int = 5) -> np.ndarray:
    """Return random features with so many frames."""
    return np.random.default_rng(seed).normal(size=(SHAPE[0], frames)).astype(np.float32)


def generated(model: Any, given: np.ndarray, *, seconds: float = 30.0, **options: Any) -> dict[str, Any]:
    """Return what transformers writes if a window has so many seconds."""
    step = seconds / model.config.max_source_positions
    return model.generate(  # type: ignore[no-any-return]
        torch.from_numpy(given)[None],
        max_new_tokens=LENGTH,
        do_sample=False,
        num_beams=1,
        return_segments=True,
        return_timestamps=True,
        time_precision=step,
        time_precision_features=step / 2,
        **options,
    )


def require_equal(found: Transcript, wanted: dict[str, Any]) -> None:
    assert list(found.token_ids) == wanted["sequences"][0].tolist()
    first = token("notimestamps") + 1
    parts = [
        (round(float(one["start"]), 6), round(float(one["end"]), 6), one["tokens"].tolist())
        for one in wanted["segments"][0]
        if tokenizer().decode([id for id in one["tokens"].tolist() if id < first], skip_special_tokens=True)
    ]
    ours = [
        (round(one.start, 6), round(one.end, 6), list(found.token_ids[one.first : one.last])) for one in found.segments
    ]
    assert ours == parts


@functools.cache
def wanted_text(frames: int, seed: int) -> dict[str, Any]:
    return generated(whisper(seed=seed), long_features(frames, seed=seed), language="de", task="translate")


@pytest.mark.parametrize("draft", [None, "suffix"])
@pytest.mark.parametrize("frames", [101, 230, 377])
def test_texts_equal_generate(frames: int, draft: str | None) -> None:
    windows, pairs = 0, 0
    for seed in range(6):
        llm = LLM(whisper(seed=seed), draft, tokenizer=tokenizer())
        (found,) = llm.transcribe_long(long_features(frames, seed=seed), GREEDY, language="de", task="translate")
        llm.engine.check_integrity()
        require_equal(found, wanted_text(frames, seed))
        windows += len(found.windows)
        pairs += sum(len(one.token_ids) for one in found.windows) > len(found.token_ids) + len(found.windows)
    assert windows > 6 * (frames // 100)
    assert pairs, "no window was cut at a pair of timestamps"


def test_the_language_is_detected_once_and_audios_form_batches() -> None:
    given = [long_features(frames, seed=frames) for frames in (150, 301)]
    llm = LLM(whisper(), "none", tokenizer=tokenizer())
    found = llm.transcribe_long(given, GREEDY)
    for one, features in zip(found, given, strict=True):
        require_equal(one, generated(whisper(), features, task="transcribe"))
        assert one.language in ("en", "de", "fr")
        assert llm.transcribe_long(features, GREEDY)[0].token_ids == one.token_ids


@pytest.mark.parametrize("prompt", [None, "a fox"])
def test_windows_may_continue_earlier_text(prompt: str | None) -> None:
    given, differs = long_features(330), 0
    ids = [token("startofprev"), *tokenizer().encode(" a fox", add_special_tokens=False)]
    told = {} if prompt is None else {"prompt_ids": torch.tensor(ids)}
    for seed in range(4):
        model = whisper(seed=seed)
        llm = LLM(whisper(seed=seed), "none", tokenizer=tokenizer())
        (found,) = llm.transcribe_long(given, GREEDY, language="fr", prompt=prompt, condition_on_previous=True)
        require_equal(found, generated(model, given, language="fr", condition_on_prev_tokens=True, **told))
        (plain,) = llm.transcribe_long(given, GREEDY, language="fr", prompt=prompt)
        require_equal(plain, generated(model, given, language="fr", **told))
        differs += plain.token_ids != found.token_ids
    assert differs


def test_samples_of_any_length_are_read(tmp_path: Any) -> None:
    llm = LLM(saved(tmp_path), "none", dtype="float32")
    sound = samples(2.5)
    extractor = llm.transcriber._feature_extractor()
    given = extractor(sound, sampling_rate=RATE, truncation=False, padding="longest", return_tensors="np")
    (found,) = llm.transcribe_long(sound, GREEDY, language="en")
    require_equal(found, generated(whisper(), given["input_features"][0], language="en", seconds=1.0))
    assert found.seconds == 2.5
    assert llm.transcriber.is_long(sound)
    assert not llm.transcriber.is_long(samples(1.0))
    with pytest.raises(InvalidRequestError, match="transcribe_long"):
        llm.transcribe(sound)


def test_what_cannot_be_cut_is_refused() -> None:
    shape = (sample("whisper").config.num_mel_bins, 500)
    with pytest.raises(InvalidRequestError, match="no timestamps at which"):
        LLM(sample("whisper"), "none").transcribe_long(np.zeros(shape, np.float32))
    llm = LLM(whisper(), "none", tokenizer=tokenizer())
    with pytest.raises(InvalidRequestError, match="one text"):
        llm.transcribe_long(long_features(150), SamplingParams(n=2, temperature=0.5), language="en")
    with pytest.raises(InvalidRequestError, match="shape"):
        llm.transcribe_long(np.zeros((3, 150), np.float32), language="en")


def test_sampled_windows_repeat_with_a_seed_and_differ() -> None:
    llm, same = LLM(whisper(), "none", tokenizer=tokenizer()), np.tile(long_features(100), 3)
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, seed=3)
    found, again = (llm.transcribe_long(same, params, language="en")[0] for _ in range(2))
    assert found.token_ids == again.token_ids
    assert len({one.seed for one in found.windows}) == len(found.windows)


@pytest.mark.parametrize(
    ("tokens", "parts", "advance"),
    [
        ([], [], 100),
        ([FIRST], [(0, 50, 0, 1)], 100),
        ([FIRST, 5], [(0, 50, 0, 2)], 100),
        ([FIRST, 5, FIRST + 7], [(0, 7, 0, 3)], 100),
        ([FIRST, 5, FIRST + 7, FIRST + 7, 6], [(0, 7, 0, 4)], 14),
        ([FIRST, 5, FIRST + 7, FIRST + 9, 6, FIRST + 20], [(0, 7, 0, 3), (9, 20, 3, 6)], 100),
        ([FIRST, 5, FIRST + 7, FIRST + 7], [(0, 7, 0, 4)], 14),
        ([FIRST, 5, FIRST + 3, FIRST + 4, 6, FIRST + 8, FIRST + 9, 7], [(0, 3, 0, 3), (4, 8, 3, 7)], 16),
    ],
)
def test_windows_are_cut_at_pairs_of_timestamps(
    tokens: list[int], parts: list[tuple[int, int, int, int]], advance: int
) -> None:
    found = cut_window(tokens, FIRST, frames=100, stride=2)
    assert [(one.start, one.end, one.first, one.last) for one in found.parts] == parts
    assert found.advance == advance
