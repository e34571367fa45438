"""Settings of the server: names of models, drafters of each, limits, addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.serve.served import ModelChoice, choose_models
from draftree.serve.settings import ServerSettings, read_bytes


def settings(**options: Any) -> ServerSettings:
    return ServerSettings(models=options.pop("models", choose_models(["stories15m"])), **options)


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
    assert read_bytes(text) == count


@pytest.mark.parametrize("text", ["", "-1", "8 apples", "MiB", "1e3"])
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes"):
        read_bytes(text)


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
    given = settings(models=choose_models(["no-such-model"], drafters), **options)
    with pytest.raises(ConfigurationError, match=message):
        given.require_methods()


def test_a_planner_is_only_for_models_with_a_drafter() -> None:
    given = settings(models=choose_models(["a=x", "b=y"], ["a=suffix", "b=none"]), plan="fixed:4")
    given.require_methods()
    assert [given.llm_options(choice)["plan"] for choice in given.models] == ["fixed:4", None]
