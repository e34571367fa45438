"""Runs of a model on the command line: loading, generation, output, comparison, traces and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import typer

from draftree.build import choose_methods
from draftree.cli.layout import refuse
from draftree.cli.options import Setup
from draftree.cli.prompt import Request, Task
from draftree.cli.render import Style, decode_rate, decoding_line, is_terminal, note, resolve_with_bar, say, waiting
from draftree.core.errors import ConfigurationError
from draftree.core.files import shown_name
from draftree.core.host import apply_threads, cpu_name, require_affinity, usable_cores
from draftree.engine.sequence import Piece, Update
from draftree.llm import LLM
from draftree.loading.loaded import LoadedModel
from draftree.loading.options import resolve_place
from draftree.models.base import LanguageModel
from draftree.options import NO_DRAFT
from draftree.outputs import Completion
from draftree.parallel.entry import load_divided
from draftree.remote.address import is_remote
from draftree.sampling.params import SamplingParams
from draftree.text.retokenize import pieces_of
from draftree.text.tokenizer import Tokenizer
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import Guarantee, Verifier
from draftree.version import __version__

if TYPE_CHECKING:
    from draftree.engine.trace import TraceWriter
    from draftree.lab.bench.benchmark import Benchmark

SPLIT = re.compile(r"(\n| +)")


class Wrapping:
    """Wraps text at a width, which only a longer word exceeds. Holds a word back until its end is known. Mutated."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._gap: list[Piece] = []
        self._word: list[Piece] = []

    def push(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the pieces that are final after these."""
        for piece in pieces:
            for part in filter(None, SPLIT.split(piece.text)):
                here = Piece(part, piece.drafted)
                if part == "\n":
                    yield from self.finish()
                    yield here
                elif part.isspace():
                    yield from self._place()
                    self._gap.append(here)
                else:
                    self._word.append(here)

    def finish(self) -> Iterator[Piece]:
        """Yield the last word; a new text may follow."""
        yield from self._place()
        self._gap, self._column = [], 0

    def _place(self) -> Iterator[Piece]:
        """Yield the complete word, after its gap or on a new line."""
        if not self._word:
            return
        gap, word = (sum(len(piece.text) for piece in pieces) for pieces in (self._gap, self._word))
        if self._column and self._column + gap + word > self._width:
            yield Piece("\n", drafted=False)
            self._column = word
        else:
            yield from self._gap
            self._column += gap + word
        yield from self._word
        self._gap, self._word = [], []


WARM_UP_TOKENS = 8
PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {127: 0x2421}
    | dict.fromkeys(range(128, 160), 0xFFFD)
)


@dataclass(frozen=True, slots=True)
class Run:
    setup: Setup
    task: Task
    completions: list[Completion]
    seconds: float  # wall-clock time, prompt included

    @property
    def decode_rate(self) -> float:
        return decode_rate([completion.stats for completion in self.completions])

    @property
    def summary(self) -> str:
        stats = [completion.stats for completion in self.completions]
        cut = ", cut at the limit" if any(each.finish_reason == "length" for each in self.completions) else ""
        return decoding_line(stats, self.seconds, drafted=not self.setup.is_plain) + cut


class Screen:
    """Shows texts while they are verified, or at the end; a live text is wrapped at `width`. Mutated by `show`."""

    def __init__(self, style: Style, *, live: bool, width: int | None = None) -> None:
        self.style = style
        self.live = live
        self._guarded = is_terminal(sys.stdout)
        self._wrapping = None if width is None else Wrapping(width)
        self._pieces: dict[int, list[Piece]] = {}

    def show(self, update: Update) -> None:
        pieces = [harmless(piece) for piece in update.pieces] if self._guarded else update.pieces
        self._pieces.setdefault(update.sequence.index, []).extend(pieces)
        if self.live:
            say(self.style.pieces(pieces if self._wrapping is None else self._wrapping.push(pieces)))

    def finish(self) -> None:
        """End the output: all verified text is shown, and the cursor is at the start of a line."""
        if self._wrapping is not None:
            say(self.style.pieces(self._wrapping.finish()))
        texts = [self._pieces[index] for index in sorted(self._pieces)]
        for number, pieces in enumerate(texts, 1):
            if len(texts) > 1:
                say(f"{self.style.dim(f'--- {number} of {len(texts)} ---')}\n")
            if not self.live:
                say(self.style.pieces(pieces))
            if pieces and not pieces[-1].text.endswith("\n"):
                say("\n")
        self._pieces = {}


def harmless(piece: Piece) -> Piece:
    """Replace control characters by their pictures, so that a model cannot control the terminal."""
    return Piece(piece.text.translate(PICTURES), piece.drafted)


def fetch_and_load(setup: Setup) -> LoadedModel:
    """Load the model, downloaded with a progress bar if necessary; all other checks run first."""
    methods = setup.methods()
    resolve_place(setup)
    require_affinity(setup.affinity)
    for name in (setup.model, *methods.draft_models):
        if not is_remote(name):
            resolve_with_bar(name)
    with waiting(f"loading {setup.model}"):
        apply_threads(setup.threads, setup.affinity)
        loaded = load_divided(setup)
    if loaded.kernels_note is not None:
        note(loaded.kernels_note)
    return loaded


def warm_up(llm: LLM, constraint: tuple[str, str] | None = None, task: Task | None = None) -> None:
    """Generate a few hidden tokens: the first pass is slower than all others, and a grammar is compiled once."""
    llm.model.settle()
    room = llm.model.max_length
    grammar: dict[str, Any] = {} if constraint is None else dict([constraint])
    count = max(1, min(WARM_UP_TOKENS, room - 2))
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=constraint is None, **grammar)
    for sequence in llm.requests.sequences([0] * min(2, room - 1), params, owner=None):
        for _ in llm.engine.stream(sequence):
            pass
    if task is not None and llm.tokenizer is not None:
        llm.tokenizer.decode(task.encoded(llm), skip_special_tokens=True)


def write(llm: LLM, setup: Setup, task: Task, *, params: SamplingParams, screen: Screen | None) -> Run:
    show = None if screen is None else screen.show
    start = time.perf_counter()
    try:
        if task.chat:
            completions = llm.chat(task.messages, params, on_update=show, **task.decoder)
        else:
            completions = llm.generate(task.prompt, params, on_update=show, **task.decoder)
        seconds = time.perf_counter() - start
    finally:
        if screen is not None and sys.stdout is not None:
            screen.finish()
    return Run(setup, task, completions, seconds)


def save_learned(llm: LLM) -> None:
    if llm.learned is not None:
        llm.learned.close()


def verifier_of(verify: str) -> type[Verifier]:
    return VERIFIERS.configure(VERIFIERS.parse(verify)[0])[0]


def lossy_line(setup: Setup, temperature: float) -> str | None:
    """Return the warning for a verifier that is lossy at this temperature; None if the text is the model's own."""
    if setup.is_plain or verifier_of(setup.verify).promise(temperature) is not Guarantee.LOSSY:
        return None
    return (
        f"verifier '{setup.verify}' is lossy at temperature {temperature:g}: "
        "the text is not distributed as the model's own (coupled is lossless)"
    )


def announce_methods(setup: Setup, llm: LLM, params: SamplingParams, style: Style) -> None:
    """Write what a model decided itself, its sampling defaults, and the warning, if there are any."""
    for line in filter(None, (llm.draft_note, llm.sampling_note)):
        note(style.dim(line))
    if warning := lossy_line(setup, llm.requests.resolved(params).sampling.temperature):
        note(style.bold(warning))


def report(run: Run, model: LanguageModel) -> dict[str, Any]:
    setup = run.setup
    first = run.completions[0]
    texts = [completion.to_json() for completion in run.completions]
    return {
        "model": setup.model,
        "draft": NO_DRAFT if setup.is_plain else setup.draft,
        "draft_note": setup.auto_note,
        "verify": setup.verify,
        "plan": None if setup.is_plain else setup.methods().plan,
        "chat": run.task.chat,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": first.stats.kernels,
        "fallback_reason": first.stats.fallback_reason,
        "lossless": first.lossless,
        "promise": str(first.stats.promise),
        "prompt_tokens": first.stats.prompt_tokens,
        "seconds": run.seconds,
        **(texts[0] if len(texts) == 1 else {"completions": texts}),
    }


def dump(values: dict[str, Any]) -> str:
    """Return strictly valid JSON: a logarithm of zero becomes null."""
    return json.dumps(finite(values), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


# Comparison of plain decoding with speculation: same prompt, same seed, texts compared.
#
# Plain decoding runs before and after speculation, so that a machine that warms up or slows down favours neither. Only
# decode time is compared: both read the prompt in the same way.

SHOWN = 30  # characters of each text in the report of a difference


def keeps_text(verifier: type[Verifier], temperature: float) -> bool:
    """Return whether speculation produces plain decoding's text, token for token."""
    return verifier.promise(temperature) is Guarantee.SAME_TEXT


def comparable(params: SamplingParams, verify: str) -> SamplingParams:
    """Return the parameters with a seed, which both runs need."""
    verifier = verifier_of(verify)
    temperature = params.sampling.temperature
    if not keeps_text(verifier, temperature):
        known = [name for name in VERIFIERS.names() if keeps_text(VERIFIERS.find(name), temperature)]
        case = "preserves the model's distribution, but not the text of a seed" if verifier.lossless else "is lossy"
        raise ConfigurationError(
            f"--compare needs equal texts, but verifier '{verify}' {case}: "
            f"at temperature {temperature:g} use {', '.join(known)}"
        )
    return params if params.seed is not None else dataclasses.replace(params, seed=secrets.randbits(32))


def are_equal(plain: Run, fast: Run) -> bool:
    return [c.token_ids for c in plain.completions] == [c.token_ids for c in fast.completions]


def speedup(plain: Sequence[Run], fast: Run) -> float:
    return fast.decode_rate / fmean(run.decode_rate for run in plain)


def verdict(plain: Sequence[Run], fast: Run) -> str:
    if other := next((run for run in plain if not are_equal(run, fast)), None):
        return f"THE TEXTS DIFFER {difference(other, fast)}"
    ratio = speedup(plain, fast)
    line = f"speed-up {ratio:.2f}, the texts are the same"
    if any(completion.stats.accepted_tokens for completion in fast.completions):
        return line
    meaning = "the difference is noise" if ratio >= 1 else "drafting only cost time"
    return f"{line}; no drafted token was accepted: {meaning}"


def difference(plain: Run, fast: Run) -> str:
    """Describe where the first two differing texts diverge."""
    completions = zip(plain.completions, fast.completions, strict=True)
    texts = next(
        ((first.text, second.text) for first, second in completions if first.token_ids != second.token_ids), None
    )
    if texts is None:
        return "no difference"
    if texts[0] == texts[1]:
        return "the texts are equal, but their tokens differ"
    pairs = enumerate(zip(*texts, strict=False))
    start = next((place for place, (left, right) in pairs if left != right), min(map(len, texts)))
    slow, quick = (repr(text[start : start + SHOWN]) for text in texts)
    return f"from character {start}: plain {slow}, with speculation {quick}"


@contextmanager
def recorded(
    path: Path | None, setup: Setup, loaded: LoadedModel, params: SamplingParams | None = None
) -> Iterator[LLM]:
    """Yield the configured methods; every round is recorded as a line of the file."""
    if path is None:
        yield setup.llm(loaded)
        return
    from draftree.engine.trace import TraceHeader, TraceWriter

    with path.open("x", encoding="utf-8") as stream:
        writer = TraceWriter(stream)
        llm = setup.llm(loaded, on_round=writer)
        llm.requests.records_picks = True
        about = run_facts(loaded)
        if params is not None:
            resolved = llm.requests.resolved(params)
            about |= {"temperature": resolved.sampling.temperature}
            about |= {"seed": resolved.seed, "max_tokens": resolved.max_tokens}
        specs = (str(setup.draft), setup.verify, setup.methods().plan)
        writer.begin(TraceHeader(shown_name(setup.model), *specs, llm.planner.parts, llm.planner.pass_seconds, about))
        yield llm
        writer.end(pieces_of(llm.tokenizer))


def run_facts(loaded: LoadedModel) -> dict[str, Any]:
    return {
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "kernels": loaded.kernels,
        "quantization": loaded.quantization,
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
        "draftree": __version__,
    }


class Recordings:
    """A folder with a trace of every drafting method; nothing without a folder. Mutated by `of`."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._writers: dict[str, TraceWriter] = {}
        self._tokenizer: Tokenizer | None = None

    def __enter__(self) -> Recordings:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writers:
            text_of = pieces_of(self._tokenizer)
            for writer in self._writers.values():
                writer.end(text_of)
        self._files.close()

    def of(self, method: str) -> TraceWriter | None:
        """Return the round callback of a method."""
        from draftree.engine.trace import TraceWriter
        from draftree.lab.bench.methods import PLAIN

        if self._folder is None or method == PLAIN:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.+@,=-]+", "_", method)
        stream = self._files.enter_context((self._folder / f"{name}.jsonl").open("x", encoding="utf-8"))
        self._writers[method] = TraceWriter(stream)
        return self._writers[method]

    def begin(self, ready: Benchmark, model: str) -> None:
        """Write the header lines; called after loading, before the first run."""
        from draftree.engine.trace import TraceHeader
        from draftree.lab.bench.methods import OurMethod
        from draftree.lab.bench.records import OURS
        from draftree.lab.bench.writers import OurWriter

        if not self._writers:
            return
        writer = ready.runner.writers[OURS]
        assert isinstance(writer, OurWriter)
        self._tokenizer, header_of = writer.tokenizer, ready.header
        named = ("dtype", "device", "kernels", "quantization", "temperature", "seed", "max_tokens", "batch", "repeats")
        about = {name: header_of[name] for name in named if name in header_of}
        about |= {"cpu": header_of["machine"]["cpu"], "cores": header_of["machine"]["usable_cores"]}
        about |= {"date": header_of["date"][:10], "draftree": header_of["versions"]["draftree"]}
        for method in ready.runner.methods:
            if method.name in self._writers and isinstance(method.how, OurMethod):
                planner, how = writer.planners[method.name], method.how
                specs = (how.draft, how.verify, choose_methods(how.draft, how.verify, how.plan).plan)
                header = TraceHeader(shown_name(model), *specs, planner.parts, planner.pass_seconds, about)
                self._writers[method.name].begin(header)


def check_beside(setup: Setup, *, compare: bool, record: Path | None) -> None:
    """Check that comparisons and traces have a drafter and a single run."""
    is_plain = setup.is_plain
    records = record is not None
    refuse(records and compare, "--record", "a trace records one run: leave --compare out")
    refuse(records and is_plain, "--record", "without a drafter there is nothing to record: add --draft")
    refuse(compare and is_plain, "--compare", "there is nothing to compare with: name a drafter with --draft")


def write_and_report(
    setup: Setup, request: Request, screen: Screen | None, *, notes: Style, record: Path | None
) -> None:
    loaded = fetch_and_load(setup)
    setup = setup.decided(loaded)
    check_beside(setup, compare=False, record=record)
    with recorded(record, setup, loaded, request.params) as llm:
        announce_methods(setup, llm, request.params, notes)
        announce(setup, screen, notes)
        request = request.met(llm)
        run = write(llm, setup, request.task, params=request.params, screen=screen)
        save_learned(llm)
    if screen is None:
        say(dump(report(run, llm.model)) + "\n")
    else:
        for line in filter(None, (setup.auto_note, run.summary, llm.model.note)):
            note(notes.dim(line))


def compare_and_report(setup: Setup, request: Request, screen: Screen | None, notes: Style) -> None:
    setup.methods()
    request = dataclasses.replace(request, params=comparable(request.params, setup.verify))
    loaded = fetch_and_load(setup)
    setup = setup.decided(loaded)
    check_beside(setup, compare=True, record=None)
    fast = setup.llm(loaded)
    announce_methods(setup, fast, request.params, notes)
    without = setup.plainly()
    plain = without.llm(loaded)
    request = request.met(fast)
    for llm in (plain, fast):
        warm_up(llm, request.params.constraint, request.task)
    announce(setup, screen, notes)
    live = screen is not None and screen.live
    plain_params = dataclasses.replace(request.params, prediction=None)
    before = write(plain, without, request.task, params=plain_params, screen=screen if live else None)
    if screen is not None:
        note(notes.dim(f"plain: {before.summary}"))
    fast_run = write(fast, setup, request.task, params=request.params, screen=screen)
    save_learned(fast)
    plain.forget()
    plain_runs = [before, write(plain, without, request.task, params=plain_params, screen=None)]
    equal = all(are_equal(run, fast_run) for run in plain_runs)
    if screen is None:
        beside = {"plain": report(before, loaded.model), "equal": equal, "speedup": speedup(plain_runs, fast_run)}
        say(dump(report(fast_run, loaded.model) | beside) + "\n")
    else:
        summaries = (f"{setup.draft}: {fast_run.summary}", f"plain again: {plain_runs[1].summary}")
        for line in filter(None, (setup.auto_note, *summaries)):
            note(notes.dim(line))
        note(notes.bold(verdict(plain_runs, fast_run)))
    if not equal:
        raise typer.Exit(1)


def announce(setup: Setup, screen: Screen | None, notes: Style) -> None:
    """Print once what the colours mean, if colours are shown."""
    if screen is not None and screen.style.coloured and notes.coloured and not setup.is_plain:
        note(f"{notes.accepted('drafted and accepted')}, target token")
