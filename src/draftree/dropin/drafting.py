"""The drafter that a `generate` call names, and the sampling settings that the drafter follows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from draftree.choices import decide
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.drafters import AUTO_DRAFT
from draftree.loading.load import LoadedModel
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.params import SamplingParams

DEFAULT_DRAFT = "ngram"
ASSISTANT = "assistant"
"""Name of the user's `assistant_model` in the drafter's spec."""


LONGEST = 64
"""Tokens ahead at most where a schedule lengthens the guess."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """Specs of drafter and planner."""

    draft: str
    plan: str | None

    def decided(self, target: LoadedModel) -> Drafting:
        """Return the same specs with a named drafter in the place of `auto`."""
        if self.draft != AUTO_DRAFT:
            return self
        choice = decide(target, "coupled", self.plan)
        return Drafting(choice.draft, choice.plan)


def choose_drafting(draft: str | None, plan: str | None, assistant: Any, config: Any) -> Drafting:
    """Return the specs for `draft`, `assistant_model` or `prompt_lookup_num_tokens`; prompt lookup if all are None.

    Args:
        draft: a drafter's spec, or None.
        plan: a planner's spec, or None.
        assistant: a loaded model, or None.
        config: the generation config.

    Raises:
        ConfigurationError: more than one of them is given, or the assistant's settings are wrong.
    """
    lookup = config.prompt_lookup_num_tokens
    given = {"draft": draft, "assistant_model": assistant, "prompt_lookup_num_tokens": lookup}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ConfigurationError(f"{' and '.join(names)} were given, and each selects a drafter: keep one of them")
    if assistant is not None:
        return _with_assistant(plan, assistant.generation_config, config)
    if lookup is not None:
        longest = config.max_matching_ngram_size or 2
        return Drafting(f"ngram,max={longest},min=1,k={lookup}", plan)
    return Drafting(DEFAULT_DRAFT if draft is None else draft, plan)


def _with_assistant(plan: str | None, own: Any, config: Any) -> Drafting:
    """The assistant's own settings come first, as in transformers; then those of the call."""

    def setting(name: str, default: Any) -> Any:
        found = getattr(own, name, None)
        found = getattr(config, name, None) if found is None else found
        return default if found is None else found

    count = int(setting("num_assistant_tokens", 20))
    schedule = setting("num_assistant_tokens_schedule", "constant")
    confidence = setting("assistant_confidence_threshold", 0.4)
    if plan is not None:
        return Drafting(f"model:{ASSISTANT},k={count}", plan)
    if schedule in ("heuristic", "heuristic_transient"):
        return Drafting(f"model:{ASSISTANT},k={max(count, LONGEST)}", f"heuristic,start={count}")
    if schedule != "constant":
        raise ConfigurationError(
            f"num_assistant_tokens_schedule={schedule!r} is not known: use constant, heuristic or "
            "heuristic_transient, or say how by plan="
        )
    return Drafting(f"model:{ASSISTANT},k={count}", f"threshold:{confidence}" if confidence else "fixed")


def draft_controls(config: Any, *, vocab_size: int, seed: int, ngram_scope: str = "all") -> Controls:
    """Controls for a drafter that ranks its own logits: as near to the generation config's as ours come.

    They decide how often it is right and nothing else: what is written follows the processors of `generate`.
    """
    if not config.do_sample:
        wanted: dict[str, Any] = {"temperature": 0.0}
    else:
        wanted = {
            "temperature": 1.0 if config.temperature is None else config.temperature,
            "top_k": config.top_k or 0,
            "top_p": 1.0 if config.top_p is None else config.top_p,
            "min_p": config.min_p or 0.0,
        }
    wanted["repetition_penalty"] = config.repetition_penalty or 1.0
    wanted["no_repeat_ngram_size"] = config.no_repeat_ngram_size or 0
    wanted["ngram_scope"] = ngram_scope
    try:
        params = SamplingParams(**wanted)
    except InvalidRequestError:  # a range of ours is narrower: the drafter does without
        params = SamplingParams(temperature=float(bool(config.do_sample)))
    controls = build_controls(params, vocab_size=vocab_size, seed=seed)
    if not params.min_p or not controls.filters:
        return controls
    # min-p is the first filter here and the last one of generate
    min_p, *others = controls.filters
    return replace(controls, filters=(*others, min_p))
