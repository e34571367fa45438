"""Upper bounds on the cost of chat template operations in characters, computed before each operation runs.

A cost bounds the work of the operation, and what it adds to memory; each element of a list costs `ELEMENT`. Results
that are no longer than the operands are charged afterwards.
"""

from __future__ import annotations

import re
from collections.abc import ItemsView, KeysView, Mapping, Sequence, Set, ValuesView
from typing import Any

__all__ = [
    "COMPARES",
    "ITERATES",
    "MAX_TEMPLATE_CHARS",
    "Budget",
    "LimitError",
    "cost_of_call",
    "cost_of_comparison",
    "cost_of_filter",
    "cost_of_format",
    "cost_of_operator",
    "cost_of_test",
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
"""Longest integer of a computation, in bits."""
ELEMENT = 16
MAX_VISITS = 1_000_000
TEXTS = (str, bytes)
LISTS = (list, tuple)
CONTAINERS = (*LISTS, Mapping, Set, KeysView, ValuesView, ItemsView)
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
MULTIPLIES = frozenset({"format", "indent", "replace", "tojson"})
"""Filters that may insert an argument at many places of the text."""
SQUARES = frozenset({"pprint", "striptags", "urlize", "wordwrap"})
"""Filters that copy the rest of the text again and again."""
COMPARES = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})
"""Filters that compare or hash the elements, each at most as often as the number of elements has bits."""
ITERATES = frozenset({"map", "reject", "rejectattr", "select", "selectattr", "sum"})
"""Filters that visit every element, with a result that may be shorter."""
SEARCHES = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
"""Methods of texts that may compare the argument at every place."""
CODECS = frozenset({"decode", "encode"})
"""Methods of texts that are slow for some of the encodings that an argument may name."""


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
    return ELEMENT * len(value) if isinstance(value, CONTAINERS) else 1


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
        elif isinstance(one, CONTAINERS):
            todo += one
        if visits > MAX_VISITS:  # nested lists may contain each other
            raise LimitError(f"it visits more than {MAX_VISITS} nested values at once")
    return total


def cost_of_operator(operator: str, left: Any, right: Any) -> int:
    """Return the cost of `left operator right`.

    Raises:
        LimitError: an operand or the result is too long a number.
    """
    if operator == "%" and isinstance(left, TEXTS):
        return cost_of_format(left, [right])
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise LimitError(f"it computes a number of more than {MAX_BITS} bits")
        return 1
    if operator == "*":
        for one, count in ((left, right), (right, left)):
            if isinstance(one, (*TEXTS, *LISTS)) and isinstance(count, int):
                return size_of(one) * max(0, count)
    if operator == "-":  # the difference of two sets
        return text_size(left) + text_size(right)
    return size_of(left) + size_of(right)


def cost_of_comparison(operator: str, left: Any, right: Any) -> int:
    """Return the cost of `left operator right` for an operator of jinja2, such as "eq" and "in".

    A comparison visits as much as the smaller operand holds; a search for an item, as much for every element.
    """
    if operator in ("in", "notin"):
        if isinstance(right, TEXTS):
            return size_of(right)
        places = len(right) if isinstance(right, (*LISTS, ValuesView, range)) else 1
        return (1 + places) * text_size(left)
    if isinstance(left, Set) and isinstance(right, Set):  # of these, every element is looked up in the other
        return text_size(left) + text_size(right)
    return text_size(min(left, right, key=size_of))


def cost_of_test(name: str, values: Sequence[Any]) -> int:
    """Return the cost of a test; the tested value is the first of `values`.

    Raises:
        LimitError: as `cost_of_operator`.
    """
    if name in ("lower", "upper"):  # of the value as text
        return text_size(values[0])
    if name in ("odd", "even", "divisibleby"):
        return cost_of_operator("%", values[0], values[1] if len(values) > 1 else 2)
    return cost_of_comparison(name, values[0], values[1]) if len(values) > 1 else 1


def cost_of_format(form: str | bytes, arguments: Sequence[Any]) -> int:
    """Return the cost of `form % arguments` or `form.format(arguments)`."""
    text = form.decode("latin-1") if isinstance(form, bytes) else form
    fields = text.count("%") + text.count("{") + 1
    widths = sum(_number(int(run[:10])) for run in NUMBER.findall(text))
    if TAKES_WIDTH.search(text):
        widths += fields * sum(_number(number) for number in _numbers(arguments))
    return len(text) + widths + fields * text_size(list(arguments))


def cost_of_call(called: Any, arguments: Sequence[Any]) -> int:
    """Return the cost of a call: methods of built-in types, and arguments that a recursive loop iterates over.

    Raises:
        LimitError: a number is too large for a method of a built-in type.
    """
    owner = getattr(called, "__self__", None)
    name = getattr(called, "__name__", "")
    if isinstance(owner, (*TEXTS, *LISTS, int, float)):
        for number in _numbers(arguments):
            _number(number)
    if isinstance(owner, TEXTS):
        return _cost_of_method(name, owner, arguments)
    if (
        isinstance(owner, CONTAINERS) or name == "changed"
    ):  # of a loop: whether the arguments are those of the last step
        return (1 + len(owner) if isinstance(owner, LISTS) else 1) * text_size(list(arguments))
    return sum(size_of(argument) for argument in arguments if isinstance(argument, (*LISTS, Mapping, range)))


def _cost_of_method(name: str, text: str | bytes, arguments: Sequence[Any]) -> int:
    if name == "replace":
        return _cost_of_replace(text, arguments)
    if name == "join":
        return _cost_of_join(arguments[0], text) if arguments else 1
    if name == "translate":
        table = arguments[0] if arguments else ()
        values = table.values() if isinstance(table, Mapping) else table if isinstance(table, LISTS) else ()
        return len(text) * max(map(size_of, values), default=1)
    if name == "expandtabs":
        return len(text) + len(text) * sum(_numbers(arguments))
    if name in CODECS and arguments:
        return len(text) ** 2
    return len(text) * (1 + sum(map(size_of, arguments)) if name in SEARCHES else 1)


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
    if name in COMPARES:
        return text_size(value) * (1 + len(value).bit_length() if isinstance(value, CONTAINERS) else 1)
    if name in SQUARES:
        return written**2 + amount
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
