"""Options of replicas, and settings from environment variables; without ray."""

from __future__ import annotations

import pytest

from draftree.core.errors import ConfigurationError
from draftree.serve.ray.options import ReplicaOptions, from_environment
from draftree.serve.served import ModelChoice
from draftree.serve.settings import ServerSettings


@pytest.mark.parametrize(("text", "found"), [("3", (3, 1, 4)), ("2-6", (None, 2, 6))])
def test_a_number_of_replicas_or_a_range_is_read(text: str, found: tuple[int | None, int, int]) -> None:
    options = ReplicaOptions.parse(text)
    assert (options.num_replicas, options.min_replicas, options.max_replicas) == found


@pytest.mark.parametrize("text", ["", "two", "0", "3-1", "-1", "1-2-3"])
def test_other_numbers_of_replicas_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        ReplicaOptions.parse(text)


def test_settings_and_options_are_read_from_the_environment() -> None:
    settings, options = from_environment(
        {
            "DRAFTREE_SERVE_MODELS": "tiny=a/b other",
            "DRAFTREE_SERVE_DRAFTS": "ngram",
            "DRAFTREE_SERVE_MAX_BODY_BYTES": "2MiB",
            "DRAFTREE_SERVE_REQUEST_TIMEOUT": "7.5",
            "DRAFTREE_SERVE_EXACT": "1",
            "DRAFTREE_SERVE_CORS_ORIGINS": "https://a.org https://b.org",
            "DRAFTREE_SERVE_NUM_REPLICAS": "none",
            "DRAFTREE_SERVE_MAX_REPLICAS": "6",
            "HOME": "/",
        }
    )
    assert [choice.name for choice in settings.models] == ["tiny", "other"]
    assert settings.models[0].drafts == ("ngram",)
    assert (settings.max_body_bytes, settings.request_timeout, settings.exact) == (2 << 20, 7.5, True)
    assert settings.cors_origins == ("https://a.org", "https://b.org")
    assert (options.num_replicas, options.max_replicas, options.most_replicas) == (None, 6, 6)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("MODEL", "x", "DRAFTREE_SERVE_MODELS"),
        ("EXACT", "maybe", "flag"),
        ("MAX_QUEUE", "ten", "whole number"),
        ("NUM_REPLICAS", "0", "at least 1"),
        ("MIN_REPLICAS", "9", "max_replicas"),
        ("HEALTH_CHECK_PERIOD", "0", "above 0"),
    ],
)
def test_wrong_variables_are_refused(name: str, value: str, part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        from_environment({"DRAFTREE_SERVE_MODELS": "tiny", f"DRAFTREE_SERVE_{name}": value})


def test_replicas_need_a_port_and_share_processors() -> None:
    for change in ({"port": 0}, {"uds": "/tmp/x"}, {"port": 1, "affinity": "0-1"}):
        settings = ServerSettings(models=(ModelChoice("m", "m"),), **change)
        with pytest.raises(ConfigurationError, match="replicas"):
            ReplicaOptions().require_fit(settings)


def test_processes_of_a_divided_model_have_cores_and_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    models = (ModelChoice(name="tiny", source="tiny"),)
    settings = ServerSettings(models=models, tp=2, pp=2, threads=3, port=1)
    options = ReplicaOptions(num_replicas=2)
    options.require_fit(settings)
    assert (options.threads(settings), options.cpus(settings)) == (3, 12)
    assert options.machine_cpus(settings) >= 24
    ReplicaOptions(gpus_per_replica=4).require_fit(settings)
    with pytest.raises(ConfigurationError, match=r"each of the 4 processes .* tp=2, pp=2 has its own GPU: use 4, or 0"):
        ReplicaOptions(gpus_per_replica=1).require_fit(settings)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="leave torchrun out"):
        options.require_fit(settings)
