"""Plain model folders: their configuration files, and a check that one is complete and readable without loading it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftree.core.errors import ModelLoadError
from draftree.core.files import JsonError, get_again, read_json
from draftree.core.host import require_address_space
from draftree.weights.gguf_file import Dtype
from draftree.weights.safetensors_file import check_safetensors

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model")
VOCABULARY = "vocab_size"
LIMITS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(LAYERS, (1, 10_000)),
    **dict.fromkeys(WIDTHS, (1, 10_000_000)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "d_ff"), (0, 100_000_000)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), (1, 100_000)),
    **dict.fromkeys(("num_key_value_heads", "num_experts", "num_local_experts", "n_routed_experts"), (0, 100_000)),
    "head_dim": (1, 1_000_000),
    "num_labels": (0, 100_000),  # transformers makes a name for each
    VOCABULARY: (1, 100_000_000),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (1, 1_000_000_000)),
}
"""Smallest and largest value of each size; the largest is a hundred times that of the largest known models."""
TEXT_CONFIGS = ("text_config", "decoder", "llm_config", "language_config")


def check_sizes(
    source: Path, config: Mapping[str, Any], *, num_tensors: int | None = None, num_values: int | None = None
) -> None:
    """Raise for sizes in a configuration that are no numbers, out of range, or do not match the weights."""
    for part in (config, *(inner for name in TEXT_CONFIGS if isinstance(inner := config.get(name), Mapping))):
        for name, (least, greatest) in LIMITS.items():
            value = part.get(name)
            for size in value if isinstance(value, list) else (value,):  # some models have one for each layer
                is_whole = isinstance(size, int) and not isinstance(size, bool)
                if size is not None and not (is_whole and least <= size <= greatest):
                    raise ModelLoadError(
                        f"'{source}' has {name}={str(size)[:40]}: it must be a whole number from {least} to "
                        f"{greatest}; {get_again(source.parent)}"
                    )
        layers, width, vocabulary = (
            next((part[name] for name in names if isinstance(part.get(name), int)), None)
            for names in (LAYERS, WIDTHS, (VOCABULARY,))
        )
        if num_tensors is not None and layers is not None and layers > num_tensors:
            raise ModelLoadError(
                f"'{source}' declares {layers} layers, and the weight files hold {num_tensors} tensors; "
                f"{get_again(source.parent)}"
            )
        if num_values is None or width is None or vocabulary is None or "embedding_size" in part:
            continue
        if width * vocabulary > num_values:
            raise ModelLoadError(
                f"'{source}' declares embeddings of {vocabulary} tokens with {width} values each, and the weight "
                f"files hold at most {num_values} values; {get_again(source.parent)}"
            )


WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
OPTIONAL_SETTINGS = ("generation_config.json", "tokenizer_config.json")


def check_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"the folder '{folder}' is not a model folder: {_why_not(folder)}")
    config = read_settings(folder / "config.json")
    if "model_type" not in config:
        raise ModelLoadError(
            f"'{folder / 'config.json'}' lacks 'model_type', which names the architecture; {get_again(folder)}"
        )
    check_sizes(folder / "config.json", config)
    for name in OPTIONAL_SETTINGS:
        if (folder / name).is_file():
            read_settings(folder / name)
    if files := [check_safetensors(path) for path in weight_files(folder)]:
        num_tensors, num_values = map(sum, zip(*files, strict=True))
        check_sizes(folder / "config.json", config, num_tensors=num_tensors, num_values=num_values)


def _why_not(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter; merge it into its base model and name the result"
    if packed := min((path.name for path in folder.glob("*.gguf")), default=None):
        return f"it lacks config.json; to use the GGUF file in it, name '{folder / packed}'"
    if inner := min((path.parent.name for path in folder.glob("*/config.json")), default=None):
        return f"it lacks config.json; did you mean '{folder / inner}'?"
    return "it lacks config.json; name a folder written by save_pretrained"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the model; none if its weights are pickled, which are not checked."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / WEIGHTS_INDEX).is_file():
        names = index_files(folder / WEIGHTS_INDEX)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise ModelLoadError(
                f"the folder '{folder}' lacks {len(missing)} of the {len(names)} weight files that its index names "
                f"({', '.join(missing[:3])}); {get_again(folder)}"
            )
        return [folder / name for name in names]
    if any((folder / name).is_file() for name in PICKLED_WEIGHTS):
        return []
    raise ModelLoadError(f"the folder '{folder}' holds no weights: it lacks {WEIGHTS}; {get_again(folder)}")


def index_files(index: Path) -> list[str]:
    """Return the names of the weight files, which are in the folder of the index."""
    places = read_settings(index).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if wrong or not isinstance(places, dict):
        named = f"it names {str(wrong[0])[:80]!r}" if wrong else "it has no 'weight_map'"
        raise ModelLoadError(
            f"'{index}' is damaged: {named}, and only files of its own folder are allowed; {get_again(index.parent)}"
        )
    return sorted(set(names))


def read_settings(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise ModelLoadError(f"'{path}' is missing; {get_again(path.parent)}") from None
    except JsonError as error:
        raise ModelLoadError(f"'{path}' cannot be read ({error}); {get_again(path.parent)}") from None


def save_configuration(
    folder: Path,
    *,
    model_type: str,
    model_class: str,
    settings: Mapping[str, Any],
    dtype: Dtype,
    stop_ids: tuple[int, ...] = (),
) -> PretrainedConfig:
    """Write `config.json` and `generation_config.json`; text ends at `stop_ids`, or else at the end token."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.for_model(model_type, **settings, architectures=[model_class], dtype=dtype)
    config.save_pretrained(folder)
    ids = {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in settings}
    if stop_ids:
        ids["eos_token_id"] = list(stop_ids)
    GenerationConfig(**ids).save_pretrained(folder)
    return config


MODELING_BYTES = 480 << 20
"""Address space that the imports of transformers' models take: 440 MiB with one thread of OpenBLAS on x86-64."""


def import_modeling() -> None:
    """Import what transformers' models need, or raise MemoryError.

    Without room the imports would fail with strange errors, or never end: OpenBLAS tries for ever to allocate buffers.
    """
    if "transformers.modeling_utils" not in sys.modules:
        require_address_space(MODELING_BYTES)
        import transformers.modeling_utils  # noqa: F401


def parameter_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every value in a weights file of this configuration; shared parameters once."""
    import_modeling()
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = dict(model.named_parameters()).keys() | (dict(model.named_buffers()).keys() & model.state_dict().keys())
    return {name: tuple(value.shape) for name, value in model.state_dict().items() if name in names}
