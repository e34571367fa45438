"""Inputs of a `generate` call: its drafter, its prompts and its encoder outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftree.build import decide
from draftree.core.errors import ConfigurationError, InvalidRequestError, UnsupportedModelError
from draftree.dropin.refusals import WITHOUT, refuse_cache
from draftree.loading.loaded import LoadedModel
from draftree.loading.transformers_model import first_line
from draftree.models.base import LanguageModel, Slot
from draftree.models.check import TOLERANCE
from draftree.models.source import HiddenSource
from draftree.models.torch.hf import HFModel
from draftree.models.torch.hf_cache import CachedModel
from draftree.models.torch.images import adopted
from draftree.models.torch.inspection import CACHE_NAMES, ReadPrompt
from draftree.options import AUTO_DRAFT
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.params import SamplingParams

DEFAULT_DRAFT = "ngram"
ASSISTANT = "assistant"  # name of the user's `assistant_model` in the drafter's spec


LONGEST = 64  # tokens ahead at most where a schedule lengthens the guess


@dataclass(frozen=True, slots=True)
class Drafting:
    draft: str
    plan: str | None

    def decided(self, target: LoadedModel) -> Drafting:
        """Return the same specs with a named drafter in the place of `auto`."""
        if self.draft != AUTO_DRAFT:
            return self
        choice = decide(target, "coupled", self.plan)
        return Drafting(choice.draft, choice.plan)


def choose_drafting(draft: str | None, plan: str | None, assistant: Any, config: Any) -> Drafting:
    """Return the specs for `draft`, `assistant_model` or `prompt_lookup_num_tokens`; prompt lookup if all are None."""
    lookup = config.prompt_lookup_num_tokens
    choices = {"draft": draft, "assistant_model": assistant, "prompt_lookup_num_tokens": lookup}
    names = [name for name, value in choices.items() if value is not None]
    if len(names) > 1:
        raise ConfigurationError(f"{' and '.join(names)} were given, and each selects a drafter: keep one of them")
    if assistant is not None:
        return _with_assistant(plan, assistant.generation_config, config)
    if lookup is not None:
        longest = config.max_matching_ngram_size or 2
        return Drafting(f"ngram,max={longest},min=1,k={lookup}", plan)
    return Drafting(DEFAULT_DRAFT if draft is None else draft, plan)


def _with_assistant(plan: str | None, settings: Any, config: Any) -> Drafting:
    """The assistant's own settings come first, as in transformers; then those of the call."""

    def setting(name: str, default: Any) -> Any:
        values = (getattr(source, name, None) for source in (settings, config))
        return next((value for value in values if value is not None), default)

    count = int(setting("num_assistant_tokens", 20))
    schedule = setting("num_assistant_tokens_schedule", "constant")
    confidence = setting("assistant_confidence_threshold", 0.4)
    draft = f"model:{ASSISTANT},k={count}"
    if plan is not None:
        return Drafting(draft, plan)
    if schedule in ("heuristic", "heuristic_transient"):
        return Drafting(f"model:{ASSISTANT},k={max(count, LONGEST)}", f"heuristic,start={count}")
    if schedule != "constant":
        raise ConfigurationError(
            f"num_assistant_tokens_schedule={schedule!r} is not known: use constant, heuristic or "
            "heuristic_transient, or say how by plan="
        )
    return Drafting(draft, f"threshold:{confidence}" if confidence else "fixed")


def draft_controls(config: Any, *, vocab_size: int, seed: int, ngram_scope: str = "all") -> Controls:
    """Controls for a drafter that ranks its own logits: as near to the generation config's as ours come.

    They decide how often it is right and nothing else: what is written follows the processors of `generate`.
    """
    wanted: dict[str, Any] = {"temperature": 0.0}
    if config.do_sample:
        wanted = {
            "temperature": 1.0 if config.temperature is None else config.temperature,
            "top_k": config.top_k or 0,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "min_p": config.min_p or 0.0,
        }
    try:
        params = SamplingParams(
            **wanted,
            repetition_penalty=config.repetition_penalty or 1.0,
            no_repeat_ngram_size=config.no_repeat_ngram_size or 0,
            ngram_scope=ngram_scope,
        )
    except InvalidRequestError:  # a range of ours is narrower: the drafter does without
        params = SamplingParams(temperature=float(bool(config.do_sample)))
    controls = build_controls(params, vocab_size=vocab_size, seed=seed)
    if not params.min_p or not controls.filters:
        return controls
    # min-p is the first filter here and the last one of generate
    min_p, *others = controls.filters
    return replace(controls, filters=(*others, min_p))


# Prompts that the model's own forward pass reads first: those with images, and padded ones where padding counts.
#
# What that pass stores of a prompt is copied into a slot, all but the last token; from there the text is written as
# usual. The last token is then scored from the slot and compared with the model's own logits, at every call, so that a
# family whose later tokens depend on more than stored keys and values is refused and not written wrongly.

NOT_READ = frozenset({"attention_mask", "use_cache", "logits_to_keep", *CACHE_NAMES})
"""Arguments of `generate` for its first pass that the first pass here does not read."""


def read_prompts(
    target: LanguageModel, input_ids: Tensor, inputs: Mapping[str, Any], *, kind: str
) -> list[Callable[[], Slot]]:
    """Read all prompts by the model's own forward; return for each row what opens a slot without its last token."""
    assert isinstance(target, (HFModel, CachedModel)), "a borrowed model is one of transformers"
    image = getattr(target.model.config, "image_token_id", None)
    if image is not None and bool((input_ids[:, -1] == image).any()):
        raise InvalidRequestError(
            f"the prompt ends with the image token {image}: Draftree reads a last token of text; add one, or {WITHOUT}"
        )
    others = {name: value for name, value in inputs.items() if name not in NOT_READ and value is not None}
    try:
        prompts = target.read(input_ids, inputs.get("attention_mask"), others)
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


@torch.inference_mode()
def _error(target: HFModel | CachedModel, last: int, prompt: ReadPrompt) -> float:
    """Difference of the last token's logits, read from a slot, from the model's own, as a share of their spread."""
    slot, error = adopted(target, prompt, last)
    target.close(slot)
    return error


_KNOWN = frozenset({*NOT_READ, "cache_position", "decoder_attention_mask", "encoder_outputs"})


def sources_of(model: Any, input_ids: Tensor, inputs: Mapping[str, Any], *, max_length: int, context: int) -> list[Any]:
    """Return the source of each row; `input_ids` are the decoder's prompts, `context` the positions that it knows."""
    strange = sorted(name for name, value in inputs.items() if name not in _KNOWN and value is not None)
    if strange:
        raise InvalidRequestError(
            f"{', '.join(strange)} cannot be honoured: of an encoder-decoder model Draftree takes the encoder's output "
            f"with its attention mask; leave the others out, or {WITHOUT}"
        )
    refuse_cache(inputs)
    decoder_mask = inputs.get("decoder_attention_mask")
    if decoder_mask is not None and not bool(decoder_mask.all()):
        raise InvalidRequestError(
            f"decoder_attention_mask hides tokens, and the decoder's prompts may have no padding: {WITHOUT}"
        )
    if max_length > context:
        raise InvalidRequestError(
            f"the decoder's prompt and the output may have {max_length} tokens, but the decoder's context holds "
            f"{context}: set max_new_tokens to {context - input_ids.shape[1]} at most"
        )
    hidden = inputs["encoder_outputs"][0]
    mask = inputs.get("attention_mask") if model.main_input_name == "input_ids" else None
    rows = range(hidden.shape[0])
    if mask is None:
        return [HiddenSource(hidden[row : row + 1]) for row in rows]
    if mask.shape != hidden.shape[:2] or not bool(mask.any(dim=1).all()):
        raise InvalidRequestError(
            f"attention_mask has shape {tuple(mask.shape)}: it must show at least one token of each of the sources, "
            f"whose shape is {tuple(hidden.shape[:2])}"
        )
    return [HiddenSource(hidden[row : row + 1, mask[row] != 0]) for row in rows]


def refuse_models(model: Any, drafting: Drafting, *, assistant: Any) -> None:
    """Raise for a draft model, which would need the input of the encoder."""
    if assistant is not None or drafting.draft.partition(":")[0] == "model":
        raise ConfigurationError(
            f"{type(model).__name__} is an encoder-decoder, and transformers passes the output of its encoder only, "
            "which no other model can read: name a drafter without a model, such as draft='ngram', or use draftree.LLM"
        )
