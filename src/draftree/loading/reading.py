"""Loading of a transformers model from files, with all of its weights or not at all."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import OUT_OF_MEMORY, DraftreeError, ModelLoadError, UnsupportedModelError, is_out_of_memory
from draftree.core.files import JsonError, get_again, kernel_refusal, read_json, refusal
from draftree.models.memory import free_memory
from draftree.weights.cache import Cache
from draftree.weights.packed_scheme import quantization_of
from draftree.weights.sums import WEIGHT_FILES, are_pickled, keep_sums

logger = logging.getLogger(__name__)

PART_OF = "draftree_first_layers_of"
"""Setting of a folder that holds the first layers of a model: how many layers the model has."""


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress progress bars, load reports and advice of transformers inside the block."""
    from transformers.utils import logging as library

    was_enabled, verbosity = library.is_progress_bar_enabled(), library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity_error()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if was_enabled:
            library.enable_progress_bar()


VALUES_PER_BYTE = 2
"""Of weights with 4 bits."""
MAX_TABLES = 1 << 30
"""Bytes of tables, such as sines by position, that a model may have beside as many as its weights take."""
READING = threading.RLock()
"""Held while transformers reads a model: it replaces methods of its classes meanwhile, and readers in two threads would
leave them replaced, after which no model of this process has tied weights."""


def read_model(
    folder: Path,
    dtype: torch.dtype | str,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    reader: Any = None,
    placement: Mapping[str, Any] | None = None,
) -> Any:
    """Load the transformers model of a folder.

    Args:
        folder: folder with its files.
        dtype: dtype of its weights; "auto" for that of the files.
        device: target device.
        trust_remote_code: whether Python code of the folder may run.
        reader: the class of transformers that reads it; None for the one of causal models.
        placement: arguments that place its modules on several devices or in files; None for all on `device`.

    Raises:
        ModelLoadError: its files are damaged, it does not fit into memory, it needs code of its own, or the folder
            holds a part of a model and `reader` reads whole ones.
        UnsupportedModelError: it declares quantized weights, which transformers cannot read here.
    """
    from transformers import AutoModelForCausalLM

    if not trust_remote_code and (why := kernel_refusal(folder)):
        raise ModelLoadError(f"model {why}")
    if not getattr(reader, "takes_parts", False):
        _require_whole(folder)
    loader: Any = reader or AutoModelForCausalLM
    try:
        with READING, quiet():
            if placement is None and isinstance(loader, type):
                _require_room(folder, loader, dtype, device=device, trusts=trust_remote_code)
            model, report = loader.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                weights_only=True,  # pickled weights: only tensors are unpickled
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported as well, and then refused below
                **(placement or {}),
            )
            model = model.to(device) if placement is None else model
    except torch.cuda.OutOfMemoryError as error:
        raise ModelLoadError(f"model '{folder}' does not fit into the memory of {device}: {error}") from error
    except DraftreeError:
        raise  # of the reader
    except Exception as error:  # the libraries raise various exceptions for damaged files
        if "trust_remote_code" in str(error) and (why := refusal(folder)):
            raise ModelLoadError(f"model {why}") from error
        if is_out_of_memory(error):
            raise ModelLoadError(f"model '{folder}' could not be read: {OUT_OF_MEMORY}") from error
        _require_readable(folder, first_line(error))
        raise ModelLoadError(f"model '{folder}' could not be read: {first_line(error)}") from error
    _require_all_weights(folder, report)
    if are_pickled(folder):
        keep_sums(folder, Cache().root)
    return model


def _require_room(folder: Path, loader: Any, dtype: torch.dtype | str, *, device: torch.device, trusts: bool) -> None:
    """Raise before anything is allocated for a configuration that needs more than its files hold, or than is free.

    Args:
        folder: folder of the model.
        loader: an auto class of transformers.
        dtype: as for `read_model`.
        device: likewise.
        trusts: whether Python code of the folder may run.

    Raises:
        ModelLoadError: the model is larger than its files, or than the free memory.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trusts)
    kind = {"dtype": dtype} if isinstance(dtype, torch.dtype) else {}
    try:
        with torch.device("meta"):
            model = loader.from_config(config, trust_remote_code=trusts, **kind)
    except Exception as error:  # reading the weights fails in the same way, or the model cannot be built without memory
        logger.info("%s: its size is not known in advance: %s", folder, first_line(error))
        return
    stored = sum(path.stat().st_size for pattern in WEIGHT_FILES for path in folder.glob(pattern))
    values = sum(parameter.numel() for parameter in model.parameters())
    weights, tables = (
        sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        for tensors in (model.parameters(), model.buffers())
    )
    is_packed = getattr(config, "quantization_config", None) is not None
    if (values > VALUES_PER_BYTE * stored and not is_packed) or tables > stored + MAX_TABLES:
        raise ModelLoadError(
            f"'{folder / 'config.json'}' describes a model of {values} values and {tables} bytes of tables, and its "
            f"weight files have {stored} bytes; {get_again(folder)}"
        )
    needed = weights + tables
    free = free_memory(device)
    if free is not None and needed > free:
        raise ModelLoadError(
            f"model '{folder}' takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on {device}: free memory, "
            "use a smaller model or dtype, or keep its weights on disk (offload=, --offload)"
        )


def _require_all_weights(folder: Path, report: Mapping[str, Any]) -> None:
    # transformers would initialize such weights randomly and continue
    wrong = sorted([*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])])
    if wrong:
        names = f"{', '.join(wrong[:3])}{', …' if len(wrong) > 3 else ''}"
        found = f"{len(wrong)} of its weights are missing or of another shape ({names})"
        _require_readable(folder, found)
        raise ModelLoadError(f"model '{folder}' does not fit its config.json: {found}; {get_again(folder)}")


def _require_readable(folder: Path, reason: str) -> None:
    """Raise UnsupportedModelError for `reason` if a model that could not be read declares quantized weights."""
    found = quantization_of(folder)
    if found is not None:
        form = f", packing format '{found['packing_format']}'" if found.get("packing_format") else ""
        raise UnsupportedModelError(
            f"model '{folder}' has weights quantized by '{found.get('quant_method')}'{form}, which neither passes in C "
            f"nor transformers can run here ({reason}): use the model without quantization, or a GGUF file"
        )


def _require_whole(folder: Path) -> None:
    try:
        of = read_json(folder / "config.json").get(PART_OF)
    except (FileNotFoundError, JsonError):
        return  # the library says what is wrong with it
    if of is not None:
        raise ModelLoadError(
            f"the folder '{folder}' holds the first layers of a model of {of} layers, for a target split by layers: "
            f"name it as weights, 'remote:URL?split=N&weights={folder}', or name the whole model"
        )


def first_line(error: Exception) -> str:
    """Return the first line of an error, shortened for a message."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__
