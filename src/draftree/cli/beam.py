"""`draftree beam`: the most likely texts of a prompt."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from draftree.beam.params import PRESETS, BeamSearchParams
from draftree.beam.trace import BeamTrace, tree_svg
from draftree.beam.trie import TokenTrie
from draftree.cli.layout import option, refuse
from draftree.cli.options import (
    AS_JSON,
    CHAT,
    EXECUTION_OPTIONS,
    PROMPT,
    SYSTEM,
    DecoderFlags,
    Setup,
    import_engine,
    takes,
    takes_setup,
    values_of,
)
from draftree.cli.prompt import Task, read_prompt
from draftree.cli.render import note, say
from draftree.core.errors import InvalidRequestError
from draftree.loading.resolve import require_sound

if TYPE_CHECKING:
    from draftree.beam.result import BeamResult
    from draftree.llm import LLM
    from draftree.options import DecoderOptions
    from draftree.text.tokenizer import Tokenizer

PANEL = "Search"


def read_texts(path: Path | None) -> list[str]:
    """Return the lines of a file that are not blank; empty without a file."""
    if path is None:
        return []
    try:
        lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--allowed-texts") from error
    refuse(not lines, "--allowed-texts", f"{path} has no text")
    return lines


def read_changes(texts: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of --set by name; a value that is not JSON is a string."""
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        refuse(not equals, "--set", f"'{text}' is not of the form NAME=VALUE, such as strict=true")
        refuse(name in changes, "--set", f"{name} is set twice: set it once")
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = value
    return changes


class SearchOptions:
    beam_width: int | None = option(None, "Number of beams; 4 if not given.", "N", PANEL)
    num_return_sequences: int | None = option(
        None, "Number of texts, at most --beam-width; 1 if not given.", "N", PANEL
    )
    max_new_tokens: int | None = option(None, "Maximum number of generated tokens; 64 if not given.", "N", PANEL)
    length_penalty: float | None = option(
        None, "A score is the log-probability over length**X; 0 is the sum, and 1 if not given.", "X", PANEL
    )


@takes_setup(*EXECUTION_OPTIONS, draft=None, generation_config="none")
@takes("limits", values_of(SearchOptions))
@takes("decoder", values_of(DecoderFlags))
def beam(
    prompt: str | None = PROMPT,
    *,
    limits: dict[str, Any],
    preset: str = option("hf", f"Rules of another library: {', '.join(PRESETS)}.", "NAME", PANEL),
    changes: list[str] | None = option(
        None,
        "Another parameter of BeamSearchParams, such as early_stopping=never or stop='[\"END\"]'; repeatable.",
        "NAME=VALUE",
        PANEL,
        names="--set",
    ),
    force_phrase: list[str] | None = option(
        None, "A phrase that every text contains, in the tokenizer's own split of it; repeatable.", "TEXT", PANEL
    ),
    allowed_texts: Path | None = option(
        None, "A file with a text in each line: the result is one of them. Blank lines are skipped.", "FILE", PANEL
    ),
    ensemble: list[str] | None = option(
        None, "A further model of the same vocabulary, whose probabilities are averaged; repeatable.", "MODEL", PANEL
    ),
    lm_model: str | None = option(
        None,
        "A causal model of the same vocabulary, whose log-probabilities are added (shallow fusion).",
        "MODEL",
        PANEL,
    ),
    draft: str | None = option(
        None,
        "Drafter of the next beams, which changes the number of passes and not the result: ngram, suffix, "
        "runners-up, model:NAME, or several joined by '+'.",
        "METHOD",
        PANEL,
    ),
    svg: Path | None = option(None, "Write the tree of the search as SVG.", "FILE", PANEL),
    svg_step: int | None = option(
        None, "With --svg: draw the state after this many steps; the end of the search if not given.", "N", PANEL, min=1
    ),
    decoder: DecoderOptions,
    chat: bool | None = CHAT,
    system: str | None = SYSTEM,
    setup: Setup,
    as_json: bool = AS_JSON,
) -> None:
    """Search the most likely texts with beams. They go to standard output, best first; scores to standard error."""
    refuse(svg_step is not None and svg is None, "--svg-step", "it needs --svg FILE")
    limits = {name: value for name, value in limits.items() if value is not None}
    others = read_changes(changes or ())
    for name in limits:
        refuse(name in others, "--set", f"{name} has an option of its own, which is given: set it once")
    # refused without a language model, which is loaded later
    weight = {} if lm_model is None or "lm_weight" not in others else {"lm_weight": others.pop("lm_weight")}
    allowed = read_texts(allowed_texts)
    # these stand for the texts, so that conflicts are found before a model is loaded
    stand_ins: dict[str, Any] = {"force_words_ids": [[0]]} if force_phrase else {}
    if allowed:
        stand_ins["allowed_trie"] = TokenTrie([[0]])
    params = BeamSearchParams.preset(preset, **limits, **others, **stand_ins)
    task = Task(read_prompt(prompt), system, chat, decoder)
    for name in (setup.model, *(ensemble or ()), *([] if lm_model is None else [lm_model])):
        require_sound(name)
    import_engine()
    from draftree.cli.runs import dump, fetch_and_load

    llm = setup.llm(fetch_and_load(setup))
    task = task.decided(llm)
    loaded: dict[str, Any] = {}
    if force_phrase:
        loaded["force_words_ids"] = [_ids(llm, text) for text in force_phrase]
    if allowed:
        loaded["allowed_trie"] = TokenTrie([_ids(llm, text) for text in allowed])
    if ensemble:
        loaded["models"] = [llm.companion(name) for name in ensemble]
    if lm_model is not None:
        loaded |= {"lm_model": llm.companion(lm_model)} | weight
    params = dataclasses.replace(params, **loaded)
    trace = BeamTrace()
    start = time.perf_counter()
    (result,) = llm.beam_search(
        task.messages if task.chat else task.text, params, draft=draft, on_step=trace if svg else None, **decoder
    )
    seconds = time.perf_counter() - start
    if svg is not None:
        write_svg(svg, trace, llm.tokenizer, task.text, step=svg_step)
    if as_json:
        about = {"model": setup.model, "chat": task.chat, "seconds": seconds}
        counts = {name: getattr(result, name) for name in ("num_steps", "num_passes", "num_drafted", "num_used")}
        texts = [dataclasses.asdict(hypothesis) for hypothesis in result.hypotheses]
        say(dump({**about, "prompt_tokens": len(result.prompt_token_ids), **counts, "hypotheses": texts}) + "\n")
    else:
        show(result, seconds)


def _ids(llm: LLM, text: str) -> list[int]:
    ids = llm.prompts.encode_text(text, add_special_tokens=False)
    if not ids:
        raise InvalidRequestError(f"{text!r} has no tokens: leave it out", param="prompt")
    return ids


def write_svg(path: Path, trace: BeamTrace, tokenizer: Tokenizer | None, prompt: str, *, step: int | None) -> None:
    text_of = str if tokenizer is None else lambda token: tokenizer.decode([token], False)
    try:
        path.write_text(tree_svg(trace, text_of, prompt=prompt, step=step), "utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint="--svg") from error


def show(result: BeamResult, seconds: float) -> None:
    for number, hypothesis in enumerate(result.hypotheses, 1):
        lacks = "" if hypothesis.constraints_met else ", phrases missing"
        length, reason = len(hypothesis.tokens), hypothesis.finish_reason
        note(f"--- {number}: score {hypothesis.score:.4f}, {length} tokens, {reason}{lacks} ---")
        text = " ".join(map(str, hypothesis.tokens)) if hypothesis.text is None else hypothesis.text
        say(text if text.endswith("\n") else text + "\n")
    drafts = f" ({result.num_used} of {result.num_drafted} drafted nodes used)" if result.num_drafted else ""
    note(f"{result.num_steps} steps in {result.num_passes} passes{drafts}, {seconds:.2f} s")
