"""Reasoning before an answer: its markers by chat template, its split from the text, and grammars that begin after it.

Most models write `<think>…</think>` and then the answer. The prompt may already have the opening marker, or a whole
empty block where reasoning is off. gpt-oss writes messages on channels, `analysis` before `final` (its format is called
harmony); calls of functions are messages there, too.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import chain
from typing import Any, final

from draftree.options import RequestOptions
from draftree.sampling.grammar.ebnf import literal
from draftree.serve.logprobs import TokenTexts
from draftree.serve.pool import ServedModel
from draftree.serve.schema import note
from draftree.serve.tools.parser import CallParser, Delta, Markers, merged

SPACE = " \t\r\n"
TAIL_TOKENS = 64
"""Number of last prompt tokens in which markers are searched; a marker may have one token for each byte."""
MOST_SPACE = 4  # maximum length of white space between reasoning and a text with a grammar


class Stage(Enum):
    BEFORE = auto()  # the text may begin with reasoning
    INSIDE = auto()  # the text begins inside reasoning
    AFTER = auto()  # the text has no reasoning


class Splitter(ABC):
    """Splits a text that grows into reasoning, text and calls. Mutated by `push` and `finish`."""

    @property
    @abstractmethod
    def is_inside(self) -> bool:
        """Whether the text ends inside reasoning."""

    @abstractmethod
    def push(self, text: str) -> list[Delta]:
        """Read a piece of the text, and return what is certain."""

    @abstractmethod
    def finish(self) -> list[Delta]:
        """Return the rest at the end of the text."""


class ReasoningFormat(ABC):
    """The written form of reasoning in a model family."""

    @property
    @abstractmethod
    def markers(self) -> Sequence[str]:
        """The texts that separate reasoning from the answer."""

    @abstractmethod
    def stage(self, prompt: str) -> Stage:
        """Return where the text of a prompt ends; its last characters suffice."""

    @abstractmethod
    def grammar(self, stage: Stage, specials: Mapping[str, int]) -> str | None:
        """Return EBNF of what precedes the answer; None if nothing does."""

    @abstractmethod
    def splitter(self, stage: Stage, functions: Collection[str]) -> Splitter:
        """Return a splitter of one text."""


@final
@dataclass(frozen=True, slots=True)
class Tags(ReasoningFormat):
    """One block between two markers at the beginning of a text."""

    opening: str
    closing: str

    @property
    def markers(self) -> Sequence[str]:
        return self.opening, self.closing

    def stage(self, prompt: str) -> Stage:
        """Return the stage by the last marker, if it ends the prompt."""
        end = prompt.rstrip(SPACE)
        if end.endswith(self.opening):
            return Stage.INSIDE
        return Stage.AFTER if end.endswith(self.closing) else Stage.BEFORE

    def grammar(self, stage: Stage, specials: Mapping[str, int]) -> str | None:
        """Return a block whose beginning is in the prompt, an optional block, or None."""
        if stage is Stage.AFTER:
            return None
        if self.closing in specials:
            inner = f'"" | ExcludeToken({", ".join(str(specials[marker]) for marker in self.markers)}) reasoning'
        else:
            inner = f"TagDispatch(loop_after_dispatch=false, excludes=({literal(self.closing)}))"
        block = f"reasoning {_terminal(self.closing, specials)} space"
        root = block if stage is Stage.INSIDE else f"(space {_terminal(self.opening, specials)} {block})?"
        return f"root ::= {root}\nreasoning ::= {inner}\nspace ::= [ \\t\\r\\n]{{0,{MOST_SPACE}}}\n"

    def splitter(self, stage: Stage, functions: Collection[str]) -> Splitter:
        return TagSplitter(self, stage)


@final
class TagSplitter(Splitter):
    """Splitter of one block and the text after it; white space around the reasoning is left out."""

    def __init__(self, form: Tags, stage: Stage) -> None:
        self._form, self._stage = form, stage
        self._closing = Markers(frozenset((form.closing,)))
        self._buffer = ""
        self._skips_space = stage is Stage.INSIDE

    @property
    def is_inside(self) -> bool:
        return self._stage is Stage.INSIDE

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        if self._stage is Stage.BEFORE:
            start = self._buffer.lstrip(SPACE)
            opening = self._form.opening
            if start.startswith(opening):
                self._stage = Stage.INSIDE
                self._buffer = start.removeprefix(opening)
                self._skips_space = True
            elif opening.startswith(start):
                return deltas
            else:
                self._stage = Stage.AFTER
        if self._skips_space:
            self._buffer = self._buffer.lstrip(SPACE)
        if self._stage is Stage.INSIDE:
            deltas += self._reasoning()
        if self._stage is Stage.AFTER and self._buffer:
            deltas.append(Delta("text", self._buffer))
            self._buffer, self._skips_space = "", False
        return deltas

    def _reasoning(self) -> list[Delta]:
        end = self._closing.search(self._buffer)
        known = len(self._buffer) - self._closing.partial_length(self._buffer) if end is None else end.start()
        text = self._buffer[:known].rstrip(SPACE)
        if end is None:
            self._buffer = self._buffer[len(text) :]
            self._skips_space &= not text
        else:
            self._buffer = self._buffer[end.end() :].lstrip(SPACE)
            self._stage, self._skips_space = Stage.AFTER, True
        return [Delta("reasoning", text)] if text else []

    def finish(self) -> list[Delta]:
        rest = self._buffer.rstrip(SPACE) if self.is_inside else self._buffer
        self._buffer = ""
        return [Delta("reasoning" if self.is_inside else "text", rest)] if rest else []


@final
class Harmony(ReasoningFormat):
    """Messages on channels: <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…"""

    @property
    def markers(self) -> Sequence[str]:
        return "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"

    def stage(self, prompt: str) -> Stage:
        """Return BEFORE: each message names its channel."""
        return Stage.BEFORE

    def grammar(self, stage: Stage, specials: Mapping[str, int]) -> str | None:
        _, channel, constrain, message, _ = self.terminals(specials)
        return self.thoughts(specials, f'{channel} "final" (" "? {constrain} "json")? {message}')

    def thoughts(self, specials: Mapping[str, int], header: str = "") -> str:
        start, channel, _, message, end = self.terminals(specials)
        return (
            f'root ::= ({channel} "analysis" {message} reasoning {end} {start} "assistant")* {header}\n'
            f'reasoning ::= "" | {self.sign(specials)} reasoning\n'
        )

    def terminals(self, specials: Mapping[str, int]) -> list[str]:
        """Return EBNF of the markers <|start|>, <|channel|>, <|constrain|>, <|message|> and <|end|>."""
        return [_terminal(marker, specials) for marker in self.markers[:5]]

    def sign(self, specials: Mapping[str, int]) -> str:
        """Return EBNF of a token inside a message."""
        return f"ExcludeToken({', '.join(str(specials[marker]) for marker in self.markers if marker in specials)})"

    def splitter(self, stage: Stage, functions: Collection[str]) -> Splitter:
        return HarmonySplitter(self, functions)


CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


@final
class HarmonySplitter(Splitter):
    """Splitter of messages. A text without the header of a message is text."""

    def __init__(self, form: Harmony, functions: Collection[str]) -> None:
        self._markers = Markers(frozenset(form.markers))
        self._functions = functions
        self._buffer = ""
        self._header: str | None = ""  # the header of a message; None inside a message
        self._channel = ""
        self._num_calls = 0
        self._is_call = False

    @property
    def is_inside(self) -> bool:
        return self._channel == "analysis" and not self._is_call

    def push(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while True:
            marker = self._markers.search(self._buffer)
            known = len(self._buffer) - self._markers.partial_length(self._buffer) if marker is None else marker.start()
            deltas += self._read(self._buffer[:known])
            self._buffer = self._buffer[known if marker is None else marker.end() :]
            if marker is None:
                return deltas
            if marker[0] == "<|message|>" and self._header is not None:
                deltas += self._open(self._header)
            elif marker[0] in ("<|channel|>", "<|constrain|>"):
                self._header = (self._header or "") + marker[0]
            else:
                self._header = ""

    def _read(self, text: str) -> list[Delta]:
        if self._header is not None:
            self._header += text
            return []
        if not text:
            return []
        if self._is_call:
            return [Delta("call", text, self._num_calls - 1)]
        return [Delta("reasoning" if self.is_inside else "text", text)]

    def _open(self, header: str) -> list[Delta]:
        channel = CHANNEL.search(header)
        recipient = RECIPIENT.search(header)
        self._header = None
        self._channel = "" if channel is None else channel[1]
        self._is_call = recipient is not None and recipient[1] in self._functions
        if recipient is None or not self._is_call:
            return []
        self._num_calls += 1
        return [Delta("call", index=self._num_calls - 1, id=f"call_{uuid.uuid4().hex[:24]}", name=recipient[1])]

    def finish(self) -> list[Delta]:
        deltas = self._read(self._buffer)
        if self._header and not self._channel:
            deltas.append(Delta("text", self._header))
        self._buffer, self._header = "", ""
        return deltas


HARMONY = Harmony()
FORMATS: tuple[tuple[str, ReasoningFormat], ...] = (
    ("<|channel|>", HARMONY),
    ("</think>", Tags("<think>", "</think>")),
    ("</seed:think>", Tags("<seed:think>", "</seed:think>")),
    ("[/THINK]", Tags("[THINK]", "[/THINK]")),
    ("<|END_THINKING|>", Tags("<|START_THINKING|>", "<|END_THINKING|>")),
    ("◁/think▷", Tags("◁think▷", "◁/think▷")),
)
"""The known formats by a text that their chat templates have; the first one is used."""


def reasoning_format(template: str) -> ReasoningFormat | None:
    return next((form for mark, form in FORMATS if mark in template), None)


def _terminal(marker: str, specials: Mapping[str, int]) -> str:
    return f"Token({specials[marker]})" if marker in specials else literal(marker)


SWITCHES = ("enable_thinking", "thinking")  # names under which chat templates read whether the model reasons
UNREAD = "is ignored: the model's chat template reads no such variable"


def reasoning_variables(
    model: ServedModel, *, effort: str | None, is_enabled: bool | None, names: Mapping[str, str]
) -> dict[str, Any]:
    """Return the template variables that set the reasoning of an answer; the effort "none" asks for none.

    What the chat template does not read is noted, by the names of the body's fields.
    """
    reads = frozenset[str]() if model.tokenizer is None else model.tokenizer.template_variables
    switch = next((name for name in SWITCHES if name in reads), None)
    variables: dict[str, Any] = {}
    if effort is not None:
        if "reasoning_effort" in reads and not (effort == "none" and switch):
            variables["reasoning_effort"] = effort
        elif switch is not None:
            variables[switch] = effort != "none"
        elif effort != "none":
            note(names.get("reasoning_effort", "reasoning_effort"), UNREAD)
    if is_enabled is not None:
        if switch is not None:
            variables[switch] = is_enabled
        elif is_enabled or reasoning_format(model.chat_template) is not None:
            note(names.get("enable_thinking", "enable_thinking"), UNREAD)
    return variables


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of one answer; `specials` has ids of special tokens by their written form."""

    form: ReasoningFormat
    stage: Stage
    specials: Mapping[str, int]

    @classmethod
    async def of(cls, model: ServedModel, prompt_ids: Sequence[int]) -> Reasoning | None:
        """Return the reasoning of an answer to an encoded conversation; None for a model that does not reason."""
        form = reasoning_format(model.chat_template)
        tokenizer = model.tokenizer
        if form is None or tokenizer is None:
            return None
        prompt = await model.llm.prompts.decode(prompt_ids[-TAIL_TOKENS:])
        await model.prepare_texts()
        return cls(form, form.stage(prompt), {tokenizer.added_tokens[token]: token for token in tokenizer.special_ids})

    @property
    def hidden(self) -> frozenset[str]:
        """Special tokens that are in the text, so that the markers can be read, and not in the answer."""
        specials = frozenset(self.specials)
        return specials.difference(self.form.markers) if specials.intersection(self.form.markers) else frozenset()

    def sampling(self, options: RequestOptions) -> RequestOptions:
        """Return sampling parameters whose text has the markers, and whose grammar begins after the reasoning."""
        if not self.specials.keys().isdisjoint(self.form.markers):
            options = replace(options, skip_special_tokens=False)
        if options.constraint is None or options.grammar_prefix is not None:
            return options
        return replace(options, grammar_prefix=self.form.grammar(self.stage, self.specials))

    def splitter(self, functions: Collection[str]) -> Splitter:
        return self.form.splitter(self.stage, functions)

    def num_tokens(self, ids: Sequence[int], texts: TokenTexts) -> int:
        """Return the number of reasoning tokens, markers included, in a text."""
        splitter = self.splitter(())
        count = 0
        for token in ids:
            was_inside = splitter.is_inside
            splitter.push(texts.text_of(token))
            count += was_inside or splitter.is_inside
        return count


@final
class AnswerStart:
    """Separates the tokens of an answer from those of its reasoning. Mutated by `push`."""

    def __init__(self, reasoning: Reasoning | None, texts: TokenTexts) -> None:
        self._splitter = None if reasoning is None else reasoning.splitter(())
        self._texts = texts

    def push(self, ids: Iterable[int]) -> int:
        """Return how many of the next tokens precede the answer: reasoning, markers, and white space around them."""
        count = 0
        for token in ids:
            if self._splitter is None:
                break
            if any(delta.kind == "text" for delta in self._splitter.push(self._texts.text_of(token))):
                self._splitter = None
                break
            count += 1
        return count


@final
class AnswerParser:
    """Parser of one answer with reasoning and calls; `check` gets the name and arguments of each call at the end."""

    def __init__(
        self, splitter: Splitter | None, calls: CallParser, check: Callable[[str, str], None] | None = None
    ) -> None:
        self._splitter, self._calls, self._check = splitter, calls, check
        self.num_calls = 0
        self._written: list[Delta] = []

    def push(self, text: str) -> list[Delta]:
        deltas = [Delta("text", text)] if self._splitter is None else self._splitter.push(text)
        return self._counted(self._without_calls(deltas))

    def finish(self) -> list[Delta]:
        deltas = [] if self._splitter is None else self._without_calls(self._splitter.finish())
        deltas = self._counted([*deltas, *self._calls.finish()])
        if self._check is not None:
            for number in range(self.num_calls):
                parts = [delta for delta in self._written if delta.index == number]
                self._check(parts[0].name or "", "".join(delta.text for delta in parts))
        return deltas

    def _without_calls(self, deltas: Iterable[Delta]) -> list[Delta]:
        parts = (self._calls.push(delta.text) if delta.kind == "text" else [delta] for delta in deltas)
        return list(chain.from_iterable(parts))

    def _counted(self, deltas: Sequence[Delta]) -> list[Delta]:
        calls = [delta for delta in deltas if delta.kind == "call"]
        self.num_calls += sum(delta.name is not None for delta in calls)
        if self._check is not None:
            self._written += calls
        return merged(deltas)
