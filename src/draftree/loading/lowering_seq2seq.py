"""Conversion of encoder-decoder models of transformers: decoders run in C, encoders through torch."""

from __future__ import annotations

import logging
from typing import Any

from draftree.core.errors import OUT_OF_MEMORY, ModelLoadError, is_out_of_memory
from draftree.loading.packed_reference import packed_source_reference, require_packed
from draftree.loading.reading import first_line
from draftree.loading.upcast import in_float32
from draftree.models.check import NATIVE_LENGTHS, QUANTIZED_TOLERANCE, ReferenceLogits, check, rounds_alike
from draftree.models.native.build import NativeMismatchError, NativeUnavailableError
from draftree.models.native.describe import DTYPES
from draftree.models.native.seq2seq.describe import read_decoder
from draftree.models.native.seq2seq.model import DecoderWeights, NativeEncoderDecoder
from draftree.models.torch.seq2seq.sources import reference_logits, source_facts
from draftree.sampling.decoding_rules import decoding_rules

logger = logging.getLogger(__name__)


def lower_encoder_decoder(model: Any, name: str, *, quantization: str | None = None) -> NativeEncoderDecoder:
    """Convert a model, and check it. The weights of its decoder are released.

    Args:
        model: a `…ForConditionalGeneration`.
        name: name in messages.
        quantization: "int8" or "int4" for weights of the decoder with 8 or 4 bits, None for the model's own.

    Raises:
        NativeUnavailableError: its architecture or this machine has no native kernels; the model is intact.
        NativeMismatchError: the native model computes other logits; weights were released.
        ModelLoadError: there is not enough memory.
    """
    model.eval().requires_grad_(False)
    dtype = str(model.dtype).removeprefix("torch.")
    mixed = {parameter.dtype for parameter in model.parameters()}
    if model.device.type != "cpu" or dtype not in DTYPES or len(mixed) > 1:
        raise NativeUnavailableError(
            f"passes in C are for float32 and bfloat16 on CPUs, not {' and '.join(sorted(map(str, mixed)))} on "
            f"{model.device}"
        )
    try:
        reference = _reference(model)
        blueprint, encoder = read_decoder(model)
        weights = DecoderWeights(model, {id(parameter) for parameter in encoder.parameters})
        facts, rules = source_facts(model), decoding_rules(model)
        ours = NativeEncoderDecoder(
            blueprint, weights, encoder=encoder, facts=facts, rules=rules, quantization=quantization
        )
    except (NativeUnavailableError, ModelLoadError):
        raise
    except Exception as error:  # a model's own code may raise anything
        if is_out_of_memory(error):
            raise ModelLoadError(f"model '{name}' could not be packed: {OUT_OF_MEMORY}") from error
        raise NativeUnavailableError(first_line(error)) from error
    result = check(ours, reference, tolerance=QUANTIZED_TOLERANCE.get(quantization or ""))
    if not (result.chains_ok and result.trees_ok):
        raise NativeMismatchError(f"its logits differ there (error {max(result.chain_error, result.tree_error):.1e})")
    if quantization == "int4":
        result = require_packed(ours, packed_source_reference(model, ours), result)
    ours.self_check = result
    ours.is_exact = result.is_exact and rounds_alike(ours, NATIVE_LENGTHS)
    if rules.note:
        logger.warning("%s", rules.note)
    return ours


def _reference(model: Any) -> ReferenceLogits:
    """Return the reference in float32 if the encoder computes in it, else in the model's dtype."""
    try:
        with in_float32(model):
            return reference_logits(model)
    except RuntimeError:  # convolutions of features keep their dtype
        return reference_logits(model)
