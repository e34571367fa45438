"""Loading of a model by one process or by several, without torch until it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from draftree.options import ModelOptions
from draftree.parallel.world import own_rank, require_one_process

if TYPE_CHECKING:
    from draftree.core.errors import RankError
    from draftree.loading.loaded import LoadedModel
    from draftree.models.base import LanguageModel


def load_divided(options: ModelOptions) -> LoadedModel:
    """Load the model, together with the other processes if it is divided among them; raise if it must be exact."""
    if options.is_parallel:
        from draftree.parallel.load import load_together

        loaded = load_together(options)
    else:
        from draftree.loading.load import load_model

        loaded = load_model(options)
    if options.exact:
        from draftree.loading.loaded import require_exact

        require_exact(loaded)
    return loaded


def leave_to_rank_zero(options: ModelOptions) -> None:
    """Return on rank 0 and in a job of one process; on other ranks, run the passes of their shares, then exit.

    Commands call it first, so that only rank 0 reads input, writes output and opens ports.
    """
    if not options.is_parallel:
        require_one_process(options)
        return
    if own_rank(options) == 0:
        return
    from draftree.parallel.load import load_together

    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    load_together(options)


def on_loss(model: LanguageModel, callback: Callable[[RankError], bool]) -> Callable[[], None]:
    """Call a function, on another thread, when a process ends that computes a model with this one.

    `model`: any model; one that this process computes alone never calls it. `callback`: gets the reason; must return
    soon, with whether nothing uses the model any more. Otherwise the process ends after some seconds.
    """
    from draftree.parallel.model import ParallelModel

    return model.on_loss(callback) if isinstance(model, ParallelModel) else lambda: None


def stop_ranks(model: LanguageModel) -> None:
    """End the other processes that compute a model with this one; it cannot be used afterwards."""
    from draftree.parallel.model import ParallelModel

    if isinstance(model, ParallelModel):
        model.stop()
