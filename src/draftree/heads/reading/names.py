"""Comparison of the tensors of a file with the table of a head."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.tensors import Shapes

MAX_NAMED = 12
"""Number of names that a message lists."""


def require_tensors(found: Mapping[str, Tensor], wanted: Shapes, *, folder: object, layout: str) -> None:
    """Check that names and shapes are those of a table, no more and no less.

    Args:
        found: tensors by our names.
        wanted: the table.
        folder: where they are from, for the message.
        layout: name of the layout, for the message.

    Raises:
        ModelLoadError: names are missing or unexpected, shapes differ, or a tensor is not of floating-point numbers.
    """
    require_names(found, wanted, folder=folder, layout=layout)
    differing = [
        f"{name} has {_by(found[name].shape)} instead of {_by(shape)}"
        for name, shape in wanted.items()
        if tuple(found[name].shape) != shape
    ]
    if differing:
        raise ModelLoadError(
            f"'{folder}' does not have the shapes of layout '{layout}': {_listed(differing, '; ')}: its config.json "
            "and its tensors contradict each other"
        )
    other = sorted(name for name in wanted if not found[name].is_floating_point())
    if other:
        raise ModelLoadError(f"'{folder}' holds {_listed(other)} not as floating-point numbers: use unpacked weights")


def require_names(
    found: Collection[str], wanted: Collection[str], *, folder: object, layout: str, optional: Iterable[str] = ()
) -> None:
    """Check that names are those wanted, no more (except optional ones) and no less.

    Raises:
        ModelLoadError: names are missing or unexpected.
    """
    missing = sorted(set(wanted) - set(found))
    unexpected = sorted(set(found) - set(wanted) - set(optional))
    if missing or unexpected:
        parts = [f"missing: {_listed(missing)}"] if missing else []
        parts += [f"unexpected: {_listed(unexpected)}"] if unexpected else []
        raise ModelLoadError(f"'{folder}' does not have the tensors of layout '{layout}': {'; '.join(parts)}")


def _listed(names: list[str], separator: str = ", ") -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return separator.join(names[:MAX_NAMED]) + more


def _by(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape) or "one number"
