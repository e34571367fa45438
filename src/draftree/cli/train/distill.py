"""`draftree train distill`: a small whole model with the target's tokens."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.render import note, say
from draftree.cli.train import options as o
from draftree.cli.train.showing import Lines, say_result, stopping

__all__ = ["distill"]

STUDENT = "Student"


def distill(
    model: o.Model,
    *,
    data: o.Data,
    output: o.Output,
    resume: o.Resume = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Start from this model, which has the target's tokens; a new one if not given.",
            metavar="MODEL",
            rich_help_panel=STUDENT,
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Width of a new one.", metavar="N", rich_help_panel=STUDENT)] = 256,
    layers: Annotated[int, typer.Option(help="Layers of a new one.", metavar="N", rich_help_panel=STUDENT)] = 4,
    heads: Annotated[int, typer.Option(help="Attention heads of a new one.", metavar="N", rich_help_panel=STUDENT)] = 4,
    intermediate: Annotated[
        int | None,
        typer.Option(
            help="Inner width of its perceptrons; 8/3 of the width if not given.", metavar="N", rich_help_panel=STUDENT
        ),
    ] = None,
    minutes: o.Minutes = None,
    steps: o.Steps = None,
    tokens: o.Tokens = None,
    weight_decay: Annotated[
        float, typer.Option(help="Weight decay of matrices.", metavar="X", rich_help_panel=o.RECIPE)
    ] = 0.1,
    loss: o.Loss = "coupled",
    first_loss: o.FirstLoss = "kl",
    first_share: o.FirstShare = 0.5,
    temperature: o.Temperature = 0.8,
    optimizer: o.Optimizer = "muon",
    learning_rate: o.LearningRate = 6e-4,
    warm_up: o.WarmUp = 50,
    batch_tokens: o.BatchTokens = 1024,
    max_length: o.MaxLength = None,
    seed: o.Seed = 0,
    depth: o.Depth = 4,
    evaluate_every: o.EvaluateEvery = 50,
    patience: o.Patience = 8,
    unseen_share: o.UnseenShare = 0.05,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    threads: o.Threads = None,
    trust_remote_code: o.TrustRemoteCode = False,
) -> None:
    """Train a small model on the target's own texts; 'draftree generate MODEL --draft model:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues.
    """
    from draftree.train.distill import StudentOptions, train_student
    from draftree.train.preparing import TrainingJob

    chosen = StudentOptions(start, hidden, layers, heads, intermediate)
    settings = o.settings_of(
        minutes=minutes,
        steps=steps,
        tokens=tokens,
        level_decay=None,
        patience=patience,
        loss=loss,
        first_loss=first_loss,
        first_share=first_share,
        temperature=temperature,
        levels=1,
        weight_decay=weight_decay,
        optimizer=optimizer,
        learning_rate=learning_rate,
        warm_up=warm_up,
        batch_tokens=batch_tokens,
        max_length=max_length,
        seed=seed,
        depth=depth,
        evaluate_every=evaluate_every,
        dtype=dtype,
    )
    job = TrainingJob(
        model=model,
        data=data,
        output=output,
        resume=resume,
        dtype=dtype,
        device=device,
        threads=threads,
        unseen_share=unseen_share,
        trust_remote_code=trust_remote_code,
    )
    with stopping():
        result = train_student(job, settings, chosen, report=Lines(), note=note)
    for line in result.notes:
        note(line)
    say_result(result.evaluation)
    say(f"{result.folder}: draftree generate {model} --draft model:{result.folder}\n")
