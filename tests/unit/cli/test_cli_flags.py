"""Sampling flags come from the dataclass, field by field."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from draftree.cli.bench import BenchOptions
from draftree.cli.flags import DEFAULTS, LIBRARY_ONLY, sampling_flags, sampling_of
from draftree.cli.options import takes
from draftree.cli.train import BudgetOptions, JobOptions, RecipeOptions, budget_line, run_of
from draftree.cli.train_data import CaptureOptions, MessageOptions
from draftree.cli.tune import DraftTuneOptions, LayerTuneOptions
from draftree.cli.verify_server import LimitOptions
from draftree.core.errors import InvalidRequestError
from draftree.lab.bench.suite.run import SuiteSettings
from draftree.lab.tune.drafts import DraftTuneSettings
from draftree.lab.tune.layers import LayerTuneSettings
from draftree.sampling.params import SamplingParams
from draftree.serve.verify import VerifySettings
from draftree.train.data.capture import CaptureSettings
from draftree.train.data.prompts import MessageSettings
from draftree.train.preparing import TrainingJob
from draftree.train.settings import Limits, TrainSettings

EXAMPLE = 'root ::= "this file is read as a grammar"'
GIVEN: dict[str, tuple[list[str], Any]] = {
    "n": (["--n", "3"], 3),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "-1"], -1),
    "min_p": (["--min-p", "0.1"], 0.1),
    "repetition_penalty": (["--repetition-penalty", "1.3"], 1.3),
    "presence_penalty": (["--presence-penalty", "-0.5"], -0.5),
    "frequency_penalty": (["--frequency-penalty", "0.25"], 0.25),
    "logit_bias": (["--logit-bias", "7=-inf", "--logit-bias", "8=2.5"], {7: float("-inf"), 8: 2.5}),
    "no_repeat_ngram_size": (["--no-repeat-ngram-size", "4"], 4),
    "ngram_scope": (["--ngram-scope", "generated"], "generated"),
    "bad_words": (["--bad-words", "foo", "--bad-words", "b c"], ("foo", "b c")),
    "allowed_token_ids": (["--allowed-token-ids", "5", "--allowed-token-ids", "6"], (5, 6)),
    "min_tokens": (["--min-tokens", "2"], 2),
    "max_tokens": (["--max-tokens", "none"], None),
    "stop": (["--stop", "###", "--stop", "\n\n"], ("###", "\n\n")),
    "stop_token_ids": (["--stop-token-ids", "5", "--stop-token-ids", "6"], (5, 6)),
    "ignore_eos": (["--ignore-eos"], True),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "prompt_logprobs": (["--prompt-logprobs", "-1"], -1),
    "truncate_prompt_tokens": (["--truncate-prompt-tokens", "5"], 5),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "seed": (["--seed", "-4"], -4),
    "logprobs": (["--logprobs", "0"], 0),
    "json_schema": (["--json-schema", '{"type": "object"}'], '{"type": "object"}'),
    "regex": (["--regex", "[a-z]+"], "[a-z]+"),
    "grammar": (["--grammar", __file__], Path(__file__).read_text(encoding="utf-8")),
    "grammar_prefix": (["--grammar-prefix", __file__], Path(__file__).read_text(encoding="utf-8")),
    "prediction": (["--prediction", __file__], Path(__file__).read_text(encoding="utf-8")),
}


def parsed(arguments: list[str]) -> SamplingParams:
    """What a command with these flags gets."""
    got: list[SamplingParams] = []

    @takes("params", sampling_of())
    def command(*, loud: bool = False, params: SamplingParams) -> None:
        assert loud
        got.append(params)

    app = typer.Typer(add_completion=False)
    app.command()(command)
    typer.main.get_command(app).main(["--loud", *arguments], standalone_mode=False)
    return got[0]


def test_every_field_has_a_flag_and_a_case() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams) if field.name not in LIBRARY_ONLY]
    assert [flag.name for flag in sampling_flags()] == names
    assert sorted(GIVEN) == sorted(names)
    assert [flag.option.param_decls[0].split("/")[0] for flag in sampling_flags()] == [
        "--" + name.replace("_", "-") for name in names
    ]


def test_without_flags_the_defaults_are_those_of_the_dataclass_and_the_table() -> None:
    assert parsed([]) == SamplingParams(**DEFAULTS)


@pytest.mark.parametrize("name", GIVEN)
def test_a_flag_sets_its_field_and_no_other(name: str) -> None:
    arguments, value = GIVEN[name]
    changed = parsed(arguments)
    assert getattr(changed, name) == value
    assert value != getattr(parsed([]), name), "the case must differ from the default"
    assert changed == dataclasses.replace(parsed([]), **{name: value})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--logit-bias", "7"], "'7' is not of the form ID=VALUE"),
        (["--logit-bias", "x=1"], "'x=1' is not of the form ID=VALUE"),
        (["--logit-bias", "7=1", "--logit-bias", "7=2"], "token 7 is given twice"),
        (["--max-tokens", "many"], "'many' is neither a whole number nor 'none'"),
        (["--prediction", "no/such/file"], "'no/such/file' cannot be read"),
    ],
)
def test_a_value_that_cannot_be_read_names_its_flag(arguments: list[str], words: str) -> None:
    with pytest.raises(typer.BadParameter, match=words) as caught:
        parsed(arguments)
    assert arguments[0] in caught.value.format_message()


def test_a_schema_is_typed_or_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    for encoding in ("utf-8", "utf-8-sig"):
        file.write_text('{"type":   "array"}', encoding=encoding)
        assert parsed(["--json-schema", str(file)]).json_schema == '{"type": "array"}'
    with pytest.raises(typer.BadParameter, match="cannot be read"):
        parsed(["--json-schema", "no/such/schema"])
    with pytest.raises(InvalidRequestError, match="json_schema"):
        parsed(["--json-schema", '{"type"'])


def test_a_value_out_of_range_is_refused_by_the_dataclass() -> None:
    with pytest.raises(InvalidRequestError, match="temperature"):
        parsed(["--temperature", "nan"])


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
        parameters = inspect.signature(run_of).parameters
        values = {key: parameter.default.default for key, parameter in parameters.items()}
        return run_of(
            **values | {"model": "m", "data": [tmp_path], "output": tmp_path / "new"} | limits
        ).settings.limits

    assert made() == Limits(None, None, 60.0)
    assert made(steps=5) == Limits(5, None, None)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (BenchOptions, SuiteSettings),
        (RecipeOptions, TrainSettings),
        (BudgetOptions, Limits),
        (JobOptions, TrainingJob),
        (CaptureOptions, CaptureSettings),
        (MessageOptions, MessageSettings),
        (DraftTuneOptions, DraftTuneSettings),
        (LayerTuneOptions, LayerTuneSettings),
        (LimitOptions, VerifySettings),
    ],
)
def test_groups_of_options_have_the_names_of_their_settings(options: type, settings: Any) -> None:
    assert get_type_hints(options).keys() <= {field.name for field in dataclasses.fields(settings)}
