"""Sources of encoder-decoder models: what the encoder reads, and the models whose slots refer to one.

A source is a value. A model encodes it when the first slot is opened on it, computes its cross-attention keys and
values once, and keeps them while a slot refers to them; equal sources share them, and forks refer to the same source.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import LanguageModel, Pass, PassResult, Slot
from draftree.sampling.decoding_rules import DecodingRules


@dataclass(frozen=True, slots=True)
class TokenSource:
    tokens: tuple[int, ...]  # at least one token id, special tokens included, without padding


@dataclass(frozen=True, slots=True)
class FeatureSource:
    """Source of features, such as a spectrogram; equal if shape and values are equal."""

    features: np.ndarray = field(compare=False)  # float32 of shape (channels, frames); read only
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        values = np.ascontiguousarray(self.features, dtype=np.float32)
        content = hashlib.sha256(str(values.shape).encode() + values.tobytes()).hexdigest()
        object.__setattr__(self, "features", values)
        object.__setattr__(self, "digest", content)

    @property
    def tokens(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class HiddenSource:
    """Source that an encoder has read already; equal to itself only."""

    hidden: Any  # the encoder's output, a tensor of shape (1, length, features)

    @property
    def tokens(self) -> tuple[int, ...]:
        return ()


Source = TokenSource | FeatureSource | HiddenSource


class EncoderDecoder(LanguageModel):
    """A language model whose texts depend on a source."""

    rules: DecodingRules  # settings of its generation configuration
    source_vocab_size: int  # number of token ids of a source; 0 if sources are features
    max_source_length: int  # maximum length of a source of tokens
    feature_shape: tuple[int, int] | None = None  # required shape of features; None if sources are tokens
    probe_source: Source  # short source for checks and measurements

    @abstractmethod
    def open_on(self, source: Source) -> Slot:
        """Return an empty slot on a source, which is encoded unless a slot on an equal one is open."""

    @abstractmethod
    def source_length(self, source: Source) -> int:
        """Return the number of positions of a source after the encoder; each takes the memory of one token."""

    def run_attending(self, pass_: Pass) -> tuple[PassResult, list[np.ndarray]]:
        """Run a pass, and return where its tokens attend to in their sources.

        Returns:
            The result; and for each job the weights of the last layer's cross-attention, the mean over its heads,
            float32 of shape (tokens, source length). The weights of a token are those with which the next one is
            predicted.

        Raises:
            UnsupportedModelError: the model does not return them.
        """
        raise UnsupportedModelError(f"{type(self).__name__} does not return the weights of its cross-attention")

    @property
    @abstractmethod
    def num_sources(self) -> int:
        """Number of encoded sources that slots refer to."""

    def open(self) -> Slot:
        raise UnsupportedModelError(f"{type(self).__name__} decodes from a source: open a slot on one by open_on")

    def open_probe(self) -> Slot:
        return self.open_on(self.probe_source)
