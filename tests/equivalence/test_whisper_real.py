"""The real Whisper-tiny.en: greedy and beam texts equal those of `generate` of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, WhisperForConditionalGeneration

from draftree import LLM, BeamSearchParams, SamplingParams
from real_weights import folder_of
from whispers import samples

NAME = "whisper-tiny.en"
GREEDY = SamplingParams(temperature=0, max_tokens=60)

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def llm() -> LLM:
    folder_of(NAME)
    return LLM(NAME, draft="suffix", dtype="float32")


@pytest.fixture(scope="module")
def peer() -> Any:
    return WhisperForConditionalGeneration.from_pretrained(folder_of(NAME)).eval()


def sound(seconds: float) -> np.ndarray:
    """Tones that come and go, with noise."""
    tones, noise = samples(seconds), np.random.default_rng(1).normal(size=int(seconds * 16000)) * 0.02
    return (tones * (np.sin(np.arange(len(tones)) / 9000) > 0) + noise).astype(np.float32)


def test_long_sounds_equal_generate(llm: LLM, peer: Any) -> None:
    given = sound(41.0)
    (found,) = llm.transcribe_long(given, SamplingParams(temperature=0, max_tokens=None))
    features = torch.from_numpy(llm.transcriber.features(given))[None]
    wanted = peer.generate(features, return_timestamps=True, do_sample=False, num_beams=1)
    assert list(found.token_ids) == wanted[0].tolist()
    assert found.text.strip()
    assert found.seconds == 41.0


@pytest.mark.parametrize("width", [1, 5])
def test_beams_equal_generate(llm: LLM, peer: Any, width: int) -> None:
    features = llm.transcriber.source(sound(5.0)).features
    rules = llm.transcriber.rules
    assert rules is not None
    start = [*llm.model.rules.start_ids, rules.no_timestamps]  # type: ignore[attr-defined]
    (found,) = llm.beam_search(features, BeamSearchParams(beam_width=width, max_new_tokens=20), decoder_prompt=start)
    wanted = peer.generate(torch.from_numpy(features)[None], do_sample=False, num_beams=width, max_new_tokens=20)
    tokenizer = AutoTokenizer.from_pretrained(folder_of(NAME))
    ids = [id for id in wanted[0].tolist() if id not in start and id != tokenizer.eos_token_id]
    assert [id for id in found.best.tokens if id != tokenizer.eos_token_id] == ids
