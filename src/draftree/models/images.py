"""Prompts with images: token ids beside the pixels that their placeholders stand for, and what opens slots on them."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, final, overload

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.models.base import Slot
from draftree.text.chat.images import PlacedImage, read_images

NOT_READ = frozenset({"input_ids", "attention_mask", "labels"})
"""Outputs of processors that a forward pass over one prompt does not read."""


@final
@dataclass(frozen=True, eq=False)
class ImagePrompt(Sequence[int]):
    tokens: tuple[int, ...]  # the ids, with as many placeholders as each image has embeddings
    inputs: Mapping[str, Tensor]  # further inputs of the model's forward pass, of batch size 1, such as pixels
    num_first: int  # number of first tokens that the model's own forward pass reads: to the token after the last image
    digest: str = field(init=False)  # hash of these tokens and inputs; equal ones give equal keys and values

    def __post_init__(self) -> None:
        digest = hashlib.sha256(repr(self.tokens[: self.num_first]).encode())
        for name, value in sorted(self.first_inputs.items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        object.__setattr__(self, "digest", digest.hexdigest())

    @property
    def first_inputs(self) -> dict[str, Tensor]:
        """Inputs of a pass over the first tokens: kinds of tokens are cut, pixels are whole."""
        shape = (1, len(self.tokens))
        return {
            name: value[:, : self.num_first] if tuple(value.shape) == shape else value
            for name, value in self.inputs.items()
        }

    def whole(self) -> ImagePrompt:
        """Return the same prompt, all of which is read by the model's own forward pass."""
        return replace(self, num_first=len(self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.tokens[index]


def refuse_images(prompt: object, what: str) -> None:
    if isinstance(prompt, ImagePrompt):
        raise InvalidRequestError(f"{what} reads no images: remove them", param="prompt")


@dataclass(frozen=True, slots=True)
class PromptProcessor:
    processor: Any  # a processor object of transformers
    image_token: int | None  # id of the placeholder in token ids; None if the model's configuration names none


@final
class ImageProcessor:
    """Processor of an image-text model, loaded for the first image. Thread-safe."""

    def __init__(self, load: Callable[[], PromptProcessor]) -> None:
        self._load = load
        self._loaded: PromptProcessor | None = None
        self._lock = threading.Lock()

    def prompt(self, text: str, placed: Iterable[PlacedImage]) -> ImagePrompt:
        """Return the prompt of a text, as the chat template writes it, with a placeholder for each image.

        Raises:
            InvalidRequestError: an image cannot be read, their number is not that of the placeholders, or the processor
                cannot be loaded.
        """
        with self._lock:  # the pixels of one prompt at a time
            images = read_images(placed)
            if self._loaded is None:
                try:
                    self._loaded = self._load()
                except ConfigurationError as error:
                    raise InvalidRequestError(f"no images can be read here: {error}") from error
            outputs = _processed(self._loaded.processor, text, images)
        tokens = tuple(outputs["input_ids"][0].tolist())
        inputs = {name: value for name, value in outputs.items() if name not in NOT_READ and isinstance(value, Tensor)}
        return ImagePrompt(tokens, inputs, _num_first(tokens, self._loaded.image_token))


def _processed(processor: Any, text: str, images: Sequence[Any]) -> Mapping[str, Any]:
    bos = processor.tokenizer.bos_token
    # as in `apply_chat_template` of a processor
    added = {"add_special_tokens": False} if bos is not None and text.startswith(bos) else {}
    try:
        outputs: Mapping[str, Any] = processor(text=[text], images=[list(images)], return_tensors="pt", **added)
    except Exception as error:  # processors raise various exceptions for images that they cannot use
        raise InvalidRequestError(
            f"{type(processor).__name__} cannot process the prompt with its {len(images)} image(s) "
            f"({_first_line(error)}): write one placeholder for each image, or give images of another size"
        ) from error
    return outputs


def _num_first(tokens: Sequence[int], image_token: int | None) -> int:
    if image_token is None:
        return len(tokens)
    last = max((place for place, token in enumerate(tokens) if token == image_token), default=None)
    if last is None:
        raise InvalidRequestError("the prompt has images, but no token for them: write the model's placeholder")
    if last + 1 == len(tokens):
        raise InvalidRequestError("the prompt ends with an image: add text after it")
    return last + 2


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip().rstrip(".")[:200] if lines else type(error).__name__


class ImageReader(ABC):
    """Opens slots of one model on prompts with images."""

    @abstractmethod
    def prepared(self, prompt: ImagePrompt) -> ImagePrompt:
        """Return a prompt with the number of tokens that `open` reads. May load what reads images: call it early.

        Raises:
            UnsupportedModelError: the model cannot read prompts with images.
        """

    @abstractmethod
    def begin(self, prompt: ImagePrompt) -> Future[Any]:
        """Begin to read the first tokens of a prepared prompt, on a thread of its own if passes can run meanwhile."""

    @abstractmethod
    def open(self, prompt: ImagePrompt, read: Future[Any]) -> Slot:
        """Return a slot with the first tokens of a prompt but the last of them; waits for what `begin` began."""
