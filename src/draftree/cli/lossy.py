"""The warning on standard error before generation with a lossy verifier."""

from __future__ import annotations

from draftree.cli.render import Style, note
from draftree.verifiers.base import VERIFIERS, Promise

__all__ = ["announce_lossy", "lossy_line"]


def lossy_line(verify: str, temperature: float) -> str | None:
    """Return the warning for this verifier at this temperature; None if it is lossless.

    Raises:
        ConfigurationError: unknown verifier.
    """
    verifier, _ = VERIFIERS.configure(VERIFIERS.parse(verify)[0])
    if verifier.promise(temperature) is not Promise.LOSSY:
        return None
    return (
        f"verifier '{verify}' is lossy at temperature {temperature:g}: "
        "the text is not distributed as the model's own (coupled is lossless)"
    )


def announce_lossy(verify: str, temperature: float, style: Style) -> None:
    """Write the warning, if there is one."""
    line = lossy_line(verify, temperature)
    if line is not None:
        note(style.bold(line))
