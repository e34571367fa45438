"""The first requests of a server to its models: every catalogue model starts, and one that fails harms no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from draftree import AsyncLLM
from draftree.core.errors import ConfigurationError
from draftree.serve.pool import ServedModel
from draftree.serve.run import warm_up
from draftree.weights.catalogue import CATALOGUE
from real_weights import folder_of
from serve_process import process
from serving import NAME, tiny_async_llm
from whispers import samples, saved, wav


@pytest.mark.weights
@pytest.mark.parametrize("name", CATALOGUE)
def test_every_catalogue_model_is_served(name: str, tmp_path: Path) -> None:
    folder_of(name)
    with process(name, tmp_path / "log") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        if CATALOGUE[name].form == "whisper":
            sound = client.audio.transcriptions.create(model=name, file=("a.wav", wav(samples(1.0))))
            assert sound.usage.seconds == 1.0
            assert sound.text.strip(), "tones have a text, too"
        else:
            text = client.completions.create(model=name, prompt="Once", max_tokens=4, extra_body={"ignore_eos": True})
            assert text.usage is not None
            assert text.usage.completion_tokens == 4


def test_a_model_that_fails_to_warm_up_is_reported_and_the_others_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    speech = ServedModel("speech", AsyncLLM(saved(tmp_path / "speech"), "none", dtype="float32"))
    folder = saved(tmp_path / "broken")
    (folder / "preprocessor_config.json").unlink()
    broken = ServedModel("broken", AsyncLLM(folder, "none", dtype="float32"))
    chat = ServedModel(NAME, tiny_async_llm())
    assert asyncio.run(warm_up([speech, broken, chat])) == [speech, chat]
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert "'broken' is not served" in record.getMessage()
    assert "preprocessor_config.json" in record.getMessage()
    with pytest.raises(ConfigurationError, match="preprocessor_config"):
        asyncio.run(warm_up([ServedModel("broken", AsyncLLM(folder, "none", dtype="float32"))]))
    for model in (speech, chat):
        asyncio.run(model.llm.close())
