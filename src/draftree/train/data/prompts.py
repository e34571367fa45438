"""Prompts of training data: shipped ones, templates, installed packages, the target's own, and their order."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from importlib.resources import files
from itertools import accumulate, islice, pairwise, takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple

from draftree.build import require_positive
from draftree.core.errors import ConfigurationError
from draftree.llm import LLM
from draftree.sampling.params import SamplingParams
from draftree.train.data.shards import PromptSource


@dataclass(frozen=True, slots=True)
class DataPrompt:
    messages: tuple[Mapping[str, str], ...]  # a conversation that ends with a message of the user, or one message
    is_text: bool = False  # whether it was given as plain text rather than as messages

    @classmethod
    def of_text(cls, text: str) -> DataPrompt:
        """Return a plain text as a prompt: one message in a chat."""
        return cls(({"role": "user", "content": text},), is_text=True)

    @property
    def text(self) -> str:
        """The prompt for a model without chat: the contents of all messages, with blank lines between them."""
        return "\n\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of one source; their licence as far as it is known."""

    name: str
    prompts: Sequence[DataPrompt]
    licence: str

    @property
    def source(self) -> PromptSource:
        """Name, size and checksum for the manifest."""
        lines = (json.dumps([dict(message) for message in prompt.messages], sort_keys=True) for prompt in self.prompts)
        checksum = hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
        return PromptSource(name=self.name, count=len(self.prompts), sha256=checksum, licence=self.licence)


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, its index among all prompts, and how it is answered."""

    prompt_id: int
    prompt: DataPrompt
    temperature: float
    seed: int


def jobs_of(sets: Sequence[PromptSet], *, temperatures: Sequence[float], seed: int) -> list[Job]:
    """Return all prompts: those of each set in random order, one of every set in turn.

    The first prompts are an even sample of the sets, of which small ones are used completely. Order, temperatures and
    seeds are functions of the arguments only.
    """
    prompts = [prompt for prompt_set in sets for prompt in prompt_set.prompts]
    starts = [0, *accumulate(len(prompt_set.prompts) for prompt_set in sets)]
    shuffled = [
        sorted(range(first, end), key=lambda prompt_id: _hash(f"order {seed}/{prompt_id}"))
        for first, end in pairwise(starts)
    ]
    order = [prompt_id for turn in zip_longest(*shuffled) for prompt_id in turn if prompt_id is not None]
    return [
        Job(
            prompt_id,
            prompts[prompt_id],
            temperatures[_hash(f"temperature {seed}/{prompt_id}") % len(temperatures)],
            _hash(f"text {seed}/{prompt_id}") >> 32,
        )
        for prompt_id in order
    ]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "little")


# Prompts written by the target itself: a chat model continues its template where the user's message would begin.
#
# Aligned models have learned the messages of users together with the answers, so what they write there resembles the
# prompts of their own training. No file of prompts is needed. Source: Xu and others, "Magpie: Alignment Data Synthesis
# from Scratch by Prompting Aligned LLMs with Nothing", 2024 (arXiv 2406.08464).

PROBES = ("alpha", "Zero")
"""Two messages that begin and end with other letters: what is equal in both encoded conversations is the template's."""
MIN_TOKENS = 4  # shorter messages are dropped
MAX_ATTEMPTS = 4  # drawn messages per wanted one, after which the model is regarded as unable to write them


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageSettings:
    """How messages of users are drawn."""

    number: int
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 200  # maximum number of tokens of a message, its end included
    seed: int = 0  # seed of the first message; each further one has the next seed
    batch: int = 64  # number of messages that are drawn at a time

    def __post_init__(self) -> None:
        require_positive(self, "number", "batch")
        if self.max_tokens <= MIN_TOKENS:
            raise ConfigurationError(
                f"max_tokens is {self.max_tokens}: it must be at least {MIN_TOKENS + 1}, because shorter messages "
                "are dropped"
            )
        if self.temperature <= 0:
            raise ConfigurationError(
                f"temperature is {self.temperature}: it must be above 0, because all messages are equal otherwise"
            )
        self.params(self.seed, end=0)

    def params(self, seed: int, end: int) -> SamplingParams:
        """Return the parameters of the message with a seed; `end` is the token id that ends it."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=seed,
            stop_token_ids=[end],
        )


class UserTurn(NamedTuple):
    """Where a chat template has the user's message: the tokens before it, and the token that ends it."""

    before: list[int]
    end: int


def user_turn(llm: LLM) -> UserTurn:
    """Return where the chat template of a model has the user's message."""
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ConfigurationError("the model has no chat template, so it cannot write messages of users: give prompts")
    first, second = (list(llm.prompts.encode_chat([{"role": "user", "content": probe}])) for probe in PROBES)
    before, after = _common(first, second), _common(first[::-1], second[::-1])[::-1]
    if not before:
        raise ConfigurationError("the chat template writes nothing before a user's message: give prompts")
    if not after or after[0] not in llm.tokenizer.special_ids:
        raise ConfigurationError("the chat template does not end a user's message with a special token: give prompts")
    return UserTurn(list(before), after[0])


def _common(first: list[int], second: list[int]) -> list[int]:
    """Return the longest common beginning."""
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def magpie_prompts(
    llm: LLM, settings: MessageSettings, *, on_progress: Callable[[int], None] | None = None
) -> list[str]:
    """Let a chat model write messages of users.

    Messages that do not end within `max_tokens`, are shorter than 4 tokens or are equal to an earlier one are dropped.
    The result is a function of model and settings, and does not depend on `batch` if the passes of the model are exact.

    `on_progress`: called after each batch with the number of messages so far.
    """
    turn = user_turn(llm)
    messages: dict[str, None] = {}
    drawn = 0
    while len(messages) < settings.number:
        if drawn >= MAX_ATTEMPTS * settings.number + settings.batch:
            raise ConfigurationError(
                f"the model wrote {len(messages)} different messages in {drawn} attempts: ask for fewer, raise "
                "max_tokens or the temperature, or give prompts"
            )
        first = settings.seed + drawn
        params = [settings.params(seed, turn.end) for seed in range(first, first + settings.batch)]
        for result in llm.generate([turn.before] * len(params), params):
            text = result.text.strip()
            # the token that ended the message is counted in token_ids
            if result.finish_reason == "stop" and len(result.token_ids) > MIN_TOKENS and text:
                messages[text] = None
        drawn += settings.batch
        if on_progress is not None:
            on_progress(min(settings.number, len(messages)))
    return list(messages)[: settings.number]


# Prompts from the documentation and the sources of installed packages, which are read and never imported.
#
# The prompts are a function of the installed packages and of the number: every package in turn, each with its prompts
# in an order given by a hash. They quote the packages; published data made with them must follow their licences.

MAX_FILES = 12  # source files of a package that are read
MAX_FILE_BYTES = 200_000
MIN_TEXT, MAX_TEXT = 200, 1200  # characters of a quoted text
MIN_LINES, MAX_LINES = 4, 25  # lines of a quoted function
HEAD_LINES = 20  # lines of a quoted beginning of a file
MAX_LINE = 160  # longer lines are data, not code
OWN = "draftree"

OF_TEXT = (
    "Summarise this text in two sentences:\n\n{text}",
    "What is this text about? Explain it in simple words:\n\n{text}",
    "Write three questions that this text answers:\n\n{text}",
    "Rewrite this text as a short list of points:\n\n{text}",
)
OF_FUNCTION = (
    "Explain this function:\n\n```python\n{text}\n```",
    "Write a docstring for this function:\n\n```python\n{text}\n```",
    "Write a unit test for this function:\n\n```python\n{text}\n```",
    "How could this function be improved?\n\n```python\n{text}\n```",
)
OF_FILE = ("Continue this Python file:\n\n```python\n{text}\n```",)


def package_prompts(number: int) -> tuple[list[DataPrompt], list[str]]:
    """Make prompts from the packages of this Python environment.

    Returns the prompts, and the packages that they quote, each with version and licence.
    """
    packages = {
        f"{str(distribution.metadata['Name']).lower()}=={distribution.version}": distribution
        for distribution in distributions()
    }
    names = sorted(name for name in packages if not name.startswith(f"{OWN}=="))
    rounds = zip_longest(*([(name, text) for text in _prompts(packages[name], number)] for name in names))
    chosen = list(islice((pair for turn in rounds for pair in turn if pair is not None), number))
    return (
        [DataPrompt.of_text(text) for _, text in chosen],
        [f"{name} ({licence_of(packages[name])})" for name in sorted({name for name, _ in chosen})],
    )


LONGEST_LICENCE = 120


def licence_of(package: Distribution) -> str:
    """Return the licence that a package's metadata name, or "unknown licence"."""
    for field in ("License-Expression", "License"):
        value = str(package.metadata[field]).strip() if field in package.metadata else ""
        # some packages give the whole text
        if 0 < len(value) <= LONGEST_LICENCE and "\n" not in value:
            return value
    named = [value for value in package.metadata.get_all("Classifier") or () if value.startswith("License ::")]
    return named[0].rpartition(" :: ")[2] if named else "unknown licence"


def _prompts(package: Distribution, number: int) -> list[str]:
    """Return prompts of one package, different ones only, in the order of a hash."""
    description = str(package.metadata.json.get("description", ""))
    made = dict.fromkeys(_about(_paragraphs(description), OF_TEXT))
    sources = [file for file in package.files or () if file.suffix == ".py" and "test" not in str(file).lower()]
    for file in sorted(sources, key=lambda file: _hash(str(file)))[:MAX_FILES]:
        made |= dict.fromkeys(_of_source(Path(str(package.locate_file(file)))))
    return sorted(made, key=_hash)[:number]


def _paragraphs(text: str) -> Iterator[str]:
    """Yield runs of paragraphs of prose of a suitable length."""
    run: list[str] = []
    for paragraph in (*re.split(r"\n\s*\n", text.replace("\r", "")), ""):
        stripped = paragraph.strip()
        is_prose = (
            len(stripped) > 60 and stripped[0].isalpha() and not re.search(r"https?://|[<>{}|`]|::|\.\. ", stripped)
        )
        if is_prose and sum(map(len, run)) + len(stripped) <= MAX_TEXT:
            run.append(stripped)
            continue
        if sum(map(len, run)) >= MIN_TEXT:
            yield "\n\n".join(run)
        run = [stripped] if is_prose and len(stripped) <= MAX_TEXT else []


def _of_source(path: Path) -> Iterator[str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):  # files for other versions of Python, or no text
        return
    lines = source.splitlines()
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef)]
    yield from _about((part for text in texts for part in _paragraphs(text)), OF_TEXT)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            function_lines = lines[node.lineno - 1 : node.end_lineno]
            has_code = len(node.body) > 1 or not isinstance(node.body[0], ast.Expr | ast.Pass)
            if has_code and MIN_LINES <= len(function_lines) <= MAX_LINES and not _is_data(function_lines):
                indent = len(function_lines[0]) - len(function_lines[0].lstrip())
                yield from _about(["\n".join(line[indent:] for line in function_lines)], OF_FUNCTION)
    if len(lines) > 2 * HEAD_LINES and not _is_data(lines[:HEAD_LINES]):
        yield from _about(["\n".join(lines[:HEAD_LINES])], OF_FILE)


def _is_data(lines: Sequence[str]) -> bool:
    return any(len(line) > MAX_LINE for line in lines)


def _about(texts: Iterable[str], forms: Sequence[str]) -> Iterator[str]:
    """Yield one prompt for each text, with the form that its hash selects."""
    for text in texts:
        yield forms[_hash(text) % len(forms)].replace("{text}", text)


# Many prompts from templates with slots: every template in turn, each with a new combination of words.
#
# A slot is `{name}`; `{name2}` is another word of the same slot. The combinations of a template are visited in steps
# that are coprime to their number, so no combination occurs twice. The result is a function of the count only, and a
# larger count continues a smaller one.

SLOT = re.compile(r"\{(\w+?)(\d?)\}")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeio])")
"""An article before a vowel; no word of the slots begins with another sound."""


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with slots, and the words of each in the order of the first occurrence."""

    text: str
    words: tuple[tuple[str, Sequence[str]], ...]

    @classmethod
    def of(cls, text: str, slots: Mapping[str, Sequence[str]]) -> Template:
        """Return a template whose slots are all known."""
        names = dict.fromkeys((name + digit, name) for name, digit in SLOT.findall(text))
        return cls(text, tuple((slot, slots[name]) for slot, name in names))

    @property
    def size(self) -> int:
        return math.prod(len(words) for _, words in self.words)

    def filled(self, number: int) -> str | None:
        """Return the prompt of a combination; None if two slots of one kind have the same word."""
        chosen: dict[str, str] = {}
        for slot, words in self.words:
            number, place = divmod(number, len(words))
            chosen[slot] = words[place]
        pairs = [(chosen[slot], chosen.get(f"{slot}2")) for slot in chosen]
        if any(first == second for first, second in pairs):
            return None
        return ARTICLE.sub(r"\1n ", SLOT.sub(lambda match: chosen[match[1] + match[2]], self.text))

    def prompts(self) -> Iterator[str]:
        size = self.size
        start, step = (_hash(f"{kind} {self.text}") % size for kind in ("start", "step"))
        while math.gcd(step, size) != 1:
            step += 1
        filled = (self.filled((start + place * step) % size) for place in range(size))
        yield from (prompt for prompt in filled if prompt is not None)


def expanded(number: int) -> list[DataPrompt]:
    """Return the first `number` prompts of the package's templates; fewer if they have fewer combinations."""
    content = json.loads(files("draftree.train.data.shipped").joinpath("templates.json").read_text("utf-8"))
    sources = [Template.of(entry["prompt"], content["slots"]).prompts() for entry in content["templates"]]
    turns = (text for turn in zip_longest(*sources) for text in turn if text is not None)
    return [DataPrompt.of_text(text) for text in islice(turns, number)]


SHIPPED, EXPANDED, PACKAGES = "shipped", "expanded", "packages"
DEFAULT_COUNTS = {EXPANDED: 10_000, PACKAGES: 2_000}
OWN_LICENCE = "Apache-2.0, part of draftree"
PACKAGES_LICENCE = "licences of the named packages; prompts quote their documentation and sources"


def prompt_set(name: str) -> PromptSet:
    """Return the prompts of "shipped", "expanded" or "packages"; the last two with ":N" for a maximum number."""
    kind, colon, count = name.partition(":")
    if kind == SHIPPED and not colon:
        return PromptSet(SHIPPED, shipped(), OWN_LICENCE)
    if kind not in DEFAULT_COUNTS or (colon and not (count.isdecimal() and int(count) > 0)):
        raise ConfigurationError(
            f"prompts are '{name}': give 'shipped', 'expanded:N', 'packages:N' with a positive N, or a file"
        )
    number = int(count) if colon else DEFAULT_COUNTS[kind]
    if kind == EXPANDED:
        return PromptSet(EXPANDED, expanded(number), OWN_LICENCE)
    prompts, names = package_prompts(number)
    return PromptSet(PACKAGES, prompts, f"{PACKAGES_LICENCE}: {', '.join(names)}")


def shipped() -> list[DataPrompt]:
    """Return the prompts that were written for this package."""
    lines = files("draftree.train.data.shipped").joinpath("prompts.jsonl").read_text("utf-8").splitlines()
    records = map(json.loads, lines)
    return [
        DataPrompt.of_text(record["prompt"]) if "prompt" in record else DataPrompt(tuple(record["messages"]))
        for record in records
    ]
