"""Heads that were trained on this machine, by the weights of their target: `draft="auto"` uses them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, config_folder, read_json

__all__ = ["TrainedHead", "keep_trained", "trained_for"]


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """The head that was trained last for a model.

    Attributes:
        folder: of the head; it must stay where it is.
        tokens_per_round: acceptance length on unseen texts, at the temperature where it is highest.
    """

    folder: str
    tokens_per_round: float


def keep_trained(fingerprint: str, head: TrainedHead) -> Path | None:
    """Remember a head for the weights with this fingerprint, in place of an earlier one; None without a home folder.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    place = _place(fingerprint)
    if place is None:
        return None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(".part")
        part.write_text(json.dumps(dataclasses.asdict(head)) + "\n", "utf-8")
        part.replace(place)
    except OSError as error:
        raise ConfigurationError(f"'{place}' cannot be written: {error.strerror}") from error
    return place


def trained_for(fingerprint: str) -> TrainedHead | None:
    """Return the head for the weights with this fingerprint; None if none was trained here.

    Raises:
        ConfigurationError: the record is damaged.
    """
    place = _place(fingerprint)
    if place is None:
        return None
    try:
        values = read_json(place)
        return TrainedHead(str(values["folder"]), float(values["tokens_per_round"]))
    except FileNotFoundError:
        return None
    except (OSError, *MALFORMED) as error:
        raise ConfigurationError(f"'{place}', kept by 'draftree train', is damaged or unreadable: delete it") from error


def _place(fingerprint: str) -> Path | None:
    folder = config_folder()
    return None if folder is None or not fingerprint else folder / "heads" / f"{fingerprint}.json"
