"""`draftree serve`: options, refusals before anything is loaded."""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from cli_samples import save_tiny_model
from draftree.cli import serve
from draftree.cli.main import run
from draftree.cli.serve import serving_flags
from draftree.core import errors
from draftree.core.errors import ConfigurationError
from draftree.serve.listening import listen, url_of
from draftree.serve.settings import MODEL_OPTIONS, ServerSettings, choose_models

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings of servers that would have been started."""
    found: list[ServerSettings] = []

    def pretend(settings: ServerSettings, keys: Any) -> int:
        found.append(settings)
        return 0

    monkeypatch.setattr(serve, "fetch_and_run", pretend)
    monkeypatch.delenv("DRAFTREE_API_KEYS", raising=False)
    return found


def refused(capfd: Captured, *arguments: str, status: int = 1) -> str:
    assert run(["serve", *arguments]) == status
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_every_field_of_the_settings_is_an_option() -> None:
    names = {field.name for field in (*dataclasses.fields(ServerSettings), *MODEL_OPTIONS)}
    assert {flag.name for flag in serving_flags()} == names - {"models", "options"}


def test_defaults_of_the_command_are_those_of_the_settings(started: list[ServerSettings]) -> None:
    assert run(["serve", "stories15m"]) == 0
    assert started == [ServerSettings(models=choose_models(["stories15m"]))]


def test_options_reach_the_settings(started: list[ServerSettings], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-12345678\n")
    arguments = ["a=stories15m", "b=stories15m", "--draft", "ngram,k=4", "--draft", "b=none", "--host", "0.0.0.0"]
    arguments += ["--port", "0", "--api-key-file", str(keys), "--max-body-bytes", "1MiB", "--memory", "2GiB"]
    arguments += ["--cors-origin", "https://a.org", "--cors-origin", "https://b.org", "--no-page", "--key-share", "0.5"]
    arguments += ["--log-format", "text", "--max-queue", "3", "--drain-timeout", "1.5", "--max-completion-tokens", "9"]
    assert run(["serve", *arguments]) == 0
    expected = ServerSettings.of(
        models=choose_models(["a=stories15m", "b=stories15m"], ["ngram,k=4", "b=none"]),
        host="0.0.0.0",
        port=0,
        api_key_file=str(keys),
        max_body_bytes=1 << 20,
        memory=2 << 30,
        cors_origins=("https://a.org", "https://b.org"),
        page=False,
        key_share=0.5,
        log_format="text",
        max_queue=3,
        drain_timeout=1.5,
        max_completion_tokens=9,
    )
    assert started == [expected]
    assert [choice.drafts for choice in started[0].models] == [("ngram,k=4",), ()]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "missing argument"),
        (["stories15m", "--port", "70000"], 1, "port is 70000"),
        (["stories15m", "--max-body-bytes", "many"], 2, "'many' is not a number of bytes"),
        (["stories15m", "--draft", "sufix"], 1, "unknown drafter 'sufix'"),
        (["stories15m", "--host", "0.0.0.0"], 1, "there are no API keys: give --api-key-file, or --allow-no-key"),
        (["stories15m", "--api-key-file", "/no/such/file"], 1, "cannot be read"),
        (["stories15m", "--quantisation", "int8"], 2, "did you mean '--quantization'"),
        (["stories15m", "--api-key", "x"], 2, "did you mean '--api-key-file'"),
        (["stories15m", "--port", "1", "--port", "2"], 2, "it is given 2 times"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    started: list[ServerSettings], capfd: Captured, arguments: list[str], status: int, message: str
) -> None:
    assert message in refused(capfd, *arguments, status=status)
    assert started == []


def test_a_damaged_model_is_refused_early(started: list[ServerSettings], capfd: Captured, tmp_path: Path) -> None:
    assert "config.json" in refused(capfd, str(tmp_path))
    assert started == []


@pytest.mark.parametrize("arguments", [["--allow-no-key"], ["--uds", "/tmp/x.sock"]])
def test_other_addresses_need_keys_or_consent(started: list[ServerSettings], arguments: list[str]) -> None:
    assert run(["serve", "stories15m", "--host", "0.0.0.0", *arguments]) == 0
    assert len(started) == 1


def test_keys_of_the_environment_count_and_consent_has_no_effect_then(
    started: list[ServerSettings], capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTREE_API_KEYS", "sk-from-variable")
    assert run(["serve", "stories15m", "--host", "0.0.0.0"]) == 0
    assert len(started) == 1
    assert "--allow-no-key has no effect" in refused(capfd, "stories15m", "--allow-no-key")


def test_a_missing_extra_is_named_before_anything_else(
    started: list[ServerSettings], capfd: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    line = refused(capfd, "no-such-model")
    assert "'draftree serve' needs the Python package 'fastapi'" in line
    assert "pip install 'draftree[serve]'" in line


def test_a_port_in_use_is_refused_before_models_are_fetched(capfd: Captured) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(capfd, "no-such/model-anywhere", "--port", str(port))
    assert f"port {port} of 127.0.0.1 is in use" in line
    assert "--port" in line


def test_an_address_of_another_machine_is_refused(capfd: Captured) -> None:
    assert "cannot be listened on" in refused(capfd, "stories15m", "--host", "192.0.2.1", "--allow-no-key")


def test_a_unix_socket_is_private_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "draftree.sock"
    given = ServerSettings(models=choose_models(["x"]), uds=str(path))
    with listen(given) as listener:
        mode = path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o660
        assert str(path) in url_of(listener)
        with pytest.raises(ConfigurationError, match="is in use by another process"), listen(given):
            pass
    assert not path.exists()


def test_a_stale_unix_socket_is_replaced_but_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "draftree.sock"
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(path))
    stale.close()
    given = ServerSettings(models=choose_models(["x"]), uds=str(path))
    with listen(given):
        pass
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="is a file that is not a socket"), listen(given):
        pass
    assert path.read_text() == "precious"


def test_the_free_port_is_in_the_url() -> None:
    with listen(ServerSettings(models=choose_models(["x"]), port=0)) as listener:
        host, port = listener.getsockname()
        assert url_of(listener) == f"http://{host}:{port}"
        assert port > 0


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="needs IPv6")
def test_an_ipv6_url_has_brackets() -> None:
    with listen(ServerSettings(models=choose_models(["x"]), host="::1", port=0)) as listener:
        assert url_of(listener).startswith("http://[::1]:")


def test_a_model_that_cannot_be_loaded_is_one_sentence(capfd: Captured, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "tiny", chat=False)
    (folder / "model.safetensors").write_bytes(b"broken")
    assert "tiny" in refused(capfd, str(folder), "--port", "0")
