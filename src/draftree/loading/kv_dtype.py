"""The format of the keys and values of a loaded model."""

from __future__ import annotations

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.loading.choices import require_kv_dtype
from draftree.loading.loaded import LoadedModel
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.model import NativeModel

__all__ = ["require_kv_dtype", "with_kv_dtype"]


def with_kv_dtype(loaded: LoadedModel, kv_dtype: str) -> LoadedModel:
    """Return a model whose slots store keys and values in this format.

    Args:
        loaded: a model without open slots.
        kv_dtype: "int8".

    Raises:
        NativeUnavailableError: its passes do not run in C.
        UnsupportedModelError: it is an encoder-decoder model.
    """
    model = loaded.model
    if not isinstance(model, NativeModel):
        where = "on another machine" if loaded.kernels == "remote" else "through torch"
        why = loaded.why_torch or f"they run {where}"
        raise NativeUnavailableError(
            f"kv_dtype is '{kv_dtype}', which needs passes in C, and '{loaded.name}' has none here: {why}"
        )
    try:
        model.use_kv_dtype(kv_dtype)
    except UnsupportedModelError as error:
        raise ConfigurationError(str(error)) from error
    return loaded
