"""Tensor-parallel plans for the modules of one stage.

transformers resolves the plan of the whole model and applies it after a pipeline has replaced the layers of other
stages; version 5.23 then fails at the first module that is not there. Here the plan is reduced to the modules of the
stage before it is applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from draftree.core.errors import ConfigurationError

__all__ = ["own_part", "plans_of_stages"]

REPLACED = "PipelineIdentityLayer"
"""Class of transformers that stands for a module of another stage."""
APPLY = "apply_tensor_parallelism"


def own_part(model: Any, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the entries of a plan whose modules or parameters this process has.

    Args:
        model: a model whose other stages are replaced.
        plan: style by name of a module or parameter of the whole model.
    """
    modules = {name for name, module in model.named_modules() if type(module).__name__ != REPLACED}
    known = modules | {name for name, _ in model.named_parameters()}
    return {name: style for name, style in plan.items() if name in known}


@contextmanager
def plans_of_stages() -> Iterator[None]:
    """Let models that are loaded inside have tensor-parallel stages.

    Raises:
        ConfigurationError: the installed transformers applies plans in another way.
    """
    import transformers
    from transformers.distributed import mixin

    apply = getattr(mixin, APPLY, None)
    if apply is None:
        raise ConfigurationError(
            f"tp and pp together are not known to work with transformers {transformers.__version__}: use tp or pp "
            "alone, or transformers 5.23"
        )

    def apply_own(model: Any, mesh: Any, plan: Mapping[str, str]) -> Any:
        return apply(model, mesh, own_part(model, plan))

    setattr(mixin, APPLY, apply_own)
    try:
        yield
    finally:
        setattr(mixin, APPLY, apply)
