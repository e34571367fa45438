"""Prompts with images: their first tokens are read by the model's own forward pass, and a slot adopts what it stored.

Only that pass knows how a family places embeddings of images, which positions they have, and which of them see each
other. The text after the last image is read by passes like any other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

import torch
from torch import Tensor

from draftree.core.errors import DraftreeError, UnsupportedModelError
from draftree.models.base import Extend, Pass, Slot
from draftree.models.check import QUANTIZED_TOLERANCE, TOLERANCE
from draftree.models.images import ImagePrompt, ImageReader
from draftree.models.native.model import NativeModel
from draftree.models.torch.hf import HFModel
from draftree.models.torch.hf_cache import CachedModel
from draftree.models.torch.inspection import ReadPrompt, quiet

logger = logging.getLogger(__name__)

Reading = HFModel | CachedModel  # models that read prompts by their own forward pass
Adopting = HFModel | CachedModel | NativeModel  # models whose slots adopt what was read


def adopted(target: Adopting, prompt: ReadPrompt, last: int) -> tuple[Slot, float]:
    """Open a slot with a prompt but its last token, and score that token.

    Returns the slot; and the difference of the token's logits from those of the pass that read the prompt, as a share
    of their spread.
    """
    slot = target.adopt(prompt)
    logits = target.run(Pass([Extend(slot, [last], [-1])])).logits.tensor()[0]
    target.truncate(slot, slot.length)
    return slot, _distance(logits, prompt.logits)


def _distance(logits: Tensor, wanted: Tensor) -> float:
    spread = float(wanted.amax() - wanted.amin()) or 1.0
    error = float((logits - wanted).abs().max()) / spread
    return float("inf") if error != error else error


@final
class OwnPassReader(ImageReader):
    """Opens slots of a target on prompts with images that a transformers model reads.

    `target`: the model that writes the texts. `load`: returns the model that reads the images, which may be the target;
    called for the first prompt.
    """

    def __init__(self, target: Adopting, load: Callable[[], Reading]) -> None:
        self._target = target
        self._load = load
        self._source: Reading | None = None
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draftree-images")
        self._reads_whole: bool | None = None
        """Whether tokens of the text before the last image see the text after it; None if it is not known yet."""

    def prepared(self, prompt: ImagePrompt) -> ImagePrompt:
        if isinstance(self._target, NativeModel) and self._target.kv_dtype is not None:
            raise UnsupportedModelError(
                f"images cannot be read with kv_dtype={self._target.kv_dtype!r}: load the model without kv_dtype"
            )
        with self._lock:
            if self._source is None:
                self._source = self._load()
            source = self._source
            if self._reads_whole is None and prompt.num_first < len(prompt):
                with quiet(advice_of=source.device):
                    self._reads_whole = not source.lock.between(lambda: self._can_continue(source, prompt))
        return prompt.whole() if self._reads_whole else prompt

    def begin(self, prompt: ImagePrompt) -> Future[ReadPrompt]:
        source = self._source
        assert source is not None, "the prompt was prepared"
        if source is not self._target:
            return self._thread.submit(source.lock.between, lambda: _read(source, prompt))
        read = Future[ReadPrompt]()
        try:
            read.set_result(_read(source, prompt))
        except Exception as error:  # as on a thread
            read.set_exception(error)
        return read

    def open(self, prompt: ImagePrompt, read: Future[ReadPrompt]) -> Slot:
        target = self._target
        slot, error = adopted(target, read.result(), prompt.tokens[prompt.num_first - 1])
        accepted = TOLERANCE[target.dtype]
        if isinstance(target, NativeModel) and target.quantization is not None:
            accepted = max(accepted, QUANTIZED_TOLERANCE.get(target.quantization, 1.0))
        if not error <= accepted:
            target.close(slot)
            raise UnsupportedModelError(
                f"this model gives other logits after the keys and values of an image than in its own forward pass "
                f"(error {error:.1e} of their spread): give prompts without images"
            )
        return slot

    def _can_continue(self, source: Reading, prompt: ImagePrompt) -> bool:
        """Return whether a text is read alike after its first tokens and together with them."""
        wanted = _read(source, prompt.whole()).logits
        try:
            first = _read(source, prompt)
        except UnsupportedModelError as reason:
            logger.info("prompts with images are read as a whole: %s", reason)
            return False
        slot, first_error = adopted(source, first, prompt.tokens[prompt.num_first - 1])
        rest = prompt.tokens[prompt.num_first - 1 :]
        job = Extend(slot, rest, range(-1, len(rest) - 1), logits_at=[len(rest) - 1], settled=len(rest))
        logits = source.run(Pass([job])).logits.tensor()[0]
        source.close(slot)
        error = max(first_error, _distance(logits, wanted))
        if error > TOLERANCE[source.dtype]:
            logger.info("prompts with images are read as a whole (error %.1e)", error)
        return error <= TOLERANCE[source.dtype]


def _read(source: Reading, prompt: ImagePrompt) -> ReadPrompt:
    device, dtype = source.device, source.dtype
    ids = torch.tensor([prompt.tokens[: prompt.num_first]], device=device)
    inputs = {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in prompt.first_inputs.items()
    }
    try:
        (read,) = source.read(ids, None, inputs)
    except DraftreeError:
        raise
    except Exception as error:  # a model's own code may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnsupportedModelError(f"the model's own forward pass over the images fails ({reason[:200]})") from error
    return read
