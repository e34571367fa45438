"""Remote targets as loaded models: the session, and the tokenizer of the served model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, VocabularyMismatchError
from draftree.core.extras import require_extra
from draftree.core.paths import expanded
from draftree.loading.choices import resolve_device, resolve_dtype
from draftree.loading.load import LoadedModel
from draftree.loading.tokenizers import load_tokenizer
from draftree.remote.address import RemoteAddress
from draftree.remote.tokenizers import MAX_BYTES, TOKENIZER_PATH, install_files, tokenizer_fingerprint
from draftree.text.tokenizer import Tokenizer
from draftree.weights.cache import Cache

__all__ = ["KEY_VARIABLE", "load_remote", "require_same_tokenizer"]

KEY_VARIABLE = "DRAFTREE_API_KEY"
FETCH_SECONDS = 60.0


def load_remote(
    name: str, *, dtype: Any, device: str, kernels: str, quantization: str | None, offload: str | int | None = None
) -> LoadedModel:
    """Begin a session with a verify server.

    Args:
        name: `remote:URL`, as for `RemoteAddress.parse`.
        dtype: of drafters on this machine.
        device: of drafters on this machine.
        kernels: must be "auto": the server chose its own.
        quantization: must be None, likewise.
        offload: must be None, likewise.

    Raises:
        ConfigurationError: a wrong address, or options of the server's model.
        GenerationError: the server cannot be reached, or refuses.
        ModelLoadError: its tokenizer cannot be used.
    """
    address = RemoteAddress.parse(name)
    if kernels != "auto" or quantization is not None or offload is not None:
        raise ConfigurationError(
            f"kernels, quantization and offload of '{name}' are chosen on the server: "
            "give them to 'draftree verify-server'"
        )
    where = resolve_device(device)
    kind = resolve_dtype(dtype, where)
    require_extra("remote", "a remote target needs", error=ConfigurationError)
    from draftree.remote.link import Link
    from draftree.remote.target import RemoteModel

    key = os.environ.get(KEY_VARIABLE) or None
    model = RemoteModel(Link(address, key), where, kind)
    model.fingerprint = f"remote-{model.link.welcome.model}-{model.link.welcome.tokenizer}"
    folder = _tokenizer_folder(address, key, model.link.welcome.tokenizer)
    return LoadedModel(
        model, folder, model.link.welcome.eos_ids, name, kernels="remote", tokenizer_sha=model.link.welcome.tokenizer
    )


def _tokenizer_folder(address: RemoteAddress, key: str | None, wanted: str) -> Path | None:
    from draftree.remote.transport import fetch

    if address.tokenizer is not None:
        folder = expanded(address.tokenizer)
        if not folder.is_dir():
            raise ConfigurationError(f"tokenizer={address.tokenizer} is no folder: name the model's folder")
    elif not wanted:
        return None
    else:
        query = "" if address.model is None else f"?model={address.model}"
        content = fetch(address, key, TOKENIZER_PATH + query, timeout=FETCH_SECONDS, max_bytes=MAX_BYTES)
        folder = install_files(content, Cache().root / "remote")
    require_same_tokenizer(load_tokenizer(folder), wanted)
    return folder


def require_same_tokenizer(tokenizer: Tokenizer | None, wanted: str) -> None:
    """Check that a tokenizer is the server's.

    Raises:
        VocabularyMismatchError: it is another one.
    """
    if tokenizer is not None and tokenizer_fingerprint(tokenizer) != wanted:
        raise VocabularyMismatchError(
            f"the tokenizer of {tokenizer.name} is not the one of the verify server: leave the tokenizer out to fetch "
            "the server's"
        )
