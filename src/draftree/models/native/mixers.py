"""Mixers with a state of a transformers model, identified by structure and values and not by the name of the family."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.native.blueprint import MAX_TAPS, MixerBlueprint, ShortConvolution
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.modules import LINEAR_TOLERANCE, Names, linear_of, part
from draftree.models.native.recurrences import has_decaying_state, linear_recurrence_of

PROBE_TOKENS = 2 * MAX_TAPS  # number of random inputs with which a mixer is compared


def convolution_of(module: nn.Module) -> nn.Conv1d | None:
    """Return the causal convolution of each channel that a mixer owns; None for none."""
    for child in module.children():
        if isinstance(child, nn.Conv1d) and child.groups == child.in_channels == child.out_channels:
            return child
    return None


def recurrent_mixer(layer: nn.Module) -> nn.Module | None:
    """Return the module of a layer that mixes tokens by a state; None for none."""
    return next((child for child in layer.children() if convolution_of(child) is not None), None)


def describe_mixer(layer: nn.Module, *, names: Names) -> MixerBlueprint:
    """Return the blueprint of a layer's mixer with a state."""
    mixer = recurrent_mixer(layer)
    convolution = None if mixer is None else convolution_of(mixer)
    if mixer is None or convolution is None:
        raise NativeUnavailableError(f"{type(layer).__name__} has neither attention nor a mixer with a convolution")
    taps = convolution.kernel_size[0]
    if taps > MAX_TAPS:
        raise NativeUnavailableError(f"its convolutions are over {taps} tokens, of {MAX_TAPS} at most")
    if convolution.dilation != (1,) or convolution.stride != (1,) or convolution.padding != (taps - 1,):
        raise NativeUnavailableError("its convolutions leave out tokens")
    if has_decaying_state(mixer):
        return linear_recurrence_of(mixer, convolution, names=names)
    own = {name for name, _ in mixer.named_parameters(recurse=False)}
    if own:
        raise NativeUnavailableError(f"{type(mixer).__name__} has parameters of unknown use ({min(own)}, …)")
    return _short_convolution(mixer, convolution, names=names)


def _short_convolution(mixer: Any, convolution: nn.Conv1d, *, names: Names) -> MixerBlueprint:
    channels = convolution.in_channels
    inputs = linear_of(part(mixer, "in_proj"), "'in_proj'", names=names)
    output = linear_of(part(mixer, "out_proj"), "'out_proj'", names=names)
    if inputs.outputs != 3 * channels or output.inputs != channels:
        raise NativeUnavailableError(
            f"{type(mixer).__name__} has {channels} channels, {inputs.outputs} inputs and {output.inputs} results"
        )

    def computed(x: Tensor) -> Tensor:
        before, gate, values = F.linear(x, mixer.in_proj.weight, mixer.in_proj.bias).mT.chunk(3, dim=1)
        mixed = convolution(before * values)[..., : x.shape[1]] * gate
        return F.linear(mixed.mT, mixer.out_proj.weight, mixer.out_proj.bias)

    _require_values(mixer, computed, inputs.inputs)
    recurrence = ShortConvolution(
        names.of(convolution), names.of_bias(convolution), convolution.kernel_size[0], channels
    )
    return MixerBlueprint((inputs,), recurrence, output)


@torch.inference_mode()
def _require_values(mixer: Any, computed: Any, inputs: int) -> None:
    """Check that a mixer's results for random inputs are those that a function computes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, PROBE_TOKENS, inputs, generator=generator).to(next(mixer.parameters()).dtype)
    result = mixer(x)
    result = result[0] if isinstance(result, tuple) else result
    wanted = computed(x)
    if not (result - wanted).abs().max() <= LINEAR_TOLERANCE * wanted.abs().max():
        raise NativeUnavailableError(f"{type(mixer).__name__} mixes tokens in another way")
