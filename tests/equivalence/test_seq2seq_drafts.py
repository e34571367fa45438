"""Draft models of encoder-decoder targets: texts do not depend on them, and they read the source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.outputs import Completion
from seq2seq_samples import VOCAB, sample, sources
from whispers import features, tokenizer, whisper

GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, seed=5, n=2)
FAMILIES = ("t5", "bart", "marian", "m2m100")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft models in folders: of each family the target itself, another random model, and a causal model."""
    root = tmp_path_factory.mktemp("drafts")
    models = {name: sample(name) for name in FAMILIES}
    models |= {f"other-{name}": sample(name, seed=9) for name in FAMILIES}
    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    models["causal"] = transformers.GPT2LMHeadModel(config).eval()
    models["whisper"], models["small-whisper"] = whisper(), whisper(seed=4, encoder_layers=1, decoder_layers=1)
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in models}


def accepted(done: list[Completion]) -> float:
    drafted = sum(one.stats.draft_tokens for one in done)
    assert drafted
    return sum(one.stats.accepted_tokens for one in done) / drafted


def closed(llm: LLM) -> None:
    llm.engine.check_integrity()
    llm.engine.forget()
    assert llm.model.num_open == 0 == llm.model.num_sources  # type: ignore[attr-defined]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", ["k=3", "tree=best-8,k=3"])
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_do_not_depend_on_the_draft_model(
    folders: dict[str, Path], name: str, shape: str, params: SamplingParams
) -> None:
    prompts = sources(4)
    wanted = [one.token_ids for one in LLM(sample(name), "none").generate(prompts, params)]
    for draft in (f"other-{name}", "causal"):
        llm = LLM(sample(name), f"model:{folders[draft]},{shape}", plan="fixed")
        done = llm.generate(prompts, params)
        assert [one.token_ids for one in done] == wanted
        assert sum(one.stats.draft_tokens for one in done)
        closed(llm)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_model_that_is_the_target_is_always_right(
    folders: dict[str, Path], name: str, params: SamplingParams
) -> None:
    """It is right only if it reads the same source from the same start."""
    llm = LLM(sample(name), f"model:{folders[name]},k=3", plan="fixed")
    assert accepted(llm.generate(sources(3), params)) == 1.0
    closed(llm)


def test_a_causal_draft_model_reads_the_source_before_the_text(folders: dict[str, Path]) -> None:
    llm = LLM(sample("bart"), f"model:{folders['causal']},k=3", plan="fixed")
    (sequence,) = llm.requests.sequences([5, 6, 7, 8], GREEDY)
    drafter: Any = llm.engine.parts.drafters[0].drafter
    stepper = drafter._builder.stepper
    state = stepper.open(sequence.view)
    state.reading.advance()
    assert state.reading.tokens(0) == [5, 6, 7, 8, *llm.model.rules.prompt]  # type: ignore[attr-defined]


@pytest.mark.parametrize("timestamps", [False, True])
@pytest.mark.parametrize("draft", ["whisper", "small-whisper"])
def test_transcriptions_do_not_depend_on_the_draft_model(
    folders: dict[str, Path], draft: str, timestamps: bool
) -> None:
    given: dict[str, Any] = {"language": "de", "timestamps": timestamps}
    for params in (GREEDY, SAMPLED):
        wanted = LLM(whisper(), "none", tokenizer=tokenizer()).transcribe(features(3), params, **given)
        llm = LLM(whisper(), f"model:{folders[draft]},k=3", plan="fixed", tokenizer=None)
        done = llm.transcribe(features(3), params, **given)
        assert [one.token_ids for one in done] == [one.token_ids for one in wanted]
        if draft == "whisper" and not timestamps:
            assert accepted(done) > 0.9
        closed(llm)


def test_models_that_cannot_draft_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigurationError, match="the target is causal"):
        LLM(transformers.GPT2LMHeadModel.from_pretrained(folders["causal"]), f"model:{folders['t5']}")
    with pytest.raises(ConfigurationError, match="the target reads features"):
        LLM(whisper(), f"model:{folders['bart']}")
    with pytest.raises(ConfigurationError, match="runs a part of a model or a head"):
        LLM(sample("t5"), "early-exit,layers=1")
