"""Transcription: greedy texts equal `generate` of transformers, from features and from samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError
from seq2seq_samples import sample

LENGTH = 20
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH)
LANGUAGES = {"<|en|>": 50, "<|de|>": 51, "<|fr|>": 52}
TASKS = {"transcribe": 53, "translate": 54}
NO_TIMESTAMPS = 55


def whisper(*, multilingual: bool = True) -> Any:
    model = sample("whisper")
    given = {"no_timestamps_token_id": NO_TIMESTAMPS, "is_multilingual": multilingual}
    if multilingual:
        given |= {"lang_to_id": LANGUAGES, "task_to_id": TASKS}
    for name, value in given.items():
        setattr(model.generation_config, name, value)
    model.generation_config._from_model_config = False  # otherwise it is not saved
    model.generation_config.begin_suppress_tokens = [2, 9]
    model.generation_config.suppress_tokens = [4, 5, 11, *range(50, 56)]
    return model


def features(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(4).normal(size=(count, 4, 100)).astype(np.float32))


def greedy(model: Any, given: np.ndarray, start: list[int]) -> list[int]:
    """Return the greedy continuation by the model's own forward, with the suppressed tokens of its configuration."""
    ids, config = list(start), model.generation_config
    with torch.inference_mode():
        for _ in range(LENGTH):
            row = model(
                input_features=torch.from_numpy(given)[None], decoder_input_ids=torch.tensor([ids]), use_cache=False
            ).logits[0, -1]
            row[config.suppress_tokens] = -torch.inf
            if len(ids) == len(start):
                row[config.begin_suppress_tokens] = -torch.inf
            ids.append(int(row.argmax()))
            if ids[-1] == 2:
                break
    return ids[len(start) :]


@pytest.mark.parametrize("draft", [None, "suffix", "ngram,min=1"])
@pytest.mark.parametrize("task", TASKS)
def test_texts_of_features_equal_greedy_decoding(draft: str | None, task: str) -> None:
    llm, given = LLM(whisper(), draft=draft), features(3)
    done = llm.transcribe(given, GREEDY, language="de", task=task)
    wanted = [greedy(whisper(), one, [2, 51, TASKS[task], NO_TIMESTAMPS]) for one in given]
    assert [list(one.token_ids) for one in done] == wanted
    llm.engine.check_integrity()
    llm.engine.forget()
    assert llm.model.num_open == 0 == llm.model.num_sources


def test_the_language_is_detected() -> None:
    own, (given,) = whisper(), features(1)
    with torch.inference_mode():
        row = own(input_features=torch.from_numpy(given)[None], decoder_input_ids=torch.tensor([[2]])).logits[0, -1]
    spoken = 50 + int(row[50:53].argmax())
    (done,) = LLM(whisper()).transcribe(given, GREEDY)
    assert list(done.token_ids) == greedy(own, given, [2, spoken, 53, NO_TIMESTAMPS])


def test_samples_are_read_by_the_feature_extractor_of_the_folder(tmp_path: Any) -> None:
    whisper(multilingual=False).save_pretrained(tmp_path)
    extractor = WhisperFeatureExtractor(feature_size=4, sampling_rate=16000, hop_length=160, chunk_length=1)
    extractor.save_pretrained(tmp_path)
    own = WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
    llm = LLM(tmp_path, dtype="float32")
    samples = np.sin(np.arange(9000, dtype=np.float32) / 9)
    given = extractor(samples, sampling_rate=16000, return_tensors="np")["input_features"][0]
    (done,) = llm.transcribe(samples, GREEDY)
    assert list(done.token_ids) == greedy(own, given, [2, NO_TIMESTAMPS])
    (alike,) = llm.transcribe([given], GREEDY)
    assert alike.token_ids == done.token_ids
    with pytest.raises(InvalidRequestError, match="cut it into parts"):
        llm.transcribe(np.zeros(16001, np.float32), GREEDY)


def test_what_cannot_be_transcribed_is_refused() -> None:
    llm = LLM(whisper())
    with pytest.raises(InvalidRequestError, match="unknown language 'dd'"):
        llm.transcribe(features(1), GREEDY, language="dd")
    with pytest.raises(InvalidRequestError, match="unknown task 'sing'"):
        llm.transcribe(features(1), GREEDY, language="de", task="sing")
    with pytest.raises(InvalidRequestError, match=r"\(4, 100\)"):
        llm.transcribe(np.zeros((4, 99), np.float32), GREEDY)
    with pytest.raises(ConfigurationError, match=r"preprocessor_config\.json"):
        llm.transcribe(np.zeros(1000, np.float32), GREEDY)
    with pytest.raises(InvalidRequestError, match="use transcribe"):
        llm.generate([[5, 6]], GREEDY)
    with pytest.raises(InvalidRequestError, match="English only"):
        LLM(whisper(multilingual=False)).transcribe(features(1), GREEDY, language="de")
    with pytest.raises(ConfigurationError, match="use generate"):
        LLM(sample("t5")).transcribe(features(1), GREEDY)
