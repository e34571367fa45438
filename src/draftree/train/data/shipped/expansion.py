"""Many prompts from templates with slots: every template in turn, each with a new combination of words.

A slot is `{name}`; `{name2}` is another word of the same slot. The combinations of a template are visited in steps that
are coprime to their number, so no combination occurs twice. The result is a function of the count only, and a larger
count continues a smaller one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice

from draftree.train.data.jobs import DataPrompt

SLOT = re.compile(r"\{(\w+?)(\d?)\}")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeio])")
"""An article before a vowel; no word of the slots begins with another sound."""


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with slots.

    Attributes:
        text: the prompt.
        words: the words of each slot, in the order of the first occurrence.
    """

    text: str
    words: tuple[tuple[str, Sequence[str]], ...]

    @classmethod
    def of(cls, text: str, slots: Mapping[str, Sequence[str]]) -> Template:
        """Return a template whose slots are all known.

        Raises:
            KeyError: a slot is unknown.
        """
        names = dict.fromkeys((name + digit, name) for name, digit in SLOT.findall(text))
        return cls(text, tuple((slot, slots[name]) for slot, name in names))

    @property
    def size(self) -> int:
        """Number of combinations."""
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
        return ARTICLE.sub(r"\1n ", SLOT.sub(lambda found: chosen[found[1] + found[2]], self.text))

    def prompts(self) -> Iterator[str]:
        """Yield all prompts, each once."""
        size = self.size
        start, step = (_hash(f"{kind} {self.text}") % size for kind in ("start", "step"))
        while math.gcd(step, size) != 1:
            step += 1
        for place in range(size):
            found = self.filled((start + place * step) % size)
            if found is not None:
                yield found


def expanded(number: int) -> list[DataPrompt]:
    """Return the first `number` prompts of the package's templates; fewer if they have fewer combinations."""
    content = json.loads(files("draftree.train.data.shipped").joinpath("templates.json").read_text("utf-8"))
    sources = [Template.of(entry["prompt"], content["slots"]).prompts() for entry in content["templates"]]
    return [DataPrompt.of_text(text) for text in islice(_in_turn(sources), number)]


def _in_turn(sources: list[Iterator[str]]) -> Iterator[str]:
    while sources:
        ended = []
        for place, source in enumerate(sources):
            found = next(source, None)
            if found is None:
                ended.append(place)
            else:
                yield found
        sources = [source for place, source in enumerate(sources) if place not in ended]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
