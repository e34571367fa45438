"""Options that are written once for several commands."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated

import pytest
import typer

from draftree.cli.made import takes
from draftree.cli.train.shared import budget_line, run_of
from draftree.train.settings import Limits, TrainSettings

if TYPE_CHECKING:
    from nowhere import Unknown

Width = Annotated[int, typer.Option(help="Width.")]


def size_of(*, width: Width = 3, height: int = 4) -> Unknown:
    return width * height


def test_the_command_gets_what_the_function_makes_and_has_its_options() -> None:
    seen = []

    @takes("size", size_of, height=5)
    def command(name: str, *, before: int = 1, size: Unknown, after: int = 2) -> None:
        seen.append((name, before, size, after))

    found = inspect.signature(command).parameters
    assert list(found) == ["name", "before", "width", "height", "after"]
    assert (found["width"].annotation, found["height"].default) == (Width, 5)
    command(name="a", before=1, width=3, height=5, after=2)
    assert seen == [("a", 1, 15, 2)]


def test_fixed_parameters_are_no_options() -> None:
    seen = []

    @takes("size", size_of, fixed={"height": 10})
    def command(*, size: Unknown) -> None:
        seen.append(size)

    assert list(inspect.signature(command).parameters) == ["width"]
    command(width=2)
    assert seen == [20]


def test_unknown_names_are_errors_of_the_program() -> None:
    with pytest.raises(AssertionError, match="has no parameters"):
        takes("size", size_of, depth=1)
    with pytest.raises(AssertionError, match="has no parameter 'size'"):

        @takes("size", size_of)
        def command() -> None: ...


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(None, None, 60.0), "up to 60 minutes;"),
        (Limits(2000, None, 1.5), "up to 1.5 minutes or 2,000 updates;"),
        (Limits(None, 1_000_000, None), "up to 1,000,000 predictions;"),
    ],
)
def test_the_budget_of_a_training_is_printed(limits: Limits, words: str) -> None:
    assert words in budget_line(TrainSettings(limits))


def test_no_early_end_is_announced_without_patience() -> None:
    assert budget_line(TrainSettings(Limits(steps=5), patience=None)) == "training for up to 5 updates"


def test_a_training_without_a_limit_has_an_hour(tmp_path) -> None:
    def made(**limits: float) -> Limits:
        values = {key: one.default for key, one in inspect.signature(run_of).parameters.items()}
        return run_of(
            **values | {"model": "m", "data": [tmp_path], "output": tmp_path / "new"} | limits
        ).settings.limits

    assert made() == Limits(None, None, 60.0)
    assert made(steps=5) == Limits(5, None, None)
