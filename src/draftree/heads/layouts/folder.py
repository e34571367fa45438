"""Folders of heads: `config.json` and tensors in safetensors or pickled files."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError, ModelNotFoundError
from draftree.core.json_files import JsonError, read_json
from draftree.heads.layouts.values import Values
from draftree.weights.safetensors_file import check_safetensors

T = TypeVar("T")
CONFIG = "config.json"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@final
class HeadFolder:
    """A folder that may hold a head.

    Errors do not name it: the caller adds its path.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def values(self) -> Values:
        """The content of `config.json`.

        Raises:
            ModelNotFoundError: there is no such file.
            ModelLoadError: it is damaged.
        """
        if not (self.path / CONFIG).is_file():
            raise ModelNotFoundError(f"it has no '{CONFIG}': give the folder of a head")
        return Values(self._json(CONFIG))

    @cached_property
    def files(self) -> list[str]:
        """Names of the files of tensors.

        Raises:
            ModelNotFoundError: there is none, or one of an index is missing.
            ModelLoadError: an index is damaged.
        """
        for name in (SAFE, *MEDUSA_FILES, PICKLED):
            if (self.path / name).is_file():
                return [name]
            if (self.path / (name + INDEX)).is_file():
                return self._parts(name + INDEX)
        raise ModelNotFoundError(f"it has no '{SAFE}', '{PICKLED}' or '{MEDUSA_FILES[0]}': its weights are missing")

    def _parts(self, index: str) -> list[str]:
        places = self._json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ModelLoadError(f"'{index}' is damaged: it has no 'weight_map' of tensors: get the head again")
        files = sorted(set(places.values()))
        for file in files:
            if Path(file).name != file:
                raise ModelLoadError(f"'{index}' names '{file}': files must be in the same folder")
            if not (self.path / file).is_file():
                raise ModelNotFoundError(f"it has no file '{file}', which '{index}' names: get the head again")
        return files

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name. Values are not read.

        Raises:
            ModelNotFoundError: a file is missing.
            ModelLoadError: a file is damaged.
        """
        found: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            found |= self._shapes(file)
        return found

    def tensors(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Return the tensors with wanted names, on the host.

        Raises:
            ModelNotFoundError: a file is missing.
            ModelLoadError: a file is damaged.
        """
        found: dict[str, Tensor] = {}
        for file in self.files:
            found |= self._read(file, wanted)
        return found

    def _shapes(self, file: str) -> dict[str, tuple[int, ...]]:
        if not file.endswith(".safetensors"):
            return {name: tuple(tensor.shape) for name, tensor in self._unpickled(file, "meta").items()}
        return self._safe(file, lambda opened: {n: tuple(opened.get_slice(n).get_shape()) for n in list(opened.keys())})

    def _read(self, file: str, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        if not file.endswith(".safetensors"):
            return {name: tensor for name, tensor in self._unpickled(file, "cpu").items() if wanted(name)}
        return self._safe(file, lambda opened: {n: opened.get_tensor(n) for n in list(opened.keys()) if wanted(n)})

    def _safe(self, file: str, read: Callable[[Any], dict[str, T]]) -> dict[str, T]:
        from safetensors import SafetensorError, safe_open

        check_safetensors(self.path / file)
        try:
            with safe_open(self.path / file, framework="pt") as opened:
                return read(opened)
        except (OSError, SafetensorError, ValueError) as reason:
            raise _damaged(file, reason) from reason

    def _unpickled(self, file: str, device: str) -> dict[str, Tensor]:
        try:
            held = torch.load(self.path / file, map_location=device, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as reason:
            raise ModelLoadError(f"'{file}' cannot be read as tensors: {reason}") from reason
        if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
            raise ModelLoadError(f"'{file}' is no table of tensors: nothing else is unpickled")
        return {str(name): value for name, value in held.items()}

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            return read_json(path)
        except (FileNotFoundError, JsonError) as reason:
            raise _damaged(name, reason) from reason


def _damaged(file: str, reason: Exception) -> ModelLoadError:
    return ModelLoadError(f"'{file}' is damaged or unreadable ({reason}): get the head again")
