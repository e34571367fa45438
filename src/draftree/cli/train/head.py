"""`draftree train head`: a head that drafts from the target's hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.cli.made import takes
from draftree.cli.render import note
from draftree.cli.train.shared import Run, head_of, run_of, say_head, train
from draftree.cli.train.showing import Lines

if TYPE_CHECKING:
    from draftree.train.head import HeadOptions

__all__ = ["head"]


@takes("run", run_of)
@takes("chosen", head_of)
def head(*, run: Run, chosen: HeadOptions) -> None:
    """Train an EAGLE-3-type head on the target's own texts; 'draftree generate MODEL --draft head:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues. Several processes: 'accelerate launch -m draftree train
    head ...'.
    """
    from draftree.train.head import train_head

    result = train(run, lambda: train_head(run.job, run.settings, chosen, report=Lines(), note=note))
    say_head(run, result)
