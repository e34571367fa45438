"""Regular languages of Unicode text: union, intersection, complement, and automata by derivatives.

A language's derivative by a character is the language of what may follow that character. Equal languages are mostly one
object, so the derivatives of a language are few, and they are the states of its automaton. Half surrogate pairs are no
characters here, so every text of a language is valid UTF-8.

Source: Brzozowski, 1964; Owens, Reppy and Turon, "Regular-expression derivatives re-examined", 2009.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Any, final

LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
"""Characters as inclusive ranges of code points: ascending, with gaps between them."""
EVERY: Ranges = ((0, 0xD7FF), (0xE000, LAST))
_SURROGATES = 0xD800, 0xE000
MAX_STATES = 1024
"""Maximum states of one automaton before equal ones are joined."""
MAX_NODES = 20_000
"""Maximum expressions that are built for one grammar, derivatives included."""
MAX_DERIVATIVES = 60_000
"""Maximum derivatives for one grammar."""


class TooLargeError(ValueError):
    """A language whose automaton is too large."""


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in normal form, without half surrogate pairs."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return intersection(tuple(merged), EVERY)


def complement(ranges: Ranges) -> Ranges:
    """Return all other characters."""
    starts = [0, *(high + 1 for _, high in ranges)]
    ends = [*(low - 1 for low, _ in ranges), LAST]
    return intersection(tuple(pair for pair in zip(starts, ends, strict=True) if pair[0] <= pair[1]), EVERY)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Return the characters in both."""
    common = []
    first = 0
    second = 0
    while first < len(one) and second < len(other):
        low = max(one[first][0], other[second][0])
        high = min(one[first][1], other[second][1])
        if low <= high:
            common.append((low, high))
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return tuple(common)


def _ends(pair: tuple[int, int]) -> tuple[int, int]:
    return pair[0], pair[1] + 1


class Machine(ABC):
    """A deterministic automaton that is given by a function, such as a comparison of numbers."""

    cuts: frozenset[int]
    """Code points at which its behaviour may change."""

    @abstractmethod
    def step(self, state: Any, code: int) -> Any:
        """Return the next state; None if no text continues."""

    @abstractmethod
    def accepts(self, state: Any) -> bool:
        """Return whether a text may end."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """A node of an expression. Made by `Languages`; compared by identity.

    Attributes:
        kind: 'chars', 'seq', 'alt', 'both', 'not', 'repeat' or 'machine'.
        args: ranges; or parts; or part, least and most (None for no limit); or machine and state.
        is_nullable: whether it has the empty text.
        is_plain: whether it has no 'both', 'not' and 'machine' inside.
    """

    kind: str
    args: tuple[Any, ...]
    is_nullable: bool
    is_plain: bool


@final
class Languages:
    """Factory of languages. Mutated by every operation, which caches its result."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Any, ...], Language] = {}
        self._derivatives: dict[tuple[Language, int], Language] = {}
        self._leaves: dict[Language, frozenset[Language]] = {}
        self._partitions: dict[frozenset[Language], list[tuple[int, Ranges]]] = {}
        self.nothing = self.chars(())
        self.empty_text = self._node("seq", (), True, True)
        self.character = self.chars(EVERY)
        self.anything = self.repeat(self.character, 0, None)

    def _node(self, kind: str, args: tuple[Any, ...], is_nullable: bool, is_plain: bool) -> Language:
        key = (kind, *args)
        if key not in self._nodes:
            if len(self._nodes) >= MAX_NODES:
                raise TooLargeError("its automaton is too large")
            self._nodes[key] = Language(kind, args, is_nullable, is_plain)
        return self._nodes[key]

    def chars(self, ranges: Ranges) -> Language:
        """Return the texts of one of these characters."""
        return self._node("chars", ranges, False, True)

    def text(self, text: str) -> Language:
        """Return the language of one text."""
        return self.seq(*(self.chars(((ord(character),) * 2,)) for character in text))

    def seq(self, *parts: Language) -> Language:
        """Return the texts of the parts, one after the other."""
        rest = self.empty_text
        for part in reversed(parts):
            rest = self._pair(part, rest)
        return rest

    def _pair(self, head: Language, rest: Language) -> Language:
        if head is self.nothing or rest is self.nothing:
            return self.nothing
        if head is self.empty_text:
            return rest
        if rest is self.empty_text:
            return head
        if head.kind == "seq":
            parts: list[Language] = []
            while head.kind == "seq" and head.args:
                parts.append(head.args[0])
                head = head.args[1]
            return self.seq(*parts, self._pair(head, rest))
        is_nullable = head.is_nullable and rest.is_nullable
        return self._node("seq", (head, rest), is_nullable, head.is_plain and rest.is_plain)

    def alt(self, *parts: Language) -> Language:
        """Return the union."""
        return self._join("alt", parts, self.nothing, any)

    def both(self, *parts: Language) -> Language:
        """Return the intersection."""
        return self._join("both", parts, self.anything, all)

    def _join(
        self, kind: str, parts: Sequence[Language], neutral: Language, joined: Callable[[Iterable[bool]], bool]
    ) -> Language:
        flat = dict.fromkeys(
            inner for part in parts for inner in (part.args if part.kind == kind else (part,)) if inner is not neutral
        )
        ruling = self.nothing if kind == "both" else self.anything
        if ruling in flat:
            return ruling
        sets = [part for part in flat if part.kind == "chars"]
        if len(sets) > 1:
            ranges = sets[0].args
            for part in sets[1:]:
                ranges = intersection(ranges, part.args) if kind == "both" else ranges_of((*ranges, *part.args))
            return self._join(kind, [self.chars(ranges), *(part for part in flat if part not in sets)], neutral, joined)
        if kind == "both" and self.empty_text in flat:
            return self.empty_text if all(part.is_nullable for part in flat) else self.nothing
        if len(flat) < 2:
            return next(iter(flat), neutral)
        is_plain = kind == "alt" and all(part.is_plain for part in flat)
        ordered = tuple(sorted(flat, key=id))
        return self._node(kind, ordered, joined(part.is_nullable for part in flat), is_plain)

    def complement(self, part: Language) -> Language:
        """Return all other texts."""
        if part.kind == "not":
            inner: Language = part.args[0]
            return inner
        if part is self.nothing or part is self.anything:
            return self.anything if part is self.nothing else self.nothing
        return self._node("not", (part,), not part.is_nullable, False)

    def repeat(self, part: Language, least: int, most: int | None) -> Language:
        """Return from `least` to `most` repetitions; None for no limit."""
        if most == 0 or part is self.empty_text:
            return self.empty_text
        if part is self.nothing:
            return self.empty_text if least == 0 else self.nothing
        if (least, most) == (1, 1):
            return part
        if part.kind == "repeat" and part.args[1:] == (0, None):
            return part
        return self._node("repeat", (part, least, most), least == 0 or part.is_nullable, part.is_plain)

    def machine(self, machine: Machine, state: Any) -> Language:
        """Return the texts that a machine accepts from a state on."""
        return self._node("machine", (machine, state), machine.accepts(state), False)

    def matches(self, language: Language, text: str) -> bool:
        """Return whether a text is in a language."""
        for character in text:
            language = self.derivative(language, ord(character))
        return language.is_nullable

    def derivative(self, language: Language, code: int) -> Language:
        """Return what may follow a character."""
        key = (language, code)
        if key not in self._derivatives:
            if len(self._derivatives) >= MAX_DERIVATIVES:
                raise TooLargeError("its automaton takes too long to build")
            self._derivatives[key] = self._derived(language, code)
        return self._derivatives[key]

    def _derived(self, language: Language, code: int) -> Language:
        kind = language.kind
        args = language.args
        if kind == "chars":
            return self.empty_text if any(low <= code <= high for low, high in args) else self.nothing
        if kind == "alt":
            return self.alt(*(self.derivative(part, code) for part in args))
        if kind == "both":
            return self.both(*(self.derivative(part, code) for part in args))
        if kind == "not":
            return self.complement(self.derivative(args[0], code))
        if kind == "repeat":
            part, least, most = args
            fewer = self.repeat(part, max(0, least - 1), None if most is None else most - 1)
            return self._pair(self.derivative(part, code), fewer)
        if kind == "machine":
            machine, state = args
            following = machine.step(state, code)
            return self.nothing if following is None else self.machine(machine, following)
        found = []
        while language.kind == "seq" and language.args:
            head, rest = language.args
            found.append(self._pair(self.derivative(head, code), rest))
            if not head.is_nullable:
                return self.alt(*found)
            language = rest
        if language.kind != "seq":
            found.append(self.derivative(language, code))
        return self.alt(*found)

    def _leaves_of(self, language: Language) -> frozenset[Language]:
        """Return the sets of characters and the machines that decide on the derivative."""
        if language not in self._leaves:
            kind = language.kind
            args = language.args
            leaves = frozenset[Language]()
            if kind in ("chars", "machine"):
                leaves = frozenset([language])
            elif kind == "seq":
                rest = language
                while rest.kind == "seq" and rest.args:
                    leaves |= self._leaves_of(rest.args[0])
                    rest = rest.args[1] if rest.args[0].is_nullable else self.empty_text
                leaves |= frozenset() if rest.kind == "seq" else self._leaves_of(rest)
            else:
                leaves = leaves.union(*map(self._leaves_of, args[:1] if kind == "repeat" else args))
            self._leaves[language] = leaves
        return self._leaves[language]

    def _classes(self, leaves: frozenset[Language]) -> list[tuple[int, Ranges]]:
        """Return classes of characters that no leaf tells apart, each with a member."""
        if leaves not in self._partitions:
            sets = [leaf.args for leaf in leaves if leaf.kind == "chars"]
            cuts = {cut for leaf in leaves if leaf.kind == "machine" for cut in leaf.args[0].cuts}
            bounds = sorted(
                {0, *_SURROGATES, LAST + 1, *cuts, *(cut for one in sets for pair in one for cut in _ends(pair))}
            )
            starts = [[low for low, _ in one] for one in sets]
            found: dict[Any, list[tuple[int, int]]] = {}
            for low, after in pairwise(bounds):
                places = (bisect(starts[number], low) - 1 for number in range(len(sets)))
                members = tuple(place >= 0 and low <= one[place][1] for place, one in zip(places, sets, strict=True))
                cut = bisect(sorted(cuts), low) if cuts else 0
                found.setdefault((members, cut), []).append((low, after - 1))
            ranges = [ranges_of(pairs) for pairs in found.values()]
            self._partitions[leaves] = [(one[0][0], one) for one in ranges if one]
        return self._partitions[leaves]

    def automaton(self, language: Language) -> Automaton:
        """Return the smallest automaton whose states all lead to the end of a text; no states for `nothing`."""
        try:
            return self._automaton(language)
        except RecursionError as error:
            raise TooLargeError("its parts are nested too deep") from error

    def _automaton(self, language: Language) -> Automaton:
        numbers = {language: 0}
        pending = [language]
        steps: list[dict[int, list[tuple[int, int]]]] = []
        for state in pending:
            targets: dict[int, list[tuple[int, int]]] = {}
            for member, ranges in self._classes(self._leaves_of(state)):
                target = self.derivative(state, member)
                if target is self.nothing:
                    continue
                if target not in numbers:
                    if len(numbers) >= MAX_STATES:
                        raise TooLargeError(f"it needs an automaton of more than {MAX_STATES} states")
                    numbers[target] = len(numbers)
                    pending.append(target)
                targets.setdefault(numbers[target], []).extend(ranges)
            steps.append(targets)
        return _smallest(steps, [state.is_nullable for state in pending])


@final
@dataclass(frozen=True, slots=True)
class Automaton:
    """A deterministic automaton that starts in state 0.

    Attributes:
        steps: for each state, the characters that lead to each next state.
        ends: for each state, whether a text may end.
    """

    steps: tuple[dict[int, Ranges], ...]
    ends: tuple[bool, ...]


def _smallest(steps: list[dict[int, list[tuple[int, int]]]], ends: list[bool]) -> Automaton:
    """Remove states that lead to no end, and join equal ones."""
    alive = _alive(steps, ends)
    if 0 not in alive:
        return Automaton((), ())
    numbers: dict[Ranges, int] = {}
    known: list[Ranges] = []

    def number_of(ranges: Ranges) -> int:
        if ranges not in numbers:
            numbers[ranges] = len(known)
            known.append(ranges)
        return numbers[ranges]

    @cache
    def union(parts: frozenset[int]) -> int:
        return number_of(ranges_of(pair for part in parts for pair in known[part]))

    edges = [
        [(target, number_of(ranges_of(pairs))) for target, pairs in targets.items() if target in alive]
        for targets in steps
    ]
    group = [int(is_end) for is_end in ends]

    def joined(state: int) -> dict[int, int]:
        """Return the numbers of the characters that lead to each group."""
        found: dict[int, set[int]] = {}
        for target, characters in edges[state]:
            found.setdefault(group[target], set()).add(characters)
        return {target: union(frozenset(parts)) for target, parts in found.items()}

    count = 0
    rows = sorted(alive)
    while True:
        keys: dict[Any, int] = {}
        refined = list(group)
        for state in rows:
            refined[state] = keys.setdefault((group[state], frozenset(joined(state).items())), len(keys))
        group = refined
        if len(keys) == count:
            break
        count = len(keys)
    chosen = {group[state]: state for state in reversed(rows)}
    found = [{target: known[part] for target, part in joined(chosen[number]).items()} for number in range(count)]
    return Automaton(tuple(found), tuple(ends[chosen[number]] for number in range(count)))


def _alive(steps: list[dict[int, list[tuple[int, int]]]], ends: list[bool]) -> set[int]:
    """Return the states that lead to an end."""
    before: list[set[int]] = [set() for _ in steps]
    for state, targets in enumerate(steps):
        for target in targets:
            before[target].add(state)
    alive = set[int]()
    pending = [state for state, is_end in enumerate(ends) if is_end]
    while pending:
        state = pending.pop()
        if state not in alive:
            alive.add(state)
            pending.extend(before[state])
    return alive


POINT = ord(".")
_DIGIT = ((0x30, 0x39),)
_NONZERO = ((0x31, 0x39),)
_CUTS = frozenset({POINT, POINT + 1, *range(0x30, 0x3B)})


@final
@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of a number.

    Attributes:
        value: the bound.
        is_strict: whether the bound itself is outside.
    """

    value: Decimal
    is_strict: bool = False


def numbers(
    languages: Languages, least: Bound | None, most: Bound | None, multiples: list[Decimal], *, is_integer: bool
) -> Language:
    """Return decimal numbers without exponent."""
    digits = languages.repeat(languages.chars(_DIGIT), 0, None)
    whole = languages.alt(languages.text("0"), languages.seq(languages.chars(_NONZERO), digits))
    fraction = languages.seq(languages.text("."), languages.chars(_DIGIT), digits)
    size = whole if is_integer else languages.seq(whole, languages.repeat(fraction, 0, 1))
    size = languages.both(size, *(_multiples(languages, step) for step in multiples))
    positive = languages.both(size, *_sizes(languages, least, most))
    negative = languages.both(size, *_sizes(languages, _negated(most), _negated(least)))
    return languages.alt(positive, languages.seq(languages.text("-"), negative))


def _negated(bound: Bound | None) -> Bound | None:
    return None if bound is None else Bound(-bound.value, bound.is_strict)


def _sizes(languages: Languages, least: Bound | None, most: Bound | None) -> list[Language]:
    """Return the conditions on a number that is not negative."""
    found = []
    if least is not None and (least.value > 0 or (least.value == 0 and least.is_strict)):
        found.append(_compared(languages, least, is_upper=False))
    if most is not None:
        found.append(languages.nothing if most.value < 0 else _compared(languages, most, is_upper=True))
    return found


def _compared(languages: Languages, bound: Bound, *, is_upper: bool) -> Language:
    whole, _, fraction = f"{bound.value:f}".partition(".")
    wanted = {-1 if is_upper else 1} | (set() if bound.is_strict else {0})
    return languages.machine(_Comparison(_CUTS, whole, fraction.rstrip("0"), frozenset(wanted)), (0, 0, False))


def _multiples(languages: Languages, step: Decimal) -> Language:
    exponent = step.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    places = max(0, -exponent)
    return languages.machine(_Multiples(_CUTS, int(step.scaleb(places)), places), (0, None))


@final
@dataclass(frozen=True)
class _Comparison(Machine):
    """Compares a decimal number that is not negative, digit by digit.

    A state is the number of digits in the current part, the order of the digits so far, and whether the point is read.
    """

    cuts: frozenset[int]
    whole: str
    fraction: str
    wanted: frozenset[int]

    def step(self, state: tuple[int, int, bool], code: int) -> tuple[int, int, bool] | None:
        """Return the next state."""
        count, order, has_point = state
        if code == POINT:
            return None if has_point else (0, self._order_of_whole(count, order), True)
        if not 0x30 <= code <= 0x39:
            return None
        digits = self.fraction if has_point else self.whole
        if not order:
            other = int(digits[count]) if count < len(digits) else 0
            order = (code - 0x30 > other) - (code - 0x30 < other)
        return min(count + 1, len(digits) + 1), order, has_point

    def _order_of_whole(self, count: int, order: int) -> int:
        if count != len(self.whole):
            return 1 if count > len(self.whole) else -1
        return order

    def accepts(self, state: tuple[int, int, bool]) -> bool:
        """Return whether the number is wanted."""
        count, order, has_point = state
        if not has_point:
            count, order = 0, self._order_of_whole(count, order)
        if not order and self.fraction[count:]:
            order = -1
        return order in self.wanted


@final
@dataclass(frozen=True)
class _Multiples(Machine):
    """Divides a decimal number by `step` * 10 ** -`places`.

    A state is the remainder of the digits so far, and the number of digits after the point; None before it.
    """

    cuts: frozenset[int]
    divisor: int
    places: int

    def step(self, state: tuple[int, int | None], code: int) -> tuple[int, int | None] | None:
        """Return the next state."""
        remainder, places = state
        if code == POINT:
            return (remainder, 0) if places is None and self.places else None
        if not 0x30 <= code <= 0x39 or places == self.places:
            return None
        return (remainder * 10 + code - 0x30) % self.divisor, None if places is None else places + 1

    def accepts(self, state: tuple[int, int | None]) -> bool:
        """Return whether the number is a multiple."""
        remainder, places = state
        return remainder * 10 ** (self.places - (places or 0)) % self.divisor == 0


# Formats of JSON strings as regular expressions. Each is the format, or a part of it without rare forms.
#
# Source: JSON Schema 2020-12 validation, section 7.3, and the RFCs that it names.

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{_LEAP}|(?:[2468][048]|[13579][26]|0[48])00)-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_HEX = "[0-9a-fA-F]"
_WORD = f"{_HEX}{{1,4}}"
_IPV6 = "|".join(
    [f"(?:{_WORD}:){{7}}{_WORD}", f"::(?:{_WORD}(?::{_WORD}){{0,6}})?"]
    + [f"{_WORD}(?::{_WORD}){{{before - 1}}}::(?:{_WORD}(?::{_WORD}){{0,{6 - before}}})?" for before in range(1, 7)]
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"(?:{_LABEL}\.){{0,2}}{_LABEL}"
_ATOM = "[A-Za-z0-9_+-]+"
_NAME = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM})*@(?:{_NAME}\.)+[A-Za-z]{{2,63}}"
_SIGN = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%{_HEX}{{2}})"
_PATH = f"(?:/{_SIGN}*)*"
_REST = rf"(?:\?(?:{_SIGN}|[/?])*)?(?:#(?:{_SIGN}|[/?])*)?"
_AUTHORITY = rf"//(?:{_NAME}\.)*{_NAME}(?::[0-9]{{1,4}})?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}{_PATH}|/?{_SIGN}+{_PATH}){_REST}"
_REFERENCE = f"(?:{_URI}|(?:{_AUTHORITY}{_PATH}|(?:/{_SIGN}+{_PATH})?){_REST})"
_VARIABLE = r"\{[+#./;?&]?[A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)*\*?\}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"

FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": _EMAIL,
    "hostname": _HOST,
    "idn-email": _EMAIL,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "iri": _URI,
    "iri-reference": _REFERENCE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "time": _TIME,
    "uri": _URI,
    "uri-reference": _REFERENCE,
    "uri-template": rf"(?:[A-Za-z0-9._~:/?#@!$&()*+,;=-]|%{_HEX}{{2}}|{_VARIABLE})*",
    "uuid": f"{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}",
}
"""Expressions by the name of the format. Other formats are annotations."""
