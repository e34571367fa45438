"""How a model is run: the options that commands with one model share, and those of its drafter."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.cli.made import takes
from draftree.cli.options import (
    RUNNING,
    Affinity,
    AllowControlTokens,
    Device,
    Draft,
    Dtype,
    GenerationConfig,
    Kernels,
    KvDtype,
    Learn,
    Offload,
    Plan,
    Quantization,
    Threads,
    TrustRemoteCode,
    Verify,
)
from draftree.cli.progress import waiting
from draftree.core.host import spare_collection, without_collection
from draftree.drafters import AUTO_DRAFT

if TYPE_CHECKING:
    from draftree.cli.writing import Setup

__all__ = ["Exact", "Execution", "How", "execution_of", "how_of", "import_engine"]

LOADING = ("dtype", "device", "kernels", "quantization", "kv_dtype", "trust_remote_code")

Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Refuse to run unless logits are bit-identical in every batch and tree.",
        rich_help_panel=RUNNING,
    ),
]


def import_engine() -> None:
    """Import torch and all modules that decode; to be called after all checks that need neither."""
    if "torch" in sys.modules:
        return  # the command was called by another program, whose objects are its own
    with waiting("importing torch"), without_collection():
        pass
    spare_collection()


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The options as given; their names are those of `Setup` and of all settings that name a model."""

    dtype: str
    device: str
    kernels: str
    quantization: str | None
    offload: str | None
    kv_dtype: str | None
    threads: int | None
    affinity: str | None
    trust_remote_code: bool

    @property
    def values(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def loading(self) -> dict[str, Any]:
        """The options with which a model is loaded, by name."""
        return {name: value for name, value in self.values.items() if name in LOADING}

    def setup(self, model: str, **others: Any) -> Setup:
        """Return the setup of a model, with other fields of `Setup`; imports torch."""
        from draftree.cli.writing import Setup

        return Setup(model, **self.values, **others)


def execution_of(
    *,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kernels: Kernels = "auto",
    quantization: Quantization = None,
    offload: Offload = None,
    kv_dtype: KvDtype = None,
    threads: Threads = None,
    affinity: Affinity = None,
    trust_remote_code: TrustRemoteCode = False,
) -> Execution:
    """Return the options of a command."""
    return Execution(
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantization=quantization,
        offload=offload,
        kv_dtype=kv_dtype,
        threads=threads,
        affinity=affinity,
        trust_remote_code=trust_remote_code,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class How(Execution):
    """The options of a command whose drafter the user names."""

    draft: str
    verify: str
    plan: str | None
    learn: str | None
    allow_control_tokens: bool
    generation_config: str
    exact: bool


@takes("execution", execution_of)
def how_of(
    *,
    draft: Draft = AUTO_DRAFT,
    verify: Verify = "coupled",
    plan: Plan = None,
    learn: Learn = None,
    allow_control_tokens: AllowControlTokens = False,
    generation_config: GenerationConfig = "auto",
    execution: Execution,
    exact: Exact = False,
) -> How:
    """Return the options of a command."""
    return How(
        **execution.values,
        draft=draft,
        verify=verify,
        plan=plan,
        learn=learn,
        allow_control_tokens=allow_control_tokens,
        generation_config=generation_config,
        exact=exact,
    )
