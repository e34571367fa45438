"""Drafters that `draftree tune` kept for a model on this machine, and the conditions under which they were measured."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, config_folder, read_json
from draftree.core.host import cpu_name, usable_cores
from draftree.loading.load import LoadedModel
from draftree.version import __version__

__all__ = ["TunedDraft", "all_tuned", "conditions_of", "forget_tuned", "keep_tuned", "tuned_folder", "tuned_for"]

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedDraft:
    """A kept result.

    Attributes:
        model: name of the model when it was measured.
        fingerprint: identity of its weights.
        draft: spec of the fastest drafter; "none" for plain decoding.
        plan: spec of its planner; None for the default.
        speedup: geometric mean over texts of its speed divided by that of plain decoding.
        spread: first and third quartile of the same.
        texts: number of texts.
        temperatures: temperatures of the texts.
        conditions: machine, threads, dtype, kernels and versions, from `conditions_of`.
        date: when it was measured, in UTC.
    """

    model: str
    fingerprint: str
    draft: str
    plan: str | None
    speedup: float
    spread: tuple[float, float]
    texts: int
    temperatures: tuple[float, ...]
    conditions: Mapping[str, Any]
    date: str

    def difference(self, conditions: Mapping[str, Any]) -> str | None:
        """Return the first difference to other conditions in words; None if there is none."""
        for key in dict.fromkeys((*self.conditions, *conditions)):
            then, now = self.conditions.get(key), conditions.get(key)
            if then != now:
                return f"{key} was {then}, and is {now}"
        return None


def conditions_of(loaded: LoadedModel) -> dict[str, Any]:
    """Return what speeds of a loaded model depend on, besides its weights."""
    device = loaded.model.device
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "kernels": loaded.kernels,
        "quantization": loaded.quantization,
        "draftree": __version__,
        "torch": torch.__version__,
    }


def tuned_folder() -> Path:
    """Return the folder of kept results, whether it exists or not.

    Raises:
        ConfigurationError: there is no home folder.
    """
    folder = config_folder()
    if folder is None:
        raise ConfigurationError("there is no home folder to keep results in: set DRAFTREE_CONFIG to a folder of yours")
    return folder / "tuned"


def all_tuned() -> list[TunedDraft]:
    """Return all kept results, oldest first.

    Raises:
        ConfigurationError: a file is damaged.
    """
    if config_folder() is None:
        return []
    found = [one for path in sorted(tuned_folder().glob("*.json")) for one in _read(path)]
    return sorted(found, key=lambda one: one.date)


def tuned_for(loaded: LoadedModel) -> tuple[TunedDraft | None, str | None]:
    """Return the kept result of a model, and a sentence if results of it exist that do not count here.

    Raises:
        ConfigurationError: the file of the model is damaged.
    """
    if config_folder() is None or not loaded.model.fingerprint:
        return None, None
    kept = _read(_place(loaded.model.fingerprint))
    conditions = conditions_of(loaded)
    for one in kept:
        if one.difference(conditions) is None:
            return one, None
    if not kept:
        return None, None
    return None, f"the result of 'draftree tune' is ignored, because {kept[-1].difference(conditions)}"


def keep_tuned(result: TunedDraft) -> Path:
    """Keep a result; replaces one of the same model under the same conditions. Returns the file.

    Raises:
        ConfigurationError: there is no home folder, or the file cannot be read or written.
    """
    place = _place(result.fingerprint)
    others = [one for one in _read(place) if one.difference(result.conditions) is not None]
    _write(place, [*others, result])
    return place


def forget_tuned(fingerprint: str) -> int:
    """Remove the results of a model, under all conditions; returns their number.

    Raises:
        ConfigurationError: the file is damaged or cannot be removed.
    """
    place = _place(fingerprint)
    count = len(_read(place))
    try:
        place.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"'{place}' cannot be removed: {error.strerror}") from error
    return count


def _place(fingerprint: str) -> Path:
    return tuned_folder() / f"{fingerprint}.json"


def _read(path: Path) -> list[TunedDraft]:
    try:
        values = read_json(path)
        if values["format"] != FORMAT:
            raise ConfigurationError(
                f"'{path}' has format {values['format']!r}, and this program reads {FORMAT}: delete it"
            )
        return [_result(one) for one in values["results"]]
    except FileNotFoundError:
        return []
    except (OSError, *MALFORMED) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"'{path}', kept by 'draftree tune', is damaged or unreadable: delete it") from error


def _result(values: Mapping[str, Any]) -> TunedDraft:
    low, high = values["spread"]
    return TunedDraft(**{**values, "spread": (low, high), "temperatures": tuple(values["temperatures"])})


def _write(place: Path, results: Sequence[TunedDraft]) -> None:
    text = json.dumps({"format": FORMAT, "results": [dataclasses.asdict(one) for one in results]}, indent=2)
    fresh = place.with_suffix(f".{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text + "\n", "utf-8")
        fresh.replace(place)
    except OSError as error:
        raise ConfigurationError(
            f"'{place}' cannot be written ({error.strerror}): set DRAFTREE_CONFIG to a writable folder"
        ) from error
