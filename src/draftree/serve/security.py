"""API keys: several, each with a name and the models it may use; compared in constant time.

The format of the file, and of the variable `DRAFTREE_API_KEYS` with semicolons in place of line breaks:

    # a comment
    sk-3b1c5a7d9e                                a key alone
    alice: sk-58f1c0a2b4                         a name for logs and metrics
    batch: sk-77ad09e3f1 smollm2,stories15m      and the only models that it may use
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from draftree.core.errors import ConfigurationError, suggestion
from draftree.serve.errors import ApiError
from draftree.serve.keys import ANONYMOUS, ApiKey
from draftree.serve.served import ModelChoice

__all__ = ["VARIABLE", "KeyRing"]

VARIABLE = "DRAFTREE_API_KEYS"
KEY = re.compile(r"[!-~]{8,256}", re.ASCII)
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
MAX_PARTS = 3
"""Name, key and models of a line."""


@final
class KeyRing:
    """All keys of a server; only digests of the secrets are kept.

    Args:
        keys: the key of every secret.
    """

    def __init__(self, keys: Mapping[str, ApiKey]) -> None:
        self._keys = [(_digest(secret), key) for secret, key in keys.items()]

    @classmethod
    def load(
        cls, path: str | None, models: Sequence[ModelChoice], *, variables: Mapping[str, str] = os.environ
    ) -> KeyRing:
        """Read the keys of a file and of the environment.

        Args:
            path: the file; None for none.
            models: the served models; lists of models name them, or their aliases.
            variables: the environment.

        Raises:
            ConfigurationError: the file cannot be read, or a line is malformed. A message never contains a key.
        """
        lines = [] if path is None else [(f"{path}, line {n}", line) for n, line in enumerate(_lines(path), 1)]
        if path is not None and not any(_is_content(line) for _, line in lines):
            raise ConfigurationError(f"the file of API keys '{path}' has no key: write one per line")
        parts = variables.get(VARIABLE, "").replace(";", "\n").splitlines()
        lines += [(f"{VARIABLE}, entry {n}", part) for n, part in enumerate(parts, 1)]
        names = {name: choice.name for choice in models for name in choice.names}
        keys: dict[str, ApiKey] = {}
        for place, line in lines:
            if _is_content(line):
                _add(keys, line.split(), place=place, names=names)
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def names(self) -> list[str]:
        """Names of the keys."""
        return [key.name for _, key in self._keys] or [ANONYMOUS.name]

    def authenticate(self, authorization: str | None) -> ApiKey:
        """Return the key of an `Authorization` header.

        Raises:
            ApiError: 401; the header is missing or malformed, or the key is unknown.
        """
        if not self._keys:
            return ANONYMOUS
        if authorization is None:
            raise _unauthorized("no API key was sent: send the header 'Authorization: Bearer KEY'", "missing_api_key")
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise _unauthorized("the header Authorization must have the form 'Bearer KEY'", "invalid_api_key")
        digest, found = _digest(secret.strip()), None
        for known, key in self._keys:  # all of them: the time does not depend on which one matches
            if hmac.compare_digest(known, digest):
                found = key
        if found is None:
            raise _unauthorized("the API key is not known to this server: check it", "invalid_api_key")
        return found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


def _lines(path: str) -> Sequence[str]:
    try:
        return Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"the file of API keys '{path}' cannot be read: {reason}") from error


def _is_content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _add(keys: dict[str, ApiKey], parts: list[str], *, place: str, names: Mapping[str, str]) -> None:
    name = parts.pop(0)[:-1] if parts[0].endswith(":") else f"key-{len(keys) + 1}"
    if not 1 <= len(parts) < MAX_PARTS:
        raise ConfigurationError(f"{place}: write KEY, NAME: KEY or NAME: KEY MODEL,MODEL")
    if not KEY_NAME.fullmatch(name):
        raise ConfigurationError(f"{place}: the name of a key has up to 64 letters, digits and . _ -")
    if not KEY.fullmatch(parts[0]):
        raise ConfigurationError(f"{place}: a key has 8 to 256 printable ASCII characters")
    if parts[0] in keys:
        raise ConfigurationError(f"{place}: the same key is also that of '{keys[parts[0]].name}': make a new one")
    if name in {key.name for key in keys.values()}:
        raise ConfigurationError(f"{place}: the name '{name}' is used twice: give each key its own")
    keys[parts[0]] = ApiKey(name, _models(parts[1], place, names) if len(parts) > 1 else None)


def _models(text: str, place: str, names: Mapping[str, str]) -> frozenset[str]:
    given = text.split(",")
    unknown = next((model for model in given if model not in names), None)
    if unknown is not None:
        raise ConfigurationError(f"{place}: there is no model '{unknown}': {suggestion(unknown, names)}")
    return frozenset(names[model] for model in given)
