"""MTP: a decoder layer of the target's own kind that reads the target's last hidden state and the next token.

`eh_proj([enorm(embedding), hnorm(state)])`, one decoder layer with experts if the target has them, a norm, and the
target's output head. The states after the norm are recycled. The layer is the class that transformers has for the
target: its attention calls ours, which passes queries, keys and values to `Attend`. Keys and values of other widths
than queries are padded, so that all have one width.

Sources: DeepSeek-V3, arXiv 2412.19437; layouts and order of inputs as in transformers 5 (`MtpModel`).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.core.errors import ModelLoadError, UnsupportedModelError
from draftree.heads.base import Attend, FeatureHead, TargetParts
from draftree.heads.config import FULL, SLIDING, HeadConfig
from draftree.heads.layers import Shared
from draftree.heads.layouts.mtp import DENSE, HIDDEN_FIRST, LAYER_TYPES, MLP_TYPES, SPARSE
from draftree.heads.vocabulary import DraftVocabulary
from draftree.models.torch.attention import NAME, LayerCall, announced, register


@final
class LayerParts:
    """Layers with random weights, norm class and rotary positions of a model of transformers, for an MTP head.

    `layers`: usually one; those of Nemotron-H have either attention or a perceptron. `rotary` is None if the model has
    no rotary positions.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.config = _config(values)
        decoder = _model_of(self.config).get_decoder()
        example = decoder.layers[-1]
        self.norm = next(type(part) for name, part in example.named_modules() if "norm" in name)
        self.layers = [type(example)(self.config, index) for index in range(self.config.num_hidden_layers)]
        for layer in self.layers:
            if isinstance(getattr(getattr(layer, "self_attn", None), "indexer", None), nn.Module):
                layer.self_attn.indexer = AllKeys()
        rotary = getattr(decoder, "rotary_emb", None)
        with torch.device("cpu"):  # it has no weights, so it is made when weights are not
            self.rotary: nn.Module | None = None if rotary is None else type(rotary)(self.config)


@final
class AllKeys(nn.Module):
    """What takes the place of an index of keys: attention reads all of them."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Return no choice, which our attention does not read."""


def _model_of(config: Any) -> Any:
    """Return a model of transformers without values, whose attention is ours."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    register()
    loader: Any = AutoModelForCausalLM
    with torch.device("meta"):
        if type(config) in loader._model_mapping:
            return loader.from_config(config, attn_implementation=NAME)
        # the language model inside a model of images
        classes = vars(importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))).values()
        parts = [c for c in classes if isinstance(c, type) and issubclass(c, PreTrainedModel)]
        if found := next((c for c in parts if c.config_class is type(config)), None):
            return found._from_config(config, attn_implementation=NAME)
    raise ModelLoadError(f"transformers has no model of layers of '{config.model_type}'")


def _config(values: Mapping[str, Any]) -> Any:
    """Return a configuration whose layers are those of the head."""
    from transformers import AutoConfig, PreTrainedConfig

    known: dict[str, Any] = PreTrainedConfig._decode_special_floats(dict(values))
    try:
        whole: Any = AutoConfig.for_model(known.pop("model_type"), **known)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"the configuration of the layer of an MTP head cannot be used: {error}") from error
    config = copy.deepcopy(whole.get_text_config())
    if (blocks := getattr(config, "mtp_layers_block_type", None)) is not None:
        config.layer_types = blocks
    else:
        for name, chosen, usual in (("layer_types", LAYER_TYPES, FULL), ("mlp_layer_types", MLP_TYPES, SPARSE)):
            if (kinds := getattr(config, name, None)) is not None:
                stated = values.get(chosen) or getattr(config, chosen, None)
                setattr(config, name, stated[:1] if stated else [usual if usual in kinds else kinds[-1]])
    config.num_hidden_layers = 1
    if (heads := getattr(config, "num_sliding_attention_heads", None)) and config.layer_types == [SLIDING]:
        config.per_layer_config = {0: {"num_attention_heads": heads}}
    is_dense = DENSE in values.get(MLP_TYPES, ())
    # the first layer with experts, by the names of DeepSeek and ERNIE
    for name in ("first_k_dense_replace", "moe_layer_start_index"):
        if hasattr(config, name):
            setattr(config, name, int(is_dense))
    if hasattr(config, "indexer_types"):
        config.indexer_types = [FULL.removesuffix("_attention")]
    config._attn_implementation = NAME
    return config


@final
class LayerPass:
    """Handler of the layer's attention; `leading` are the dimensions of the head's rows before they are flattened."""

    def __init__(self, attend: Attend, leading: tuple[int, ...], window: int | None) -> None:
        self._attend = attend
        self._leading = leading
        self._window = window

    def note_mask(self, window: int | None) -> None:
        """Ignore masks: `attend` has its own."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from shape (sequences, heads, rows, head_dim) to (sequences, rows, heads, head_dim)."""
        if call.window != self._window or call.softcap is not None:
            raise ModelLoadError("the layer of this MTP head has a cap or a window of another kind: not supported")
        width = max(query.shape[-1], value.shape[-1])
        scale = call.scaling * width**0.5
        rows = [F.pad(part, (0, width - part.shape[-1])).transpose(1, 2) for part in (query * scale, key, value)]
        mixed = self._attend(0, *(part.reshape(*self._leading, *part.shape[1:]) for part in rows))
        return mixed.reshape(rows[0].shape)[..., : value.shape[-1]]


@final
class MtpHead(FeatureHead):
    """Head of kind `mtp`."""

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        parts = LayerParts(config.layer)
        width = config.hidden
        epsilon = getattr(parts.config, "rms_norm_eps", None) or parts.config.layer_norm_epsilon
        self.enorm, self.hnorm = parts.norm(width, eps=epsilon), parts.norm(width, eps=epsilon)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        layers = parts.layers
        self.block = layers[0] if len(layers) == 1 else nn.ModuleList(layers)
        self.norm = parts.norm(width, eps=epsilon) if config.has_norm else nn.Identity()
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False) if config.own_output else None
        self._rotary = [parts.rotary]  # in lists, so that they are no parts of the module
        self.is_hidden_first = bool(config.layer.get(HIDDEN_FIRST))
        self._config = parts.config
        self._has_index = any(isinstance(part, AllKeys) for part in self.modules())
        self._attention = [part for part in self.modules() if hasattr(part, "o_proj")]
        if (getattr(parts.config, "layer_types", None) or [FULL])[0] == SLIDING:
            self.window = getattr(self._attention[0], "sliding_window", None)
        self._shared: Shared | None = None
        self._finish: Callable[[Tensor], Tensor] | None = None

    @property
    def sinks(self) -> Tensor | None:
        sinks: Tensor | None = getattr(self._attention[0], "sinks", None)
        return sinks

    def bind(self, parts: TargetParts) -> None:
        """Set embedding, output head and final norm of the target."""
        self.require_target(parts)
        self._shared = Shared(parts, self.vocabulary, None, None if self.lm_head is None else self.lm_head.weight)
        self._finish = parts.finish

    @property
    def dtype(self) -> torch.dtype:
        return self.eh_proj.weight.dtype

    @property
    def shared(self) -> Shared:
        """Embedding and output of the target."""
        assert self._shared is not None, "a head is bound to a target before it runs"
        return self._shared

    @property
    def layers(self) -> list[Any]:
        """The layers, usually one."""
        return list(self.block) if isinstance(self.block, nn.ModuleList) else [self.block]

    def as_model(self) -> Any:
        """Return a model of transformers whose layers, norm, embedding and output are those of the head.

        Raises:
            UnsupportedModelError: transformers has the layers in a model of images only.
        """
        config = copy.deepcopy(self._config)
        config.tie_word_embeddings = False
        model = _model_of(config)
        if model.get_output_embeddings() is None:
            raise UnsupportedModelError(f"layers of '{config.model_type}' are in a model of images")
        decoder = model.get_decoder()
        decoder.layers = nn.ModuleList(self.layers)
        decoder.norm = self.norm if self.config.has_norm else decoder.norm.to_empty(device="cpu")
        if self._rotary[0] is not None:
            decoder.rotary_emb = self._rotary[0]
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
        angles = self._angles(flat, places)
        # layers with an index of keys cut a mask, which our attention does not read
        mask = flat.new_zeros(1, 1, 1, 1) if self._has_index else None
        with announced(LayerPass(attend, leading, self.window)):
            for layer in self.layers:
                states = layer(flat, attention_mask=mask, position_embeddings=angles, position_ids=places)
                flat = states[0] if isinstance(states, tuple) else states
        states = flat.reshape(x.shape)
        return self.norm(states if chosen is None else states.index_select(-2, chosen))

    def _angles(self, x: Tensor, places: Tensor) -> Any:
        """Return cosines and sines for rows of shape (sequences, rows, hidden); None without rotary positions."""
        rotary: Any = self._rotary[0]
        if rotary is None:
            return None
        kinds = getattr(self._config, "layer_types", None)
        if kinds and kinds[0] in (self._config.rope_parameters or ()):
            return rotary.to(x.device)(x, position_ids=places, layer_type=kinds[0])
        return rotary.to(x.device)(x, position_ids=places)

    def recycle(self, states: Tensor) -> Tensor:
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self.shared.logits(states)
