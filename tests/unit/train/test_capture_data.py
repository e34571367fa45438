"""Captured data: texts of the target with their hidden states, settings, sizes, continued and damaged folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_samples import VOCAB, capture_of, contents, prompts, table
from draftree import SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.engine.engine import Engine
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.table import TableLM, hashed
from draftree.train.data.capture import CaptureSettings, estimate, require_disk
from draftree.train.data.prompts import DataPrompt, PromptSet
from draftree.train.data.shards import Text, TrainingData, is_unseen
from native_samples import lowered

SMALL: dict[str, Any] = {"shard_megabytes": 1, "max_tokens": 40}

in_c = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")


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


@pytest.mark.parametrize(
    ("layers", "expected"), [(30, (2, 15, 27)), (7, (2, 3, 4)), (6, (2, 3, 4)), (2, (0, 1, 2)), (1, (0, 1))]
)
def test_automatic_features(layers: int, expected: tuple[int, ...]) -> None:
    assert CaptureSettings().layers(layers) == expected


def test_no_features() -> None:
    assert CaptureSettings(features="none").layers(30) == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": "1,x"}, "give 'auto', 'none', or layers"),
        ({"teacher": "top:3"}, "give 'hidden' or 'top-k:K'"),
        ({"temperatures": ()}, "give one or several numbers"),
        ({"temperatures": (-1.0,)}, "give one or several numbers"),
        ({"batch": 0}, "batch is 0: it must be at least 1"),
        ({"limit_tokens": 0}, "limit_tokens is 0"),
    ],
)
def test_invalid_settings_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CaptureSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"features": "0,3"}, "features name layer 3, but the target has 2 layers"),
        ({"features": "2,-1"}, "name each layer once"),
        ({"teacher": "top-k:431"}, "K from 1 to 430"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        capture_of(**settings)


def test_the_size_is_estimated_before_the_start(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    settings = CaptureSettings(max_tokens=12, batch=3, limit_tokens=100)
    capture = capture_of(limit_tokens=100)
    found = estimate(capture, settings, clock=lambda: float(next(ticks)))
    assert found.tokens == 100
    assert found.num_bytes == 100 * capture.row_bytes
    assert capture.row_bytes == 4 + 4 * VOCAB * 8
    assert found.seconds > 0
    assert "100 tokens" in str(found)
    manifest = capture.run(tmp_path)
    rest = estimate(capture, settings, done_prompts=manifest.next_prompt, done_tokens=manifest.num_tokens)
    assert (rest.texts, rest.tokens, rest.num_bytes) == (0, 0, 0)
    everything = estimate(capture_of(), CaptureSettings(max_tokens=12, batch=3))
    assert everything.texts == 12
    assert everything.tokens >= TrainingData(tmp_path).num_tokens
    require_disk(tmp_path / "new" / "folder", 1000)
    with pytest.raises(ConfigurationError, match="of free disk space: make less"):
        require_disk(tmp_path, 1 << 60)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("limit", [None, 300])
def test_an_interrupted_capture_continues_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    settings: dict[str, Any] = {**SMALL, "limit_tokens": limit, "temperatures": (0.0, 0.7, 1.0)}
    rows = 95  # of a shard: several shards
    monkeypatch.setattr("draftree.train.data.capture.MEGABYTE", rows * capture_of(**settings).row_bytes)
    monkeypatch.setattr("draftree.train.data.capture.MEGABYTE", rows * capture_of(**settings).row_bytes)
    capture_of(**settings).run(tmp_path / "whole")
    wanted = contents(tmp_path / "whole")
    assert len(wanted) >= 4
    step, runs = Engine.step, 0
    cut = tmp_path / "cut"
    while not (cut / "manifest.json").exists() or not TrainingData(cut).folders[0].manifest.complete:
        runs += 1
        left = 10 + 7 * runs

        def dying(self: Engine) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return step(self)

        monkeypatch.setattr(Engine, "step", dying)
        try:
            capture_of(**settings).run(tmp_path / "cut")
        except KeyboardInterrupt:
            data = TrainingData(tmp_path / "cut")
            assert not data.folders[0].manifest.complete
            assert len(list(data)) == data.folders[0].manifest.num_texts
        assert runs < 30
    assert runs >= 4
    assert contents(tmp_path / "cut") == wanted


@pytest.mark.parametrize("victim", ["write_atomically", "sum_of", "save_file"])
def test_a_kill_while_a_file_is_written_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """The process ends at every call of a step of writing: nothing after it runs."""
    from draftree.train.data import shards

    monkeypatch.setattr("draftree.train.data.capture.MEGABYTE", 95 * capture_of().row_bytes)
    monkeypatch.setattr("draftree.train.data.capture.SAVE_SECONDS", 0.0)
    settings: dict[str, Any] = {"max_tokens": 30, "shard_megabytes": 1}
    capture_of(**settings).run(tmp_path / "whole")
    wanted, original = contents(tmp_path / "whole"), getattr(shards, victim)
    for when in (0, 1, 2, 5):
        folder, left = tmp_path / f"cut {when}", [None] * when

        def dying(*args: Any, left: list[None] = left) -> Any:
            if not left:
                raise Killed  # a process that has ended writes nothing
            left.pop()
            return original(*args)

        monkeypatch.setattr(shards, victim, dying)
        with pytest.raises(Killed):
            capture_of(**settings).run(folder)
        monkeypatch.setattr(shards, victim, original)
        (folder / "shard-00000.safetensors.part").write_bytes(b"left over")
        if (folder / shards.MANIFEST).exists():
            assert TrainingData(folder).folders[0].manifest.num_texts >= 0, "what is there is sound"
        capture_of(**settings).run(folder)
        assert contents(folder) == wanted


def test_a_complete_folder_grows_to_a_larger_limit(tmp_path: Path) -> None:
    capture_of(limit_tokens=60).run(tmp_path / "grown")
    first = TrainingData(tmp_path / "grown")
    assert 60 <= first.num_tokens < 60 + 40
    again = capture_of(limit_tokens=60).run(tmp_path / "grown")
    assert again == first.folders[0].manifest, "nothing is added to a complete folder"
    capture_of(limit_tokens=150).run(tmp_path / "grown")
    capture_of(limit_tokens=150).run(tmp_path / "whole")
    assert contents(tmp_path / "grown") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 13}, "max_tokens is 13, and was 12"),
        ({"seed": 1}, "seed is 1, and was 0"),
        ({"features": "1"}, r"features is \(1,\), and was \(0, 2, 1\)"),
        ({"model": table(6)}, "fingerprint is 'table 6', and was 'table 5'"),
        ({"sets": [prompts(11)]}, r"prompts is own \(11, \w+\), and was own \(12, \w+\)"),
    ],
)
def test_another_recipe_does_not_continue_a_folder(tmp_path: Path, changes: Any, message: str) -> None:
    capture_of(limit_tokens=30).run(tmp_path)
    with pytest.raises(ConfigurationError, match=f"cannot be continued: {message}; repeat the options"):
        capture_of(**changes).run(tmp_path)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("own")
    with pytest.raises(ConfigurationError, match=r"holds other files \('notes.txt'\)"):
        capture_of().run(tmp_path)


def test_damaged_data_are_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no training data"):
        TrainingData(tmp_path)
    capture_of(limit_tokens=40).run(tmp_path / "data")
    shard = tmp_path / "data" / TrainingData(tmp_path / "data").folders[0].manifest.shards[0].file
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConfigurationError, match="is damaged: its SHA-256 checksum is"):
        TrainingData(tmp_path / "data")
    assert len(TrainingData(tmp_path / "data", verify=False))
    shard.write_bytes(content[:50])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        TrainingData(tmp_path / "data", verify=False)[0]
    shard.unlink()
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        TrainingData(tmp_path / "data")
    manifest = tmp_path / "data" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigurationError, match="has version 2, and this program reads version 1"):
        TrainingData(tmp_path / "data")


def test_folders_are_read_together(tmp_path: Path) -> None:
    capture_of(features="0,1").run(tmp_path / "first")
    capture_of(features="0,1", seed=1, temperatures=(0.5,)).run(tmp_path / "second")
    one, other = (TrainingData(tmp_path / name) for name in ("first", "second"))
    both = TrainingData(tmp_path / "first", tmp_path / "second")
    assert len(both) == len(one) + len(other)
    assert both.num_tokens == one.num_tokens + other.num_tokens
    assert [folder.texts for folder in both.folders] == [range(len(one)), range(len(one), len(both))]
    for text, wanted in zip(both, [*one, *other], strict=True):
        assert torch.equal(text.tokens, wanted.tokens)
        assert torch.equal(text.features, wanted.features)
    assert both.prompt_ids() == one.prompt_ids() + other.prompt_ids()
    assert torch.equal(both.counts(), one.counts() + other.counts())
    assert both.recipe.prompts == one.recipe.prompts + other.recipe.prompts


def test_folders_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    capture_of(features="0,1", limit_tokens=40).run(tmp_path / "first")
    capture_of(features="1", limit_tokens=40).run(tmp_path / "second")
    with pytest.raises(ConfigurationError, match=r"second' does not fit '.*first': features is .*, and was .* there"):
        TrainingData(tmp_path / "first", tmp_path / "second")
    with pytest.raises(ConfigurationError, match=r"first/../first' is given twice"):
        TrainingData(tmp_path / "first", tmp_path / "first" / ".." / "first")
    with pytest.raises(ConfigurationError, match="no folder of training data was given"):
        TrainingData()


def test_a_folder_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    capture, refused = capture_of(), []

    def other(progress: object) -> None:
        with pytest.raises(ConfigurationError, match="another process writes data to"):
            capture_of().run(tmp_path / "data")
        refused.append(progress)

    manifest = capture.run(tmp_path / "data", on_progress=other)
    assert refused
    assert manifest.complete
    assert capture_of().run(tmp_path / "data") == manifest
