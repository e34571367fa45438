"""The drop-in writes the same tokens as `generate` of encoder-decoder models, Whisper included."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import TextStreamer

import draftree
from draftree.core.errors import ConfigurationError, InvalidRequestError
from seq2seq_samples import TEXT_FAMILIES, sample, sources
from whispers import features, tokenizer, whisper

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": 2},
    "encoder": {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2},
    "suppressed": {"suppress_tokens": [7, 9, 12], "begin_suppress_tokens": [30, 31], "min_new_tokens": 8},
}


def padded(pad: int) -> dict[str, torch.Tensor]:
    rows = sources(3)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def written(model: Any, inputs: dict[str, Any], **given: Any) -> torch.Tensor:
    given = {"max_new_tokens": 18, "do_sample": False, "num_beams": 1, **given}
    found: torch.Tensor = model.generate(**inputs, **given)
    return found


def ours(model: Any, inputs: dict[str, Any], **given: Any) -> Any:
    return written(model, inputs, custom_generate=draftree.generate, **given)


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_every_family_writes_the_tokens_of_generate(name: str) -> None:
    model = sample(name)
    inputs = padded(int(model.config.pad_token_id))
    before = model.config._attn_implementation
    wanted = written(model, inputs)
    torch.testing.assert_close(ours(model, inputs, draft="ngram"), wanted)
    torch.testing.assert_close(ours(model, inputs, draft="suffix"), wanted)
    assert model.config._attn_implementation == before
    torch.testing.assert_close(written(model, inputs), wanted)
    changed = [name for name, module in model.named_modules() if {"forward", "compute_bias"} & module.__dict__.keys()]
    assert changed == [], "the modules are restored"


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_gives_the_tokens_of_generate(setting: str) -> None:
    model, given = sample("bart"), SETTINGS[setting]
    inputs = padded(1)
    torch.testing.assert_close(ours(model, inputs, **given), written(model, inputs, **given))


def test_results_are_those_of_generate() -> None:
    model, inputs = sample("t5"), padded(0)
    given = {"return_dict_in_generate": True, "output_scores": True}
    found, wanted = ours(model, inputs, **given), written(model, inputs, **given)
    torch.testing.assert_close(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(wanted.scores), atol=1e-4, rtol=1e-4)
    assert len(found.stats) == 3


def test_several_samples_repeat_with_a_seed() -> None:
    model, inputs = sample("bart"), padded(1)
    given: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "top_k": 20}
    torch.manual_seed(3)
    found = ours(model, inputs, **given)
    torch.manual_seed(3)
    torch.testing.assert_close(ours(model, inputs, draft="suffix", **given), found)
    assert found.shape[0] == 9
    assert len({tuple(row) for row in found.tolist()}) > 3


def test_streamers_get_the_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    model, inputs = sample("bart"), {"input_ids": torch.tensor([[5, 6, 7]])}
    streamer = TextStreamer(tokenizer())
    bound = functools.partial(draftree.generate, streamer=streamer)
    found = model.generate(**inputs, max_new_tokens=8, custom_generate=bound)
    assert capsys.readouterr().out.strip() == tokenizer().decode(found[0]).strip()


@pytest.mark.parametrize("timestamps", [False, True])
def test_whisper_writes_the_tokens_of_generate(timestamps: bool) -> None:
    model = whisper()
    given: dict[str, Any] = {"language": "de", "task": "transcribe"}
    if timestamps:
        given["return_timestamps"] = True
    for one in features(2):
        inputs = {"input_features": torch.from_numpy(one)[None]}
        wanted = written(model, inputs, **given)
        for draft in ("ngram", "suffix"):
            torch.testing.assert_close(ours(model, inputs, draft=draft, **given), wanted)


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_beams_of_every_family_are_those_of_generate(name: str) -> None:
    model = sample(name)
    inputs = padded(int(model.config.pad_token_id))
    given = {"num_beams": 4, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
    wanted = written(model, inputs, **given)
    found = ours(model, inputs, **{**given, "output_scores": False})
    torch.testing.assert_close(found.sequences, wanted.sequences)
    torch.testing.assert_close(found.sequences_scores, wanted.sequences_scores, atol=1e-4, rtol=1e-4)
    assert type(found) is type(wanted)


@pytest.mark.parametrize("setting", SETTINGS)
def test_beams_with_every_setting(setting: str) -> None:
    model, given = sample("bart"), {"num_beams": 3, "early_stopping": True, **SETTINGS[setting]}
    inputs = padded(1)
    torch.testing.assert_close(ours(model, inputs, **given), written(model, inputs, **given))


@pytest.mark.parametrize("timestamps", [False, True])
def test_beams_of_whisper_are_those_of_generate(timestamps: bool) -> None:
    model, given = whisper(), {"language": "de", "task": "transcribe", "num_beams": 3}
    if timestamps:
        given["return_timestamps"] = True
    for one in features(2):
        inputs = {"input_features": torch.from_numpy(one)[None]}
        torch.testing.assert_close(ours(model, inputs, **given), written(model, inputs, **given))


def test_what_cannot_be_honoured_is_refused() -> None:
    model, inputs = sample("bart"), padded(1)
    with pytest.raises(ConfigurationError, match="no drafter takes part"):
        ours(model, inputs, num_beams=3, draft="ngram")
    with pytest.raises(ConfigurationError, match="the output of its encoder only"):
        ours(model, inputs, draft="model:anything")
    with pytest.raises(ConfigurationError, match="the output of its encoder only"):
        written(
            model, inputs, custom_generate=functools.partial(draftree.generate, assistant_model=sample("bart", seed=2))
        )
    mask = torch.tensor([[1, 1], [0, 1], [1, 1]])
    with pytest.raises(InvalidRequestError, match="decoder_attention_mask"):
        ours(model, inputs, decoder_input_ids=torch.tensor([[2, 5]] * 3), decoder_attention_mask=mask)
    with pytest.raises(InvalidRequestError, match="context holds 64"):
        ours(model, inputs, max_new_tokens=64)
