"""Resolution of a user's name for a model to a local folder, and what is needed before it is loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from draftree.core.errors import ModelLoadError, ModelNotFoundError, WeightsError, suggestion
from draftree.core.files import expanded, home_folder
from draftree.remote.address import is_remote
from draftree.weights.cache import DISK_FULL, Cache, Progress, silent
from draftree.weights.catalogue import CATALOGUE
from draftree.weights.download import require_client
from draftree.weights.folders import check_model_folder
from draftree.weights.gguf_file import is_gguf, other_kinds, read_gguf, require_gguf
from draftree.weights.install import check_sums, entry_is_here, install_entry, install_gguf

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?(?!.*(--|\.\.))[A-Za-z0-9_][\w.-]*(?<![.-])", re.ASCII)
"""A repository of the hub: `owner/name`, or a name alone for old repositories without an owner."""
PATH_LIKE = re.compile(r"[/~.\\]|[A-Za-z]:[/\\]|.*[/\\]$|.*\.gguf$|.*/.*/", re.IGNORECASE)
"""Spelled as a path: names and hub ids do not begin or end like this, nor contain two slashes."""

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "README.md")
"""The card names the base model, for which drafters may be published."""
HUB_FILES_LEFT_OUT = ("*/*", "consolidated*")
PICKLED_HUB_FILES = ("pytorch_model*.bin",)
HUB_TIMEOUT_SECONDS = 10.0
WAYS_TO_NAME = "name a folder with config.json, a GGUF file, or a hub id 'owner/name'"


def resolve_model(
    name: str | os.PathLike[str],
    *,
    fetch: bool = True,
    convert: bool = True,
    reason: str = "",
    progress: Progress = silent,
) -> Path:
    """Return the local folder of a model, after a check that its settings and weights are present and readable.

    `name` is tried in this order: a name of the catalogue; a model folder or a GGUF file (converted once into the
    cache, with a warning that has the `reason`); the name of a folder in the cache; a hub id, `owner/name` or
    `name`. A `Path` is never a name. `progress` gets the bytes fetched, read and converted.
    """
    cache = Cache()
    if isinstance(name, str) and name in CATALOGUE:
        return install_entry(CATALOGUE[name], cache, fetch=fetch, progress=progress)
    spelled = os.fspath(name)
    if is_remote(name):
        raise ModelNotFoundError(
            f"'{spelled}' is a model on a verify server, and this needs a model on this machine: generate, chat and "
            "serve can use a server's model; name a folder or a model of the catalogue here"
        )
    if not spelled.strip():
        raise ModelNotFoundError(f"no model was named: {WAYS_TO_NAME}")
    path = expanded(spelled)
    if path.is_dir():
        folder = path
    elif path.is_file():
        if is_gguf(path):
            return install_gguf(path, cache, convert=convert, reason=reason, progress=progress)
        raise ModelLoadError(f"'{path}' is not a GGUF file: name the model's folder, which contains config.json")
    elif not isinstance(name, str) or PATH_LIKE.match(spelled):
        raise ModelNotFoundError(f"the model '{spelled}' does not exist: no such folder or file; check the path")
    elif cache.manifest(spelled) is not None:
        folder = cache.folder(spelled)
    elif HUB_ID.fullmatch(spelled):
        folder = hub_folder(spelled, fetch=fetch)
    else:
        raise ModelNotFoundError(f"there is no model '{spelled}': {_names_for(spelled)}")
    check_model_folder(folder)
    check_sums(folder, cache)
    return folder


def require_sound(name: str) -> None:
    """Raise for a damaged model folder early: before torch is imported, and before another model is fetched."""
    if name.strip() and expanded(name).is_dir():
        check_model_folder(expanded(name))


def _names_for(spelled: str) -> str:
    return f"{suggestion(spelled, CATALOGUE)}; else {WAYS_TO_NAME}"


def hub_folder(repository: str, *, fetch: bool, revision: str | None = None) -> Path:
    """Return the snapshot of a hub repository in the hub's own cache; fetched if missing and allowed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    def snapshot(*files: str) -> Path:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                cache_dir=hub_cache(),
                allow_patterns=list(files),
                ignore_patterns=list(HUB_FILES_LEFT_OUT),
                etag_timeout=HUB_TIMEOUT_SECONDS,
                local_files_only=not fetch,
            )
        )

    def missing(where: str, with_owner: str) -> ModelNotFoundError:
        without = f"there is no model '{repository}' on this machine{where}: {_names_for(repository)}"
        return ModelNotFoundError(with_owner if "/" in repository else without)

    try:
        folder = snapshot(*HUB_FILES)
        return folder if any(folder.glob("*.safetensors")) else snapshot(*HUB_FILES, *PICKLED_HUB_FILES)
    except GatedRepoError:
        raise ModelNotFoundError(
            f"the hub requires acceptance of the terms of '{repository}': "
            "accept them on its page, then log in with 'hf auth login'"
        ) from None
    except RepositoryNotFoundError:
        raise missing(
            " or at the hub",
            f"the hub has no model '{repository}' that you can access: check the spelling, or log in if it is private",
        ) from None
    except LocalEntryNotFoundError:
        why = "the hub cannot be reached" if fetch else "fetching is not allowed"
        raise missing(
            f", and {why}",
            f"the model '{repository}' is not on this machine, and {why}: name a local folder or a GGUF file, "
            f"use one of {', '.join(CATALOGUE)}, or set HF_HOME to a cache that holds it",
        ) from None
    except Exception as error:
        # The hub's client propagates the errors of its network library, which varies.
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise WeightsError(
                f"the disk became full while '{repository}' was downloaded from the hub: "
                "free some space, or set HF_HOME to a folder on another disk"
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(
            f"'{repository}' could not be fetched from the hub ({reason}): try again, or name a local folder"
        ) from None


def hub_cache() -> Path:
    """Return the folder of the hub client's cache, by the client's rules: every start asks, and imports no client."""
    home = os.environ.get("HF_HOME")
    if home_folder() is None and not home:
        return Cache().root / "hub"
    if home is None:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    home = os.path.expandvars(os.path.expanduser(home))
    older = os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expandvars(os.path.expanduser(os.environ.get("HF_HUB_CACHE", older))))


def gguf_path(name: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that a model's name refers to; None for other models."""
    path = expanded(os.fspath(name)) if os.fspath(name).strip() and name not in CATALOGUE else None
    return path if path is not None and path.is_file() and is_gguf(path) else None


def is_block_file(name: str | os.PathLike[str]) -> bool:
    """Return whether a model's name is a GGUF file all of whose matrices have blocks that native kernels support."""
    path = gguf_path(name)
    if path is None:
        return False
    require_gguf()
    return not other_kinds(read_gguf(path))


def prepared_folder(name: str, *, fetch: bool = True, convert: bool = True, progress: Progress = silent) -> Path:
    """Return the folder with a model's configuration and tokenizer, so that loading it fetches nothing.

    A GGUF file that runs on its own blocks is described, not converted. Arguments and errors as for `resolve_model`.
    """
    if is_block_file(name):
        from draftree.weights.gguf_blocks import describe_blocks  # it imports torch

        return describe_blocks(expanded(name), Cache(), progress=progress)[0]
    return resolve_model(name, fetch=fetch, convert=convert, progress=progress)


def require_extras(name: str | os.PathLike[str]) -> None:
    """Raise for a model that cannot be converted because the extra `gguf` is not installed."""
    if isinstance(name, str) and name in CATALOGUE:
        entry = CATALOGUE[name]
        if entry.form == "gguf" and not entry_is_here(entry, Cache()):
            require_gguf()
        return
    path = expanded(Path(name))
    if path.is_file() and is_gguf(path):
        require_gguf()


def require_clients(name: str) -> None:
    """Raise for a model of the catalogue whose registry's client is not installed."""
    if name in CATALOGUE and not entry_is_here(CATALOGUE[name], Cache()):
        for package in CATALOGUE[name].packages:
            require_client(package)
