"""Decimal numbers within bounds, and multiples of a number, as languages."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import final

from draftree.sampling.grammar.languages import Language, Languages, Machine

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
    """Return decimal numbers without exponent.

    Args:
        languages: the factory.
        least: lower bound.
        most: upper bound.
        multiples: positive numbers that each divide the number.
        is_integer: whether the numbers have no fraction.
    """
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
