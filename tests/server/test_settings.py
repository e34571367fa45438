"""Settings of the server and of replicas: models and their drafters, limits, addresses, environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.core.host import parse_bytes
from draftree.serve.ray.options import ReplicaOptions, from_environment
from draftree.serve.settings import ModelChoice, ServerSettings, choose_models


def settings(**options: Any) -> ServerSettings:
    return ServerSettings.of(models=options.pop("models", choose_models(["stories15m"])), **options)


def test_a_model_is_served_under_its_own_name_with_a_lossless_drafter() -> None:
    assert choose_models(["stories15m"]) == (ModelChoice("stories15m", "stories15m", (), ("auto",)),)


def test_a_folder_is_served_under_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (choice,) = choose_models([str(tmp_path / "tiny")])
    assert (choice.name, choice.source) == ("tiny", str(tmp_path / "tiny"))


def test_a_folder_with_an_equals_sign_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    (choice,) = choose_models([f"mine={tmp_path / 'a=b'}"])
    assert (choice.name, choice.source) == ("mine", str(tmp_path / "a=b"))
    with pytest.raises(ConfigurationError, match="'a=b' cannot be the name of a served model"):
        choose_models([str(tmp_path / "a=b")])


def test_names_and_aliases_stand_before_the_model() -> None:
    (choice,) = choose_models(["gpt-4o,default=stories15m"])
    assert (choice.name, choice.aliases, choice.source) == ("gpt-4o", ("default",), "stories15m")


def test_drafters_are_for_all_models_or_for_one() -> None:
    first, second = choose_models(["a=x", "b=y"], ["ngram,k=4", "b=model:z,k=2", "b=suffix", "model:w,k=3"])
    assert first.drafts == ("ngram,k=4", "model:w,k=3")
    assert second.drafts == ("model:z,k=2", "suffix")


def test_none_is_plain_decoding() -> None:
    assert choose_models(["a=x"], ["none"])[0].drafts == ()


@pytest.mark.parametrize(
    ("models", "drafters", "message"),
    [
        ([], [], "there is no model to serve"),
        (["a=x", "a=y"], [], "the name 'a' is used twice"),
        (["a="], [], "has no source"),
        (["a b=x"], [], "'a b' cannot be the name"),
        (["=x"], [], "'' cannot be the name"),
        (["a=x"], ["b=suffix"], "there is no model 'b'"),
        (["a=x"], ["suffix", "suffix"], "drafter 'suffix' of model 'a' is given twice"),
        (["a=x"], ["suffix", "none"], "'none' stands alone"),
    ],
)
def test_bad_names_and_drafters_are_refused(models: list[str], drafters: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose_models(models, drafters)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port is 70000: it must be at most 65535"),
        ({"port": -1}, "port is -1: it must be a whole number of at least 0"),
        ({"port": True}, "port is True"),
        ({"max_queue": 1.5}, "max_queue is 1.5: it must be a whole number"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0: it must be a whole number of at least 1"),
        ({"request_timeout": float("nan")}, "request_timeout is nan: it must be a number"),
        ({"key_share": 0.0}, "key_share is 0.0: it must be above 0 and at most 1"),
        ({"key_share": 1.5}, "key_share is 1.5"),
        ({"log_format": "jsn"}, "log_format is 'jsn': did you mean 'json'"),
        ({"log_level": "all"}, "log_level is 'all'"),
        ({"cors_origins": ("example.org",)}, "CORS origin 'example.org' is not an origin"),
        ({"cors_origins": ("https://a.org/path",)}, "is not an origin"),
        ({"allowed_hosts": ("http://a.org",)}, "allowed host 'http://a.org' is not a name"),
        ({"models": ()}, "there is no model to serve"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings(**options)


@pytest.mark.parametrize(
    ("options", "is_loopback"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "127.3.2.1"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::"}, False),
        ({"host": "192.168.1.2"}, False),
        ({"host": "example.org"}, False),
        ({"host": "0.0.0.0", "uds": "/run/draftree.sock"}, True),
    ],
)
def test_only_addresses_of_this_machine_are_loopback(options: dict[str, Any], is_loopback: bool) -> None:
    assert settings(**options).is_loopback is is_loopback


@pytest.mark.parametrize(
    ("text", "count"), [("1024", 1024), ("8MiB", 8 << 20), ("1.5 GB", 1_500_000_000), ("2gib", 2 << 30)]
)
def test_sizes_have_units(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1", "8 apples", "MiB", "1e3"])
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("drafters", "options", "message"),
    [
        (["sufix"], {}, "unknown drafter 'sufix'"),
        ([], {"verify": "coupld"}, "unknown verifier 'coupld'"),
        ([], {"plan": "nothing"}, "unknown planner 'nothing'"),
        (["none"], {"plan": "fixed:4"}, "no model has a drafter"),
        ([], {"dtype": "int3"}, "unknown dtype"),
        ([], {"kernels": "fast"}, "unknown kernels"),
    ],
)
def test_methods_are_checked_before_anything_is_loaded(
    drafters: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings(models=choose_models(["no-such-model"], drafters), **options).require_methods()


def test_a_planner_is_only_for_models_with_a_drafter() -> None:
    given = settings(models=choose_models(["a=x", "b=y"], ["a=suffix", "b=none"]), plan="fixed:4")
    given.require_methods()
    assert [given.options_of(choice).plan for choice in given.models] == ["fixed:4", None]


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
    assert (settings.max_body_bytes, settings.request_timeout, settings.options.exact) == (2 << 20, 7.5, True)
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
        settings = ServerSettings.of(models=(ModelChoice("m", "m"),), **change)
        with pytest.raises(ConfigurationError, match="replicas"):
            ReplicaOptions().require_fit(settings)


def test_processes_of_a_divided_model_have_cores_and_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    models = (ModelChoice(name="tiny", source="tiny"),)
    settings = ServerSettings.of(models=models, tp=2, pp=2, threads=3, port=1)
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
