"""The doctor: its findings on a tiny model, its sentences, and its refusals. Numbers are only checked for
plausibility: processors differ.
"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_samples import CONTEXT, write_model
from draftree import LLM
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.core.host import Processor, ProcessorFacts, choose_threads
from draftree.engine import memory
from draftree.engine.memory import SlotEstimate
from draftree.lab import doctor
from draftree.lab.bench import passes as speeds
from draftree.lab.bench.passes import Speeds, measure_speeds
from draftree.lab.doctor import (
    DoctorSettings,
    MachineReport,
    ModelReport,
    PassReport,
    examine,
    examine_machine,
    expectations,
)
from draftree.models.memory import Footprint
from draftree.models.native import build
from draftree.models.native.build import NativeUnavailableError
from draftree.options import ModelOptions

MODEL = ModelReport(
    name="m",
    family="llama",
    vocab_size=9,
    max_length=64,
    dtype="bfloat16",
    device="cpu",
    kernels="native (X)",
    fallback_reason=None,
    quantization=None,
    supports_trees=True,
    is_exact=True,
    chain_error=0.0,
    tree_error=0.0,
    tolerance=0.1,
    footprint=Footprint(1, 1, 1, 1),
)
ONE = ProcessorFacts((Processor(0, 0),), 1)
MACHINE = MachineReport({}, {}, ("cpu",), 1, ONE, choose_threads(ONE), (), 1, "/cc", "X", None, True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def small_buffers(monkeypatch):
    monkeypatch.setattr(speeds, "LEAST_BYTES", 1 << 22)
    monkeypatch.setattr(speeds, "CACHES", speeds.CACHES / "nowhere")
    monkeypatch.setattr(speeds, "PRODUCT_SECONDS", 0.001)
    monkeypatch.setattr(doctor, "REPEATS", 2)


def said(**changes: Any) -> str:
    model, machine = dataclasses.replace(MODEL, **changes.pop("model", {})), changes.pop("machine", MACHINE)
    given = {"draft": None, "memory": None, "passes": (), "draft_pass_seconds": None, **changes}
    return " | ".join(expectations(machine, model, **given))


def test_the_machine_alone(capsys) -> None:
    assert run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("processor", "compiler", "native kernels", torch.__version__))
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["machine"]
    assert (found["instructions"] is None) != (found["why_not_native"] is None)


def test_a_model_with_a_drafter_measured(folder, tmp_path, capsys, small_buffers) -> None:
    small = write_model(tmp_path / "small", seed=1)
    draft = f"model:{small},k=3"
    assert run(["doctor", str(folder), "--draft", draft, "--dtype", "float32", "--measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["supports_trees"]
    assert found["model"]["chain_error"] <= found["model"]["tolerance"]
    assert found["draft"]["problem"] is None
    assert found["draft"]["models"][0]["vocabulary"]["same"]
    assert found["draft"]["nodes"] == 3
    assert found["memory"]["num_slots"] > 1
    token = 2 * 2 * 2 * 8 * 4
    assert found["model"]["footprint"]["token"] == token
    assert found["memory"]["slot_bytes"] >= (CONTEXT + 3) * 2 * token
    assert [entry["rows"] for entry in found["passes"]] == [1, 2, 4, 8, 16, 32, 64]
    assert all(entry["seconds"] > entry["floor_seconds"] > 0 for entry in found["passes"])
    assert found["speeds"]["read_bytes_per_second"] > 1e8
    assert found["speeds"]["operations_per_second"]["float32"] > 1e8


@pytest.mark.parametrize("draft", [None, "ngram", "suffix", "model"])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_doctor_counts_slots_as_the_engine_does(folder, tmp_path, monkeypatch, draft, kernels) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 50_000_000)
    if draft == "model":
        draft = f"model:{write_model(tmp_path / 'small', seed=1)},tree=2-2-1"
    settings = DoctorSettings(ModelOptions(str(folder), draft, dtype="float32", kernels=kernels))
    found = examine(settings, examine_machine())
    engine = LLM(str(folder), draft, dtype="float32", kernels=kernels).engine
    assert found.memory.num_slots == engine.num_slots(found.length) > 1
    fitting = found.memory.num_slots
    sequences = [
        SimpleNamespace(limit=found.length, history=range(found.length), source_length=0) for _ in range(fitting + 1)
    ]
    assert engine._allocator.fits(sequences[:fitting])
    assert not engine._allocator.fits(sequences)


def test_the_printed_report(folder, capsys, small_buffers) -> None:
    arguments = ["doctor", str(folder), "--draft", "ngram", "--dtype", "float32", "--measure", "--length", "64"]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    for part in ("self-check", "for 64 tokens", "slots into", "GB/s", "x floor", "Plain decoding: about"):
        assert part in shown


def test_a_drafter_that_does_not_fit_is_reported(folder, tmp_path) -> None:
    lone = write_model(tmp_path / "lone", seed=1)
    for path in lone.glob("token*"):
        path.unlink()
    settings = DoctorSettings(ModelOptions(str(folder), f"model:{lone},map=tokens", dtype="float32"))
    found = examine(settings, examine_machine())
    assert found.draft is not None
    assert found.draft.problem is not None
    assert "no tokenizers" in found.draft.problem
    assert found.draft.models[0].vocabulary is None
    assert any("cannot draft here" in sentence for sentence in found.expectations)


@pytest.mark.parametrize(("verify", "is_lossy"), [("soft", True), ("typical", True), ("coupled", False)])
def test_a_lossy_rule_is_named(folder, verify, is_lossy) -> None:
    found = examine(DoctorSettings(ModelOptions(str(folder), "ngram", verify=verify)), MACHINE)
    assert any(f"'{verify}' is lossy above temperature 0" in sentence for sentence in found.expectations) is is_lossy


def test_without_a_compiler_the_reason_is_named(folder, monkeypatch, capsys) -> None:
    def missing() -> str:
        raise NativeUnavailableError("no C compiler was found")

    monkeypatch.setattr(build, "find_compiler", missing)
    monkeypatch.setattr(doctor, "find_compiler", missing)
    monkeypatch.setattr(doctor, "library", missing)
    monkeypatch.setattr("draftree.models.native.decoder.library", missing)
    assert run(["doctor", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "not here: no C compiler was found" in shown
    assert "with a C compiler passes take" in shown


@pytest.mark.parametrize(
    ("arguments", "message", "status"),
    [
        (["--measure"], "name one", 2),
        (["--draft", "ngram"], "name one", 2),
        (["--dtype", "float32"], "it needs a model: name one", 2),
        (["--verify", "token"], "it needs a model: name one", 2),
        (["--kernels", "torch"], "it needs a model: name one", 2),
        (["MODEL", "--verify", "token"], "it needs a drafter: name one with --draft", 2),
        (["MODEL", "--draft", "nosuch"], "nosuch", 1),
        (["MODEL", "--length", "0"], "length is 0", 1),
        (["MODEL", "--length", "100000"], "lower the length", 1),
        (["MODEL", "--dtype", "float31"], "unknown dtype", 1),
        (["MODEL", "--quantization", "int3"], "unknown quantization", 1),
        (["MODEL", "--threads", "0"], "threads is 0", 1),
        (["/no/such/model"], "/no/such/model", 1),
    ],
)
def test_wrong_arguments_are_refused(folder, capsys, arguments, message, status) -> None:
    assert run(["doctor", *(str(folder) if a == "MODEL" else a for a in arguments)]) == status
    assert message in capsys.readouterr().err


def test_speeds_by_torch_where_there_is_no_compiler(monkeypatch, small_buffers) -> None:
    def missing() -> None:
        raise NativeUnavailableError("none")

    monkeypatch.setattr(speeds, "_probe", missing)
    found = measure_speeds(torch.device("cpu"), threads=1)
    assert found.how == "torch"
    assert found.read_bytes_per_second > 1e8
    assert found.operations_per_second["float32"] is not None


def test_the_floor_is_the_larger_of_reading_and_multiplying() -> None:
    found = Speeds(100.0, 1, {"float32": 10.0, "int8": None}, 1, "C")
    assert found.floor_seconds(read_bytes=200, operations=10, kind="float32") == 2.0
    assert found.floor_seconds(read_bytes=200, operations=50, kind="float32") == 5.0
    assert found.floor_seconds(read_bytes=200, operations=50, kind="int8") == 2.0


def test_expectations_follow_from_the_reports() -> None:
    assert "bit-identical" in said()
    assert "near-ties" in said(model={"is_exact": False})
    assert "a different model" in said(model={"quantization": "int8"})
    assert "with a C compiler passes take" in said(
        machine=dataclasses.replace(MACHINE, compiler=None),
        model={"kernels": "torch", "fallback_reason": "no compiler"},
    )
    assert "No slot of this length" in said(memory=SlotEstimate(1, 1, 0, 1, 0))
    passes = tuple(PassReport(rows, seconds, 0.5) for rows, seconds in ((1, 1.0), (2, 1.0), (8, 1.2), (16, 2.0)))
    told = said(passes=passes)
    assert "about 1 tokens/s" in told
    assert "a draft of 7 tokens that costs nothing pays if on average more than 0.20" in told.lower()
    assert "cannot pay" in said(passes=passes, draft=doctor.DraftReport("d", 1, (), "", None), draft_pass_seconds=1)


def test_length_defaults_to_the_context(folder) -> None:
    found = examine(DoctorSettings(ModelOptions(str(folder), None, dtype="float32")), examine_machine())
    assert found.length == CONTEXT
    with pytest.raises(ConfigurationError):
        DoctorSettings(ModelOptions("m", None, kernels="torch", quantization="int8"))
