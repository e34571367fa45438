"""API keys: their file, authentication, and what a key may see and use on a running server."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.serve import access
from draftree.serve.access import VARIABLE, KeyRing
from draftree.serve.errors import ApiError
from draftree.serve.pool import ServedModel
from draftree.serve.records import ANONYMOUS, ApiKey
from draftree.serve.settings import ModelChoice, ServerSettings, choose_models
from operated import code_of, post
from serving import ALIAS, HTTP, NAME, Running, running_server, tiny_async_llm

MODELS = choose_models(["smollm2,default=x", "stories15m"])
FILE = """\
# keys of the laboratory

sk-3b1c5a7d9e
alice: sk-58f1c0a2b4
batch:  sk-77ad09e3f1   default,stories15m
"""


def ring(folder: Path, text: str = FILE, variables: Mapping[str, str] | None = None) -> KeyRing:
    path = folder / "keys"
    path.write_text(text, encoding="utf-8")
    return KeyRing.load(str(path), MODELS, variables=variables or {})


def bearer(secret: str) -> str:
    return f"Bearer {secret}"


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_each_line_is_a_key_with_an_optional_name_and_models(tmp_path: Path, start: str) -> None:
    keys = ring(tmp_path, start + FILE)
    assert keys.authenticate(bearer("sk-3b1c5a7d9e")) == ApiKey("key-1")
    assert keys.authenticate(bearer("sk-58f1c0a2b4")) == ApiKey("alice")
    batch = keys.authenticate(bearer("sk-77ad09e3f1"))
    assert batch == ApiKey("batch", frozenset({"smollm2", "stories15m"}))
    assert keys.names == ["key-1", "alice", "batch"]


def test_a_key_without_models_allows_all() -> None:
    assert ApiKey("alice").allows(("stories15m",))
    assert ApiKey("batch", frozenset({"smollm2"})).allows(("smollm2", "default"))
    assert not ApiKey("batch", frozenset({"smollm2"})).allows(("stories15m",))


def test_the_variable_adds_keys(tmp_path: Path) -> None:
    keys = ring(tmp_path, variables={VARIABLE: "carol: sk-from-variable; sk-another-one"})
    assert keys.authenticate(bearer("sk-from-variable")).name == "carol"
    assert keys.authenticate(bearer("sk-another-one")).name == "key-5"
    assert keys.authenticate(bearer("sk-58f1c0a2b4")).name == "alice"


def test_without_keys_every_request_is_anonymous() -> None:
    keys = KeyRing.load(None, MODELS, variables={})
    assert not keys
    assert keys.authenticate(None) is ANONYMOUS
    assert keys.authenticate("Bearer anything") is ANONYMOUS


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "invalid_api_key"),
        ("Bearer", "invalid_api_key"),
        ("Bearer  ", "invalid_api_key"),
        ("Basic sk-58f1c0a2b4", "invalid_api_key"),
        ("sk-58f1c0a2b4", "invalid_api_key"),
        ("Bearer sk-58f1c0a2b5", "invalid_api_key"),
        ("Bearer sk-58f1c0a2b", "invalid_api_key"),
        ("Bearer alice", "invalid_api_key"),
        ("Bearer \udcff\u20ac", "invalid_api_key"),
    ],
)
def test_other_headers_are_refused_with_401(tmp_path: Path, header: str | None, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        ring(tmp_path).authenticate(header)
    assert (caught.value.status, caught.value.code) == (401, code)
    assert caught.value.headers == {"WWW-Authenticate": "Bearer"}
    assert "sk-58f1c0a2b" not in caught.value.message


def test_the_scheme_is_case_insensitive(tmp_path: Path) -> None:
    assert ring(tmp_path).authenticate("bearer sk-58f1c0a2b4").name == "alice"


@pytest.mark.parametrize("secret", ["sk-3b1c5a7d9e", "sk-58f1c0a2b4", "sk-77ad09e3f1", "sk-unknown-key"])
def test_every_key_is_compared_whichever_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    compared: list[Any] = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append((first, second))
        return hmac.compare_digest(first, second)

    class Spy:
        compare_digest = staticmethod(compare)

    keys = ring(tmp_path)
    monkeypatch.setattr(access, "hmac", Spy)
    if secret == "sk-unknown-key":
        with pytest.raises(ApiError):
            keys.authenticate(bearer(secret))
    else:
        keys.authenticate(bearer(secret))
    assert len(compared) == 3
    assert {len(part) for pair in compared for part in pair} == {32}


def test_the_ring_keeps_no_secret(tmp_path: Path) -> None:
    assert "sk-58f1c0a2b4" not in repr(vars(ring(tmp_path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "has no key"),
        ("short\n", "line 1: a key has 8 to 256"),
        ("sk-ümlaut-key\n", "line 1: a key has 8 to 256"),
        ("alice:\n", "line 1: write KEY"),
        ("alice: sk-12345678 smollm2 more\n", "line 1: write KEY"),
        ("al/ice: sk-12345678\n", "line 1: the name of a key"),
        ("sk-12345678\nbob: sk-12345678\n", "line 2: the same key is also that of 'key-1'"),
        ("bob: sk-12345678\nbob: sk-87654321\n", "line 2: the name 'bob' is used twice"),
        ("bob: sk-12345678 smolm2\n", "line 1: there is no model 'smolm2': did you mean 'smollm2'"),
        ("bob: sk-12345678 ,\n", "line 1: there is no model ''"),
    ],
)
def test_malformed_files_are_refused_without_showing_a_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        ring(tmp_path, text)
    assert "sk-12345678" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        KeyRing.load(str(tmp_path / "none"), MODELS, variables={})


ALICE, BOB = {"Authorization": "Bearer sk-alice-1234"}, {"Authorization": "Bearer sk-bob-12345"}
OTHER = "other"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two models and two keys, of which one may use one model only."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text(f"alice: sk-alice-1234\nbob: sk-bob-12345 {ALIAS}\n", encoding="utf-8")
    choices = (ModelChoice(NAME, "tiny", (ALIAS,)), ModelChoice(OTHER, "tiny"))
    models = [ServedModel(NAME, tiny_async_llm(), (ALIAS,)), ServedModel(OTHER, tiny_async_llm())]
    given = ServerSettings(models=choices, api_key_file=str(keys))
    with running_server(models, settings_given=given) as running:
        yield running


def test_without_a_key_only_public_paths_answer(guarded: Running) -> None:
    paths = {"/": 200, "/health": 200, "/ready": 200, "/version": 200}
    paths |= dict.fromkeys(("/metrics", "/v1/models", "/draftree/status", "/draftree/rounds", "/openapi.json"), 401)
    for path, status in paths.items():
        with HTTP.stream("GET", guarded.url + path) as answer:
            assert answer.status_code == status, path
    refused = post(guarded)
    assert (refused.status_code, code_of(refused)) == (401, "missing_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    wrong = post(guarded, {"Authorization": "Bearer sk-wrong-key"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")


def test_a_key_sees_and_uses_its_models_only(guarded: Running) -> None:
    assert post(guarded, ALICE, model=OTHER).status_code == 200
    assert post(guarded, BOB, model=ALIAS).status_code == 200
    refused = post(guarded, BOB, model=OTHER)
    assert (refused.status_code, code_of(refused)) == (404, "model_not_found")
    assert OTHER not in refused.json()["error"]["message"].partition("served:")[2]
    names = [one["id"] for one in HTTP.get(f"{guarded.url}/v1/models", headers=BOB).json()["data"]]
    assert names == [NAME, ALIAS]
    models = HTTP.get(f"{guarded.url}/draftree/status", headers=BOB).json()["models"]
    assert [one["name"] for one in models] == [NAME]


def test_a_key_gets_no_rounds_of_other_models(guarded: Running) -> None:
    with HTTP.stream("GET", f"{guarded.url}/draftree/rounds", headers=BOB) as stream:
        lines = stream.iter_lines()
        assert next(lines) == ": rounds"
        post(guarded, ALICE, model=OTHER)
        post(guarded, ALICE, model=NAME)
        first = next(line for line in lines if line.startswith("data: "))
    assert json.loads(first.removeprefix("data: "))["model"] == NAME
