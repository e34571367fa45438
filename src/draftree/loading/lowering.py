"""Conversion of transformers models to native kernels, checked against their own forward passes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftree.core.errors import OUT_OF_MEMORY, ModelLoadError, is_out_of_memory
from draftree.core.host import return_free_memory
from draftree.loading.image_text import text_part
from draftree.loading.loaded import LoadedModel
from draftree.loading.native_start import PackedStart
from draftree.loading.references import checked_packed, in_float32, packed_source_reference, require_ok, require_packed
from draftree.loading.transformers_model import eos_ids_in, first_line
from draftree.models.check import (
    NATIVE_LENGTHS,
    QUANTIZED_TOLERANCE,
    check,
    reference_logits,
    rounds_alike,
)
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.describe import DTYPES, plan_model
from draftree.models.native.model import NativeModel
from draftree.models.native.seq2seq.describe import read_decoder
from draftree.models.native.seq2seq.model import DecoderWeights, NativeEncoderDecoder
from draftree.models.native.streaming.model import BudgetError
from draftree.models.native.weights import ModelWeights, places_in_files
from draftree.models.torch.inspection import quiet
from draftree.models.torch.seq2seq.sources import reference_logits as source_reference_logits
from draftree.models.torch.seq2seq.sources import source_facts
from draftree.sampling.decoding_rules import decoding_rules
from draftree.weights.cache import steps

logger = logging.getLogger(__name__)


@contextmanager
def _conversion(name: str) -> Iterator[None]:
    try:
        with quiet():  # what transformers advises is about its own passes, which run only here
            yield
    except (NativeUnavailableError, ModelLoadError, BudgetError):
        raise
    except Exception as error:  # a model's own code may raise anything
        if is_out_of_memory(error):
            raise ModelLoadError(f"model '{name}' could not be packed: {OUT_OF_MEMORY}") from error
        raise NativeUnavailableError(first_line(error)) from error


def lower_model(
    model: Any,
    *,
    folder: Path | None = None,
    name: str = "",
    quantization: str | None = None,
    start: PackedStart | None = None,
) -> LoadedModel:
    """Convert a transformers model, or the text decoder of an image-text model, to native kernels and check it.

    The model is intact after NativeUnavailableError; otherwise its weights were released. NativeMismatchError: its
    logits differ. `start` keeps what later starts need.
    """
    whole = model.eval().requires_grad_(False)
    implementation = model.config._attn_implementation
    eos_ids, model_name = eos_ids_in(model), name or type(model).__name__
    try:
        with _conversion(model_name):
            model = text_part(whole)
            # a reference with as much rounding error as the tolerance would reject more accurate logits
            with in_float32(model):
                reference = reference_logits(model)
            blueprint = plan_model(model)
            steps.info("%s: packing weights for native kernels", model_name)
            if start is None:
                ours = NativeModel(blueprint, ModelWeights(model), quantization=quantization)
                places = None
            else:
                # streamed weights are larger than memory, and reading them once more takes long
                places = None if start.streams else places_in_files(model, blueprint.names, start.key.folder)
                ours = start.build(blueprint, ModelWeights(model))
    except NativeUnavailableError:
        whole.set_attn_implementation(implementation)
        raise
    steps.info("%s: comparing logits with those of transformers", model_name)
    tolerance, compares = QUANTIZED_TOLERANCE.get(quantization or ""), start is None or not start.streams
    result = require_ok(check(ours, reference, tolerance=tolerance, compares_tokens=compares))
    if quantization == "int4":
        result = checked_packed(model, ours, result)
    is_alike = start.is_exact if start is not None and start.streams else rounds_alike(ours, NATIVE_LENGTHS)
    result = replace(result, is_exact=result.is_exact and is_alike)
    ours.is_exact, ours.self_check = result.is_exact, result
    if start is not None:
        start.record(ours, eos_ids, places)
    if quantization is not None:
        ours.free_slots()  # of the comparisons
        return_free_memory()  # of the weights before rounding
    return LoadedModel.native(ours, folder, eos_ids, name=model_name, quantization=quantization)


def lower_encoder_decoder(model: Any, name: str, *, quantization: str | None = None) -> NativeEncoderDecoder:
    """Convert an encoder-decoder model in the same way; only the weights of its decoder are released."""
    model.eval().requires_grad_(False)
    dtype = str(model.dtype).removeprefix("torch.")
    mixed = {parameter.dtype for parameter in model.parameters()}
    if model.device.type != "cpu" or dtype not in DTYPES or len(mixed) > 1:
        raise NativeUnavailableError(
            f"native kernels are for float32 and bfloat16 on CPUs, not {' and '.join(sorted(map(str, mixed)))} on "
            f"{model.device}"
        )
    with _conversion(name):
        try:
            with in_float32(model):
                reference = source_reference_logits(model)
        except RuntimeError:  # convolutions of features keep their dtype
            reference = source_reference_logits(model)
        blueprint, encoder = read_decoder(model)
        weights = DecoderWeights(model, {id(parameter) for parameter in encoder.parameters})
        facts, rules = source_facts(model), decoding_rules(model)
        ours = NativeEncoderDecoder(
            blueprint, weights, encoder=encoder, facts=facts, rules=rules, quantization=quantization
        )
    result = require_ok(check(ours, reference, tolerance=QUANTIZED_TOLERANCE.get(quantization or "")))
    if quantization == "int4":
        result = require_packed(ours, packed_source_reference(model, ours), result)
    ours.self_check = result
    ours.is_exact = result.is_exact and rounds_alike(ours, NATIVE_LENGTHS)
    if rules.note:
        logger.warning("%s", rules.note)
    return ours
