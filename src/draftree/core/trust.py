"""Code in a model's folder: detected by its entries in the settings, run only with permission.

transformers imports a model's own classes from Python files that `auto_map` names in the settings. They run with all
rights of the process. Draftree passes `trust_remote_code=False` wherever transformers loads anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftree.core.json_files import JsonError, read_json

__all__ = ["ALLOW", "code_named_in", "kernel_refusal", "refusal"]

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
    found = {}
    for name in SETTINGS:
        entries = _entries(folder / name)
        if entries:
            found[name] = entries[0]
    return found


def refusal(folder: Path) -> str:
    """Return why a model or tokenizer whose settings name custom code is refused; empty if they name none."""
    found = code_named_in(folder)
    if not found:
        return ""
    named = ", ".join(f"'{entry}' in {name}" for name, entry in found.items())
    return f"'{folder}' needs Python code of its own ({named}), which is not run: {ALLOW}"


def kernel_refusal(folder: Path) -> str:
    """Return why a model whose settings name a compiled attention kernel of the hub is refused; empty if none."""
    content = _settings(folder / "config.json")
    for part in (content, *(value for value in content.values() if isinstance(value, dict))):
        for key in ("attn_implementation", "_attn_implementation"):
            if named := next((name for name in _classes(part.get(key)) if "/" in name), None):
                return f"'{folder}' needs the compiled code '{named}' of the hub ({key} in config.json): {ALLOW}"
    return ""


def _entries(path: Path) -> list[str]:
    return _classes(_settings(path).get("auto_map"))


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
