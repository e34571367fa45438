"""Regular languages of Unicode text: union, intersection, complement, and automata by derivatives.

A language's derivative by a character is the language of what may follow that character. Equal languages are mostly one
object, so the derivatives of a language are few, and they are the states of its automaton. Half surrogate pairs are no
characters here, so every text of a language is valid UTF-8.

Source: Brzozowski, 1964; Owens, Reppy and Turon, "Regular-expression derivatives re-examined", 2009.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, final

LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]  # characters as inclusive ranges of code points: ascending, with gaps between them
EVERY: Ranges = ((0, 0xD7FF), (0xE000, LAST))
_SURROGATES = 0xD800, 0xE000
MAX_STATES = 1024  # maximum states of one automaton before equal ones are joined
MAX_NODES = 20_000  # maximum expressions that are built for one grammar, derivatives included
MAX_DERIVATIVES = 60_000  # maximum derivatives for one grammar


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


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """Return the characters in both."""
    common = []
    first = 0
    second = 0
    while first < len(left) and second < len(right):
        low = max(left[first][0], right[second][0])
        high = min(left[first][1], right[second][1])
        if low <= high:
            common.append((low, high))
        if left[first][1] < right[second][1]:
            first += 1
        else:
            second += 1
    return tuple(common)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """A deterministic automaton that is given by functions. It tells only digits and the point apart."""

    step: Callable[[Any, int], Any]  # from a state and a code point to the next state; None if no text continues
    accepts: Callable[[Any], bool]  # whether a text may end in a state


@final
@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """A node of an expression. Made by `Languages`; compared by identity."""

    kind: str  # 'chars', 'seq', 'alt', 'both', 'not', 'repeat' or 'machine'
    args: tuple[Any, ...]  # ranges; or parts; or part, least and most (None for no limit); or machine and state
    is_nullable: bool  # whether it has the empty text
    is_plain: bool  # whether it has no 'both', 'not' and 'machine' inside


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
        return self._node("chars", ranges, False, True)

    def text(self, text: str) -> Language:
        return self.seq(*(self.chars(((ord(character),) * 2,)) for character in text))

    def seq(self, *parts: Language) -> Language:
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
        return self._join("alt", parts)

    def both(self, *parts: Language) -> Language:
        """Return the intersection."""
        return self._join("both", parts)

    def _join(self, kind: str, parts: Iterable[Language]) -> Language:
        is_alt = kind == "alt"
        neutral, ruling = (self.nothing, self.anything) if is_alt else (self.anything, self.nothing)
        flat = dict.fromkeys(
            inner for part in parts for inner in (part.args if part.kind == kind else (part,)) if inner is not neutral
        )
        if ruling in flat:
            return ruling
        sets = [part for part in flat if part.kind == "chars"]
        if len(sets) > 1:
            ranges = sets[0].args
            for part in sets[1:]:
                ranges = ranges_of((*ranges, *part.args)) if is_alt else intersection(ranges, part.args)
            return self._join(kind, [self.chars(ranges), *(part for part in flat if part not in sets)])
        nullable = [part.is_nullable for part in flat]
        if not is_alt and self.empty_text in flat:
            return self.empty_text if all(nullable) else self.nothing
        if len(flat) < 2:
            return next(iter(flat), neutral)
        is_plain = is_alt and all(part.is_plain for part in flat)
        return self._node(kind, tuple(sorted(flat, key=id)), any(nullable) if is_alt else all(nullable), is_plain)

    def complement(self, part: Language) -> Language:
        """Return all other texts."""
        if part.kind == "not":
            inner: Language = part.args[0]
            return inner
        if part is self.nothing:
            return self.anything
        return self.nothing if part is self.anything else self._node("not", (part,), not part.is_nullable, False)

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
        for character in text:
            language = self.derivative(language, ord(character))
        return language.is_nullable

    def derivative(self, language: Language, code: int) -> Language:
        key = (language, code)
        if key not in self._derivatives:
            if len(self._derivatives) >= MAX_DERIVATIVES:
                raise TooLargeError("its automaton takes too long to build")
            self._derivatives[key] = self._derived(language, code)
        return self._derivatives[key]

    def _derived(self, language: Language, code: int) -> Language:
        args = language.args
        match language.kind:
            case "chars":
                return self.empty_text if any(low <= code <= high for low, high in args) else self.nothing
            case "alt" | "both" as kind:
                return self._join(kind, [self.derivative(part, code) for part in args])
            case "not":
                return self.complement(self.derivative(args[0], code))
            case "repeat":
                part, least, most = args
                fewer = self.repeat(part, max(0, least - 1), None if most is None else most - 1)
                return self._pair(self.derivative(part, code), fewer)
            case "machine":
                machine, state = args
                following = machine.step(state, code)
                return self.nothing if following is None else self.machine(machine, following)
        parts = []
        while language.kind == "seq" and language.args:
            head, rest = language.args
            parts.append(self._pair(self.derivative(head, code), rest))
            if not head.is_nullable:
                return self.alt(*parts)
            language = rest
        if language.kind != "seq":
            parts.append(self.derivative(language, code))
        return self.alt(*parts)

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
            cuts = _NUMERIC if any(leaf.kind == "machine" for leaf in leaves) else ()
            edges = (edge for ranges in sets for low, high in ranges for edge in (low, high + 1))
            starts = [[low for low, _ in ranges] for ranges in sets]
            classes: dict[Any, list[tuple[int, int]]] = {}
            for low, after in pairwise(sorted({0, *_SURROGATES, LAST + 1, *cuts, *edges})):
                places = [bisect(lows, low) - 1 for lows in starts]
                key = [place >= 0 and low <= ranges[place][1] for place, ranges in zip(places, sets, strict=True)]
                classes.setdefault((*key, bisect(cuts, low)), []).append((low, after - 1))
            partition = filter(None, map(ranges_of, classes.values()))
            self._partitions[leaves] = [(ranges[0][0], ranges) for ranges in partition]
        return self._partitions[leaves]

    def automaton(self, language: Language) -> Automaton:
        """Return the smallest automaton whose states all lead to the end of a text; no states for `nothing`."""
        numbers = {language: 0}
        pending = [language]
        steps: list[dict[int, list[tuple[int, int]]]] = []
        for state in pending:
            targets: dict[int, list[tuple[int, int]]] = {}
            try:
                successors = [
                    (self.derivative(state, member), ranges) for member, ranges in self._classes(self._leaves_of(state))
                ]
            except RecursionError as error:
                raise TooLargeError("its parts are nested too deep") from error
            for target, ranges in successors:
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
    """A deterministic automaton that starts in state 0."""

    steps: tuple[dict[int, Ranges], ...]  # for each state, the characters that lead to each next state
    ends: tuple[bool, ...]  # for each state, whether a text may end


def _smallest(steps: list[dict[int, list[tuple[int, int]]]], ends: list[bool]) -> Automaton:
    """Remove states that lead to no end, and join equal ones."""
    alive = _alive(steps, ends)
    if 0 not in alive:
        return Automaton((), ())
    numbers: dict[Ranges, int] = {}
    known: list[Ranges] = []

    def number_of(pairs: Iterable[tuple[int, int]]) -> int:
        ranges = ranges_of(pairs)
        number = numbers.setdefault(ranges, len(known))
        if number == len(known):
            known.append(ranges)
        return number

    @cache
    def union(parts: frozenset[int]) -> int:
        return number_of(pair for part in parts for pair in known[part])

    edges = [[(target, number_of(pairs)) for target, pairs in targets.items() if target in alive] for targets in steps]
    group = [int(is_end) for is_end in ends]

    def joined(state: int) -> dict[int, int]:
        """Return the numbers of the characters that lead to each group."""
        parts: dict[int, set[int]] = {}
        for target, characters in edges[state]:
            parts.setdefault(group[target], set()).add(characters)
        return {target: union(frozenset(characters)) for target, characters in parts.items()}

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
    merged = [{target: known[part] for target, part in joined(chosen[number]).items()} for number in range(count)]
    return Automaton(tuple(merged), tuple(ends[chosen[number]] for number in range(count)))


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
_NUMERIC = (POINT, POINT + 1, *range(0x30, 0x3B))


@final
@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of a number."""

    value: Decimal
    is_strict: bool = False  # whether the bound itself is outside


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
    conditions = []
    if least is not None and (least.value > 0 or (least.value == 0 and least.is_strict)):
        conditions.append(_compared(languages, least, 1))
    if most is not None:
        conditions.append(languages.nothing if most.value < 0 else _compared(languages, most, -1))
    return conditions


def _compared(languages: Languages, bound: Bound, order: int) -> Language:
    """Return the numbers above (1) or below (-1) a bound."""
    whole, _, fraction = f"{bound.value:f}".partition(".")
    machine = _comparison(whole, fraction.rstrip("0"), (order,) if bound.is_strict else (order, 0))
    return languages.machine(machine, (0, 0, False))


@lru_cache
def _comparison(whole: str, fraction: str, wanted: tuple[int, ...]) -> Machine:
    """Return a machine that compares a decimal number that is not negative, digit by digit.

    A state is the number of digits in the current part, the order of the digits so far, and whether the point is read.
    """

    def order_of_whole(count: int, order: int) -> int:
        return order if count == len(whole) else 1 if count > len(whole) else -1

    def step(state: tuple[int, int, bool], code: int) -> tuple[int, int, bool] | None:
        count, order, has_point = state
        if code == POINT:
            return None if has_point else (0, order_of_whole(count, order), True)
        if not 0x30 <= code <= 0x39:
            return None
        digits = fraction if has_point else whole
        if not order:
            other = int(digits[count]) if count < len(digits) else 0
            order = (code - 0x30 > other) - (code - 0x30 < other)
        return min(count + 1, len(digits) + 1), order, has_point

    def accepts(state: tuple[int, int, bool]) -> bool:
        count, order, has_point = state
        if not has_point:
            count, order = 0, order_of_whole(count, order)
        return (-1 if not order and fraction[count:] else order) in wanted

    return Machine(step, accepts)


def _multiples(languages: Languages, multiple: Decimal) -> Language:
    exponent = multiple.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    places = max(0, -exponent)
    return languages.machine(_division(int(multiple.scaleb(places)), places), (0, None))


@lru_cache
def _division(divisor: int, most_places: int) -> Machine:
    """Return a machine that divides a decimal number by `divisor` * 10 ** -`most_places`.

    A state is the remainder of the digits so far, and the number of digits after the point; None before it.
    """

    def step(state: tuple[int, int | None], code: int) -> tuple[int, int | None] | None:
        remainder, places = state
        if code == POINT:
            return (remainder, 0) if places is None and most_places else None
        if not 0x30 <= code <= 0x39 or places == most_places:
            return None
        return (remainder * 10 + code - 0x30) % divisor, None if places is None else places + 1

    def accepts(state: tuple[int, int | None]) -> bool:
        remainder, places = state
        return remainder * 10 ** (most_places - (places or 0)) % divisor == 0

    return Machine(step, accepts)


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
