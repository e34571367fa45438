"""MTP: a decoder layer of the target's own kind that reads the target's last hidden state and the next token.

`eh_proj([enorm(embedding), hnorm(state)])`, one decoder layer with experts if the target has them, a norm, and the
target's output head. The states after the norm are recycled.

Sources: DeepSeek-V3, arXiv 2412.19437; layouts and order of inputs as in transformers 5 (`MtpModel`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from draftree.heads.base import Attend, FeatureHead
from draftree.heads.config import HeadConfig
from draftree.heads.decoder_parts import Shared
from draftree.heads.mtp_layers import LayerParts, run_layer
from draftree.heads.target_parts import TargetParts
from draftree.heads.vocabulary import DraftVocabulary

HIDDEN_FIRST = "mtp_hidden_states_first"
"""Value of a configuration with which the state comes before the embedding."""


@final
class MtpHead(FeatureHead):
    """Head of kind `mtp`.

    Args:
        config: its configuration.
        vocabulary: the tokens that it can propose, all of them.

    Raises:
        ModelLoadError: transformers does not have the layer.
    """

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        parts, width = LayerParts(config.layer), config.hidden
        self.enorm = parts.norm(width, eps=config.epsilon)
        self.hnorm = parts.norm(width, eps=config.epsilon)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = parts.layer
        self.norm = parts.norm(width, eps=config.epsilon)
        self._rotary = [parts.rotary]  # in a list, so that it is no part of the module
        self._is_hidden_first = bool(config.layer.get(HIDDEN_FIRST))
        self._shared: Shared | None = None
        self._finish: Callable[[Tensor], Tensor] | None = None

    def bind(self, parts: TargetParts) -> None:
        """Set embedding, output head and final norm of the target."""
        self.require_target(parts)
        self._shared = Shared(parts, self.vocabulary, None, None)
        self._finish = parts.finish

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.eh_proj.weight.dtype

    def project(self, features: Tensor) -> Tensor:
        """Return the target's last states after its final norm."""
        assert self._finish is not None, "a head is bound to a target before it runs"
        return self._finish(features[..., 0, :]).to(self.dtype)

    def run(
        self, tokens: Tensor, before: Tensor, positions: Tensor, attend: Attend, chosen: Tensor | None = None
    ) -> Tensor:
        """Return the states after the layer and the norm."""
        assert self._shared is not None, "a head is bound to a target before it runs"
        read = [self.enorm(self._shared.embed(tokens).to(self.dtype)), self.hnorm(before)]
        x = self.eh_proj(torch.cat(read[::-1] if self._is_hidden_first else read, dim=-1))
        leading, rows = x.shape[:-2], x.shape[-2]
        flat, places = x.reshape(-1, rows, x.shape[-1]), positions.reshape(-1, rows)
        rotary: Any = self._rotary[0].to(x.device)
        states = run_layer(self.block, flat, rotary(flat, position_ids=places), places, _Shaped(attend, leading))
        states = states.reshape(x.shape)
        found: Tensor = self.norm(states if chosen is None else states.index_select(-2, chosen))
        return found

    def recycle(self, states: Tensor) -> Tensor:
        """Return the states."""
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Return the target's logits of the states."""
        assert self._shared is not None, "a head is bound to a target before it runs"
        return self._shared.logits(states)


class _Shaped:
    """Attention with the leading dimensions of the head's rows."""

    def __init__(self, attend: Attend, leading: tuple[int, ...]) -> None:
        self._attend, self._leading = attend, leading

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = [part.reshape(*self._leading, *part.shape[1:]) for part in (query, key, value)]
        return self._attend(layer, *rows).reshape(query.shape)
