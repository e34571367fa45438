"""Remote targets as loaded models: the session, and the tokenizer of the served model."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from draftree.core.errors import ConfigurationError, GenerationError, require_extra
from draftree.core.files import expanded
from draftree.loading.loaded import LoadedModel, load_tokenizer, require_same_tokenizer
from draftree.loading.options import resolve_place
from draftree.options import ModelOptions
from draftree.remote.address import FrameError, RemoteAddress
from draftree.remote.tokenizers import MAX_BYTES, TOKENIZER_PATH, install_files, kept_digests
from draftree.weights.cache import Cache

if TYPE_CHECKING:
    from draftree.remote.link import Welcome
    from draftree.remote.split.target import SplitModel

__all__ = ["KEY_VARIABLE", "load_remote"]

KEY_VARIABLE = "DRAFTREE_API_KEY"
FETCH_SECONDS = 60.0


def load_remote(options: ModelOptions) -> LoadedModel:
    """Begin a session with a verify server.

    Dtype and device are those of drafters on this machine; kernels and quantization are those of its layers if the
    address has a split, else they must not be chosen.
    """
    address = RemoteAddress.parse(str(options.model))
    is_chosen = options.kernels != "auto" or options.quantization is not None
    if (is_chosen and not address.split) or options.offload is not None:
        raise ConfigurationError(
            f"kernels, quantization and offload of '{options.model}' are chosen on the server: "
            "give them to 'draftree verify-server'"
        )
    device, dtype = resolve_place(options)
    require_extra("remote", "a remote target needs", error=ConfigurationError)
    from draftree.remote.link import Link, Patience
    from draftree.remote.target import RemoteModel

    key = os.environ.get(KEY_VARIABLE) or None
    model: RemoteModel | SplitModel
    if address.split:
        model = _split_target(address, key, options)
    else:
        model = RemoteModel(Link(address, key, patience=Patience(total=address.wait)), device, dtype)
    # at the end of the process, or of the model: without it, the session counts until its lease ends
    weakref.finalize(model, model.link.close)
    welcome = model.link.welcome
    model.fingerprint = f"remote-{welcome.model}-{welcome.tokenizer}"
    folder = _tokenizer_folder(address, key, welcome)
    return LoadedModel(
        model, folder, welcome.eos_ids, str(options.model), kernels="remote", tokenizer_sha=welcome.tokenizer
    )


def _split_target(address: RemoteAddress, key: str | None, options: ModelOptions) -> SplitModel:
    """Load the first layers, and begin a session that sends their states."""
    from draftree.loading.first_layers import load_first_layers
    from draftree.remote.link import Link, Patience
    from draftree.remote.split.target import SplitModel

    local = load_first_layers(replace(options, model=address.weights), address.split)
    link = Link(address, key, patience=Patience(total=address.wait), takes_bytes=True)
    try:
        return SplitModel(link, local, address)
    except FrameError as error:
        link.close()
        raise GenerationError(f"the server's reply cannot be used: {error}") from error
    except Exception:
        link.close()
        raise


def _tokenizer_folder(address: RemoteAddress, key: str | None, welcome: Welcome) -> Path | None:
    """Return the folder of the server's tokenizer, whose files are fetched if they are not in the cache."""
    from draftree.remote.transport import fetch

    wanted = welcome.tokenizer
    if address.tokenizer is not None:
        folder = expanded(address.tokenizer)
        if not folder.is_dir():
            raise ConfigurationError(f"tokenizer={address.tokenizer} is no folder: name the model's folder")
    elif not wanted:
        return None
    else:
        where = Cache().root / "remote"
        chosen = [] if address.model is None else [("model", address.model)]
        query = urlencode([*chosen, *(("known", digest) for digest in kept_digests(welcome.model, where))])
        content = fetch(address, key, f"{TOKENIZER_PATH}?{query}", timeout=FETCH_SECONDS, max_bytes=MAX_BYTES)
        folder = install_files(content, where)
    require_same_tokenizer(load_tokenizer(folder), wanted)
    return folder
