"""Check that a model folder is complete and readable, without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftree.core.errors import ModelLoadError
from draftree.core.files import JsonError, get_again, read_json
from draftree.weights.config_check import check_sizes
from draftree.weights.safetensors_file import check_safetensors

__all__ = ["check_model_folder"]

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
OPTIONAL_SETTINGS = ("generation_config.json", "tokenizer_config.json")


def check_model_folder(folder: Path) -> None:
    """Read the settings and the headers of the weights.

    Raises:
        ModelLoadError: the folder is not a model folder, or a file in it is missing, damaged or truncated.
    """
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"the folder '{folder}' is not a model folder: {why_not(folder)}")
    config = read_settings(folder / "config.json")
    if "model_type" not in config:
        raise ModelLoadError(
            f"'{folder / 'config.json'}' lacks 'model_type', which names the architecture; {get_again(folder)}"
        )
    check_sizes(folder / "config.json", config)
    for name in OPTIONAL_SETTINGS:
        if (folder / name).is_file():
            read_settings(folder / name)
    files = [check_safetensors(path) for path in weight_files(folder)]
    if files:
        num_tensors, num_values = sum(one.num_tensors for one in files), sum(one.num_values for one in files)
        check_sizes(folder / "config.json", config, num_tensors=num_tensors, num_values=num_values)


def why_not(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return "it holds an adapter; merge it into its base model and name the result"
    packed = sorted(path.name for path in folder.glob("*.gguf"))
    if packed:
        return f"it lacks config.json; to use the GGUF file in it, name '{folder / packed[0]}'"
    inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if inner:
        return f"it lacks config.json; did you mean '{folder / inner[0]}'?"
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
    """Return the names of the weight files, which are in the folder of the index.

    Raises:
        ModelLoadError: the index names no file, or a file elsewhere.
    """
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
    """Read one of the settings files of a model.

    Raises:
        ModelLoadError: it is missing, damaged or holds no settings.
    """
    try:
        return read_json(path)
    except FileNotFoundError:
        raise ModelLoadError(f"'{path}' is missing; {get_again(path.parent)}") from None
    except JsonError as error:
        raise ModelLoadError(f"'{path}' cannot be read ({error}); {get_again(path.parent)}") from None
