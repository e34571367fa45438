"""Heads of the EAGLE family that draft level by level: EAGLE-1 and 2 (`eagle`), EAGLE-3 and 3.1 (`eagle3`).

`eagle`: a product of the embedding of a token and the target's last hidden state before it, followed by decoder layers
of which the first has no input norm. The states are those of the target's last layer after its norm, so the target's
output head makes the logits.

`eagle3`: a product of several hidden states of the target; the attention of the first layer reads it beside the
embedding. The states have a norm and an output head of their own, or the target's rows.

Source: EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858; EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.core.errors import ConfigurationError
from draftree.heads.base import Attend, FeatureHead, TargetParts
from draftree.heads.config import HeadConfig
from draftree.heads.layers import Layer, Norm, Rotary, Rotation
from draftree.heads.vocabulary import DraftVocabulary


class EagleFamilyHead(FeatureHead):
    """Common parts of heads with decoder layers: embedding, rotary positions, output head."""

    def __init__(
        self, config: HeadConfig, vocabulary: DraftVocabulary, *, joins: bool, has_input_norm: bool = True
    ) -> None:
        super().__init__(config, vocabulary)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden) if config.own_embedding else None
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab_size, bias=False) if config.own_output else None
        self.layers = nn.ModuleList(
            Layer(config, index, joins=joins and index == 0, has_input_norm=has_input_norm or index > 0)
            for index in range(config.num_layers)
        )
        self._rotary = Rotary(config.rope, config.head_dim, config.max_length)
        self._embedding: Tensor | None = None
        self._output: Tensor | None = None
        self._finish: Callable[[Tensor], Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of all states."""
        return next(self.parameters()).dtype

    def bind(self, parts: TargetParts) -> None:
        """Set the parts that are shared with the target."""
        self.require_target(parts)
        shares = [
            name for name, module in (("embedding", self.embed_tokens), ("output head", self.lm_head)) if module is None
        ]
        if shares and parts.hidden != self.config.hidden:
            raise ConfigurationError(
                f"the head has states of width {self.config.hidden} and no {shares[0]} of its own, and the target's "
                f"has width {parts.hidden}: choose the target that it was made for, or another head"
            )
        if self.embed_tokens is None:
            self._embedding = parts.embedding
        if self.lm_head is None:
            ids = self.vocabulary.ids.to(parts.output.device)
            self._output = parts.output if self.vocabulary.is_full else parts.output[ids]
        self._finish = parts.finish

    @property
    def rotary(self) -> Rotary:
        """Rotary positions of all layers."""
        return self._rotary

    def embedding_weight(self) -> Tensor:
        """Return the embedding, its own or the target's, shape (vocabulary, hidden)."""
        weight = self._embedding if self.embed_tokens is None else self.embed_tokens.weight
        assert weight is not None, "a head without its own embedding is bound to a target before it runs"
        return weight

    def output_weight(self) -> Tensor:
        """Return the output head, its own or the target's rows, shape (draft vocabulary, hidden)."""
        weight = self._output if self.lm_head is None else self.lm_head.weight
        assert weight is not None, "a head without its own output is bound to a target before it runs"
        return weight

    def forget_output(self) -> None:
        """Forget the target's rows of the output head, which another copy replaces; `logits` cannot run then."""
        self._output = None

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return embeddings of tokens, not scaled, shape (..., rows, hidden), in the head's dtype."""
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens)
        assert self._embedding is not None, "a head without its own embedding is bound to a target before it runs"
        return F.embedding(tokens, self._embedding).to(self.dtype)

    def through_layers(
        self, states: Tensor, embedded: Tensor, positions: Tensor, attend: Attend, chosen: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream of the chosen rows after all layers, from that before the first."""
        cosines, sines = self._rotary.tables_at(positions, states)
        if positions.dim() == 1:  # a pass of decoding: half the time of an index
            cosines, sines = cosines.index_select(0, positions), sines.index_select(0, positions)
        else:
            cosines, sines = cosines[positions], sines[positions]
        rotated = Rotation(cosines.unsqueeze(-2), sines.unsqueeze(-2))
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            states = layer(states, embedded, rotated, attend, chosen if index == last else None)
        return states

    def outputs(self, states: Tensor) -> Tensor:
        """Return the product of states with the output head, float32, or float64 for float64 states."""
        if self.lm_head is not None:
            products: Tensor = self.lm_head(states)
        else:
            assert self._output is not None, "a head without its own output is bound to a target before it runs"
            products = F.linear(states.to(self._output.dtype), self._output)
        return products if products.dtype == torch.float64 else products.float()


@final
class EagleHead(EagleFamilyHead):
    """EAGLE-1 and EAGLE-2."""

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary, joins=False, has_input_norm=False)
        self.fc = nn.Linear(config.hidden + config.target_hidden, config.hidden, bias=config.fc_bias)
        if config.hidden != config.target_hidden:
            raise ConfigurationError(
                f"head: hidden is {config.hidden} and target_hidden {config.target_hidden}: they are equal for kind "
                "'eagle', whose states are those of the target"
            )

    def project(self, features: Tensor) -> Tensor:
        assert self._finish is not None, "the head is bound to a target before it reads hidden states"
        return self._finish(features[..., 0, :]).to(self.dtype)

    def run(
        self, tokens: Tensor, before: Tensor, positions: Tensor, attend: Attend, chosen: Tensor | None = None
    ) -> Tensor:
        embedded = self.embedded(tokens)
        joined = self.fc(torch.cat((embedded, before), dim=-1))
        return self.through_layers(joined, embedded, positions, attend, chosen)

    def recycle(self, states: Tensor) -> Tensor:
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self.outputs(states)


class Eagle3Head(EagleFamilyHead):
    """EAGLE-3 and EAGLE-3.1."""

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary, joins=True)
        count = len(config.features)
        width = config.target_hidden
        epsilon = config.epsilon
        self.fc = nn.Linear(count * width, config.hidden, bias=config.fc_bias)
        self.input_norm = Norm(count * width, epsilon) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(Norm(width, epsilon) for _ in range(count)) if config.fc_norm else None
        self.norm = Norm(config.hidden, epsilon)

    def project(self, features: Tensor) -> Tensor:
        features = features.to(self.dtype)
        if self.fc_norm is not None:
            features = torch.stack([norm(features[..., i, :]) for i, norm in enumerate(self.fc_norm)], dim=-2)
        joined = features.flatten(-2)
        return self.fc(joined if self.input_norm is None else self.input_norm(joined))

    def run(
        self, tokens: Tensor, before: Tensor, positions: Tensor, attend: Attend, chosen: Tensor | None = None
    ) -> Tensor:
        return self.through_layers(before, self.embedded(tokens), positions, attend, chosen)

    def recycle(self, states: Tensor) -> Tensor:
        """Return the states, after the final norm in EAGLE-3.1."""
        if not self.config.norm_output:
            return states
        return self.norm(states)

    def logits(self, states: Tensor) -> Tensor:
        return self.outputs(self.norm(states))
