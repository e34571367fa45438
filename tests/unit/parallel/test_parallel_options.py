"""Divisions that are not possible are refused, before weights are read."""

from __future__ import annotations

import ctypes
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from draftree import LLM
from draftree.cli.main import TERMINATED, leave, run
from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.models.native.shares import TeamMemory
from draftree.models.torch.hf import HFModel
from draftree.options import ModelOptions
from draftree.parallel import channel, load
from draftree.parallel.channel import Lifelines
from draftree.parallel.entry import leave_to_rank_zero
from draftree.parallel.load import Stage, own_part, require_divisible, require_possible
from draftree.parallel.world import VARIABLES, World, group_rank, own_rank
from families import COMMON, EXPERTS, fresh


@pytest.mark.parametrize("options", [{"tp": 0}, {"pp": -1}, {"tp": 1.5}, {"tp": True}])
def test_sizes_are_positive_integers(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="whole number of at least 1"):
        ModelOptions("name", **options)


def test_strict_sums_need_several_processes() -> None:
    with pytest.raises(ConfigurationError, match="tp is 1"):
        ModelOptions("name", pp=2, strict_sums=True)
    assert ModelOptions("name", tp=2, pp=3, strict_sums=True).num_processes == 6
    assert not ModelOptions("name").is_parallel


def config(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **(COMMON | changes))


@pytest.mark.parametrize(
    ("kind", "changes", "options", "reason"),
    [
        (
            "llama",
            {},
            {"tp": 3},
            "2 key-value heads, which cannot be divided evenly among tp=3 processes: use tp of 1, 2",
        ),
        ("llama", {"num_key_value_heads": 1}, {"tp": 2}, "1 key-value heads.*use tp of 1"),
        ("llama", {}, {"pp": 3}, "2 layers, fewer than pp=3"),
        ("gpt2", {}, {"tp": 2}, "no tensor-parallel plan for 'name' of type 'gpt2'"),
        ("gpt2", {}, {"pp": 2}, "cannot divide the layers of 'name' of type 'gpt2'"),
    ],
)
def test_heads_and_layers_must_divide(kind: str, changes: dict[str, Any], options: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        require_divisible(config(kind, **changes), ModelOptions("name", **options))


def test_sums_of_experts_cannot_be_ordered() -> None:
    require_divisible(config("qwen3"), ModelOptions("name", tp=2, strict_sums=True))
    with pytest.raises(UnsupportedModelError, match="cannot order the sums"):
        require_divisible(config("mixtral", **EXPERTS), ModelOptions("name", tp=2, strict_sums=True))


@pytest.mark.parametrize("command", ["generate", "serve", "bench"])
def test_several_processes_for_a_model_that_is_not_divided_are_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of them would run the whole command."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert run([command, "stories15m", *(["Hello"] if command == "generate" else [])]) == 1
    assert "2 processes were started, and tp=1, pp=1 needs one: divide the model with --tp 2" in capsys.readouterr().err


def test_variables_of_clusters_start_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    leave_to_rank_zero(ModelOptions("stories15m"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    leave_to_rank_zero(ModelOptions("stories15m"))


def test_without_torchrun_the_command_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    fresh("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="torchrun --standalone --nproc-per-node 2 -m draftree"):
        LLM(tmp_path, "none", tp=2)
    with pytest.raises(ConfigurationError, match="name or the folder"):
        LLM(HFModel(fresh("llama")), "none", tp=2)
    for name in VARIABLES:
        monkeypatch.setenv(name, "3")
    assert own_rank(ModelOptions("name", tp=2)) == 3


def test_the_number_of_processes_must_fit() -> None:
    world = World(0, 3, 0, 3, None)
    with pytest.raises(ConfigurationError, match="needs 2 processes, and 3 were started"):
        require_possible(world, ModelOptions("name", tp=2))
    with pytest.raises(ConfigurationError, match="have no stages"):
        require_possible(world, ModelOptions("name", pp=3, kernels="graphs"))
    require_possible(world, ModelOptions("name", pp=3))
    require_possible(World(0, 4, 0, 4, None), ModelOptions("name", tp=2, pp=2))


def test_rank_0_is_in_the_last_stage() -> None:
    options = ModelOptions("name", tp=2, pp=3)
    assert [group_rank(rank, options) for rank in range(6)] == [4, 5, 0, 1, 2, 3]
    assert group_rank(0, ModelOptions("name", tp=4)) == 0


def test_an_unknown_version_runs_the_forward_of_transformers() -> None:
    model = fresh("llama")
    for version in ("5.22.0", "6.0.0", "5.23.0"):  # and this model has no stages, whatever the version
        stage = Stage(model, version)
        assert not stage.is_own
        ids = torch.tensor([[3, 4]])
        logits = stage.logits(input_ids=ids, use_cache=False)
        assert logits is not None
        assert torch.equal(logits, model(input_ids=ids, use_cache=False).logits)


def test_signals_end_a_rank_that_waits_for_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def note(*arguments: Any) -> None:
        seen.append(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)

    monkeypatch.setattr(load, "Member", note)
    monkeypatch.setattr(load, "attend", note)
    monkeypatch.setattr(load, "current_world", lambda options: World(1, 2, 1, 2, None))
    with pytest.raises(SystemExit):
        load.load_together(ModelOptions("name", tp=2))
    assert seen == [False, True], "from then on the rank ends with rank 0"


def test_a_plan_is_reduced_to_the_modules_of_a_stage() -> None:
    class PipelineIdentityLayer(torch.nn.Identity):
        pass

    model = fresh("llama")
    plan = {f"model.layers.{layer}.mlp.{name}": "colwise" for layer in range(2) for name in ("up_proj", "gate_proj")}
    plan |= {"model.embed_tokens": "embedding_rowwise", "model.layers.1.mlp.up_proj.weight": "colwise"}
    model.model.layers[0] = PipelineIdentityLayer()
    model.model.embed_tokens = PipelineIdentityLayer()
    assert set(own_part(model, plan)) == {name for name in plan if name.startswith("model.layers.1.")}


def test_a_released_team_does_not_wait() -> None:
    ours = TeamMemory.create()
    theirs = TeamMemory.opened(ours.path)
    arrived = ctypes.c_long.from_address(theirs.at_least(100))
    ours.release()
    first = arrived.value
    theirs.release()
    theirs.release()
    assert 0 < first < arrived.value, "each release exceeds what passes counted since"


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The other end of the connection to rank 1; this process is rank 0."""
    monkeypatch.setattr(channel, "GRACE_SECONDS", 3600.0)
    near, far = socket.socketpair()
    with near, far:
        watched = Lifelines(0, {1: near})
        yield far
        watched.drop()
        watched.wait(60)


def test_a_signal_after_the_end_of_a_rank_names_the_rank(
    peer: socket.socket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "NOTICE_SECONDS", 60.0)
    peer.close()
    assert leave(SystemExit(TERMINATED)) == 1
    assert capsys.readouterr().err.startswith("error: rank 1 ended without a word; this process ends")


def test_a_signal_while_all_ranks_live_is_a_signal(peer: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(SystemExit(TERMINATED)) == TERMINATED
    assert capsys.readouterr().err == "terminated\n"


def test_a_signal_after_the_job_is_a_signal(peer: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    assert channel._current is not None
    channel._current.drop()
    assert leave(SystemExit(TERMINATED)) == TERMINATED
    assert capsys.readouterr().err == "terminated\n"


def test_an_error_that_the_end_of_rank_zero_causes_is_no_failure_of_this_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Collective operations fail when a rank leaves them; only other errors are shown with their origin."""

    class LeftError(Exception):
        """Stands for the end of the process."""

    def leave_now() -> None:
        raise LeftError

    def broken(*_: Any) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(channel, "GRACE_SECONDS", 3600.0)
    monkeypatch.setattr(channel, "NOTICE_SECONDS", 60.0)
    monkeypatch.setattr(load, "_leave", leave_now)
    monkeypatch.setattr(load, "load_share", broken)
    near, far = socket.socketpair()
    with near, far, caplog.at_level("INFO", logger=load.logger.name):
        watched = Lifelines(1, {0: near})
        member: Any = SimpleNamespace(lifelines=watched)
        far.close()
        with pytest.raises(LeftError):
            load.attend(World(1, 2, 1, 2, None), member, ModelOptions("name"))
        watched.drop()
        watched.wait(60)
    assert [record.getMessage() for record in caplog.records] == ["rank 0 ended without a word, so rank 1 ends"]
    assert caplog.records[0].exc_info is None
