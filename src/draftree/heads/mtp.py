"""MTP: a decoder layer of the target's own kind that reads the target's last hidden state and the next token.

`eh_proj([enorm(embedding), hnorm(state)])`, one decoder layer with experts if the target has them, a norm, and the
target's output head. The states after the norm are recycled. The layer is the class that transformers has for the
target: its attention calls ours, which passes queries, keys and values to `Attend`. Keys and values of other widths
than queries are padded, so that all have one width.

Sources: DeepSeek-V3, arXiv 2412.19437; layouts and order of inputs as in transformers 5 (`MtpModel`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.core.errors import ModelLoadError
from draftree.heads.base import Attend, FeatureHead, TargetParts
from draftree.heads.config import FULL, HeadConfig
from draftree.heads.layers import Shared
from draftree.heads.vocabulary import DraftVocabulary
from draftree.models.torch.attention import NAME, LayerCall, announced, register

SPARSE = "sparse"


@final
class LayerParts:
    """Decoder layer with random weights, norm class and rotary positions of a model of transformers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.config = _config(values)
        model = _model_of(self.config)
        example = model.get_decoder().layers[-1]
        if any(name.endswith("indexer") for name, _ in example.named_modules()):
            raise ModelLoadError(
                f"layers of '{self.config.model_type}' choose the keys that they attend to (an indexer): not supported"
            )
        self.norm = next(type(part) for name, part in example.named_modules() if "norm" in name)
        self.layer: nn.Module = type(example)(self.config, 0)
        rotary = getattr(model.get_decoder(), "rotary_emb", None)
        if rotary is None:
            raise ModelLoadError(f"layers of '{self.config.model_type}' have no rotary positions: not supported")
        with torch.device("cpu"):  # it has no weights, so it is made when weights are not
            self.rotary: nn.Module = type(rotary)(self.config)


def _model_of(config: Any) -> Any:
    """Return a model of transformers without values, whose attention is ours."""
    from transformers import AutoModelForCausalLM

    register()
    loader: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return loader.from_config(config, attn_implementation=NAME)


def _config(values: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    known = dict(values)
    try:
        whole: Any = AutoConfig.for_model(known.pop("model_type"), **known)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"the configuration of the layer of an MTP head cannot be used: {error}") from error
    config = copy.deepcopy(whole.get_text_config())
    config.num_hidden_layers = 1
    for name, only in (("layer_types", FULL), ("mlp_layer_types", SPARSE)):
        kinds = getattr(config, name, None)
        if kinds is not None:
            setattr(config, name, [only if only in kinds else kinds[-1]])
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0  # the layers of MTP are those with experts
    config._attn_implementation = NAME
    return config


@final
class LayerPass:
    """Handler of the layer's attention; `leading` are the dimensions of the head's rows before they are flattened."""

    def __init__(self, attend: Attend, leading: tuple[int, ...]) -> None:
        self._attend = attend
        self._leading = leading

    def note_mask(self, window: int | None) -> None:
        """Ignore masks: `attend` has its own."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from shape (sequences, heads, rows, head_dim) to (sequences, rows, heads, head_dim)."""
        if call.window is not None or call.softcap is not None or call.sinks is not None:
            raise ModelLoadError("the layer of this MTP head has a window, a cap or sinks: not supported")
        width = max(query.shape[-1], value.shape[-1])
        scale = call.scaling * width**0.5
        rows = [F.pad(part, (0, width - part.shape[-1])).transpose(1, 2) for part in (query * scale, key, value)]
        mixed = self._attend(0, *(part.reshape(*self._leading, *part.shape[1:]) for part in rows))
        return mixed.reshape(rows[0].shape)[..., : value.shape[-1]]


HIDDEN_FIRST = "mtp_hidden_states_first"
"""Value of a configuration with which the state comes before the embedding."""


@final
class MtpHead(FeatureHead):
    """Head of kind `mtp`."""

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        parts = LayerParts(config.layer)
        width = config.hidden
        self.enorm = parts.norm(width, eps=config.epsilon)
        self.hnorm = parts.norm(width, eps=config.epsilon)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.block = parts.layer
        self.norm = parts.norm(width, eps=config.epsilon)
        self._rotary = [parts.rotary]  # in a list, so that it is no part of the module
        self.is_hidden_first = bool(config.layer.get(HIDDEN_FIRST))
        self._config = parts.config
        self._shared: Shared | None = None
        self._finish: Callable[[Tensor], Tensor] | None = None

    def bind(self, parts: TargetParts) -> None:
        """Set embedding, output head and final norm of the target."""
        self.require_target(parts)
        self._shared = Shared(parts, self.vocabulary, None, None)
        self._finish = parts.finish

    @property
    def dtype(self) -> torch.dtype:
        return self.eh_proj.weight.dtype

    @property
    def shared(self) -> Shared:
        """Embedding and output of the target."""
        assert self._shared is not None, "a head is bound to a target before it runs"
        return self._shared

    def as_model(self) -> Any:
        """Return a model of transformers whose only layer, norm, embedding and output are those of the head."""
        config = copy.deepcopy(self._config)
        config.tie_word_embeddings = False
        model = _model_of(config)
        decoder = model.get_decoder()
        decoder.layers[0], decoder.norm, decoder.rotary_emb = self.block, self.norm, self._rotary[0]
        model.get_input_embeddings().weight = nn.Parameter(self.shared.embedding.to(self.dtype), requires_grad=False)
        model.get_output_embeddings().weight = nn.Parameter(self.shared.output.to(self.dtype), requires_grad=False)
        return model

    def project(self, features: Tensor) -> Tensor:
        assert self._finish is not None, "a head is bound to a target before it runs"
        return self._finish(features[..., 0, :]).to(self.dtype)

    def run(
        self, tokens: Tensor, before: Tensor, positions: Tensor, attend: Attend, chosen: Tensor | None = None
    ) -> Tensor:
        read = [self.enorm(self.shared.embed(tokens).to(self.dtype)), self.hnorm(before)]
        x = self.eh_proj(torch.cat(read[::-1] if self.is_hidden_first else read, dim=-1))
        leading = x.shape[:-2]
        rows = x.shape[-2]
        flat = x.reshape(-1, rows, x.shape[-1])
        places = positions.reshape(-1, rows)
        rotary: Any = self._rotary[0].to(x.device)
        angles = rotary(flat, position_ids=places)
        with announced(LayerPass(attend, leading)):
            states = self.block(flat, attention_mask=None, position_embeddings=angles, position_ids=places)
        if isinstance(states, tuple):
            states = states[0]
        states = states.reshape(x.shape)
        return self.norm(states if chosen is None else states.index_select(-2, chosen))

    def recycle(self, states: Tensor) -> Tensor:
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self.shared.logits(states)
