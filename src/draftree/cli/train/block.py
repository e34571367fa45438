"""`draftree train block`: a head that drafts several tokens in one pass."""

from __future__ import annotations

from typing import Annotated

import typer

from draftree.cli.render import note, say
from draftree.cli.train import options as o
from draftree.cli.train.showing import Lines, say_result, stopping

__all__ = ["block"]

HEAD = "Head"


def block(
    model: o.Model,
    *,
    data: o.Data,
    output: o.Output,
    resume: o.Resume = False,
    minutes: o.Minutes = None,
    steps: o.Steps = None,
    tokens: o.Tokens = None,
    draft_vocab: Annotated[
        int,
        typer.Option(help="Tokens that it can propose, by counts in the answers.", metavar="N", rich_help_panel=HEAD),
    ] = 8192,
    layers: Annotated[int, typer.Option(help="Decoder layers.", metavar="N", rich_help_panel=HEAD)] = 2,
    intermediate: Annotated[
        int | None,
        typer.Option(
            help="Inner width of the perceptron; the target's if not given.", metavar="N", rich_help_panel=HEAD
        ),
    ] = None,
    train_output: Annotated[
        bool,
        typer.Option(
            "--train-output",
            help="Train the output head too; it stays the target's if not given.",
            rich_help_panel=HEAD,
        ),
    ] = False,
    markov_rank: Annotated[
        int,
        typer.Option(help="Rank of the bias by the token before; 0 for none.", metavar="N", rich_help_panel=HEAD),
    ] = 64,
    loss: o.Loss = "coupled",
    first_loss: o.FirstLoss = "kl",
    first_share: o.FirstShare = 0.5,
    temperature: o.Temperature = 0.8,
    levels: o.Levels = 3,
    levels_from: o.LevelsFrom = 0.5,
    level_decay: o.Decay = None,
    optimizer: o.Optimizer = "muon",
    learning_rate: o.LearningRate = 1e-3,
    warm_up: o.WarmUp = 50,
    batch_tokens: o.BatchTokens = 2048,
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
    """Train a DSpark-type head, whose blocks have as many tokens as --depth; '--draft head:FOLDER' uses it.

    Ctrl-C keeps the last checkpoint, and --resume continues.
    """
    from draftree.train.block import BlockOptions, train_block
    from draftree.train.fresh_head import HeadShape
    from draftree.train.head import HeadOptions
    from draftree.train.preparing import TrainingJob

    settings = o.settings_of(
        minutes=minutes,
        steps=steps,
        tokens=tokens,
        level_decay=level_decay,
        patience=patience,
        loss=loss,
        first_loss=first_loss,
        first_share=first_share,
        temperature=temperature,
        levels=levels,
        levels_from=levels_from,
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
    shape = HeadShape(layers, intermediate, trains_output=train_output)
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
    chosen = BlockOptions(HeadOptions(shape, draft_vocab), markov_rank)
    with stopping():
        result = train_block(job, settings, chosen, report=Lines(), note=note)
    for line in result.notes:
        note(line)
    say_result(result.evaluation)
    say(f"{result.folder}: draftree generate {model} --draft head:{result.folder}\n")
