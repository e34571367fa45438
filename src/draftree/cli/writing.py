"""Generation for the command line: models are loaded once, and texts are shown while they are generated."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.assembly import Methods, choose_methods
from draftree.choices import decide, learning_of
from draftree.cli.progress import resolve_with_bar, waiting
from draftree.cli.prompt import Task
from draftree.cli.render import Style, decode_rate, decoding_line, is_terminal, note, say
from draftree.cli.wrap import Wrapping
from draftree.completion import Completion
from draftree.core.host import apply_threads, require_affinity
from draftree.core.types import RoundRecord
from draftree.drafters import AUTO_DRAFT, NO_DRAFT, drafts
from draftree.engine.sequence import Piece, Update
from draftree.execution import ExecutionSettings, load_named, require_positive
from draftree.llm import LLM
from draftree.loading.choices import require_known, require_kv_dtype, resolve_device, resolve_dtype
from draftree.loading.load import LoadedModel
from draftree.remote.address import is_remote
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer

__all__ = ["Run", "Screen", "Setup", "fetch_and_load", "save_learned", "warm_up", "write"]

WARM_UP_TOKENS = 8
PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {127: 0x2421}
    | dict.fromkeys(range(128, 160), 0xFFFD)
)


@dataclass(frozen=True, slots=True)
class Setup(ExecutionSettings):
    """A model and its methods, as named by the user.

    Attributes:
        auto_note: what `auto` stood for and why; empty if the user named a drafter.
    """

    draft: str | None = None
    verify: str = "coupled"
    plan: str | None = None
    exact: bool = False
    allow_control_tokens: bool = False
    generation_config: str = "none"
    learn: str | None = None
    auto_note: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether no drafter is configured."""
        return not drafts(self.draft)

    def plainly(self) -> Setup:
        """Return the same setup without a drafter."""
        return dataclasses.replace(self, draft=None, plan=None, learn=None, auto_note="")

    def decided(self, loaded: LoadedModel) -> Setup:
        """Return the same setup with a named drafter instead of `auto`, and the reason in `auto_note`.

        Raises:
            ConfigurationError: no drafter fits to the planner.
        """
        if self.draft != AUTO_DRAFT:
            return self
        choice = decide(loaded, self.verify, self.plan)
        return dataclasses.replace(self, draft=choice.draft, plan=choice.plan, auto_note=choice.note)

    def methods(self) -> Methods:
        """Find and check the methods; loads nothing. For `auto`, those of a stand-in.

        Raises:
            ConfigurationError: a method is unknown, or they do not fit together.
        """
        methods = choose_methods(self.draft, self.verify, self.plan)
        learning_of(self.learn, {self.draft or NO_DRAFT: methods})
        return methods

    def over(
        self,
        loaded: LoadedModel,
        *,
        drafters: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> LLM:
        """Return the methods on a loaded model.

        Args:
            loaded: the model.
            drafters: the drafters that requests can choose; empty for that of the setup alone.
            tokenizer: its tokenizer; None to load it.
            on_round: called with the record of every round.
        """
        return LLM(
            loaded,
            drafters or self.draft,
            verify=self.verify,
            plan=self.plan,
            exact=self.exact,
            allow_control_tokens=self.allow_control_tokens,
            generation_config=self.generation_config,
            trust_remote_code=self.trust_remote_code,
            tokenizer=tokenizer,
            learn=self.learn,
            on_round=on_round,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run.

    Attributes:
        setup: the setup of the run.
        task: the task, with `chat` decided.
        completions: one, or n.
        seconds: wall-clock time, prompt included.
    """

    setup: Setup
    task: Task
    completions: list[Completion]
    seconds: float

    @property
    def decode_rate(self) -> float:
        """Decoded tokens per second, all texts together."""
        return decode_rate([completion.stats for completion in self.completions])

    @property
    def summary(self) -> str:
        """Tokens, seconds and speed in one line."""
        stats = [completion.stats for completion in self.completions]
        cut = ", cut at the limit" if any(one.finish_reason == "length" for one in self.completions) else ""
        return decoding_line(stats, self.seconds, drafted=not self.setup.is_plain) + cut


class Screen:
    """Shows texts while they are verified, or at the end. Mutated by `show`.

    Args:
        style: style of the output.
        live: show each piece immediately; for one text only.
        width: columns to which a live text is wrapped; None does not wrap.
    """

    def __init__(self, style: Style, *, live: bool, width: int | None = None) -> None:
        self.style = style
        self.live = live
        self._guarded = is_terminal(sys.stdout)
        self._wrapping = None if width is None else Wrapping(width)
        self._pieces: dict[int, list[Piece]] = {}

    def show(self, update: Update) -> None:
        """Show the new pieces of a round."""
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
    """Load the model, downloaded with a progress bar if necessary; all other checks run first.

    Raises:
        ConfigurationError: device, dtype or methods are not available.
        ModelError: the model cannot be found or used.
    """
    methods = setup.methods()
    resolve_dtype(setup.dtype, resolve_device(setup.device))
    require_known(setup.kernels, setup.quantization)
    require_kv_dtype(setup.kv_dtype, setup.kernels, setup.device)
    require_positive(setup, "threads")
    require_affinity(setup.affinity)
    for name in (setup.model, *methods.draft_models):
        if not is_remote(name):
            resolve_with_bar(name)
    with waiting(f"loading {setup.model}"):
        apply_threads(setup.threads, setup.affinity)
        loaded = load_named(setup)
    if loaded.kernels_note is not None:
        note(loaded.kernels_note)
    return loaded


def warm_up(llm: LLM, constraint: tuple[str, str] | None = None, task: Task | None = None) -> None:
    """Generate a few hidden tokens: the first pass is slower than all others, and a grammar is compiled once.

    Args:
        llm: the model.
        constraint: name and value of the grammar.
        task: a task with `chat` decided, whose template and tokenizer are used, too.
    """
    llm.model.settle()
    room = llm.model.max_length
    grammar: dict[str, Any] = {} if constraint is None else dict([constraint])
    count = max(1, min(WARM_UP_TOKENS, room - 2))
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=constraint is None, **grammar)
    for sequence in llm.requests.sequences([0] * min(2, room - 1), params, owner=None):
        for _ in llm.engine.stream(sequence):
            pass
    if task is not None and llm.tokenizer is not None:
        ids = llm.prompts.encode_chat(task.messages) if task.chat else llm.tokenizer.encode(task.text)
        llm.tokenizer.decode(ids, skip_special_tokens=True)


def save_learned(llm: LLM) -> None:
    """Save what drafters learned, if they did, and release its files."""
    if llm.learned is not None:
        llm.learned.close()


def write(llm: LLM, setup: Setup, task: Task, *, params: SamplingParams, screen: Screen | None) -> Run:
    """Generate the texts of one task.

    Args:
        llm: the model with the methods of `setup`.
        setup: the setup, for the report.
        task: the task, with `chat` decided.
        params: sampling parameters.
        screen: where the text appears; None shows nothing.
    """
    show = None if screen is None else screen.show
    start = time.perf_counter()
    try:
        if task.chat:
            completions = llm.chat(task.messages, params, on_update=show, **task.decoder)
        else:
            completions = llm.generate(task.text, params, on_update=show, **task.decoder)
        seconds = time.perf_counter() - start
    finally:
        if screen is not None and sys.stdout is not None:
            screen.finish()
    return Run(setup, task, completions, seconds)
