"""Conversion of a GGUF file to a plain model folder: configuration, tokenizer and weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
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
    import torch
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
    prefix = file.metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        value = file.metadata.get(f"{prefix}.{key}", default)
        if value is None:
            raise file.broken(f"it lacks the key '{prefix}.{key}'")
        return value

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
    prefix = file.metadata["general.architecture"]
    parameters: Settings = {"rope_theta": shortest_float(theta), "rope_type": "default"}
    kind = file.metadata.get(f"{prefix}.rope.scaling.type", "none")
    if kind == "linear":
        factor = file.metadata[f"{prefix}.rope.scaling.factor"]
        return parameters if factor == 1 else parameters | {"rope_type": "linear", "factor": shortest_float(factor)}
    if kind != "none":
        raise UnsupportedModelError(
            f"'{file.path}' scales positions by the rule '{kind}', which a GGUF file does not describe completely: "
            "use the model's own folder"
        )
    if "rope_freqs.weight" in file.tensors:
        factors = [float(factor) for factor in file.read("rope_freqs.weight").ravel()]
        context = file.metadata[f"{prefix}.context_length"]
        parameters |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        parameters |= {"attention_factor": 1.0, "factor": 1.0, "original_max_position_embeddings": context}
    return parameters


def _llama_settings(file: GgufFile) -> Settings:
    settings = dense_settings(file)
    return settings | {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": False}


def dense_settings(file: GgufFile) -> Settings:
    if file.metadata.get(f"{file.metadata['general.architecture']}.expert_count", 0):
        raise UnsupportedModelError(
            f"'{file.path}' is a mixture of experts of an architecture that cannot be unpacked from GGUF: "
            "use the model's own folder"
        )
    return shared_settings(file)


def expert_settings(file: GgufFile) -> Settings:
    settings, prefix = shared_settings(file), file.metadata["general.architecture"]
    keys = {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    }
    if prefix == "qwen2moe":
        keys["shared_expert_intermediate_size"] = "expert_shared_feed_forward_length"
    for name, key in keys.items():
        value = file.metadata.get(f"{prefix}.{key}")
        if value is None:
            raise file.broken(f"it lacks the key '{prefix}.{key}'")
        settings[name] = value
    # the files do not say whether the weights of a row's experts are scaled to a sum of 1: Qwen3 does, Qwen2 does not
    return settings | {"norm_topk_prob": prefix == "qwen3moe", "decoder_sparse_step": 1, "mlp_only_layers": []}


def _gemma3_settings(file: GgufFile) -> Settings:
    settings = dense_settings(file)
    num_layers, num_heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    is_global = [(layer + 1) % GEMMA3_GLOBAL_EVERY == 0 for layer in range(num_layers)]
    # The one size whose attention is not scaled by its head size; llama.cpp also identifies it by its depth.
    wide = num_layers == GEMMA3_27B_LAYERS
    return settings | {
        "sliding_window": file.metadata["gemma3.attention.sliding_window"],
        "layer_types": ["full_attention" if whole else "sliding_attention" for whole in is_global],
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
    roles = {role: token_id(file, key) for role, key in ROLES.items()}
    special = {index for index, kind in enumerate(kinds) if kind == CONTROL} | set(end_ids(file))
    settings = TokenizerSettings(
        special=tuple(sorted(special)),
        # Runs of spaces match as ordinary pieces: text is normalized before the merges, after these are searched.
        whole=tuple(
            index
            for index, kind in enumerate(kinds)
            if kind == USER_DEFINED and WORD_START not in pieces[index] and index not in special
        ),
        roles={role: index for role, index in roles.items() if index is not None},
        adds_bos=_adds_bos(file),
        context_length=file.metadata[f"{file.metadata['general.architecture']}.context_length"],
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
    found = file.metadata.get(key)
    count = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < count:
        raise file.broken(f"{key} is {found}, and its vocabulary has {count} pieces")
    return found


def end_ids(file: GgufFile) -> tuple[int, ...]:
    """Return the tokens that end a text: those that the file declares, and the `TURN_ENDS` in its vocabulary."""
    pieces = {piece: index for index, piece in enumerate(_spelled_pieces(file))}
    declared = (token_id(file, role) for role in END_ROLES)
    named = TURN_ENDS - ({MESSAGE_END} if ANSWER_END in pieces else set())
    found = [index for index in declared if index is not None]
    return tuple(dict.fromkeys([*found, *sorted(pieces[piece] for piece in named if piece in pieces)]))


def _adds_bos(file: GgufFile) -> bool:
    # Older files lack the key: SentencePiece vocabularies begin every text with the bos token.
    default = file.metadata.get("tokenizer.ggml.model") == "llama"
    is_added = bool(file.metadata.get("tokenizer.ggml.add_bos_token", default))
    if is_added and token_id(file, "bos") is None:
        raise file.broken(
            "texts of its model begin with a bos token, and it does not say which one (tokenizer.ggml.bos_token_id)"
        )
    return is_added


def _built_tokenizer(file: GgufFile, pieces: list[str]) -> Tokenizer:
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        unknown = token_id(file, "unknown")
        return sentencepiece_tokenizer(
            pieces,
            _merge_ranks(file, len(pieces)),
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


def _merge_ranks(file: GgufFile, num_pieces: int) -> list[float]:
    if file.metadata["general.architecture"].startswith("gemma"):
        # Gemma's scores do not give the order of merges; its pieces are stored in that order.
        return list(range(num_pieces))
    return [-score for score in file.metadata["tokenizer.ggml.scores"]]


JOINED = "+"  # between the names of tensors that make one parameter
GGUF_CONVERTER = "gguf-2"  # changes whenever the same file would convert to a different folder

EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")  # weights of all experts of a layer
TENSORS_READ_ELSEWHERE = frozenset({"rope_freqs.weight"})


def convert_gguf(source: Path, folder: Path, *, dtype: Dtype, progress: Progress) -> None:
    """Write configuration, weights (rounded to `dtype`) and tokenizer of a GGUF file into the empty `folder`."""
    file = GgufFile(source)
    try:
        with panics_as_errors():
            architecture, settings, shapes = save_description(file, folder, dtype=dtype)
            sources = tensor_sources(file, shapes)
    except (DraftreeError, OSError):
        raise
    except Exception as error:
        # Damaged metadata can fail anywhere in the libraries that build a model from it.
        raise file.broken(f"its metadata do not describe a model ({error})") from error
    tensors = unpacked(file, architecture, settings=settings, sources=sources, progress=progress)
    write_safetensors(folder / "model.safetensors", shapes, tensors, dtype=dtype)


def save_description(
    file: GgufFile, folder: Path, *, dtype: Dtype
) -> tuple[Architecture, dict[str, Any], dict[str, tuple[int, ...]]]:
    """Write tokenizer and configuration; returns the architecture, the settings and the shapes of the weights."""
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
    return architecture, settings, parameter_shapes(config)


def tensor_sources(file: GgufFile, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Map every parameter of the model to its GGUF tensor; each tensor of the file must be used, and match in shape.

    Gate and up projections of experts are two tensors of the file: their names are joined by `JOINED`.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    name = file.metadata["general.architecture"]
    arch = next(arch for arch, spelled in MODEL_ARCH_NAMES.items() if spelled == name)
    names = get_tensor_name_map(arch, file.metadata[f"{name}.block_count"])
    sources: dict[str, str] = {}
    for parameter, shape in shapes.items():
        source = expert_sources(parameter) or names.get_name(parameter, try_suffixes=(".weight", ".bias"))
        if source is None:
            raise UnsupportedModelError(f"'{file.path}': no GGUF tensor is known for the parameter '{parameter}'")
        found = joined_shape(file, source)
        if found != shape:
            raise file.broken(f"tensor '{source}' has the shape {list(found)}, and its metadata declare {list(shape)}")
        sources[parameter] = source
    used = {name for source in sources.values() for name in source.split(JOINED)}
    if unused := sorted(set(file.tensors) - used - TENSORS_READ_ELSEWHERE):
        raise UnsupportedModelError(
            f"'{file.path}' holds tensors that do not belong to a model of its architecture '{name}' "
            f"({', '.join(unused[:3])}): use the model's own folder"
        )
    return sources


def expert_sources(parameter: str) -> str | None:
    """Return the tensors of the experts of a layer; None for other parameters."""
    found = EXPERTS.fullmatch(parameter)
    if found is None:
        return None
    parts = ("gate", "up") if found[2] == "gate_up" else ("down",)
    return JOINED.join(f"blk.{found[1]}.ffn_{part}_exps.weight" for part in parts)


def joined_shape(file: GgufFile, source: str) -> tuple[int, ...]:
    """Return the shape of a tensor, or of several of the same shape that are joined in their last dimension but one."""
    shapes = [file.tensor(name).shape for name in source.split(JOINED)]
    if len(shapes) == 1:
        return shapes[0]
    if len(set(shapes)) > 1 or len(shapes[0]) != 3:
        raise file.broken(f"the tensors {source.split(JOINED)} have the shapes {shapes}")
    experts, outputs, inputs = shapes[0]
    return experts, len(shapes) * outputs, inputs


def read_joined(file: GgufFile, source: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the values of a tensor, or of several that are joined, float32."""
    parts = [file.read(name) for name in source.split(JOINED)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2)


def joined_bytes(file: GgufFile, source: str) -> int:
    return sum(file.tensor(name).num_bytes for name in source.split(JOINED))


def unpacked(
    file: GgufFile,
    architecture: Architecture,
    *,
    settings: dict[str, Any],
    sources: dict[str, str],
    progress: Progress,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter in the layout of transformers, in float32."""
    import torch

    total_bytes = sum(joined_bytes(file, source) for source in sources.values())
    done_bytes = 0
    for parameter, source in sources.items():
        values = architecture.restore(parameter, read_joined(file, source), settings)
        if not np.isfinite(values).all():
            raise ModelLoadError(f"'{file.path}' is damaged: tensor '{source}' has values that are not finite")
        yield parameter, torch.from_numpy(np.require(values, requirements=["C", "W"]))
        done_bytes += joined_bytes(file, source)
        progress("convert", done_bytes, total_bytes)
