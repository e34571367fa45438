"""Files and folders from outside the program: paths, JSON, locks, code in models, and what restores a damaged one."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, final

from draftree.core.errors import ConfigurationError

try:
    import fcntl
except ImportError:  # not on Windows, where two processes are not kept apart
    fcntl = None  # type: ignore[assignment]


def home_folder() -> Path | None:
    """Return the home folder; None if `HOME` is missing or empty and the system has no entry for this user id."""
    if os.environ.get("HOME") or os.name == "nt":
        try:
            return Path.home()
        except RuntimeError:
            return None
    import pwd  # of Unix alone

    try:
        folder = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None
    return Path(folder) if folder else None


def config_folder() -> Path | None:
    """Return the folder of what the user keeps; None without a home folder.

    It is `DRAFTREE_CONFIG`, else `XDG_CONFIG_HOME/draftree`, else `~/.config/draftree`.
    """
    return user_folder("CONFIG")


def user_folder(kind: str) -> Path | None:
    """Return the folder that the variables of the environment name for "CONFIG" or "CACHE", else one of the home."""
    if folder := os.environ.get(f"DRAFTREE_{kind}"):
        return expanded(folder).absolute()
    if shared := os.environ.get(f"XDG_{kind}_HOME"):
        return expanded(shared).absolute() / "draftree"
    home = home_folder()
    return None if home is None else home / f".{kind.lower()}" / "draftree"


def expanded(spelled: str | os.PathLike[str]) -> Path:
    path = Path(spelled)
    first = path.parts[0] if path.parts else ""
    if first == "~" and (home := home_folder()) is not None:
        return home.joinpath(*path.parts[1:])
    try:
        return path.expanduser() if first != "~" else _homeless(path)
    except RuntimeError:
        return _homeless(path)


def _homeless(path: Path) -> Path:
    raise ConfigurationError(f"'{path}' begins with a home folder that this system does not know: give a full path")


def shown_name(name: str) -> str:
    """A model's name for rows, headers and reports: of a path that exists its last part, else the name itself."""
    path = expanded(name)
    return path.resolve().name if path.exists() else name


MAX_JSON_BYTES = 64 << 20
"""Largest file, or line of a file of JSON lines, that is read: twice the largest known tokenizer.json."""
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""What a reader of parsed content raises for values that are missing or of another type."""


class JsonError(ValueError):
    """Content that is not the expected JSON; the text says why."""


def parse_json(content: str | bytes) -> Any:
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        return json.loads(text)
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise JsonError("it is not UTF-8 text") from None
    except ValueError as error:
        raise JsonError(f"it is not JSON: {error}") from None


def parse_json_object(content: str | bytes) -> dict[str, Any]:
    value = parse_json(content)
    if not isinstance(value, dict):
        raise JsonError("it does not hold a JSON object")
    return value


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Raise a JsonError that says why a file cannot be read, except for a missing one."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise JsonError(error.strerror or str(error)) from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        with _reading(), path.open("rb") as stream:
            content = stream.read(MAX_JSON_BYTES + 1)
    except JsonError:
        raise
    except ValueError as error:  # a name that no file can have
        raise JsonError(str(error)) from None
    if len(content) > MAX_JSON_BYTES:
        raise JsonError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
    return parse_json_object(content)


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    write_whole(path, (json.dumps(value, indent=indent) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is complete or as before; its folder is made if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def read_json_lines(path: Path, *, may_be_cut: bool = False) -> list[dict[str, Any]]:
    """Read one JSON object per line. Blank lines are skipped, and with `may_be_cut` an incomplete last one."""
    objects = []
    with _reading(), path.open("rb") as stream:
        for number, line in enumerate(read_lines(stream), start=1):
            if not line.strip():
                continue
            try:
                objects.append(parse_json_object(line))
            except JsonError as error:
                if may_be_cut and not line.endswith(b"\n"):
                    break
                raise JsonError(f"line {number}: {error}") from None
    return objects


def read_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; unlike `str.splitlines`, only line feeds end one."""
    for number in itertools.count(1):
        line = stream.readline(MAX_JSON_BYTES + 1)
        if len(line) > MAX_JSON_BYTES:
            raise JsonError(f"line {number}: it has more than {MAX_JSON_BYTES >> 20} MiB")
        if not line:
            return
        yield line


@final
class PathLock:
    """Keeps other processes from a folder, or a file that is made if missing, while this object lives."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        descriptor = os.open(path, flags, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        self._release = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        self._release()


SETTINGS = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "generation_config.json",
)
ALLOW = "read that code, then allow it with LLM(..., trust_remote_code=True) or --trust-remote-code"


def code_named_in(folder: Path) -> dict[str, str]:
    """Map each settings file that names custom code to the first class that it names."""
    entries = {name: _classes(_settings(folder / name).get("auto_map")) for name in SETTINGS}
    return {name: classes[0] for name, classes in entries.items() if classes}


def refusal(folder: Path) -> str:
    """Return why a model or tokenizer whose settings name custom code is refused; empty if they name none."""
    named = ", ".join(f"'{entry}' in {name}" for name, entry in code_named_in(folder).items())
    return f"'{folder}' needs Python code of its own ({named}), which is not run: {ALLOW}" if named else ""


def kernel_refusal(folder: Path) -> str:
    """Return why a model whose settings name a compiled attention kernel of the hub is refused; empty if none."""
    content = _settings(folder / "config.json")
    for part in (content, *(value for value in content.values() if isinstance(value, dict))):
        for key in ("attn_implementation", "_attn_implementation"):
            if named := next((name for name in _classes(part.get(key)) if "/" in name), None):
                return f"'{folder}' needs the compiled code '{named}' of the hub ({key} in config.json): {ALLOW}"
    return ""


def _settings(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (FileNotFoundError, JsonError):
        return {}  # the reader of damaged settings refuses them


def _classes(mapped: Any) -> list[str]:
    """Return every class in an `auto_map`: a name, a list of names or nulls, or a mapping to them."""
    if isinstance(mapped, str):
        return [mapped]
    if isinstance(mapped, Mapping):
        mapped = list(mapped.values())
    return [name for part in mapped for name in _classes(part)] if isinstance(mapped, list) else []


MANIFEST = "draftree.json"  # present in every folder of the cache; records the origin of the model
MODELS, WORK = "models", "work"  # folders of the cache: complete model folders; locks and unfinished model folders
HUB_SNAPSHOT = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]")


def get_again(folder: Path) -> str:
    """Return the last part of a message about a damaged model: the remedy."""
    if match := HUB_SNAPSHOT.search(f"{folder}/"):
        return f"run 'hf download {match[1]}/{match[2]} --force-download'"
    try:
        source = read_json(folder / MANIFEST)["source"]
    except (OSError, *MALFORMED):
        return "copy the model again from its origin"
    # beside the folder of models, a cache has one for unfinished work
    models = folder.absolute().parent
    if models.name != MODELS or not (models.parent / WORK).is_dir():
        return "it was copied from a cache of models: copy it again from there"
    if isinstance(source, list):
        return f"run 'draftree models get {folder.name}'"
    return f"run 'draftree models remove {folder.name}', then name '{source}' again"
