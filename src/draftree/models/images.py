"""Seam of prompts with images: what opens slots on them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from draftree.models.base import Slot
from draftree.models.image_prompt import ImagePrompt


class ImageReader(ABC):
    """Opens slots of one model on prompts with images."""

    @abstractmethod
    def prepared(self, prompt: ImagePrompt) -> ImagePrompt:
        """Return a prompt with the number of tokens that `open` reads. May load what reads images: call it early.

        Raises:
            UnsupportedModelError: the model cannot read prompts with images.
        """

    @abstractmethod
    def open(self, prompt: ImagePrompt) -> Slot:
        """Return a slot with the first tokens of a prepared prompt but the last of them."""
