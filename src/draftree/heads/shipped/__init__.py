"""The heads of this package, and the target that each was trained for.

A target is identified by the fingerprint of its weights (samples of every parameter, compared in bfloat16) and by
values of its configuration that change what it computes. Dtype, device, kernels and 8-bit weights make no difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.core.errors import ModelLoadError
from draftree.core.files import MALFORMED, read_json
from draftree.heads.layouts import Values, rope_of

FOLDERS = Path(__file__).parent
MANIFEST = "manifest.json"
FORMAT = 1
MAX_BYTES = 16_000_000
"""Maximum size of a folder."""
FACTS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "hidden_act", "rms_norm_eps"),
)
"""Values of `config.json` that identify a target besides its weights; the rotary positions are added."""


@dataclass(frozen=True, slots=True)
class ShippedHead:
    """One head of the package, and what identifies its target; `licence` is that of the head's weights."""

    folder: Path
    fingerprint: str
    config: Mapping[str, Any]
    licence: str

    @property
    def name(self) -> str:
        """Name after `head:`, the name of the target."""
        return self.folder.name

    def reason_against(self, fingerprint: str, config: Mapping[str, Any] | None) -> str | None:
        """Return why the head is not for a target; None if it is. The target may have no configuration."""
        if fingerprint != self.fingerprint:
            return f"the drafter '{self.name}' of this package was trained for other weights"
        changed = [] if config is None else [key for key in self.config if config.get(key) != self.config[key]]
        if changed:
            return f"the drafter '{self.name}' of this package was trained for another value of {changed[0]}"
        return None


def shipped_heads() -> list[ShippedHead]:
    """Return the heads of the package, by name."""
    return [read_manifest(path.parent) for path in sorted(FOLDERS.glob(f"*/{MANIFEST}"))]


def read_manifest(folder: Path) -> ShippedHead:
    path = folder / MANIFEST
    try:
        values = read_json(path)
        if values["format"] != FORMAT:
            raise ModelLoadError(f"{path} has format {values['format']!r}, and this program reads {FORMAT}")
        target = values["target"]
        return ShippedHead(folder, str(target["fingerprint"]), dict(target["config"]), str(values["licence"]))
    except (OSError, *MALFORMED) as reason:
        raise ModelLoadError(f"{path} is damaged ({reason!r}): install the package again") from reason


def manifest_json(fingerprint: str, config: Mapping[str, Any], licence: str) -> dict[str, Any]:
    """Return the content of a manifest; arguments as the attributes of `ShippedHead`."""
    return {"format": FORMAT, "licence": licence, "target": {"fingerprint": fingerprint, "config": dict(config)}}


def config_facts(folder: Path) -> dict[str, Any]:
    """Return the values of a model's `config.json` that identify it besides its weights; None for absent ones."""
    try:
        values = read_json(folder / "config.json")
        facts: dict[str, Any] = {name: values.get(name) for name in FACTS}
        return facts | {"rope": rope_of(Values(values))}
    except (OSError, *MALFORMED) as reason:
        raise ModelLoadError(f"{folder / 'config.json'} is damaged or unreadable ({reason})") from reason


def head_folder(name: str) -> Path:
    """Return the folder of a head by its name in this package, or by its path.

    A name of the package precedes a folder of that name in the working folder, which is written as `./NAME`.
    """
    shipped = FOLDERS / name
    return shipped if Path(name).name == name and (shipped / MANIFEST).is_file() else Path(name)
