"""What a lossy rule announces on standard error before it writes."""

from __future__ import annotations

from draftree.cli.render import Style, note
from draftree.verifiers.base import VERIFIERS, Promise

__all__ = ["announce_lossy", "lossy_line"]


def lossy_line(verify: str, temperature: float) -> str | None:
    """The announcement for drafts that this rule verifies at this temperature; None where the rule is lossless.

    Raises:
        ConfigurationError: no such rule.
    """
    verifier, _ = VERIFIERS.configure(VERIFIERS.parse(verify)[0])
    if verifier.promise(temperature) is not Promise.LOSSY:
        return None
    return (
        f"verifier '{verify}' is lossy at temperature {temperature:g}: "
        "the text is not distributed as the model's own (coupled is lossless)"
    )


def announce_lossy(verify: str, temperature: float, ink: Style) -> None:
    """Write the announcement, if there is one."""
    line = lossy_line(verify, temperature)
    if line is not None:
        note(ink.bold(line))
