"""TLS between device and verify server: a certificate of an unknown authority is refused unless the device names it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.remote.address import RefusedError, RemoteAddress
from draftree.remote.transport import PostTransport, WebSocketTransport, fetch
from draftree.serve.access import KeyRing
from draftree.serve.app import create_app
from draftree.serve.listening import tls_options
from draftree.serve.pool import ModelPool, ServedModel
from draftree.serve.records import ApiKey
from draftree.serve.verify import VerifySettings
from serving import ALIAS, NAME, Running, _serving, running_server, self_signed, settings, tiny_async_llm
from verify_clients import device, plain_texts, texts_of

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(files: tuple[Path, Path]) -> Iterator[Running]:
    keys = KeyRing({"secret": ApiKey("one")})
    with running_server(verify=VerifySettings(), keys=keys, tls=files) as running:
        yield running


@pytest.mark.parametrize("transport", ["websocket", "post"])
def test_texts_and_keys_travel_encrypted(server: Running, files: tuple[Path, Path], transport: str) -> None:
    assert server.url.startswith("https://")
    with device(f"{server.url}?ca={files[0]}&transport={transport}", key="secret") as llm:
        assert texts_of(llm) == plain_texts()
        kind = WebSocketTransport if transport == "websocket" else PostTransport
        assert isinstance(llm.model.link._transport, kind)


def test_post_is_used_where_there_is_no_websocket(files: tuple[Path, Path]) -> None:
    pool = ModelPool([ServedModel(NAME, tiny_async_llm("ngram"), (ALIAS,))])
    app = create_app(settings(), pool, verify=VerifySettings())
    with _serving(app, "none", files) as (url, _), device(f"{url}?ca={files[0]}") as llm:
        assert texts_of(llm) == plain_texts()
        assert isinstance(llm.model.link._transport, PostTransport)


@pytest.mark.parametrize("kind", [WebSocketTransport, PostTransport, None])
def test_an_unknown_authority_is_refused_at_once(server: Running, kind: Any) -> None:
    address = RemoteAddress.parse(f"remote:{server.url}")
    with pytest.raises(RefusedError, match=r"not trusted \(self.signed certificate\).*ca=FILE") as refusal:
        if kind is None:
            fetch(address, "secret", "/v1/verify/tokenizer", timeout=300.0, max_bytes=1 << 20)
        else:
            kind(address, "secret", timeout=300.0).exchange(b"")
    assert refusal.value.retry_ms is None, "the device does not try again"


def test_another_authority_and_another_name_are_refused(
    server: Running, files: tuple[Path, Path], tmp_path: Path
) -> None:
    other, _ = self_signed(tmp_path, "other")
    with pytest.raises(RefusedError, match="not trusted"), device(f"{server.url}?ca={other}", key="secret"):
        pass
    url = server.url.replace("127.0.0.1", "localhost")
    with pytest.raises(RefusedError, match="Hostname mismatch"):
        WebSocketTransport(RemoteAddress.parse(f"remote:{url}?ca={files[0]}"), None, timeout=300.0)


def test_files_of_authorities_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="without encryption"):
        RemoteAddress.parse("remote:http://host?ca=file")
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for path in (tmp_path / "missing.pem", wrong):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            WebSocketTransport(RemoteAddress.parse(f"remote:https://localhost?ca={path}"), None, timeout=1.0)


def test_certificate_and_key_are_checked_before_weights(files: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = map(str, files)
    _, other = self_signed(tmp_path, "other")
    assert tls_options(settings()) == {}
    assert tls_options(settings(tls_certificate=certificate, tls_key=key))["ssl_keyfile"] == key
    for given in ({"tls_certificate": certificate}, {"tls_key": key}):
        with pytest.raises(ConfigurationError, match="needs both"):
            settings(**given)
    for wrong in (str(other), str(tmp_path / "missing")):
        with pytest.raises(ConfigurationError, match="cannot be used"):
            tls_options(settings(tls_certificate=certificate, tls_key=wrong))
