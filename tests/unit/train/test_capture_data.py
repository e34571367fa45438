"""Captured data: the texts of the target itself with their hidden states."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_samples import VOCAB, capture_of, contents, prompts, table
from draftree import SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.table import TableLM, hashed
from draftree.train.data.jobs import DataPrompt, PromptSet
from draftree.train.data.reading import TrainingData, is_unseen
from draftree.train.data.texts import Text
from native_samples import lowered

SMALL: dict[str, Any] = {"shard_megabytes": 1, "max_tokens": 40}

in_c = pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler")


def require_states(text: Text, model: LanguageModel, layers: tuple[int, ...]) -> None:
    """The states of a text are those of one pass over it."""
    slot = model.open()
    tokens = text.tokens[:-1].tolist()
    capture = tuple(sorted(layers))
    hidden = model.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1))], capture=capture)).hidden
    model.close(slot)
    assert hidden is not None
    wanted = hidden[:, [capture.index(layer) for layer in layers]].to(model.dtype)
    assert torch.equal(text.features, wanted[:, :-1])
    if text.last is not None:
        assert torch.equal(text.last, wanted[:, -1])


def test_texts_are_those_of_plain_decoding_with_their_states(tmp_path: Path) -> None:
    capture = capture_of(features="0,1")
    manifest = capture.run(tmp_path / "data")
    data = TrainingData(tmp_path / "data")
    assert manifest == data.folders[0].manifest
    assert manifest.complete
    assert len(data) == manifest.num_texts == 12
    assert data.num_tokens == sum(text.num_rows for text in data)
    model, kinds = table(), set()
    for text, job in zip(data, capture.jobs, strict=True):
        assert (text.prompt_id, text.seed) == (job.prompt_id, job.seed)
        assert text.temperature == job.temperature
        ids = capture.prompt_ids(job)
        assert text.tokens[: text.prompt_length].tolist() == ids
        params = SamplingParams(max_tokens=12, temperature=job.temperature, seed=job.seed, detokenize=False)
        (plain,) = capture._llm.generate([ids], params)
        assert text.tokens[text.prompt_length :].tolist() == list(plain.token_ids)
        kinds |= {plain.finish_reason, job.temperature}
        require_states(text, model, (0, 1, 2))
    assert kinds == {"stop", "length", 0.0, 0.8}, "both temperatures, texts that end and texts that are cut"


@in_c
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_states_in_c_are_bit_identical(tmp_path: Path, kind: str) -> None:
    model = lowered("llama", kind, vocab_size=VOCAB)
    capture_of(model, features="1", max_tokens=9).run(tmp_path)
    data = TrainingData(tmp_path)
    assert data.recipe.dtype == "bfloat16"
    assert data.recipe.exact == model.is_exact
    assert data[0].features.dtype == torch.bfloat16
    for text in data:
        require_states(text, model, (1, 2))


@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_drafts_change_no_byte(tmp_path: Path, draft: str) -> None:
    capture_of(**SMALL).run(tmp_path / "plain")
    capture_of(draft=draft, batch=2, **SMALL).run(tmp_path / "drafted")
    assert contents(tmp_path / "plain") == contents(tmp_path / "drafted")


def test_the_top_teacher_is_that_of_the_logits(tmp_path: Path) -> None:
    capture_of(teacher="top-k:20", features="0", limit_tokens=80).run(tmp_path)
    data, model = TrainingData(tmp_path), table()
    assert data.recipe.top_k == 20
    for text in data:
        assert text.last is None
        assert text.top is not None
        tokens = text.tokens.tolist()
        logits = torch.stack([model.logits(tokens[: row + 1]) for row in range(text.num_rows)]).float()
        wanted = logits.log_softmax(-1).topk(20)
        assert torch.equal(text.top.ids, wanted.indices)
        assert torch.allclose(text.top.logits, wanted.values, atol=5e-3)
        assert torch.allclose(text.top.lse, logits.logsumexp(-1), atol=1e-4)


def test_without_features_a_row_has_the_teacher_only(tmp_path: Path) -> None:
    capture = capture_of(teacher="top-k:20", features="none", limit_tokens=80)
    capture.run(tmp_path / "none")
    capture_of(teacher="top-k:20", features="0", limit_tokens=80).run(tmp_path / "one")
    assert capture.row_bytes == 4 + 20 * 6 + 4
    for text, other in zip(TrainingData(tmp_path / "none"), TrainingData(tmp_path / "one"), strict=True):
        assert text.features.shape == (text.num_rows, 0, other.features.shape[2])
        assert torch.equal(text.tokens, other.tokens)
        assert text.top is not None
        assert other.top is not None
        assert torch.equal(text.top.ids, other.top.ids)


def test_prompts_that_cannot_be_answered_are_counted(tmp_path: Path) -> None:
    long = DataPrompt.of_text("fox " * 300)
    refused = DataPrompt(({"role": "wizard", "content": "Abracadabra"},))
    own = PromptSet("odd", [*prompts(3).prompts, long, refused], "MIT")
    manifest = capture_of(sets=[own], max_prompt_tokens=100).run(tmp_path)
    assert manifest.skipped == {"prompt refused": 1, "prompt too long": 1}
    assert (manifest.num_texts, manifest.next_prompt, manifest.complete) == (3, 5, True)


def test_texts_that_fail_are_counted(tmp_path: Path) -> None:
    good = hashed(VOCAB, seed=5)

    def spoilt(context: tuple[int, ...]) -> torch.Tensor:
        return good(context) * (float("nan") if len(context) > 40 else 1.0)

    model = TableLM(spoilt, num_features=3)
    model.num_layers = 2
    manifest = capture_of(model).run(tmp_path)
    failed = manifest.skipped["generation failed"]
    assert 0 < failed < 12
    assert manifest.num_texts == 12 - failed
    assert all(text.num_rows < 41 for text in TrainingData(tmp_path))


def test_raw_prompts_are_plain_text(tmp_path: Path) -> None:
    capture = capture_of(chat=False, limit_tokens=50)
    capture.run(tmp_path)
    text, job = TrainingData(tmp_path)[0], capture.jobs[0]
    ids = capture._llm.prompts.encode_prompt(job.prompt.text)
    assert text.tokens[: text.prompt_length].tolist() == ids
    assert not TrainingData(tmp_path).recipe.chat


def test_sets_are_interleaved_and_prompts_split_by_hash(tmp_path: Path) -> None:
    few = PromptSet("few", [DataPrompt.of_text(f"fox {i}") for i in range(4)], "MIT")
    capture = capture_of(sets=[prompts(12), few])
    assert {job.prompt_id for job in capture.jobs} == set(range(16))
    assert sum(job.prompt_id >= 12 for job in capture.jobs[:8]) == 4, "a small set comes first"
    assert [job.prompt_id for job in capture.jobs] == [
        job.prompt_id for job in capture_of(sets=[prompts(12), few]).jobs
    ]
    capture.run(tmp_path)
    data = TrainingData(tmp_path)
    seen, unseen = data.split(0.4)
    assert sorted([*seen, *unseen]) == list(range(16))
    assert seen
    assert unseen
    assert all(is_unseen(data[index].prompt_id, 0.4) for index in unseen)
    assert data.split(0.0) == (list(range(16)), [])
    answers = sum(len(text.tokens) - text.prompt_length for text in data)
    assert int(data.counts().sum()) == answers
    assert int(data.counts(answers_only=False).sum()) == sum(len(text.tokens) for text in data)
    with pytest.raises(ConfigurationError, match=r"unseen_share is 1.0: it must be"):
        data.split(1.0)
