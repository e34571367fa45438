"""Types of the options that the trainings share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.options import Device, Model, Threads, TrustRemoteCode

__all__ = [
    "BatchTokens",
    "Data",
    "DataTokens",
    "Decay",
    "Depth",
    "Device",
    "Dtype",
    "EvaluateEvery",
    "FirstLoss",
    "FirstShare",
    "LearningRate",
    "Levels",
    "LevelsFrom",
    "Loss",
    "MaxLength",
    "Minutes",
    "Model",
    "Optimizer",
    "Output",
    "Patience",
    "Resume",
    "Seed",
    "Steps",
    "Temperature",
    "Threads",
    "Tokens",
    "TrustRemoteCode",
    "UnseenShare",
    "WarmUp",
]

FILES, BUDGET, RECIPE, EVALUATION = "Files", "Budget", "Recipe", "Evaluation"

Data = Annotated[
    list[Path],
    typer.Option(
        help="Folder of 'draftree train data'; repeatable for data of one target.",
        metavar="FOLDER",
        rich_help_panel=FILES,
    ),
]
Output = Annotated[Path, typer.Option(help="New folder of the result.", metavar="FOLDER", rich_help_panel=FILES)]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.", rich_help_panel=FILES)]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Minutes of training; 60 if neither --steps nor --tokens is given.", metavar="X", rich_help_panel=BUDGET
    ),
]
Steps = Annotated[int | None, typer.Option(help="Maximum number of updates.", metavar="N", rich_help_panel=BUDGET)]
Tokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of trained predictions, repeated ones included.", metavar="N", rich_help_panel=BUDGET
    ),
]
Loss = Annotated[
    str,
    typer.Option(
        help="Loss of the later part: coupled, coupled_miss, lk, lk_hybrid, tv, kl, reverse_kl or cross_entropy.",
        metavar="NAME",
        rich_help_panel=RECIPE,
    ),
]
FirstLoss = Annotated[str, typer.Option(help="Loss of the first part.", metavar="NAME", rich_help_panel=RECIPE)]
FirstShare = Annotated[
    float, typer.Option(help="Share of the budget of the first part.", metavar="X", rich_help_panel=RECIPE)
]
Temperature = Annotated[
    float,
    typer.Option(help="Temperature at which target and drafter are compared.", metavar="X", rich_help_panel=RECIPE),
]
Levels = Annotated[
    int, typer.Option(help="Levels of training on the drafter's own states.", metavar="N", rich_help_panel=RECIPE)
]
LevelsFrom = Annotated[
    float,
    typer.Option(help="Share of the budget that trains the first level only.", metavar="X", rich_help_panel=RECIPE),
]
Decay = Annotated[
    float | None,
    typer.Option(
        "--level-decay",
        help="Weight of each level relative to the one before; by survival of the drafts if not given.",
        metavar="X",
        rich_help_panel=RECIPE,
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        help="muon (matrices of layers; adamw for the rest) or adamw.", metavar="NAME", rich_help_panel=RECIPE
    ),
]
LearningRate = Annotated[float, typer.Option(help="Highest learning rate.", metavar="X", rich_help_panel=RECIPE)]
WarmUp = Annotated[
    int, typer.Option(help="Updates until the highest learning rate.", metavar="N", rich_help_panel=RECIPE)
]
BatchTokens = Annotated[int, typer.Option(help="Tokens of a batch.", metavar="N", rich_help_panel=RECIPE)]
MaxLength = Annotated[
    int | None, typer.Option(help="Cut longer texts; no limit if not given.", metavar="N", rich_help_panel=RECIPE)
]
Seed = Annotated[
    int, typer.Option(help="Seed of first weights and of the order of texts.", metavar="N", rich_help_panel=RECIPE)
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of computation: auto, float32 or bfloat16; weights are updated in float32.",
        metavar="NAME",
        rich_help_panel="Execution",
    ),
]
Depth = Annotated[
    int,
    typer.Option(
        help="Levels of drafts in evaluations, and by default later.", metavar="N", rich_help_panel=EVALUATION
    ),
]
EvaluateEvery = Annotated[
    int,
    typer.Option(help="Updates between evaluations on unseen texts.", metavar="N", rich_help_panel=EVALUATION),
]
Patience = Annotated[
    int,
    typer.Option(
        help="End after so many evaluations without a better acceptance length; 0 for no early end.",
        metavar="N",
        rich_help_panel=EVALUATION,
    ),
]
DataTokens = Annotated[
    int | None,
    typer.Option(
        help="Train on the first texts with so many tokens only, prompts included; on all texts if not given.",
        metavar="N",
        rich_help_panel=FILES,
    ),
]
UnseenShare = Annotated[
    float,
    typer.Option(help="Share of the prompts that are kept for evaluations.", metavar="X", rich_help_panel=EVALUATION),
]
