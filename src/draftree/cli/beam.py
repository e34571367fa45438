"""`draftree beam`: the most likely texts of a prompt."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftree.beam.params import PRESETS, BeamSearchParams
from draftree.beam.trace import BeamTrace, tree_svg
from draftree.beam.trie import TokenTrie
from draftree.cli.flags import sampling_flags
from draftree.cli.layout import option
from draftree.cli.options import (
    AsJson,
    Chat,
    Execution,
    Model,
    Prompt,
    System,
    decoder_of,
    execution_of,
    import_engine,
    takes,
)
from draftree.cli.prompt import Task, read_prompt
from draftree.cli.render import note, say
from draftree.core.errors import InvalidRequestError
from draftree.loading.resolve import require_sound

if TYPE_CHECKING:
    from draftree.beam.result import BeamResult
    from draftree.engine.prompts import DecoderOptions
    from draftree.llm import LLM
    from draftree.text.tokenizer import Tokenizer

PANEL = "Search"
Phrases = Annotated[
    list[str] | None,
    option("A phrase that every text contains, in the tokenizer's own split of it; repeatable.", "TEXT", PANEL),
]
AllowedTexts = Annotated[
    Path | None,
    option("A file with a text in each line: the result is one of them. Blank lines are left out.", "FILE", PANEL),
]
Ensemble = Annotated[
    list[str] | None,
    option("A further model of the same vocabulary, whose probabilities are averaged; repeatable.", "MODEL", PANEL),
]
LanguageModelName = Annotated[
    str | None,
    option(
        "A causal model of the same vocabulary, whose log-probabilities are added (shallow fusion).",
        "MODEL",
        PANEL,
        names="--lm-model",
    ),
]
Weight = Annotated[float, option("Weight of the log-probabilities of --lm-model.", "NUMBER", PANEL)]


@dataclass(frozen=True, slots=True)
class Material:
    """Texts and models of a search.

    Attributes:
        phrases: texts that every result contains.
        allowed: texts that a result may be; empty for any.
        ensemble: names of further models.
        lm_model: name of the language model; None for none.
        lm_weight: its weight.
    """

    phrases: Sequence[str]
    allowed: Sequence[str]
    ensemble: Sequence[str]
    lm_model: str | None
    lm_weight: float

    @property
    def checked_as(self) -> dict[str, Any]:
        """Parameters that stand for the texts, so that conflicts are found before a model is loaded."""
        if self.lm_weight != 1.0 and self.lm_model is None:
            raise typer.BadParameter("it needs --lm-model", param_hint="--lm-weight")
        phrases = {"force_words_ids": [[0]]} if self.phrases else {}
        return phrases | ({"allowed_trie": TokenTrie([[0]])} if self.allowed else {})

    @property
    def model_names(self) -> list[str]:
        """Names of all further models."""
        return [*self.ensemble, *([] if self.lm_model is None else [self.lm_model])]

    def loaded(self, params: BeamSearchParams, llm: LLM) -> BeamSearchParams:
        """Return the parameters with token ids and loaded models."""
        found: dict[str, Any] = {}
        if self.phrases:
            found["force_words_ids"] = [_ids(llm, text) for text in self.phrases]
        if self.allowed:
            found["allowed_trie"] = TokenTrie([_ids(llm, text) for text in self.allowed])
        if self.ensemble:
            found["models"] = [llm.companion(name) for name in self.ensemble]
        if self.lm_model is not None:
            found |= {"lm_model": llm.companion(self.lm_model), "lm_weight": self.lm_weight}
        return dataclasses.replace(params, **found)


def _ids(llm: LLM, text: str) -> list[int]:
    ids = llm.prompts.encode_text(text, add_special_tokens=False)
    if not ids:
        raise InvalidRequestError(f"{text!r} has no tokens: leave it out", param="prompt")
    return ids


def read_texts(path: Path | None) -> list[str]:
    """Return the lines of a file that are not blank; empty without a file."""
    if path is None:
        return []
    try:
        lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--allowed-texts") from error
    if not lines:
        raise typer.BadParameter(f"{path} has no text", param_hint="--allowed-texts")
    return lines


WITHOUT = frozenset(
    {
        "prefix_allowed_tokens_fn",
        "allowed_trie",
        "force_words_ids",
        "length_bounds",
        "early_stopping",
        "models",
        "lm_model",
        "lm_weight",
    }
)
"""Functions are for the library; the others have options of their own."""
STOP_RULES: dict[str, bool | str] = {"true": True, "false": False, "never": "never", "fcfs": "fcfs"}
Preset = Annotated[str, option(f"Rules of another library: {', '.join(PRESETS)}.", "NAME", PANEL)]
Stopping = Annotated[
    str | None, option("When a search with enough finished texts ends: true, false, never or fcfs.", "RULE", PANEL)
]
Bounds = Annotated[
    str | None,
    option(
        "Four numbers min_a,min_b,max_a,max_b: a text has from min_a*n+min_b to max_a*n+max_b tokens for n prompt "
        "tokens.",
        "NUMBERS",
        PANEL,
    ),
]
Svg = Annotated[Path | None, option("Write the tree of the search as SVG.", "FILE", PANEL)]
SvgStep = Annotated[
    int | None,
    option("With --svg: draw the state after this many steps; the end of the search if not given.", "N", PANEL, min=1),
]

Draft = Annotated[
    str | None,
    option(
        "Drafter of the next beams, which changes the number of passes and not the result: ngram, suffix, "
        "runners-up, model:NAME, or several joined by '+'.",
        "METHOD",
        PANEL,
    ),
]


def takes_search(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the keyword `given` of a typer function by the flags of `BeamSearchParams` that the user gave."""
    flags = list(sampling_flags({}, kind=BeamSearchParams, without=WITHOUT))
    for flag in flags:
        typing.get_args(flag.annotation)[1].rich_help_panel = PANEL
    own = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in own.parameters.values() if parameter.name != "given"]
    parameters = [*kept, *(flag.parameter() for flag in flags)]

    @functools.wraps(command)
    def with_flags(context: typer.Context, **values: Any) -> None:
        given = {}
        for flag in flags:
            value, source = values.pop(flag.name), context.get_parameter_source(flag.name)
            if source is not None and source.name != "DEFAULT":
                given[flag.name] = flag.value(value)
        command(context=context, **values, given=given)

    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags


@takes_search
@takes("execution", execution_of)
@takes("decoder", decoder_of)
def beam(
    context: typer.Context,
    model: Model,
    prompt: Prompt = None,
    *,
    preset: Preset = "hf",
    early_stopping: Stopping = None,
    force_phrase: Phrases = None,
    length_bounds: Bounds = None,
    allowed_texts: AllowedTexts = None,
    ensemble: Ensemble = None,
    lm_model: LanguageModelName = None,
    lm_weight: Weight = 1.0,
    svg: Svg = None,
    svg_step: SvgStep = None,
    draft: Draft = None,
    decoder: DecoderOptions,
    chat: Chat = None,
    system: System = None,
    execution: Execution,
    as_json: AsJson = False,
    given: dict[str, Any],
) -> None:
    """Search the most likely texts with beams. They go to standard output, best first; scores to standard error."""
    given |= read_options(early_stopping, length_bounds)
    if svg_step is not None and svg is None:
        raise typer.BadParameter("it needs --svg FILE", param_hint="--svg-step")
    material = Material(force_phrase or [], read_texts(allowed_texts), ensemble or [], lm_model, lm_weight)
    params = BeamSearchParams.preset(preset, **given, **material.checked_as)
    if chat is False and system is not None:
        raise typer.BadParameter("--no-chat has no system message: leave one of them out", param_hint="--system")
    task = Task(read_prompt(prompt), system, chat, decoder)
    for name in (model, *material.model_names):
        require_sound(name)
    import_engine()
    from draftree.cli.runs import dump, fetch_and_load

    setup = execution.setup(model)
    llm = setup.over(fetch_and_load(setup))
    task = task.decided(llm)
    params = material.loaded(params, llm)
    trace = BeamTrace()
    start = time.perf_counter()
    (result,) = llm.beam_search(
        task.messages if task.chat else task.text, params, draft=draft, on_step=trace if svg else None, **decoder
    )
    seconds = time.perf_counter() - start
    if svg is not None:
        write_svg(svg, trace, llm.tokenizer, task.text, step=svg_step)
    if as_json:
        say(dump({"model": model, "chat": task.chat, "seconds": seconds, **to_json(result)}) + "\n")
    else:
        show(result, seconds)


def write_svg(path: Path, trace: BeamTrace, tokenizer: Tokenizer | None, prompt: str, *, step: int | None) -> None:
    """Write the picture of a search."""
    text_of = str if tokenizer is None else lambda token: tokenizer.decode([token], False)
    try:
        path.write_text(tree_svg(trace, text_of, prompt=prompt, step=step), "utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint="--svg") from error


def read_options(early_stopping: str | None, length_bounds: str | None) -> dict[str, Any]:
    """Return the values of the options that are not plain fields."""
    found: dict[str, Any] = {}
    if early_stopping is not None:
        if early_stopping not in STOP_RULES:
            raise typer.BadParameter(
                f"'{early_stopping}' is none of {', '.join(STOP_RULES)}", param_hint="--early-stopping"
            )
        found["early_stopping"] = STOP_RULES[early_stopping]
    if length_bounds is not None:
        try:
            found["length_bounds"] = [float(part) for part in length_bounds.split(",")]
        except ValueError:
            raise typer.BadParameter(
                f"'{length_bounds}' is not of the form 0,1,2,10", param_hint="--length-bounds"
            ) from None
    return found


def to_json(result: BeamResult) -> dict[str, Any]:
    """Return a result as plain values."""
    return {
        "prompt_tokens": len(result.prompt_token_ids),
        "num_steps": result.num_steps,
        "num_passes": result.num_passes,
        "num_drafted": result.num_drafted,
        "num_used": result.num_used,
        "hypotheses": [dataclasses.asdict(hypothesis) for hypothesis in result.hypotheses],
    }


def show(result: BeamResult, seconds: float) -> None:
    """Print the texts, and their scores to standard error."""
    for number, found in enumerate(result.hypotheses, 1):
        lacks = "" if found.constraints_met else ", phrases missing"
        note(f"--- {number}: score {found.score:.4f}, {len(found.tokens)} tokens, {found.finish_reason}{lacks} ---")
        text = " ".join(map(str, found.tokens)) if found.text is None else found.text
        say(text if text.endswith("\n") else text + "\n")
    drafts = f" ({result.num_used} of {result.num_drafted} drafted nodes used)" if result.num_drafted else ""
    note(f"{result.num_steps} steps in {result.num_passes} passes{drafts}, {seconds:.2f} s")
