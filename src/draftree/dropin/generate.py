"""The function that `generate` of transformers calls in place of its own loop, and its return values."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from draftree.build import build_parts, choose_methods
from draftree.core.errors import ConfigurationError, MissingTokenizerError
from draftree.core.noise import Noise
from draftree.drafters.base import LoadedDraftModel
from draftree.dropin import beams
from draftree.dropin.inputs import (
    Drafting,
    choose_drafting,
    draft_controls,
    read_prompts,
    refuse_models,
    sources_of,
)
from draftree.dropin.refusals import (
    has_images,
    how_to_bind,
    num_pads,
    refuse_config,
    refuse_inputs,
    refuse_lookbehind,
    refuse_model,
    refuse_sync,
    refuse_unbound,
)
from draftree.dropin.steps import SEEDS, Callbacks, Row, Steps, StepwiseVerifier, callbacks_of, pad_id_of, scoped
from draftree.engine.engine import Engine
from draftree.engine.parts import EngineParts
from draftree.engine.sequence import WritingSequence
from draftree.loading.lending import borrowed, is_padding_counted
from draftree.loading.loaded import LoadedModel
from draftree.models.source import EncoderDecoder, HiddenSource
from draftree.models.torch.inspection import turning_length
from draftree.options import EngineLimits
from draftree.outputs import CompletionStats, stats_of
from draftree.sampling.controls import Controls
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer


@dataclass
class DraftreeOutput(GenerateDecoderOnlyOutput):
    """Return value of `generate` with `return_dict_in_generate=True`, and the statistics of each row.

    The cache, `attentions` and `hidden_states` are None. In a batch `scores` and `logits` are zeros after the
    end of a row. `stats` is None where transformers wrote the text by itself.
    """

    stats: tuple[CompletionStats, ...] | None = None


@dataclass
class DraftreeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same for models with an encoder."""

    stats: tuple[CompletionStats, ...] | None = None


logger = logging.getLogger(__name__)


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    draft: str | None = None,
    plan: str | None = None,
    ngram_scope: str = "all",
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    token_healing: bool = False,
    **model_kwargs: Any,
) -> Tensor | DraftreeOutput | DraftreeEncoderDecoderOutput | beams.BeamOutput:
    """Write what `model.generate` writes, in less time: give this as its `custom_generate`.

    Greedy decoding and beam search (without a drafter) give the same tokens; sampling gives the same distribution
    (`torch.manual_seed` decides the draw). Batches, logits processors, stopping criteria, streamers, scores and
    `num_return_sequences` work as in `generate`. Unsupported settings are refused. After the call the model is
    unchanged. Models with an encoder work too, without a draft model.

    transformers does not pass its arguments `streamer`, `assistant_model`, `tokenizer` and `assistant_tokenizer` to a
    `custom_generate` callable. Bind them with `functools.partial`; do not give them to `model.generate`.

    Args:
        model: given by transformers, as are `input_ids` to `generation_config`.
        input_ids: shape (batch, length).
        logits_processor: those of transformers and those of the call.
        stopping_criteria: likewise.
        generation_config: complete.
        synced_gpus: refused.
        streamer: receives the prompt and each token, in order. Bind it.
        draft: spec of the drafter: `ngram`, `model:NAME` and others, as for `LLM`; None is `ngram`.
        plan: spec of the planner, as for `LLM`.
        ngram_scope: where `no_repeat_ngram_size` applies: "all" is prompt and generated tokens, as in transformers;
            "generated" leaves the prompt out.
        assistant_model: a loaded model that drafts, instead of `draft`. Bind it.
        assistant_tokenizer: the assistant's. Bind it.
        tokenizer: the model's; needed for stop strings, and for a draft model with another tokenizer. Bind it.
        stop_strings: end the text, as in transformers; need `tokenizer`.
        token_healing: refused.
        **model_kwargs: inputs of the model; more than an attention mask and images is refused.

    Raises:
        DraftreeError: a setting cannot be honoured; the message names it.

    Example:
        >>> model.generate(**inputs, custom_generate=draftree.generate, draft="ngram")  # doctest: +SKIP
        >>> printed = functools.partial(draftree.generate, streamer=TextStreamer(tokenizer))  # doctest: +SKIP
        >>> model.generate(**inputs, custom_generate=printed)  # doctest: +SKIP
    """
    refuse_unbound(model)
    refuse_model(model)
    refuse_sync(model, asked=synced_gpus)
    if token_healing:
        raise ConfigurationError(
            "token_healing=True cannot be honoured, since transformers does not pass the tokenizer: leave it out and "
            "give the prompts that model.heal_tokens(input_ids, tokenizer) returns"
        )
    refuse_config(generation_config, without_cache=getattr(model.generation_config, "use_cache", None) is False)
    refuse_lookbehind(generation_config, "the call")
    if assistant_model is not None:
        refuse_lookbehind(assistant_model.generation_config, "assistant_model.generation_config")
    stopping_criteria = _with_stop_strings(stopping_criteria, stop_strings, tokenizer)
    logits_processor = scoped(logits_processor, ngram_scope, input_ids.shape[1])
    calls = callbacks_of(generation_config, logits_processor, stopping_criteria, streamer)
    max_length = stopping_criteria.max_length or generation_config.max_length
    if (generation_config.num_beams or 1) > 1:
        drafted = {"draft": draft, "plan": plan, "assistant_model": assistant_model}
        beams.refuse_beside_beams(generation_config, calls, drafted)
        return beams.search(model, input_ids, generation_config, calls, model_kwargs, max_length=max_length)
    drafting = choose_drafting(draft, plan, assistant_model, generation_config)
    if model.config.is_encoder_decoder:
        refuse_models(model, drafting, assistant=assistant_model)
    turns = turning_length(model.config.get_text_config())
    if turns is not None and max_length - min(num_pads(input_ids, model_kwargs.get("attention_mask"))) > turns:
        logger.warning(
            "%s: texts beyond %d positions are written by transformers alone, without drafts: there its rotary angles "
            "change with the length of the text",
            type(model).__name__,
            turns,
        )
        _start_stream(streamer, input_ids)
        return _written_plainly(model, input_ids, generation_config, calls, model_kwargs)
    with _both_borrowed(model, assistant_model, assistant_tokenizer) as (target, assistant):
        opened, sources, limits = None, None, {"max_length": max_length, "context": target.model.max_length}
        if isinstance(target.model, EncoderDecoder):
            sources = sources_of(model, input_ids, model_kwargs, **limits)
            pads = [0] * len(sources)
        else:
            refuse_inputs(input_ids, model_kwargs, **limits)
            pads = num_pads(input_ids, model_kwargs.get("attention_mask"))
        if (sources is None and has_images(model_kwargs)) or (any(pads) and is_padding_counted(model)):
            opened = read_prompts(target.model, input_ids, model_kwargs, kind=target.name)
        steps = Steps(input_ids, max_length=max_length, pad_id=pad_id_of(generation_config, calls), callbacks=calls)
        rows = _rows(input_ids, pads, max_length, generation_config, target.model.vocab_size, ngram_scope, sources)
        for row, opens in zip(rows, opened or (), strict=False):
            row.sequence.opens = opens
        parts = _parts(drafting, target, _tokenizer(tokenizer), assistant)
        _start_stream(streamer, input_ids)
        _write(parts, steps, rows)
    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return steps.sequences
    kind = DraftreeOutput if sources is None else DraftreeEncoderDecoderOutput
    return kind(
        sequences=steps.sequences,  # type: ignore[arg-type]
        scores=tuple(steps.scores) if calls.keeps_scores else None,  # type: ignore[arg-type]
        logits=tuple(steps.logits) if calls.keeps_logits else None,  # type: ignore[arg-type]
        stats=tuple(stats_of(row.sequence) for row in rows),
    )


def _written_plainly(
    model: Any, input_ids: Tensor, config: Any, calls: Callbacks, inputs: Mapping[str, Any]
) -> Tensor | DraftreeOutput:
    """Return the result of transformers' own loop."""
    written = model._sample(
        input_ids,
        logits_processor=calls.processors,
        stopping_criteria=calls.criteria,
        generation_config=config,
        synced_gpus=False,
        streamer=calls.streamer,
        **inputs,
    )
    return written if isinstance(written, Tensor) else DraftreeOutput(**written)


def _start_stream(streamer: Any, input_ids: Tensor) -> None:
    """Put the prompt, as `generate` does for a streamer that it is given itself."""
    if streamer is not None:
        streamer.put(input_ids.cpu())


def _with_stop_strings(criteria: Any, stop_strings: str | list[str] | None, tokenizer: Any) -> Any:
    if stop_strings is None:
        return criteria
    if tokenizer is None:
        raise MissingTokenizerError(f"stop_strings need the tokenizer: {how_to_bind('tokenizer')}")
    return StoppingCriteriaList([*criteria, StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)])


@contextmanager
def _both_borrowed(
    model: Any, assistant: Any, assistant_tokenizer: Any
) -> Iterator[tuple[LoadedModel, LoadedDraftModel | None]]:
    """The model and its assistant, if it has one; they may be the same."""
    with ExitStack() as loans:
        target = loans.enter_context(borrowed(model))
        if assistant is None:
            yield target, None
            return
        refuse_model(assistant)
        loaded = target if assistant is model else loans.enter_context(borrowed(assistant))
        yield target, LoadedDraftModel(loaded.model, _tokenizer(assistant_tokenizer), loaded.name)


def _tokenizer(tokenizer: Any) -> Tokenizer | None:
    return None if tokenizer is None else Tokenizer(tokenizer)


def _rows(
    input_ids: Tensor,
    pads: Sequence[int],
    max_length: int,
    config: Any,
    vocab_size: int,
    ngram_scope: str,
    sources: Sequence[HiddenSource] | None,
) -> list[Row]:
    plain = SamplingParams(temperature=0.0)
    seeds = [0] * len(pads)
    if config.do_sample:
        # from torch's generator: torch.manual_seed makes the text reproducible, as it does for generate
        seeds = torch.randint(SEEDS, (len(pads),)).tolist()
    rows = []
    for place, (ids, skipped, seed) in enumerate(zip(input_ids.tolist(), pads, seeds, strict=True)):
        # the target's logits are left as they are: `Steps` turns them into scores
        controls = Controls(plain, Noise(seed), 0.0, processors=(), filters=(), stop_ids=frozenset())
        sequence = WritingSequence(
            "generate",
            place,
            ids[skipped:],
            controls=controls,
            limit=max_length - skipped,
            detokenizer=None,
            draft_controls=draft_controls(config, vocab_size=vocab_size, seed=seed, ngram_scope=ngram_scope),
            source=None if sources is None else sources[place],
            source_length=0 if sources is None else int(sources[place].hidden.shape[1]),
        )
        rows.append(Row(place, skipped, sequence, Noise(seed) if config.do_sample else None))
    return rows


def _parts(
    drafting: Drafting, target: LoadedModel, tokenizer: Tokenizer | None, assistant: LoadedDraftModel | None
) -> EngineParts:
    drafting = drafting.decided(target)
    methods = choose_methods(drafting.draft, "coupled", drafting.plan)
    for reads, what in ((methods.traits.reads_predictions, "prediction"), (methods.traits.reads_grammars, "grammar")):
        if reads:
            raise ConfigurationError(
                f"draft={drafting.draft!r} drafts from the {what} of a request, and generate takes none: "
                f"name another drafter, or use draftree.LLM with SamplingParams({what}=...)"
            )
    load = None if assistant is None else lambda name: assistant
    try:
        return build_parts(methods, target, tokenizer, load_draft=load)
    except MissingTokenizerError as error:
        names = ("tokenizer",) if assistant is None else ("tokenizer", "assistant_tokenizer")
        raise MissingTokenizerError(f"{error}; {how_to_bind(*names)}") from error


def _write(parts: EngineParts, steps: Steps, rows: Sequence[Row]) -> None:
    sequences = [row.sequence for row in rows]
    engine = Engine(
        replace(parts, verifier=StepwiseVerifier(steps, rows)),
        EngineLimits(max_batch_size=len(rows), prefix_cache_size=0),
        together=steps.in_step,
        tries_again=False,
    )
    engine.add(*sequences)
    try:
        while not engine.is_idle:
            engine.step()
    finally:
        engine.abort(sequences)
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
