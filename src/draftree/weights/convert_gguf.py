"""Conversion of a GGUF file to a plain model folder: configuration, tokenizer and weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from draftree.core.errors import DraftreeError, ModelLoadError, UnsupportedModelError, panics_as_errors, suggestion
from draftree.weights.cache import Progress
from draftree.weights.folders import check_sizes, parameter_shapes, save_configuration
from draftree.weights.gguf_families import (
    ATTENTION_FAMILIES,
    JOINED,
    Array,
    Settings,
    Shape,
    num_layers_of,
    stored_shape,
)
from draftree.weights.gguf_file import Dtype, GgufFile
from draftree.weights.gguf_hybrids import HYBRIDS
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


ARCHITECTURES = {**ATTENTION_FAMILIES, **HYBRIDS}
GGUF_CONVERTER = "gguf-3"  # changes whenever the same file would convert to a different folder

PARTS = {
    ".experts.gate_up_proj": f"ffn_gate_exps.weight{JOINED}ffn_up_exps.weight",
    ".experts.up_proj": "ffn_up_exps.weight",
    ".experts.down_proj": "ffn_down_exps.weight",
    ".router.weight": "ffn_gate_inp.weight",
    ".expert_bias": "exp_probs_b.bias",
    ".e_score_correction_bias": "exp_probs_b.bias",
    ".dt_bias": "ssm_dt.bias",
    ".in_proj_qkvz.weight": f"attn_qkv.weight{JOINED}attn_gate.weight",
    ".input_linear.weight": f"ffn_gate.weight{JOINED}ffn_up.weight",
    ".output_linear.weight": "ffn_down.weight",
}
"""Tensors of a layer by the ends of parameters' names that the `gguf` package does not know, or that are several."""
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

    def shape(self, name: str) -> Shape:
        """Return the shape of a parameter in transformers; tensors are joined in their last dimension but one."""
        parts = self.parts(name)
        shapes = [stored_shape(name, self.file.tensor(part).shape) for part in parts]
        if len(shapes) == 1:
            return self._architecture.layout(name, shapes[0])
        outside = {(*shape[:-2], shape[-1]) for shape in shapes}
        if len(outside) > 1 or len(shapes[0]) < 2:
            raise self.file.broken(f"the tensors {parts} have the shapes {shapes}")
        return *shapes[0][:-2], sum(shape[-2] for shape in shapes), shapes[0][-1]

    @property
    def has_tiled_heads(self) -> bool:
        """Whether the value heads of delta nets are in another order than in transformers."""
        keys, values = (self.settings.get(f"linear_num_{kind}_heads") for kind in ("key", "value"))
        return self._architecture.group is not None and keys != values

    def read(self, name: str) -> Array:
        """Return the values of a parameter in the layout of transformers, float32, contiguous."""
        values = self.read_tiled(name)
        if self._architecture.group is not None:
            values = self._architecture.group(name, values, self.settings)
        return np.require(values, requirements=["C", "W"])

    def read_tiled(self, name: str) -> Array:
        """Return the values of a parameter like `read`, with the heads in the order of the file."""
        parts = [self.file.read(part) for part in self.parts(name)]
        return self.restored(name, parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-2))

    def restored(self, name: str, values: Array) -> Array:
        values = values.reshape(stored_shape(name, values.shape))
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


def save_description(file: GgufFile, folder: Path, *, dtype: Dtype) -> tuple[GgufModel, dict[str, Shape]]:
    """Write tokenizer and configuration; return the model, and the shapes of its parameters."""
    try:
        with panics_as_errors():
            return _saved_description(file, folder, dtype)
    except (DraftreeError, OSError):
        raise
    except Exception as error:
        # Damaged metadata can fail anywhere in the libraries that build a model from it.
        raise file.broken(f"its metadata do not describe a model ({error})") from error


def _saved_description(file: GgufFile, folder: Path, dtype: Dtype) -> tuple[GgufModel, dict[str, Shape]]:
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


def _find_sources(model: GgufModel, shapes: Mapping[str, Shape]) -> None:
    """Find the tensor of every parameter; each tensor of the file must be used, and match in shape."""
    file = model.file
    name = file.metadata["general.architecture"]
    tensor = _tensor_names(file)
    for parameter, shape in shapes.items():
        source = tensor(parameter)
        if source is None:
            raise UnsupportedModelError(f"'{file.path}': no GGUF tensor is known for the parameter '{parameter}'")
        model.sources[parameter] = source
        if (stored := model.shape(parameter)) != shape:
            raise file.broken(f"tensor '{source}' has the shape {list(stored)}, and its metadata declare {list(shape)}")
    used = {part for parameter in shapes for part in model.parts(parameter)}
    later = tuple(f"blk.{layer}." for layer in range(num_layers_of(file), file.setting("block_count")))
    unused = sorted(set(file.tensors) - used - TENSORS_READ_ELSEWHERE)
    if unused := [tensor for tensor in unused if not tensor.startswith(later)]:
        raise UnsupportedModelError(
            f"'{file.path}' holds tensors that do not belong to a model of its architecture '{name}' "
            f"({', '.join(unused[:3])}): use the model's own folder"
        )


def _tensor_names(file: GgufFile) -> Callable[[str], str | None]:
    """Return a function from a parameter to its tensors, joined by `JOINED`; to None for an unknown parameter."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    name = file.metadata["general.architecture"]
    arch = next(arch for arch, spelled in MODEL_ARCH_NAMES.items() if spelled == name)
    names = get_tensor_name_map(arch, file.setting("block_count"))

    def spelled(name: str) -> str:
        """Return the name that the file has: of Granite's shared expert, and of norms in Falcon-H1's perceptrons."""
        others = (re.sub(r"(ffn_(gate|up|down))\.", r"\1_shexp.", name), name.removesuffix(".weight"))
        return next((other for other in (name, *others) if other in file.tensors), name)

    def tensor(parameter: str) -> str | None:
        parts = next((parts for end, parts in PARTS.items() if parameter.endswith(end)), None)
        if parts is not None:
            layer = parameter.split(".")[2]
            return JOINED.join(spelled(f"blk.{layer}.{part}") for part in parts.split(JOINED))
        others = (parameter, parameter.replace("model.layers.", "backbone.layers."))  # the latter is Nemotron-H's
        known = (names.get_name(other, try_suffixes=(".weight", ".bias")) for other in others)
        return next((spelled(name) for name in known if name is not None), None)

    return tensor
