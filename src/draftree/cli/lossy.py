"""What standard error says before generation: decisions, sampling defaults, the warning of a lossy verifier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.cli.render import Style, note
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import Guarantee

if TYPE_CHECKING:
    from draftree.cli.writing import Setup
    from draftree.llm import LLM
    from draftree.sampling.params import SamplingParams

__all__ = ["announce_lossy", "announce_methods", "lossy_line"]


def lossy_line(verify: str, temperature: float) -> str | None:
    """Return the warning for this verifier at this temperature; None if it is lossless.

    Raises:
        ConfigurationError: unknown verifier.
    """
    verifier, _ = VERIFIERS.configure(VERIFIERS.parse(verify)[0])
    if verifier.promise(temperature) is not Guarantee.LOSSY:
        return None
    return (
        f"verifier '{verify}' is lossy at temperature {temperature:g}: "
        "the text is not distributed as the model's own (coupled is lossless)"
    )


def announce_methods(setup: Setup, llm: LLM, params: SamplingParams, style: Style) -> None:
    """Write what a model decided itself, its sampling defaults, and the warning, if there are any."""
    for line in filter(None, (llm.draft_note, llm.sampling_note)):
        note(style.dim(line))
    if not setup.is_plain:
        announce_lossy(setup.verify, llm.requests.resolved(params).sampling.temperature, style)


def announce_lossy(verify: str, temperature: float, style: Style) -> None:
    """Write the warning, if there is one."""
    line = lossy_line(verify, temperature)
    if line is not None:
        note(style.bold(line))
