"""Conversion of a GGUF file to a plain model folder: configuration, tokenizer and weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftree.core.errors import DraftreeError, ModelLoadError, UnsupportedModelError, panics_as_errors, suggestion
from draftree.weights.cache import Progress
from draftree.weights.folders import check_sizes, parameter_shapes, save_configuration
from draftree.weights.gguf_file import Dtype, GgufFile
from draftree.weights.safetensors_file import write_safetensors
from draftree.weights.tokenizers_from_pieces import (
    CUTTING_RULES,
    WORD_START,
    TokenizerSettings,
    byte_level_tokenizer,
    save_tokenizer,
    sentencepiece_tokenizer,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[np.float32]]
Settings = dict[str, Any]

GEMMA3_GLOBAL_EVERY = 6
GEMMA3_LOCAL_THETA = 10_000.0
GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class Architecture:
    """One supported architecture: its names in GGUF and transformers, its configuration, and its tensor layout.

    `restore(name, values, settings)` undoes the changes that the conversion to GGUF made to a tensor; `name` is the
    transformers parameter name.
    """

    model_type: str
    model_class: str
    settings: Callable[[GgufFile], Settings]
    restore: Callable[[str, Array, Settings], Array]


def shared_settings(file: GgufFile) -> Settings:
    get = file.setting
    if get("block_count") > len(file.tensors):
        raise file.broken(f"it declares {get('block_count')} layers and has {len(file.tensors)} tensors")
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden_size // num_heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"'{file.path}' rotates only part of each head, which cannot be unpacked from GGUF: "
            "use the model's own folder"
        )
    return {
        "vocab_size": file.tensor("token_embd.weight").shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": shortest_float(get("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope_parameters(file, theta=get("rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def rope_parameters(file: GgufFile, *, theta: float) -> Settings:
    """Return the rotary embedding parameters; a file's factors per frequency become transformers' longrope."""
    parameters: Settings = {"rope_theta": shortest_float(theta), "rope_type": "default"}
    kind = file.setting("rope.scaling.type", "none")
    if kind == "linear":
        factor = file.setting("rope.scaling.factor")
        return parameters if factor == 1 else parameters | {"rope_type": "linear", "factor": shortest_float(factor)}
    if kind != "none":
        raise UnsupportedModelError(
            f"'{file.path}' scales positions by the rule '{kind}', which a GGUF file does not describe completely: "
            "use the model's own folder"
        )
    if "rope_freqs.weight" in file.tensors:
        factors = [float(factor) for factor in file.read("rope_freqs.weight").ravel()]
        parameters |= {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": file.setting("context_length"),
        }
    return parameters


def _llama_settings(file: GgufFile) -> Settings:
    settings = dense_settings(file)
    return settings | {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def dense_settings(file: GgufFile) -> Settings:
    if file.setting("expert_count", 0):
        raise UnsupportedModelError(
            f"'{file.path}' is a mixture of experts of an architecture that cannot be unpacked from GGUF: "
            "use the model's own folder"
        )
    return shared_settings(file)


def expert_settings(file: GgufFile) -> Settings:
    settings = shared_settings(file)
    architecture = file.metadata["general.architecture"]
    settings["num_experts"] = file.setting("expert_count")
    settings["num_experts_per_tok"] = file.setting("expert_used_count")
    settings["moe_intermediate_size"] = file.setting("expert_feed_forward_length")
    if architecture == "qwen2moe":
        settings["shared_expert_intermediate_size"] = file.setting("expert_shared_feed_forward_length")
    # the files do not say whether the weights of a row's experts are scaled to a sum of 1: Qwen3 does, Qwen2 does not
    return settings | {"norm_topk_prob": architecture == "qwen3moe", "decoder_sparse_step": 1, "mlp_only_layers": []}


def _gemma3_settings(file: GgufFile) -> Settings:
    settings = dense_settings(file)
    num_layers, num_heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    # The one size whose attention is not scaled by its head size; llama.cpp also identifies it by its depth.
    wide = num_layers == GEMMA3_27B_LAYERS
    return settings | {
        "sliding_window": file.setting("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if layer % GEMMA3_GLOBAL_EVERY else "full_attention"
            for layer in range(1, num_layers + 1)
        ],
        "query_pre_attn_scalar": settings["hidden_size"] // num_heads if wide else settings["head_dim"],
        "rope_parameters": {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": {"rope_theta": GEMMA3_LOCAL_THETA, "rope_type": "default"},
        },
    }


def _as_stored(name: str, values: Array, settings: Settings) -> Array:
    return values


def pairs_to_halves(values: Array, num_heads: int) -> Array:
    """Reorder the rows of a query or key projection from adjacent rotated pairs to rotated halves.

    Row 2i + j of a head becomes row j * (head_dim / 2) + i: from the layout of Meta's and llama.cpp's code to
    that of transformers.
    """
    rows, columns = values.shape[0], values.shape[1:]
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, *columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _restore_llama(name: str, values: Array, settings: Settings) -> Array:
    if ".q_proj." in name:
        return pairs_to_halves(values, settings["num_attention_heads"])
    if ".k_proj." in name:
        return pairs_to_halves(values, settings["num_key_value_heads"])
    return values


def _restore_gemma(name: str, values: Array, settings: Settings) -> Array:
    # GGUF stores the factor of a normalization, transformers the factor minus one.
    return values - np.float32(1) if "norm" in name else values


def shortest_float(value: float) -> float:
    """Return the shortest decimal number of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama_settings, _restore_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", dense_settings, _as_stored),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", expert_settings, _as_stored),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", dense_settings, _as_stored),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", expert_settings, _as_stored),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3_settings, _restore_gemma),
}


CONTROL, USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`

ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
END_ROLES = ("eos", "eot", "eom")
TURN_ENDS = frozenset(
    {
        "<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>",
        "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>",
    }
)  # fmt: skip
"""Pieces that end a turn in the chat templates of known families. Files often declare the end of a document only."""
MESSAGE_END = "<|end|>"
ANSWER_END = "<|return|>"
"""With the second in the vocabulary (gpt-oss), the first ends a message, after which the answer goes on."""


def save_gguf_tokenizer(file: GgufFile, folder: Path) -> None:
    pieces = _spelled_pieces(file)
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    roles = {role: index for role, key in ROLES.items() if (index := token_id(file, key)) is not None}
    special = {index for index, kind in enumerate(kinds) if kind == CONTROL} | set(end_ids(file))
    # Older files lack the key: SentencePiece vocabularies begin every text with the bos token.
    is_sentencepiece = file.metadata.get("tokenizer.ggml.model") == "llama"
    adds_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece))
    if adds_bos and "bos_token" not in roles:
        raise file.broken(
            "texts of its model begin with a bos token, and it does not say which one (tokenizer.ggml.bos_token_id)"
        )
    settings = TokenizerSettings(
        special=tuple(sorted(special)),
        # Runs of spaces match as ordinary pieces: text is normalized before the merges, after these are searched.
        whole=tuple(
            index
            for index, kind in enumerate(kinds)
            if kind == USER_DEFINED and WORD_START not in pieces[index] and index not in special
        ),
        roles=roles,
        adds_bos=adds_bos,
        context_length=file.setting("context_length"),
        chat_template=file.metadata.get("tokenizer.chat_template"),
    )
    save_tokenizer(_built_tokenizer(file, pieces), pieces, settings, folder=folder)


def _spelled_pieces(file: GgufFile) -> list[str]:
    pieces = file.metadata.get("tokenizer.ggml.tokens")
    if not pieces:
        raise file.broken("it has no vocabulary")
    if file.metadata.get("tokenizer.ggml.model") == "llama":
        pieces = [piece.replace(" ", WORD_START) for piece in pieces]
    if len(set(pieces)) != len(pieces):
        raise file.broken("two pieces of its vocabulary have the same text")
    return list(pieces)


def token_id(file: GgufFile, role: str) -> int | None:
    """Return the id of the token with a role, such as "bos"; None if the file declares none."""
    key = f"tokenizer.ggml.{role}_token_id"
    index = file.metadata.get(key)
    count = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if index is not None and (not isinstance(index, int) or not 0 <= index < count):
        raise file.broken(f"{key} is {index}, and its vocabulary has {count} pieces")
    return index


def end_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end a text: those that the file declares, and the `TURN_ENDS` in its vocabulary."""
    pieces = {piece: index for index, piece in enumerate(_spelled_pieces(file))}
    declared = [index for role in END_ROLES if (index := token_id(file, role)) is not None]
    named = TURN_ENDS - ({MESSAGE_END} if ANSWER_END in pieces else set())
    return tuple(dict.fromkeys([*declared, *sorted(pieces[piece] for piece in named if piece in pieces)]))


def _built_tokenizer(file: GgufFile, pieces: list[str]) -> Tokenizer:
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        unknown = token_id(file, "unknown")
        # Gemma's scores do not give the order of merges; its pieces are stored in that order.
        is_gemma = file.metadata["general.architecture"].startswith("gemma")
        scores = file.metadata["tokenizer.ggml.scores"] if not is_gemma else ()
        return sentencepiece_tokenizer(
            pieces,
            list(range(len(pieces))) if is_gemma else [-score for score in scores],
            starts_with_space=bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True)),
            unknown=None if unknown is None else pieces[unknown],
        )
    rule = file.metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and rule in CUTTING_RULES:
        return byte_level_tokenizer(pieces, file.metadata["tokenizer.ggml.merges"], rule=rule)
    raise UnsupportedModelError(
        f"the tokenizer in '{file.path}' is of the kind '{kind}' and splits text by the rule '{rule}', "
        f"which is not supported: use the model's own folder "
        f"(known: kind 'llama', and kind 'gpt2' with {', '.join(CUTTING_RULES)})"
    )


JOINED = "+"  # between the names of tensors that make one parameter
GGUF_CONVERTER = "gguf-2"  # changes whenever the same file would convert to a different folder

EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")  # weights of all experts of a layer
TENSORS_READ_ELSEWHERE = frozenset({"rope_freqs.weight"})


class GgufModel:
    """A GGUF file by the parameters of its model in transformers.

    `sources` maps each to its tensor. Gate and up projections of experts are two tensors of the file, whose names are
    joined by `JOINED`.
    """

    def __init__(self, file: GgufFile, settings: Settings, sources: dict[str, str]) -> None:
        self.file = file
        self.settings = settings
        self.sources = sources
        self._architecture = ARCHITECTURES[file.metadata["general.architecture"]]

    def parts(self, name: str) -> list[str]:
        return self.sources[name].split(JOINED)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter; tensors of one shape are joined in their last dimension but one."""
        parts = self.parts(name)
        shapes = [self.file.tensor(part).shape for part in parts]
        if len(shapes) == 1:
            return shapes[0]
        if len(set(shapes)) > 1 or len(shapes[0]) != 3:
            raise self.file.broken(f"the tensors {parts} have the shapes {shapes}")
        experts, outputs, inputs = shapes[0]
        return experts, len(shapes) * outputs, inputs

    def read(self, name: str) -> Array:
        """Return the values of a parameter in the layout of transformers, float32, contiguous."""
        parts = [self.file.read(part) for part in self.parts(name)]
        return self.restored(name, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2))

    def restored(self, name: str, values: Array) -> Array:
        values = self._architecture.restore(name, values, self.settings)
        return np.require(values, requirements=["C", "W"])


def convert_gguf(source: Path, folder: Path, *, dtype: Dtype, progress: Progress) -> None:
    """Write configuration, weights (rounded to `dtype`) and tokenizer of a GGUF file into the empty `folder`."""
    model, shapes = save_description(GgufFile(source), folder, dtype=dtype)

    def read(name: str) -> Array:
        values = model.read(name)
        if not np.isfinite(values).all():
            raise ModelLoadError(
                f"'{source}' is damaged: tensor '{model.sources[name]}' has values that are not finite"
            )
        return values

    write_safetensors(folder / "model.safetensors", shapes, read, dtype=dtype, progress=progress)


def save_description(file: GgufFile, folder: Path, *, dtype: Dtype) -> tuple[GgufModel, dict[str, tuple[int, ...]]]:
    """Write tokenizer and configuration; return the model, and the shapes of its parameters."""
    try:
        with panics_as_errors():
            return _saved_description(file, folder, dtype)
    except (DraftreeError, OSError):
        raise
    except Exception as error:
        # Damaged metadata can fail anywhere in the libraries that build a model from it.
        raise file.broken(f"its metadata do not describe a model ({error})") from error


def _saved_description(file: GgufFile, folder: Path, dtype: Dtype) -> tuple[GgufModel, dict[str, tuple[int, ...]]]:
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"'{file.path}' holds a model of the architecture '{name}', which cannot be unpacked from GGUF: "
            f"use the model's own folder; {suggestion(str(name), ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise UnsupportedModelError(
            f"'{file.path}' is one part of a model that was split into {file.metadata['split.count']} files: "
            "join them with 'llama-gguf-split --merge' first"
        )
    architecture = ARCHITECTURES[name]
    settings = architecture.settings(file)
    num_values = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    check_sizes(file.path, settings, num_tensors=len(file.tensors), num_values=num_values)
    save_gguf_tokenizer(file, folder)
    ends = end_ids(file)
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
    special = {name: index for role, name in names.items() if (index := token_id(file, role)) is not None}
    config = save_configuration(
        folder,
        model_type=architecture.model_type,
        model_class=architecture.model_class,
        settings=settings | special,
        dtype=dtype,
        stop_ids=ends if len(ends) > 1 else (),
    )
    model = GgufModel(file, settings, {})
    shapes = parameter_shapes(config)
    _find_sources(model, shapes)
    return model, shapes


def _find_sources(model: GgufModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Find the tensor of every parameter; each tensor of the file must be used, and match in shape."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    file = model.file
    name = model.file.metadata["general.architecture"]
    arch = next(arch for arch, spelled in MODEL_ARCH_NAMES.items() if spelled == name)
    names = get_tensor_name_map(arch, file.setting("block_count"))
    for parameter, shape in shapes.items():
        source: str | None
        if expert := EXPERTS.fullmatch(parameter):
            parts = ("gate", "up") if expert[2] == "gate_up" else ("down",)
            source = JOINED.join(f"blk.{expert[1]}.ffn_{part}_exps.weight" for part in parts)
        else:
            source = names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if source is None:
            raise UnsupportedModelError(f"'{file.path}': no GGUF tensor is known for the parameter '{parameter}'")
        model.sources[parameter] = source
        if (stored := model.shape(parameter)) != shape:
            raise file.broken(f"tensor '{source}' has the shape {list(stored)}, and its metadata declare {list(shape)}")
    used = {part for parameter in shapes for part in model.parts(parameter)}
    if unused := sorted(set(file.tensors) - used - TENSORS_READ_ELSEWHERE):
        raise UnsupportedModelError(
            f"'{file.path}' holds tensors that do not belong to a model of its architecture '{name}' "
            f"({', '.join(unused[:3])}): use the model's own folder"
        )
