"""Comparison of tensors that were read with the parameters of a head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from draftree.core.errors import ModelLoadError

MAX_NAMED = 12
"""Number of names that a message lists."""


def require_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], layout: str) -> None:
    """Check that names and shapes are those of a head's parameters, no more and no less.

    Args:
        found: tensors by our names.
        wanted: parameters of the head; only names and shapes are used.
        layout: name of the layout, for the message.

    Raises:
        ModelLoadError: names are missing or unexpected, shapes differ, or a tensor is not of floating-point numbers.
    """
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        parts = [f"missing: {_listed(missing)}"] if missing else []
        parts += [f"unexpected: {_listed(unexpected)}"] if unexpected else []
        raise ModelLoadError(f"it does not have the tensors of layout '{layout}': {'; '.join(parts)}")
    differing = [
        f"{name} has {_by(found[name].shape)} instead of {_by(tensor.shape)}"
        for name, tensor in wanted.items()
        if found[name].shape != tensor.shape
    ]
    if differing:
        raise ModelLoadError(
            f"it does not have the shapes of layout '{layout}': {_listed(differing, '; ')}: its config.json and its "
            "tensors contradict each other"
        )
    other = sorted(name for name in wanted if not found[name].is_floating_point())
    if other:
        raise ModelLoadError(f"{_listed(other)} are not floating-point numbers: use weights that are not packed")


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return separator.join(names[:MAX_NAMED]) + more


def _by(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape) or "one number"
