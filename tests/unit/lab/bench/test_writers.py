"""transformers as the peer: the tokens equal those of plain calls of `generate`, and every round is timed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from bench_samples import write_model
from draftree.core.errors import ModelLoadError
from draftree.lab.bench.methods import Method, PeerMethod
from draftree.lab.bench.writers import PeerWriter, RunParams
from draftree.text.tokenizer import Tokenizer
from text_backends import byte_fallback

PROMPT = [5, 9, 17, 5, 9, 17, 5, 9]
PLAIN = Method("transformers", "plain", PeerMethod())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def assistant(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", seed=1))


def writer(folder, *methods: Method, eos_ids=()) -> PeerWriter:
    model = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
    target = SimpleNamespace(folder=folder, model=model, runs_code=False)
    return PeerWriter(target, Tokenizer.load(folder), methods=methods, eos_ids=eos_ids)


def generated(folder, prompt, count: int) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    model.generation_config = GenerationConfig()
    return tuple(model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist())


def test_every_way_writes_the_same_greedy_text(folder, assistant):
    ways = [
        PLAIN,
        Method("lookup", "ngram", PeerMethod(lookup_tokens=4)),
        Method("assistant", "model", PeerMethod(assistant=assistant)),
        Method("assistant k=3", "model", PeerMethod(assistant=assistant, assistant_tokens=3)),
        Method("exit", "early-exit", PeerMethod(exit_layers=1)),
        Method("exit k=3", "early-exit", PeerMethod(exit_layers=1, assistant_tokens=3)),
    ]
    peer, wanted = writer(folder, *ways), generated(folder, PROMPT, 24)
    for way in ways:
        (outcome,) = peer.write(way, [PROMPT], RunParams(24))
        assert outcome.token_ids == wanted, way.name
        stats = outcome.stats
        assert stats["completion_tokens"] == 24
        assert stats["acceptance_length"] == pytest.approx(24 / stats["rounds"])
        assert stats["prefill_seconds"] > 0
        assert stats["decode_seconds"] > 0
        assert outcome.finish_reason == "length"
    assert peer.write(PLAIN, [PROMPT], RunParams(24))[0].stats["rounds"] == 24


def test_an_assistant_with_another_tokenizer_is_given_both(folder, tmp_path):
    other = write_model(tmp_path / "other", seed=2, tokenizer=byte_fallback())
    way = Method("assistant", "model", PeerMethod(assistant=str(other)))
    (outcome,) = writer(folder, way).write(way, [PROMPT], RunParams(16))
    assert outcome.token_ids == generated(folder, PROMPT, 16)


def test_a_text_ends_with_its_end_token(folder):
    text = generated(folder, PROMPT, 24)
    end = text[5]
    place = text.index(end) + 1
    for way in (PLAIN, Method("lookup", "ngram", PeerMethod(lookup_tokens=6))):
        (outcome,) = writer(folder, eos_ids=[end]).write(way, [PROMPT], RunParams(24))
        assert outcome.token_ids == text[:place]
        assert outcome.finish_reason == "stop"


def test_a_batch_is_padded_on_the_left(folder):
    prompts = [PROMPT, [30, 31, 32], list(range(40, 60))]
    outcomes = writer(folder).write(PLAIN, prompts, RunParams(12))
    assert [o.token_ids for o in outcomes] == [generated(folder, prompt, 12) for prompt in prompts]
    assert [o.stats["prompt_tokens"] for o in outcomes] == [8, 3, 20]


def test_a_seed_gives_a_sampled_text_again(folder):
    peer = writer(folder)
    first, again, other = (peer.write(PLAIN, [PROMPT], RunParams(16, 1.0, seed))[0].token_ids for seed in (1, 1, 2))
    assert first == again != other


def test_a_models_own_settings_do_not_apply(tmp_path):
    folder = write_model(tmp_path / "tiny")
    wanted = generated(folder, PROMPT, 12)
    GenerationConfig(do_sample=True, repetition_penalty=5.0, temperature=3.0).save_pretrained(folder)
    assert writer(folder).write(PLAIN, [PROMPT], RunParams(12))[0].token_ids == wanted


def test_a_broken_folder_is_named(tmp_path):
    folder = write_model(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match="transformers could not read"):
        writer(folder)
