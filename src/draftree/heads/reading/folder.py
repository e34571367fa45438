"""Folders of heads: `config.json` and tensors in safetensors or pickled files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError, ModelNotFoundError

T = TypeVar("T")
CONFIG = "config.json"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
MAX_CONFIG_BYTES = 16_000_000
"""Upper limit of JSON files: a damaged file must not fill the memory."""


@final
class HeadFolder:
    """A folder that may hold a head.

    Args:
        path: the folder.

    Raises:
        ModelNotFoundError: it is no folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ModelNotFoundError(f"there is no folder '{path}': name the folder of a head, with {CONFIG} in it")
        self.path = path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of `config.json`; empty without the file."""
        return self._json(CONFIG) if (self.path / CONFIG).is_file() else {}

    @property
    def architectures(self) -> list[str]:
        """Names of classes in `config.json`."""
        names = self.config.get("architectures") or []
        return [name for name in names if isinstance(name, str)]

    @cached_property
    def files(self) -> list[str]:
        """Names of the files of tensors.

        Raises:
            ModelLoadError: there is none, or an index is damaged.
        """
        for name in (SAFE, PICKLED):
            if (self.path / (name + INDEX)).is_file():
                places = self._json(name + INDEX).get("weight_map")
                if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                    raise ModelLoadError(f"'{self.path / (name + INDEX)}' has no map of tensors: its folder is damaged")
                return sorted({self._inside(file) for file in places.values()})
        for name in (SAFE, *MEDUSA_FILES, PICKLED):
            if (self.path / name).is_file():
                return [name]
        raise ModelLoadError(
            f"'{self.path}' has no tensors: looked for {SAFE}, {', '.join(MEDUSA_FILES)} and {PICKLED}"
        )

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name. Values are not read.

        Raises:
            ModelLoadError: a file is missing or damaged.
        """
        found: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            found |= self._shapes(file)
        return found

    def tensors(self, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
        """Return the tensors with wanted names.

        Raises:
            ModelLoadError: a file is missing or damaged.
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

        try:
            with safe_open(self.path / file, framework="pt") as opened:
                return read(opened)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"'{self.path / file}' cannot be read: {error}") from error

    def _unpickled(self, file: str, device: str) -> dict[str, Tensor]:
        try:
            held = torch.load(self.path / file, map_location=device, weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise ModelLoadError(f"'{self.path / file}' cannot be read as tensors: {error}") from error
        if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
            raise ModelLoadError(f"'{self.path / file}' is no table of tensors")
        return {str(name): value for name, value in held.items()}

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise ModelLoadError(f"'{path}' has more than {MAX_CONFIG_BYTES} bytes: it is no configuration")
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"'{path}' cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise ModelLoadError(f"'{path}' is no JSON object")
        return found

    def _inside(self, file: str) -> str:
        # an index must not name files outside of its folder
        if Path(file).name != file:
            raise ModelLoadError(f"the index of '{self.path}' names '{file}': files must be in the same folder")
        return file
