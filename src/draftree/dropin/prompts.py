"""Prompts that the model's own forward pass reads first: those with images, and padded ones where padding counts.

What that pass stores of a prompt is copied into a slot, all but the last token; from there the text is written as
usual. The last token is then scored from the slot and compared with the model's own logits, at every call, so that a
family whose later tokens depend on more than stored keys and values is refused and not written wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import InvalidRequestError, UnsupportedModelError
from draftree.dropin.refusals import WITHOUT
from draftree.loading.reading import first_line
from draftree.models.base import Extend, LanguageModel, Pass, Slot
from draftree.models.check import TOLERANCE
from draftree.models.torch.cache_argument import CACHE_NAMES
from draftree.models.torch.hf import HFModel
from draftree.models.torch.hf_cache import CachedModel
from draftree.models.torch.own_forward import ReadPrompt

NOT_READ = frozenset({"attention_mask", "use_cache", "logits_to_keep", *CACHE_NAMES})
"""Arguments of `generate` for its first pass that the first pass here does not read."""


def read_prompts(
    target: LanguageModel, input_ids: Tensor, inputs: Mapping[str, Any], *, kind: str
) -> list[Callable[[], Slot]]:
    """Read all prompts by the model's own forward.

    Args:
        target: the model behind the seam.
        input_ids: shape (batch, length).
        inputs: what `generate` would hand to the model's forward.
        kind: the model's name, for messages.

    Returns:
        For each row what opens a slot with all but the last token of its prompt.

    Raises:
        InvalidRequestError: a prompt ends with a token of an image.
        UnsupportedModelError: text cannot go on from the keys and values that the model stores.
    """
    assert isinstance(target, (HFModel, CachedModel)), "a borrowed model is one of transformers"
    _refuse_image_at_end(target, input_ids)
    given = {name: value for name, value in inputs.items() if name not in NOT_READ and value is not None}
    try:
        prompts = target.read(input_ids, inputs.get("attention_mask"), given)
        errors = [_error(target, ids, prompt) for ids, prompt in zip(input_ids[:, -1].tolist(), prompts, strict=True)]
    except UnsupportedModelError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedModelError(
            f"{kind} fails in the forward pass over this prompt ({first_line(error)}): {WITHOUT}"
        ) from error
    if not max(errors) <= TOLERANCE[target.dtype]:
        raise UnsupportedModelError(
            f"{kind} gives other logits after the keys and values of this prompt than in its own forward pass "
            f"(error {max(errors):.1e} of their spread): {WITHOUT}"
        )
    return [partial(target.adopt, prompt) for prompt in prompts]


def _refuse_image_at_end(target: HFModel | CachedModel, input_ids: Tensor) -> None:
    config = target.model.config
    image = getattr(config, "image_token_id", None)
    if image is not None and bool((input_ids[:, -1] == image).any()):
        raise InvalidRequestError(
            f"the prompt ends with the image token {image}: Draftree reads a last token of text; add one, or {WITHOUT}"
        )


@torch.inference_mode()
def _error(target: HFModel | CachedModel, last: int, prompt: ReadPrompt) -> float:
    """Difference of the last token's logits, read from a slot, from the model's own, as a share of their spread."""
    slot = target.adopt(prompt)
    logits = target.run(Pass([Extend(slot, [last], [-1])])).logits.tensor()[0]
    target.close(slot)
    spread = float(prompt.logits.amax() - prompt.logits.amin()) or 1.0
    error = float((logits - prompt.logits).abs().max()) / spread
    return float("inf") if error != error else error


def openers(opened: Sequence[Callable[[], Slot]] | None, count: int) -> Sequence[Callable[[], Slot] | None]:
    """One for each row; None where rows are read as usual."""
    return [None] * count if opened is None else opened
