"""Chat templates, rendered in a sandbox that also bounds what they compute.

A template is a program by the author of the model. The sandbox of jinja2 keeps it from Python's internals, but lets it
allocate and loop without end. Here every operation that can make a text or list longer, and every step of a loop, is
paid from a budget before it is done.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from importlib.metadata import version
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from draftree.text.chat.template_costs import (
    MAX_TEMPLATE_CHARS,
    Budget,
    LimitError,
    cost_of_call,
    cost_of_filter,
    cost_of_format,
    cost_of_operator,
    size_of,
    text_size,
)

__all__ = ["TemplateStoppedError", "render_chat"]

OLDEST_JINJA = (3, 1, 6)
"""Older ones let templates out of their sandbox."""
STEP, CALL = 10, 20
"""Cost of one step of a loop, and of one call; a character costs 1."""

_budget: ContextVar[Budget] = ContextVar("budget")


class TemplateStoppedError(TemplateRuntimeError):
    """A template was stopped, because it computes too much."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, Any],
) -> str:
    """The text of a conversation.

    Args:
        template: of the model.
        messages: of the conversation.
        add_generation_prompt: end with what opens the assistant's answer.
        special_tokens: by their role, for the template.

    Raises:
        TemplateStoppedError: the template computes too much.
        Exception: whatever else the template raises.
    """
    token = _budget.set(Budget(text_size(messages)))
    try:
        text: str = _compiled(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except (LimitError, MemoryError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise TemplateStoppedError(f"the template was stopped, because {why}") from error
    finally:
        _budget.reset(token)
    return text


def pay(units: int) -> None:
    """Take units from the budget of the template that is being rendered.

    Raises:
        LimitError: nothing is left.
    """
    budget = _budget.get(None)
    if budget is not None:
        budget.pay(units)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    if tuple(map(int, version("jinja2").split(".")[:3])) < OLDEST_JINJA:
        raise TemplateError("jinja2 is older than 3.1.6, and its sandbox is not safe: run pip install -U jinja2")
    if len(template) > MAX_TEMPLATE_CHARS:
        raise LimitError(f"it has {len(template)} characters, and {MAX_TEMPLATE_CHARS} are allowed")
    return BoundedEnvironment().from_string(template)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox for chat templates, with the globals and filters that transformers gives them."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions = [Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_written)
        self.globals.pop("lipsum", None)
        self.globals |= {
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }
        self.filters["tojson"] = _to_json
        self.filters = {name: _paying(name, function) for name, function in self.filters.items()}
        self.filters |= {"_counted": Counted, "_joined": self._joined, "_charged": _charged}

    def _parse(self, source: str, name: Any, filename: Any) -> nodes.Template:
        tree = Counting().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def concat(self, pieces: Iterable[str]) -> str:
        """Join output; compiled templates call it."""
        found = []
        for piece in pieces:
            pay(1 + len(piece))
            found.append(piece)
        return "".join(found)

    def _joined(self, pieces: Iterable[Any]) -> str:
        return self.concat(str(_written(piece)) for piece in pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator that can make its operands longer."""
        pay(cost_of_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """A call of a method, macro or function."""
        if getattr(__obj, "__name__", "") == "join" and len(args) == 1:
            args = (_listed(args[0]),)
        pay(CALL + cost_of_call(__obj, [*args, *kwargs.values()]))
        return _charged(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format`, which can pad to any width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def paid(*args: Any, **kwargs: Any) -> str:
            pay(cost_of_format(value.__self__, [*args, *kwargs.values()]))
            return wrapped(*args, **kwargs)

        return paid


class Counting(NodeTransformer):
    """Puts loops, joined texts and slices of a parsed template behind filters that pay for them."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802, by the node
        """Every step is paid."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802, by the node
        """`~` is no operator that a sandbox can intercept."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802, by the node
        """A slice is a copy."""
        self.generic_visit(node)
        return _filtered(node, "_charged") if isinstance(node.arg, nodes.Slice) else node


class Counted:
    """What a loop runs over; every step is paid. Its length is known where the original's is."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            pay(STEP)
            yield value

    def __len__(self) -> int:
        return len(self._values)


class Generation(Extension):
    """The tag that marks what the assistant wrote: its content as it is."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        """The statements inside of the tag."""
        next(parser.stream)
        found: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return found


class TemplateDict:
    """`dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """As `dict`."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """Variables of a template that outlive a block; none begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # an attribute may be called self
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template has no attribute {name!r}: rename it")


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _written(value: Any) -> Any:
    """A value that is about to be written out."""
    if isinstance(value, list | tuple | dict | set):
        pay(text_size(value))
    return value


def _listed(values: Any) -> Any:
    """What is joined: its length is known only where it is a list."""
    return list(Counted(values)) if isinstance(values, Iterator) else values


def _charged(value: Any) -> Any:
    pay(size_of(value))
    return value


def _paying(name: str, function: Any) -> Any:
    @wraps(function)  # keeps the mark of those that take the context first
    def paid(*args: Any, **kwargs: Any) -> Any:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        if name == "join" and len(args) > first:
            args = (*args[:first], _listed(args[first]), *args[first + 1 :])
        pay(1 + cost_of_filter(name, args[first:], kwargs))
        return _charged(function(*args, **kwargs))

    return paid


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
