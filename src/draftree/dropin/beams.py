"""`generate` with `num_beams` > 1: the beam search of `draftree/beam`, with the processors and criteria of the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor, StoppingCriteriaList
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.search import BeamSearch
from draftree.beam.sequence import Hooks, SequenceSearch
from draftree.beam.strategies import Candidate
from draftree.core.errors import ConfigurationError, GenerationError, InvalidRequestError
from draftree.core.tensors import to_device
from draftree.dropin.inputs import sources_of
from draftree.dropin.refusals import WITHOUT, has_images, num_pads, refuse_inputs
from draftree.dropin.steps import ROW_WISE, SEEDS, Callbacks
from draftree.engine.sequence import DecoderInput
from draftree.loading.lending import borrowed, is_padding_counted
from draftree.models.source import EncoderDecoder
from draftree.models.torch.inspection import turning_length

BeamOutput = GenerateBeamDecoderOnlyOutput | GenerateBeamEncoderDecoderOutput
"""Return values of `generate` with `return_dict_in_generate`."""


def refuse_beside_beams(config: Any, calls: Callbacks, drafting: Mapping[str, Any]) -> None:
    """Raise where a setting has no effect on a beam search, or is not offered with one."""
    lookup = {"prompt_lookup_num_tokens": getattr(config, "prompt_lookup_num_tokens", None)}
    if name := next((name for name, value in {**drafting, **lookup}.items() if value is not None), None):
        raise ConfigurationError(
            f"{name} was given with num_beams={config.num_beams}, but no drafter takes part in a beam search: leave "
            f"{name} out, or set num_beams=1"
        )
    if calls.streamer is not None:
        raise ConfigurationError("a streamer cannot show several beams: leave it out, or set num_beams=1")
    for name, is_kept in (("output_scores", calls.keeps_scores), ("output_logits", calls.keeps_logits)):
        if is_kept:
            raise ConfigurationError(
                f"{name}=True cannot be honoured with num_beams={config.num_beams}: the scores of all tokens are not "
                f"kept (sequences_scores are returned anyway); leave it out, or {WITHOUT}"
            )


class CallHooks(Hooks):
    """Logits processors and stopping criteria of a call; `rows` are its prompts with their padding, (prompts, length).

    Processors that may count rows are shown those of all beams, as `generate` does; others those of one prompt.
    """

    def __init__(self, rows: Tensor, calls: Callbacks) -> None:
        self._rows = rows
        known = (EosTokenCriteria, MaxLengthCriteria)
        self._criteria = StoppingCriteriaList([each for each in calls.criteria if not isinstance(each, known)])
        kinds = [(each, isinstance(each, PrefixConstrainedLogitsProcessor)) for each in calls.processors]
        self._functions = [each._prefix_allowed_tokens_fn for each, is_prefix in kinds if is_prefix]
        self._processors = LogitsProcessorList([each for each, is_prefix in kinds if not is_prefix])
        self._counts_rows = not all(type(each) in ROW_WISE for each in self._processors)

    def _processed_among_all(self, text: SequenceSearch, shown: Tensor, logprobs: Tensor) -> Tensor:
        """Call the processors with rows for all beams of all prompts; the first own row stands for the others."""
        width = text.params.beam_width
        first, count = text.index * width, len(shown)
        all_shown = shown[:1].repeat(width * len(self._rows), 1)
        all_logprobs = logprobs[:1].repeat(len(all_shown), 1)
        all_shown[first : first + count], all_logprobs[first : first + count] = shown, logprobs
        processed: Tensor = self._processors(all_shown, all_logprobs)  # type: ignore[arg-type]
        return processed[first : first + count]

    def _shown(self, text: SequenceSearch, generated: Sequence[tuple[int, ...]]) -> Tensor:
        row = self._rows[text.index]
        tokens = to_device(generated, row.device).reshape(len(generated), -1)
        return torch.cat((row.expand(len(generated), -1), tokens), dim=1)

    def process(self, text: SequenceSearch, logprobs: Tensor) -> Tensor:
        """Call the processors; a function of allowed tokens gets the index of the prompt."""
        shown = self._shown(text, [beam.tokens for beam in text.live])
        if self._counts_rows:
            logprobs = self._processed_among_all(text, shown, logprobs)
        else:
            logprobs = self._processors(shown, logprobs)  # type: ignore[arg-type]
        for function in self._functions:
            mask = torch.full_like(logprobs, -torch.inf)
            for row, tokens in enumerate(shown):
                mask[row, function(text.index, tokens)] = 0
            logprobs = logprobs + mask
        return logprobs

    def ends(self, text: SequenceSearch, candidates: Sequence[Candidate]) -> Sequence[bool]:
        if not self._criteria:
            return [False] * len(candidates)
        shown = self._shown(text, [(*candidate.parent.tokens, candidate.token) for candidate in candidates])
        return self._criteria(shown, None).tolist()


@torch.no_grad()
def search(
    model: Any, input_ids: Tensor, config: Any, calls: Callbacks, inputs: Mapping[str, Any], *, max_length: int
) -> Tensor | BeamOutput:
    """Return what `generate` returns for `num_beams` > 1; `input_ids` has each prompt repeated for its beams."""
    width = int(config.num_beams)
    rows, mask = input_ids[::width], inputs.get("attention_mask")
    if has_images(inputs):
        raise InvalidRequestError(f"images with num_beams={width} cannot be honoured: set num_beams=1, or {WITHOUT}")
    with borrowed(model) as target:
        limits = {"max_length": max_length, "context": target.model.max_length}
        ends = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
        if isinstance(target.model, EncoderDecoder):
            sources = sources_of(model, input_ids, inputs, **limits)[::width]
            lengths = [source.hidden.shape[1] for source in sources]
            prompts = [DecoderInput(*parts) for parts in zip(rows.tolist(), sources, lengths, strict=True)]
        else:
            refuse_inputs(input_ids, inputs, **limits)
            pads = num_pads(rows, None if mask is None else mask[::width])
            _refuse_positions(model, pads, max_length, width)
            prompts = [DecoderInput(row[skipped:]) for row, skipped in zip(rows.tolist(), pads, strict=True)]
        params = [_params(config, max_length - rows.shape[1]) for _ in prompts]
        searcher = BeamSearch(target.model, end_ids=ends, batch_size=len(prompts), hooks=CallHooks(rows, calls))
        results = searcher.run(prompts, params)
    return _output(results, rows, config, ends, has_encoder=isinstance(target.model, EncoderDecoder))


def _refuse_positions(model: Any, pads: Sequence[int], max_length: int, width: int) -> None:
    """Raise where a model computes positions in another way in its own loop."""
    turns = turning_length(model.config.get_text_config())
    if (any(pads) and is_padding_counted(model)) or (turns is not None and max_length - min(pads) > turns):
        raise InvalidRequestError(
            f"{type(model).__name__} computes these positions in another way in its own loop, which num_beams="
            f"{width} cannot follow: give one prompt without padding, a smaller max_new_tokens, or {WITHOUT}"
        )


def _params(config: Any, max_new_tokens: int) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=config.num_beams,
        num_return_sequences=config.num_return_sequences or 1,
        max_new_tokens=max_new_tokens,
        length_penalty=float(1.0 if config.length_penalty is None else config.length_penalty),
        early_stopping=config.early_stopping or False,
        sampling="beam" if config.do_sample else "none",
        seed=int(torch.randint(SEEDS, ())) if config.do_sample else 0,
    )


def _output(
    results: Sequence[BeamResult], rows: Tensor, config: Any, ends: Sequence[int], *, has_encoder: bool
) -> Tensor | BeamOutput:
    wanted = config.num_return_sequences or 1
    for index, result in enumerate(results):
        if len(result.hypotheses) < wanted:
            raise GenerationError(
                f"prompt {index} has {len(result.hypotheses)} texts, and num_return_sequences={wanted} were asked for: "
                "ask for fewer"
            )
    texts = [(index, text) for index, result in enumerate(results) for text in result.hypotheses]
    longest = max(len(text.tokens) for _, text in texts)
    pad = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
    fill = (pad or ends[0]) if ends else -1  # as in generate, where a pad id of 0 counts as none
    written = [[*text.tokens, *[fill] * (longest - len(text.tokens))] for _, text in texts]
    sequences = torch.cat((rows.repeat_interleave(wanted, dim=0), to_device(written, rows.device)), dim=1)
    if not config.return_dict_in_generate:
        return sequences
    width = int(config.num_beams)
    ranks = [
        [*(index * width + rank for rank in text.beam_indices), *[-1] * (longest - len(text.tokens))]
        for index, text in texts
    ]
    kind = GenerateBeamEncoderDecoderOutput if has_encoder else GenerateBeamDecoderOnlyOutput
    return kind(
        sequences=sequences,  # type: ignore[arg-type]
        sequences_scores=to_device([text.score for _, text in texts], rows.device, dtype=torch.float32),
        beam_indices=to_device(ranks, rows.device, dtype=torch.int32),  # type: ignore[arg-type]
    )
