"""Draft model: a smaller model proposes a chain or a tree, one pass per level, also with another tokenizer.

If the verifier allows it, candidates are ranked with the request's noise, which matches the target token more often
than an independent draw. Vocabularies are compared token by token. If they differ, the draft model reads the text in
its own tokens, and its proposals are mapped by the common tokens (`map=tokens`) or as strings that are tokenized again
(`map=strings`). By tokens, the noise is shared and the draft has a distribution, so every verifier accepts it, but
tokens that the draft model lacks are never proposed. By strings, any text can be proposed, ranked by probability and
without the noise, so fewer tokens are accepted above temperature 0.

Source: Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318; shared noise: Daliri et al.,
arXiv 2408.07978; other vocabularies: Timor et al., arXiv 2502.05202. Costs one pass of the draft model for every
level. Loses if that is not much less than a pass of the target, or if the models rarely agree.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch

from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.tree import Draw
from draftree.drafters.base import DraftContext, DraftTraits, LoadedDraftModel, require_range
from draftree.drafters.tree_builder.builder import TreeBuildingDrafter, TreeOptions
from draftree.drafters.tree_builder.model_stepper import ModelStepper, Reader, SameReader, require_same_source
from draftree.drafters.tree_builder.vocabularies import (
    MAPS,
    STRINGS,
    TOKENS,
    CommonReader,
    StringTreeBuilder,
    translation_between,
)
from draftree.loading.apart import load_apart
from draftree.loading.blocks import quantization_beside
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel, load_tokenizer
from draftree.loading.resolve import prepared_folder
from draftree.models.memory import Footprint
from draftree.models.native.build import NativeUnavailableError
from draftree.models.source import EncoderDecoder
from draftree.options import QUANTIZATIONS, ModelOptions

logger = logging.getLogger(__name__)


def model_reader(
    target: LoadedModel, dtype: Any, device: str, *, kernels: str, trust_remote_code: bool
) -> Callable[..., LoadedDraftModel]:
    """Return a function that loads a drafter's model from files.

    Its weights have 8 bits if the target's have and it has native kernels, or if that is requested: drafts never change
    a text.
    """
    load = partial(load_model, dtype=dtype, device=device, kernels=kernels, trust_remote_code=trust_remote_code)

    def read(name: str, quantization: str | None = None) -> LoadedDraftModel:
        try:
            loaded = load(name, quantization=quantization or quantization_beside(name, target.quantization))
        except NativeUnavailableError as reason:
            if quantization is not None or target.quantization is None:
                raise
            logger.info("drafter '%s' keeps its own weights: %s", name, reason)
            loaded = load(name, quantization=None)
        if loaded.kernels_note is not None and loaded.fallback_reason != target.fallback_reason:
            logger.warning("drafter '%s': %s", loaded.name, loaded.kernels_note)
        folder = loaded.folder
        tokenizer = None if folder is None else load_tokenizer(folder, trust_remote_code=trust_remote_code)
        return LoadedDraftModel(loaded.model, tokenizer, os.fspath(name))

    return read


def apart_reader(target_quantization: str | None, *, trust_remote_code: bool) -> Callable[..., LoadedDraftModel]:
    """Return a function that loads a drafter's model in a process of its own, on the CPU."""

    def read(name: str, quantization: str | None = None) -> LoadedDraftModel:
        folder = prepared_folder(name)
        options = ModelOptions(
            name,
            device="cpu",
            threads=torch.get_num_threads(),
            quantization=quantization or quantization_beside(name, target_quantization),
            trust_remote_code=trust_remote_code,
        )
        model = load_apart(options, must_quantize=quantization is not None)
        return LoadedDraftModel(model, load_tokenizer(folder, trust_remote_code=trust_remote_code), name)

    return read


MAX_STOPS = 16
"""Largest value of `ahead`: each place is a text that the draft model reads."""


@final
class ModelDrafter(TreeBuildingDrafter):
    """Drafter that grows trees with a loaded model."""

    @dataclass(frozen=True, slots=True)
    class Config(TreeOptions):
        """`model:NAME`: a catalogue name, a folder, a GGUF file or a hub id.

        `k`: maximum number of levels; `tree`: the shape, chain, 1-1-3-1-1, best-32, iid-2-2-1 or wor-2-2-1; `map`: the
        mapping between vocabularies, tokens, strings or auto, which is tokens if enough of them are common; `ahead`:
        number of places of a tree after which the model, in a process of its own, drafts while the target verifies;
        `bits`: int8 or int4 for weights of 8 or 4 bits; by default those of `quantization`, int8 beside a GGUF file or
        a checkpoint of 4 bits, else the model's own, which models in blocks of their files keep.
        """

        name: str = field(metadata={"argument": True, "names_model": True})
        k: int | None = None
        tree: str = "chain"
        map: str = "auto"
        ahead: int = 0
        bits: str | None = None

        def __post_init__(self) -> None:
            TreeOptions.__post_init__(self)
            if self.map not in MAPS:
                raise ConfigurationError(
                    f"option map is '{self.map}', which is not a mapping between vocabularies: "
                    f"{suggestion(self.map, MAPS)}"
                )
            if self.bits is not None and self.bits not in QUANTIZATIONS:
                raise ConfigurationError(
                    f"drafter 'model' has weights of kind '{self.bits}': {suggestion(self.bits, list(QUANTIZATIONS))}"
                )
            require_range("model", self, "ahead", least=0, most=MAX_STOPS)
            if self.ahead and Draw.FREE not in self.draws:
                raise ConfigurationError(
                    f"drafter 'model' has tree={self.tree} with ahead={self.ahead}: draws belong to one text, and "
                    "trees that are drafted ahead to several; use a tree of free choices such as chain or best-32"
                )
            if self.ahead and self.map == STRINGS:
                raise ConfigurationError(
                    f"drafter 'model' has map={STRINGS} with ahead={self.ahead}: use map={TOKENS}, or leave ahead out"
                )
            if not self.draws:
                raise ConfigurationError(
                    f"drafter 'model' has tree={self.tree} with map={STRINGS}: draws are of single tokens, and strings "
                    f"are tokenized again; use map={TOKENS}, or a tree of free choices such as chain or best-32"
                )

        @property
        def draws(self) -> frozenset[Draw]:
            """Draws of the shape; free choices only with strings."""
            return self.shape.draws & {Draw.FREE} if self.map == STRINGS or self.ahead else self.shape.draws

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        return replace(
            super().describe(config),
            draws=config.draws,
            reads_sources=True,
            ahead=config.ahead,
        )

    def __init__(self, config: Config, context: DraftContext) -> None:
        load = context.load_model
        if config.ahead:
            if context.load_apart is None or isinstance(context.target, EncoderDecoder):
                raise ConfigurationError("drafter 'model' cannot draft during this target's passes: leave ahead out")
            load = context.load_apart
        loaded = load(config.name) if config.bits is None else load(config.name, quantization=config.bits)
        require_same_source(loaded, context.target)
        self._model = loaded.model
        translation = translation_between(config.map, loaded, context)
        if translation is not None and isinstance(context.target, EncoderDecoder):
            raise ConfigurationError(
                f"drafter '{loaded.name}' has other tokens than the target, whose source it reads in the target's "
                "tokens: choose a drafter with the same tokenizer"
            )
        self._note = "" if translation is None else str(translation)
        if translation is not None and translation.way == STRINGS:
            self._builder = StringTreeBuilder(loaded.model, shape=config.shape, translation=translation)
            return
        reader: Reader
        if translation is None:
            reads_source = not isinstance(loaded.model, EncoderDecoder)
            reader = SameReader(loaded.model.vocab_size, context.target.vocab_size, reads_source=reads_source)
        else:
            reader = CommonReader(translation)
        self._build(ModelStepper(loaded.model, reader), config.shape, context)

    @property
    def footprint(self) -> Footprint:
        return self._model.footprint
