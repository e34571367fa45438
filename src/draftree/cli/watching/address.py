"""The address of a server, checked before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from draftree.core.errors import ConfigurationError

__all__ = ["Address"]

FORM = "give the address that 'draftree serve' prints, such as http://127.0.0.1:8000"
API_PATH = "/v1"


@dataclass(frozen=True, slots=True)
class Address:
    """The root of a server.

    Attributes:
        scheme: "http" or "https".
        host: name or number, an IPv6 number without brackets.
        port: TCP port.
        path: prefix of all paths, without a slash at its end; usually empty.
    """

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Return the address of a URL. `/v1` at its end, which clients of the API need, is left out.

        Raises:
            ConfigurationError: it is no URL of a server.
        """
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigurationError(f"'{url}' is not a URL ({error}): {FORM}") from error
        if parts.scheme not in ("http", "https"):
            raise ConfigurationError(f"'{url}' does not begin with http:// or https://: {FORM}")
        if not host:
            raise ConfigurationError(f"'{url}' names no host: {FORM}")
        if parts.username is not None or parts.password is not None:
            raise ConfigurationError("the URL contains a user or a password: leave it out, and give keys with --key")
        if parts.query or parts.fragment or not (parts.path + host).isascii() or " " in parts.path + host:
            raise ConfigurationError(f"'{url}' is not the root of a server: {FORM}")
        path = parts.path.rstrip("/").removesuffix(API_PATH).rstrip("/")
        return cls(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"
