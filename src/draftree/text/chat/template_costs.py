"""Upper bounds on the cost of chat template operations in characters, computed before each operation runs.

A cost bounds what the operation adds to memory; each element of a list costs `ELEMENT`. Operations whose result cannot
be longer than their operands cost nothing here: their results are charged afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "MAX_TEMPLATE_CHARS",
    "Budget",
    "LimitError",
    "cost_of_call",
    "cost_of_filter",
    "cost_of_format",
    "cost_of_operator",
    "size_of",
    "text_size",
]

BASE_BUDGET = 100_000_000
"""In characters; about 100 MB at one byte each, and a second of work."""
BUDGET_PER_CHAR = 50
"""Characters added to the budget for each character of the messages."""
MAX_TEMPLATE_CHARS = 1_000_000
MAX_NUMBER = 1_000_000
"""Largest argument that is a width, a count or a precision."""
MAX_BITS = 4_096
"""Longest integer, in bits."""
ELEMENT = 16
MAX_VISITS = 1_000_000
TEXTS = (str, bytes)
LISTS = (list, tuple)
NUMBER = re.compile(r"\d+")
TAKES_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""A format whose width is an argument."""
ANY_NUMBER = frozenset({"default", "d", "int", "float", "select", "reject", "selectattr", "rejectattr", "map", "attr"})
"""Filters whose numeric arguments are values, not sizes."""
WRITES_OUT = frozenset(
    [
        "capitalize",
        "center",
        "e",
        "escape",
        "filesizeformat",
        "forceescape",
        "format",
        "indent",
        "join",
        "lower",
        "pprint",
        "replace",
        "safe",
        "string",
        "striptags",
        "title",
        "tojson",
        "trim",
        "truncate",
        "upper",
        "urlencode",
        "urlize",
        "wordcount",
        "wordwrap",
        "xmlattr",
    ]
)
"""Filters that convert their value to text first."""
MULTIPLIES = frozenset({"format", "indent", "replace", "tojson", "wordwrap"})
"""Filters that may insert an argument at many places of the text."""


class LimitError(Exception):
    """A template exceeds its limits; the message completes "the template was stopped, because …"."""


class Budget:
    """The remaining budget of one rendering. Mutated by `pay`.

    Args:
        num_chars: number of characters in the messages.
    """

    def __init__(self, num_chars: int) -> None:
        self._left = BASE_BUDGET + BUDGET_PER_CHAR * num_chars

    def pay(self, units: int) -> None:
        """Deduct units.

        Raises:
            LimitError: the budget is exhausted.
        """
        self._left -= units
        if self._left < 0:
            raise LimitError("it makes too long a text, or loops too often")


def size_of(value: Any) -> int:
    """Return the size of a value without the contents of its elements."""
    if isinstance(value, TEXTS):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, (*LISTS, Mapping, set, frozenset)) else 1


def text_size(value: Any) -> int:
    """Return the size of a value converted to text, with all its nested values.

    Raises:
            LimitError: too many nested values.
    """
    total, visits, todo = 0, 0, [value]
    while todo:
        one = todo.pop()
        total, visits = total + size_of(one), visits + 1
        if isinstance(one, Mapping):
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, (*LISTS, set, frozenset)):
            todo += one
        if visits > MAX_VISITS:  # nested lists may contain each other
            raise LimitError(f"it writes out more than {MAX_VISITS} values")
    return total


def cost_of_operator(operator: str, left: Any, right: Any) -> int:
    """Return the cost of `left operator right`.

    Raises:
        LimitError: the result would be too long a number.
    """
    if operator == "%":
        return cost_of_format(left, [right]) if isinstance(left, TEXTS) else 1
    if operator == "+":
        return size_of(left) + size_of(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
        if bits > MAX_BITS:
            raise LimitError(f"it computes a number of more than {MAX_BITS} bits")
        return 1
    if operator == "*":
        for one, count in ((left, right), (right, left)):
            if isinstance(one, (*TEXTS, *LISTS)) and isinstance(count, int):
                return size_of(one) * max(0, count)
    return 1


def cost_of_format(form: str | bytes, arguments: Sequence[Any]) -> int:
    """Return the cost of `form % arguments` or `form.format(arguments)`."""
    text = form.decode("latin-1") if isinstance(form, bytes) else form
    fields = text.count("%") + text.count("{") + 1
    widths = sum(_number(int(run[:10])) for run in NUMBER.findall(text))
    if TAKES_WIDTH.search(text):
        widths += fields * sum(_number(number) for number in _numbers(arguments))
    return len(text) + widths + fields * text_size(list(arguments))


def cost_of_call(called: Any, arguments: Sequence[Any]) -> int:
    """Return the cost of a call: text methods with longer results, and arguments that a recursive loop iterates over.

    Raises:
        LimitError: a number is too large for a method of a built-in type.
    """
    owner = getattr(called, "__self__", None)
    if isinstance(owner, (*TEXTS, *LISTS, int, float)):
        for number in _numbers(arguments):
            _number(number)
    if isinstance(owner, TEXTS):
        return _cost_of_method(getattr(called, "__name__", ""), owner, arguments)
    return sum(size_of(argument) for argument in arguments if isinstance(argument, (*LISTS, Mapping, range)))


def _cost_of_method(name: str, text: str | bytes, arguments: Sequence[Any]) -> int:
    if name == "replace":
        return _cost_of_replace(text, arguments)
    if name == "join":
        return _cost_of_join(arguments[0], text) if arguments else 1
    if name == "translate":
        longest = max((size_of(value) for value in dict(arguments[0]).values()), default=1) if arguments else 1
        return len(text) * longest
    if name == "expandtabs":
        return len(text) + len(text) * sum(_numbers(arguments))
    return 1


def cost_of_filter(name: str, values: Sequence[Any], named: Mapping[str, Any]) -> int:
    """Return the cost of a filter; the filtered value is the first of `values`.

    Raises:
        LimitError: a number is too large, or a sum has operands that are not numbers.
    """
    if not values:
        return 1
    value, arguments = values[0], [*values[1:], *named.values()]
    numbers = [] if name in ANY_NUMBER else [_number(number) for number in _numbers(arguments)]
    amount = sum(numbers) + sum(len(argument) for argument in arguments if isinstance(argument, TEXTS))
    written = text_size(value) if name in WRITES_OUT else 0
    if name == "replace" and isinstance(value, str):
        return _cost_of_replace(value, arguments)
    if name == "join":
        return _cost_of_join(value, arguments[0] if arguments else "")
    if name == "format" and isinstance(value, str):
        return cost_of_format(value, arguments)
    if name == "sum" and any(not isinstance(one, int | float) for one in [*values[2:], *_given(named, "start")]):
        raise LimitError("it sums values that are not numbers")
    return written * (1 + amount) if name in MULTIPLIES else written + amount


def _cost_of_replace(text: Any, arguments: Sequence[Any]) -> int:
    texts: list[Any] = [argument for argument in arguments if isinstance(argument, type(text))]
    if len(texts) < 2:
        return 1  # the call itself raises
    return len(text) + text.count(texts[0]) * len(texts[1])


def _cost_of_join(values: Any, between: Any) -> int:
    gap = len(between) if isinstance(between, TEXTS) else 1
    return text_size(values) + gap * (len(values) if hasattr(values, "__len__") else 1)


def _given(named: Mapping[str, Any], name: str) -> list[Any]:
    return [named[name]] if name in named else []


def _numbers(values: Sequence[Any]) -> list[int]:
    """The integers among values, and in lists among them."""
    flat = [one for value in values for one in (value if isinstance(value, LISTS) else [value])]
    return [abs(one) for one in flat if isinstance(one, int) and not isinstance(one, bool)]


def _number(value: int) -> int:
    if value > MAX_NUMBER:
        raise LimitError(f"it uses a width or count of {value}")
    return value
