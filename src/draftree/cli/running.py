"""How a model is run: the options that commands with one model and its drafter share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from draftree.cli.options import (
    RUNNING,
    AllowControlTokens,
    Device,
    Draft,
    Dtype,
    Kernels,
    Learn,
    Plan,
    Quantization,
    Threads,
    TrustRemoteCode,
    Verify,
)
from draftree.drafters import AUTO_DRAFT

if TYPE_CHECKING:
    from draftree.cli.writing import Setup

__all__ = ["Exact", "How", "how_of"]

Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Refuse to run unless logits are bit-identical in every batch and tree.",
        rich_help_panel=RUNNING,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """The options as given; their names are those of `Setup`."""

    draft: str
    verify: str
    plan: str | None
    learn: str | None
    allow_control_tokens: bool
    device: str
    dtype: str
    kernels: str
    quantization: str | None
    threads: int | None
    exact: bool
    trust_remote_code: bool

    def setup(self, model: str) -> Setup:
        """Return the setup of a model; imports torch."""
        from draftree.cli.writing import Setup

        return Setup(model, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})


def how_of(
    *,
    draft: Draft = AUTO_DRAFT,
    verify: Verify = "coupled",
    plan: Plan = None,
    learn: Learn = None,
    allow_control_tokens: AllowControlTokens = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    kernels: Kernels = "auto",
    quantization: Quantization = None,
    threads: Threads = None,
    exact: Exact = False,
    trust_remote_code: TrustRemoteCode = False,
) -> How:
    """Return the options of a command."""
    return How(
        draft=draft,
        verify=verify,
        plan=plan,
        learn=learn,
        allow_control_tokens=allow_control_tokens,
        device=device,
        dtype=dtype,
        kernels=kernels,
        quantization=quantization,
        threads=threads,
        exact=exact,
        trust_remote_code=trust_remote_code,
    )
