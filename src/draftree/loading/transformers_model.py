"""Models of transformers: read from files with all of their weights or not at all, wrapped, and checked."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import OUT_OF_MEMORY, DraftreeError, ModelLoadError, UnsupportedModelError, is_out_of_memory
from draftree.core.files import JsonError, get_again, kernel_refusal, read_json, refusal
from draftree.loading.loaded import LoadedModel
from draftree.loading.options import has_native_bfloat16
from draftree.models.base import CheckResult
from draftree.models.check import ReferenceLogits, check, reference_logits, rounds_alike
from draftree.models.memory import free_memory
from draftree.models.torch.hf import HFModel
from draftree.models.torch.hf_cache import CachedModel, Continuation
from draftree.models.torch.inspection import fingerprint, quiet
from draftree.models.torch.packing import can_pack, pack
from draftree.models.torch.seq2seq.model import HFEncoderDecoder
from draftree.models.torch.seq2seq.sources import reference_logits as source_reference_logits
from draftree.models.torch.static import Shapes
from draftree.sampling.decoding_rules import DecodingRules
from draftree.weights.cache import WEIGHT_FILES, Cache, are_pickled, keep_sums
from draftree.weights.folders import import_modeling
from draftree.weights.packed_checkpoint import quantization_of

logger = logging.getLogger(__name__)

PART_OF = "draftree_first_layers_of"
"""Setting of a folder that holds the first layers of a model: how many layers the model has."""


def config_of(folder: Path, *, trust_remote_code: bool = False) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)


VALUES_PER_BYTE = 2  # of weights with 4 bits
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

    `reader` is a class of transformers, by default that of causal models; `placement` spreads the modules over
    devices and files.
    """
    import_modeling()
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
    except torch.OutOfMemoryError as error:
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
    """Raise before allocation for a configuration that needs more than its files hold, or than is free."""
    config = config_of(folder, trust_remote_code=trusts)
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
        reason = f"{len(wrong)} of its weights are missing or of another shape ({names})"
        _require_readable(folder, reason)
        raise ModelLoadError(f"model '{folder}' does not fit its config.json: {reason}; {get_again(folder)}")


def _require_readable(folder: Path, reason: str) -> None:
    """Raise UnsupportedModelError for `reason` if a model that could not be read declares quantized weights."""
    quantization = quantization_of(folder)
    if quantization is not None:
        form = f", packing format '{quantization['packing_format']}'" if quantization.get("packing_format") else ""
        raise UnsupportedModelError(
            f"model '{folder}' has weights quantized by '{quantization.get('quant_method')}'{form}, which neither "
            f"native kernels nor transformers can run here ({reason}): use a model without quantization or a GGUF file"
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


def eos_ids_in(model: Any) -> tuple[int, ...]:
    """Return ids of the tokens that end a text, from the settings of a transformers model; empty for none."""
    configs = (getattr(model, "generation_config", None), model.config.get_text_config())
    known = (getattr(config, "eos_token_id", None) for config in configs)
    eos = next((token for token in known if token is not None), None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)


def eos_ids_from(folder: Path, model: Any) -> tuple[int, ...]:
    """Return `eos_ids_in` of a model built from the configuration of a folder, whose generation settings come first."""
    from transformers import GenerationConfig

    # as transformers reads a model: without the file, or with a damaged one, config.json decides
    with contextlib.suppress(OSError, ValueError):
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return eos_ids_in(model)


ROW_BUCKETS = (2,)
"""In bfloat16 a pass over one row uses other kernels than a pass over two; two rows cost the same if the
processor has bfloat16 instructions."""


def _own_logits(model: Any, reference: Callable[[Any], ReferenceLogits]) -> ReferenceLogits:
    """Return logits of a model's own forward pass, before its attention is replaced."""
    try:
        with quiet():
            logits = reference(model)
    except UnsupportedModelError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedModelError(
            f"{type(model).__name__} fails in its own forward pass ({first_line(error)}): its architecture is not "
            "supported"
        ) from error
    if any(bool(rows.isnan().any()) for rows in logits.logits.values()):
        overflow = ", or overflow in float16: use another dtype" if model.dtype == torch.float16 else ""
        raise ModelLoadError(f"the logits of {type(model).__name__} are not numbers: its weights are damaged{overflow}")
    return logits


def wrap_checked(model: Any, name: str, *, shapes: Shapes | None = None) -> HFModel | CachedModel:
    """Return a checked model: with our attention if it is exact there, else with transformers' own cache."""
    with quiet(advice_of=model.device):
        return _wrap_checked(model, name, shapes=shapes)


def _wrap_checked(model: Any, name: str, *, shapes: Shapes | None) -> HFModel | CachedModel:
    implementation = model.config._attn_implementation
    reference = _own_logits(model, reference_logits)
    must_be_exact = shapes is not None and shapes.exact
    try:
        ours = HFModel(model, row_buckets=row_buckets(model), shapes=shapes)
        result = check(ours, reference)
    except UnsupportedModelError as error:
        reason = str(error)
    except Exception as error:  # as above, now with our attention in it
        reason = f"our attention fails here ({first_line(error)})"
        logger.warning("%s: %s", name, reason)
    else:
        reason = f"our attention is not exact here (error {result.chain_error:.1e})"
        if result.chains_ok:
            _limit_to_checked(ours, result, name)
            # other shapes use other kernels: exactness of one small tree is verified for larger ones
            ours.is_exact = shapes is not None and result.is_exact and rounds_alike(ours)
            if ours.is_exact or not must_be_exact:
                return ours
            reason = f"some rows have other bits in other passes on {ours.device}"
        logger.warning("%s: %s", name, reason)
    _restore(model, implementation)
    if must_be_exact:
        raise UnsupportedModelError(f"exact was requested for '{name}', but {reason}: leave exact out")
    logger.info("%s: %s; trying transformers' own cache, chains only", name, reason)
    return _wrap_with_cache(model, reference)


def _limit_to_checked(ours: HFModel | HFEncoderDecoder, result: CheckResult, name: str) -> None:
    ours.supports_trees = result.trees_ok
    ours.self_check = result
    if not result.trees_ok:
        logger.warning("%s: trees are not scored exactly (error %.1e): chains only", name, result.tree_error)


def _wrap_with_cache(model: Any, reference: ReferenceLogits) -> CachedModel:
    """Return a checked model that continues its texts in the cheapest way that is exact."""
    kind = type(model).__name__
    reason: Exception | None = None
    error = float("inf")
    for continuation in Continuation:
        try:
            cached = CachedModel(model, continuation)
            result = check(cached, reference)
        except Exception as raised:  # as above
            logger.info("%s: fails to continue by %s: %s", kind, continuation.name, first_line(raised))
            reason = raised
            continue
        if result.chains_ok:
            cached.self_check = result
            return cached
        logger.info("%s: continued by %s: error %.1e", kind, continuation.name, result.chain_error)
        error = min(error, result.chain_error)
    if error < float("inf"):
        raise UnsupportedModelError(
            f"{kind} gives other logits token by token than in one pass (error {error:.1e} of their spread), as "
            "models do whose tokens see later ones, within prompts or anywhere: use a causal model"
        )
    raise UnsupportedModelError(f"{kind} fails token by token: its architecture is not supported") from reason


def row_buckets(model: Any) -> tuple[int, ...]:
    """Return the numbers of rows that passes of a transformers model are padded to; empty for no padding."""
    half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    return ROW_BUCKETS if half and has_native_bfloat16(model.device) else ()


def wrap_model(
    model: Any, *, folder: Path | None = None, name: str = "", packed: bool = False, shapes: Shapes | None = None
) -> LoadedModel:
    """Wrap a transformers model as a `LanguageModel`, with packed float32 layers if allowed, and check it."""
    model.eval().requires_grad_(False)
    name = name or type(model).__name__
    if model.config.is_encoder_decoder:
        ours = wrap_encoder_decoder(model, name, packed=packed)
        return LoadedModel(ours, folder, eos_ids_in(model), name)
    known = None
    if packed and can_pack(model.device, next(model.parameters()).dtype):
        known = fingerprint(model)  # packed weights are not readable afterwards
        logger.info("%s: packed %d linear layers", name, pack(model))
    wrapped = wrap_checked(model, name, shapes=shapes)
    if known is not None:
        wrapped.fingerprint = known
    loaded = LoadedModel(wrapped, folder, eos_ids_in(model), name)
    if not isinstance(wrapped, HFModel) or wrapped.static is None:
        return loaded
    why = wrapped.static.why_eager
    return replace(loaded, kernels="graphs" if why is None else f"graphs ({why})")


def require_graphs(loaded: LoadedModel) -> LoadedModel:
    """Return a model whose passes have fixed shapes.

    Raises:
        UnsupportedModelError: its passes have none.
    """
    if not loaded.kernels.startswith("graphs"):
        raise UnsupportedModelError(
            f"kernels 'graphs' were requested, but {loaded.name} keeps keys and values in a form of its own, "
            "whose shape changes from pass to pass: use kernels 'torch'"
        )
    return loaded


def wrap_encoder_decoder(
    model: Any, name: str, *, packed: bool = False, rules: DecodingRules | None = None
) -> HFEncoderDecoder:
    """Return a checked model. One whose trees are not scored exactly is limited to chains."""
    kind, implementation = type(model).__name__, model.config._attn_implementation
    reference = _own_logits(model, source_reference_logits)
    try:
        ours = HFEncoderDecoder(model, rules)
        result = _checked(ours, reference, packed=packed)
        if not result.chains_ok:
            raise UnsupportedModelError(
                f"{kind} gives other logits from stored keys and values than in one pass (error "
                f"{result.chain_error:.1e} of their spread): its architecture is not supported"
            )
    except Exception as error:
        _restore(model, implementation)
        if isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(
            f"{kind} fails with our attention in its decoder ({first_line(error)}): its architecture is not supported"
        ) from error
    _limit_to_checked(ours, result, name)
    if ours.rules.note:
        logger.warning("%s", ours.rules.note)
    return ours


def _checked(model: HFEncoderDecoder, reference: ReferenceLogits, *, packed: bool) -> CheckResult:
    """Check a model; one whose decoder as a function computes something else runs its modules."""
    if model.function is not None:
        try:
            result = check(model, reference)
            if result.chains_ok and result.trees_ok:
                if not packed or not can_pack(model.device, model.dtype):
                    return result
                model.pack()
                return check(model, reference)
            reason = f"error {result.error:.1e}"
        except Exception as error:  # the modules may differ from those that are known
            reason = first_line(error)
        logger.info("%s: passes run the modules of the decoder (%s)", model.kind, reason)
        model.run_modules()
    return check(model, reference)


def _restore(model: Any, implementation: Any) -> None:
    if model._can_set_attn_implementation():
        model.set_attn_implementation(implementation)
