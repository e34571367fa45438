"""Native decoders of encoder-decoder models: transformers' logits, and the same bits however a token is scored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftree import LLM, BeamSearchParams, SamplingParams
from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.core.tree import path
from draftree.loading.load import load_model
from draftree.models.base import Close, Extend, Fork, Pass
from draftree.models.native import decoder
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.seq2seq.describe import read_decoder
from draftree.models.source import FeatureSource, Source, TokenSource
from draftree.models.torch.seq2seq.model import HFEncoderDecoder
from native_builds import EACH_BUILD, built
from native_samples import in_c
from native_seq2seq import CONTEXT, DTYPES, FAMILIES, folder_of, lowered, model_of, native
from seq2seq_samples import VOCAB, sample

pytestmark = in_c

SHORT, LONG = 7, 150
"""Lengths of sources: part of one block of keys, and several blocks."""


def tokens_of(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def source_of(name: str, length: int = SHORT) -> Source:
    if name == "whisper":
        wave = np.random.default_rng(length).normal(size=(4, 100)).astype(np.float32)
        return FeatureSource(wave)
    return TokenSource(tuple(tokens_of(length, length)))


def theirs(model: Any, source: Source, tokens: list[int]) -> torch.Tensor:
    if isinstance(source, FeatureSource):
        read: dict[str, Any] = {"input_features": torch.from_numpy(source.features)[None]}
    else:
        read = {"input_ids": torch.tensor([source.tokens])}
    with torch.inference_mode():
        found: torch.Tensor = model(**read, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    return found


def at_once(lm: Any, source: Source, tokens: list[int]) -> torch.Tensor:
    slot = lm.open_on(source)
    found: torch.Tensor = lm.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1))])).logits.tensor().clone()
    lm.close(slot)
    return found


def one_by_one(lm: Any, source: Source, tokens: list[int]) -> torch.Tensor:
    slot, rows = lm.open_on(source), []
    for token in tokens:
        rows.append(lm.run(Pass([Extend(slot, [token], [-1])])).logits.tensor().clone())
        lm.commit(slot, [0])
    lm.close(slot)
    return torch.cat(rows)


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, length: int) -> None:
    source, tokens = source_of(name, length), tokens_of(80, 5)
    wanted, found = theirs(model_of(name), source, tokens), at_once(native(name), source, tokens)
    assert (found - wanted).abs().max() < 3e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.03), ("int8", 0.1), ("int4", 0.25)])
@pytest.mark.parametrize("name", ["t5-gated", "marian", "mbart", "whisper"])
def test_smaller_formats_stay_near_float32(name: str, kind: str, share: float) -> None:
    source, tokens = source_of(name), tokens_of(40, 6)
    rows = [at_once(lm, source, tokens) for lm in (native(name), native(name, kind))]
    error = (rows[1] - rows[0]).pow(2).mean().sqrt() / (rows[0].max() - rows[0].min())
    assert 0 < error < share


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", ["t5", "umt5", "bart", "marian", "m2m100", "whisper"])
def test_a_node_has_the_same_bits_in_every_tree_and_batch(name: str, kind: str) -> None:
    lm, choose = native(name, kind), random.Random(3)
    assert lm.is_exact
    here, other = source_of(name, LONG), source_of(name, SHORT + 1)
    for prefix in (0, 63, 70):
        before, nodes = tokens_of(prefix, prefix), tokens_of(20, prefix + 1)
        parents = [choose.randrange(-1, node) if node else -1 for node in range(20)]
        slots = [lm.open_on(one) for one in (other, here, here)]
        if prefix:
            lm.run(Pass([Extend(slots[1], before, range(-1, prefix - 1), logits_at=())]))
            lm.commit(slots[1], range(prefix))
        jobs = [
            Extend(slots[0], nodes[:5], range(-1, 4)),
            Extend(slots[1], nodes, parents),
            Extend(slots[2], [9], [-1]),
        ]
        scores = lm.run(Pass(jobs)).of(1).tensor().clone()
        for slot in slots:
            lm.close(slot)
        deepest = max(range(20), key=lambda node: len(path(parents, node)))
        for node in {0, 19, deepest}:
            branch = path(parents, node)
            rows = one_by_one(lm, here, [*before, *(nodes[n] for n in branch)])
            assert torch.equal(scores[branch], rows[prefix:])
    assert lm.num_open == 0 == lm.num_sources


@pytest.mark.parametrize("build", EACH_BUILD)
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_every_set_of_instructions_agrees(name: str, build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(build)
    monkeypatch.setattr(decoder, "library", lambda: library)
    lm, source, tokens = lowered(name, "bfloat16"), source_of(name, LONG), tokens_of(70, 8)
    rows = one_by_one(lm, source, tokens)
    assert torch.equal(at_once(lm, source, tokens), rows)
    spread = rows.max() - rows.min()
    assert (rows - at_once(native(name, "bfloat16"), source, tokens)).pow(2).mean().sqrt() < 0.01 * spread


def test_forks_refer_to_the_source_of_their_slot() -> None:
    lm = lowered("marian")
    one, other = source_of("marian", 9), source_of("marian", 12)
    slots = [lm.open_on(one), lm.open_on(other), lm.open_on(one)]
    assert lm.num_sources == 2
    lm.run(Pass([Extend(slots[1], [5, 6], [-1, 0], logits_at=())]))
    lm.commit(slots[1], [0, 1])
    (fork,) = lm.apply([Fork(slots[1], 1)])
    found = lm.run(Pass([Extend(fork, [7], [-1])])).logits.tensor().clone()
    lm.check_integrity()
    lm.apply([Close(slot) for slot in (*slots, fork)])
    assert torch.equal(found[0], one_by_one(lm, other, [5, 7])[1])
    assert lm.num_sources == 0


@pytest.mark.parametrize("name", ["t5", "marian"])
def test_the_weights_of_the_last_attention_are_those_of_torch(name: str) -> None:
    source, tokens = source_of(name, 21), tokens_of(6, 2)
    found = []
    for lm in (native(name), HFEncoderDecoder(model_of(name))):
        slots = [lm.open_on(one) for one in (source_of(name, 4), source)]
        jobs = [Extend(slots[0], [5], [-1]), Extend(slots[1], tokens, [-1, 0, 0, 1, -1, 4])]
        found.append(lm.run_attending(Pass(jobs))[1])
        for slot in slots:
            lm.close(slot)
    for ours, wanted in zip(*found, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-5)


@pytest.mark.parametrize("name", ["t5-gated", "bart-tied", "marian", "m2m100"])
def test_a_folder_is_loaded_with_passes_in_c(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    ours, torch_ = (load_model(folder, dtype="float32", kernels=kernels) for kernels in ("auto", "torch"))
    assert ours.kernels.startswith("native")
    assert ours.fallback_reason is None
    assert ours.eos_ids == torch_.eos_ids
    assert ours.model.rules == torch_.model.rules  # type: ignore[attr-defined]
    source, tokens = source_of(name, 30), tokens_of(20, 4)
    wanted, found = (at_once(one.model, source, tokens) for one in (torch_, ours))
    assert (found - wanted).abs().max() < 3e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize("draft", ["ngram,min=1", "suffix", "lookahead"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_draft_changes_a_text(draft: str, temperature: float, tmp_path: Path) -> None:
    folder = folder_of("marian", tmp_path)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=4)
    prompts = [tokens_of(count, count) for count in (4, 20, 70)]
    plain = LLM(folder, "none", dtype="float32", exact=True).generate(prompts, params)
    done = LLM(folder, draft, dtype="float32", exact=True, plan="fixed").generate(prompts, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.stats.draft_tokens for one in done) > 0


def test_a_model_drafts_for_another_in_c(tmp_path: Path) -> None:
    folder = folder_of("t5", tmp_path)
    params, prompts = SamplingParams(max_tokens=30, temperature=0), [tokens_of(count, count) for count in (5, 40)]
    plain = LLM(folder, "none", dtype="float32").generate(prompts, params)
    done = LLM(folder, f"model:{folder}", dtype="float32", plan="fixed").generate(prompts, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.stats.accepted_tokens for one in done) > 20


@pytest.mark.parametrize("draft", [None, "ngram", "suffix+runners-up"])
@pytest.mark.parametrize("name", ["marian", "t5-gated"])
def test_beams_equal_those_through_torch(name: str, draft: str | None, tmp_path: Path) -> None:
    folder, found = folder_of(name, tmp_path), []
    params = BeamSearchParams(beam_width=4, max_new_tokens=20, num_return_sequences=4)
    prompts = [tokens_of(count, count) for count in (4, 33)]
    for kernels, own in (("torch", None), ("auto", None), ("auto", draft)):
        llm = LLM(folder, "none", dtype="float32", kernels=kernels)
        results = llm.beam_search(prompts, params, draft=own)
        found.append([[(one.tokens, one.score) for one in result.hypotheses] for result in results])
        assert llm.model.num_open == 0
    assert found[1] == found[2]
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert [ids for ids, _ in ours] == [ids for ids, _ in wanted]
        assert [score for _, score in ours] == pytest.approx([score for _, score in wanted], abs=1e-4)


def test_sizes_without_blocks_run_through_torch(tmp_path: Path) -> None:
    sample("bart").save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="float32")
    assert loaded.kernels == "torch"
    assert "no multiple of 16" in str(loaded.fallback_reason)
    with pytest.raises(ConfigurationError, match="cannot run on native kernels"):
        load_model(tmp_path, dtype="float32", kernels="native")


def test_graphs_and_quantization_through_torch_are_refused(tmp_path: Path) -> None:
    folder = folder_of("t5", tmp_path)
    with pytest.raises(ConfigurationError, match="no fixed shapes"):
        load_model(folder, kernels="graphs")
    with pytest.raises(ConfigurationError, match="needs native kernels"):
        load_model(folder, kernels="torch", quantization="int8")
    assert load_model(folder, quantization="int8").quantization == "int8"


def test_parts_and_hidden_states_are_refused() -> None:
    lm = native("t5")
    slot = lm.open_on(source_of("t5"))
    with pytest.raises(UnsupportedModelError, match="no part runs alone"):
        lm.run(Pass([Extend(slot, [5], [-1])], capture=(1,)))
    lm.close(slot)
    for refused in (lm.embedding_facts, lambda: lm.quantized_copy("int8")):
        with pytest.raises(UnsupportedModelError, match="no part runs alone"):
            refused()


def test_a_parameter_of_unknown_use_is_refused() -> None:
    model = model_of("bart")
    model.get_decoder().layers[0].strange = torch.nn.Linear(2, 2)
    with pytest.raises(NativeUnavailableError, match="2 of its parameters are of unknown use"):
        read_decoder(model)


@pytest.mark.parametrize("name", ["bart", "m2m100", "whisper"])
def test_the_context_ends_with_the_table_of_positions(name: str) -> None:
    assert native(name).max_length == CONTEXT == HFEncoderDecoder(model_of(name)).max_length
