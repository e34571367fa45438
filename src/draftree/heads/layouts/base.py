"""Interface of layouts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from draftree.heads.config import HeadConfig
from draftree.heads.layouts.folder import HeadFolder


class Layout(Protocol):
    """A module that reads one layout. Errors do not name the folder: the caller adds it."""

    NAME: str

    def recognise(self, folder: HeadFolder) -> bool:
        """Return whether the folder has this layout.

        Raises:
            ModelError: a file is missing or damaged.
        """

    def configure(self, folder: HeadFolder) -> HeadConfig:
        """Return the configuration, from `config.json` and the names and shapes of tensors.

        Raises:
            ModelLoadError: values are missing or not supported.
            ConfigurationError: values contradict each other.
        """

    def tensors(self, folder: HeadFolder) -> dict[str, Tensor]:
        """Return the tensors by our names, with the maps of the draft vocabulary.

        Raises:
            ModelLoadError: a file is damaged, or tensors are missing.
        """
