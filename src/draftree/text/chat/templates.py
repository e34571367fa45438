"""Chat template rendering in a sandbox with a bounded amount of work.

A template is a program by the author of the model. The sandbox of jinja2 shields Python's internals, but allows
unbounded allocation and work. Here every operation whose work or result can exceed the template's own length is charged
to a budget before it runs: loops and calls by the size of their bodies, comparisons and hashes by the nested size of
their operands (a list that contains itself twice, 60 times over, has 2⁶⁰ elements to compare).
"""

from __future__ import annotations

import json
import operator
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
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from draftree.text.chat.conversation import Conversation
from draftree.text.chat.template_costs import (
    COMPARES,
    ITERATES,
    MAX_TEMPLATE_CHARS,
    Budget,
    LimitError,
    cost_of_call,
    cost_of_comparison,
    cost_of_filter,
    cost_of_format,
    cost_of_operator,
    cost_of_test,
    size_of,
    text_size,
)

__all__ = ["BoundedEnvironment", "TemplateStoppedError", "render_chat"]

OLDEST_JINJA = (3, 1, 6)
"""Older versions have sandbox escapes."""
STEP, CALL = 10, 20
"""Cost of one step of a loop, and of one call, besides the nodes of the body; a character or a node costs 1."""
OPERATORS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "lteq": operator.le,
    "gt": operator.gt,
    "gteq": operator.ge,
    "in": lambda item, values: item in values,
    "notin": lambda item, values: item not in values,
}
"""Comparisons by jinja2's names of their operators."""

_budget: ContextVar[Budget] = ContextVar("budget")


class TemplateStoppedError(TemplateRuntimeError):
    """A template was stopped because it exceeded its budget."""


def render_chat(
    template: str,
    conversation: Conversation,
    *,
    special_tokens: Mapping[str, Any],
) -> str:
    """Render a conversation to text.

    Args:
        template: the model's chat template.
        conversation: messages, tools and variables.
        special_tokens: special tokens by role, as variables of the template.

    Raises:
        TemplateStoppedError: the template exceeds its budget.
        Exception: any error that the template raises.
    """
    given = [conversation.messages, conversation.tools, dict(conversation.variables)]
    token = _budget.set(Budget(text_size(given)))
    try:
        text: str = _compiled(template).render(
            messages=conversation.messages,
            tools=conversation.tools,
            documents=None,
            add_generation_prompt=conversation.add_generation_prompt,
            **special_tokens,
            **conversation.variables,
        )
    except (LimitError, MemoryError, RecursionError) as error:
        why = str(error) or type(error).__name__
        raise TemplateStoppedError(f"the template was stopped, because {why}") from error
    finally:
        _budget.reset(token)
    return text


def pay(units: int) -> None:
    """Charge units to the budget of the current rendering.

    Raises:
        LimitError: the budget is exhausted.
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
    """The sandbox for chat templates, with the globals and filters that transformers provides."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

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
        self.filters |= {
            "_counted": Counted,
            "_joined": self._joined,
            "_charged": _charged,
            "_compared": _compared,
            "_hashed": _hashed,
            "_begun": _begun,
        }
        self.tests = {name: _paying_test(name, function) for name, function in self.tests.items()}

    def _parse(self, source: str, name: Any, filename: Any) -> nodes.Template:
        tree = Counting().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def concat(self, pieces: Iterable[str]) -> str:
        """Join output; called by compiled templates."""
        found = []
        for piece in pieces:
            pay(1 + len(piece))
            found.append(piece)
        return "".join(found)

    def _joined(self, pieces: Iterable[Any]) -> str:
        return self.concat(str(_written(piece)) for piece in pieces)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charge and apply an operator whose result can be longer than its operands."""
        pay(cost_of_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Charge and perform a call of a method, macro or function."""
        if getattr(__obj, "__name__", "") == "join" and len(args) == 1:
            args = (_listed(args[0]),)
        pay(CALL + cost_of_call(__obj, [*args, *kwargs.values()]))
        return _charged(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Charge and perform `obj[argument]`, which hashes the argument."""
        return super().getitem(obj, _hashed(argument))

    def wrap_str_format(self, value: Any) -> Any:
        """Wrap `str.format`, which can pad to any width, with a charge."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def paid(*args: Any, **kwargs: Any) -> str:
            pay(cost_of_format(value.__self__, [*args, *kwargs.values()]))
            return wrapped(*args, **kwargs)

        return paid


class Counting(NodeTransformer):
    """Transformer that wraps what costs more than its own length in filters that charge for it."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802, by the node
        """Charge every step."""
        step = STEP + _num_nodes(node)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted", step)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802, by the node
        """Charge every call."""
        return self._charging_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802, by the node
        """Charge every call of `caller`."""
        return self._charging_body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Block:  # noqa: N802, by the node
        """Charge every rendering, since a block can render itself again."""
        return self._charging_body(node)

    def _charging_body(self, node: Any) -> Any:
        count = nodes.Const(_num_nodes(node), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(count, "_begun"), lineno=node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Filter:  # noqa: N802, by the node
        """Charge a comparison, or a chain of them, whose operands are then all evaluated."""
        self.generic_visit(node)
        operands = nodes.Tuple([node.expr, *(operand.expr for operand in node.ops)], "load", lineno=node.lineno)
        return _filtered(operands, "_compared", tuple(operand.op for operand in node.ops))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Dict:  # noqa: N802, by the node
        """Charge keys, which are hashed."""
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _filtered(pair.key, "_hashed")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802, by the node
        """Charge `~`, which the sandbox cannot intercept as an operator."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802, by the node
        """Charge a slice, which is a copy."""
        self.generic_visit(node)
        return _filtered(node, "_charged") if isinstance(node.arg, nodes.Slice) else node


class Counted:
    """Values with a charge per step of their iteration. They have a length if the original has one."""

    def __init__(self, values: Any, step: int = STEP) -> None:
        self._values, self._step = values, step

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            pay(self._step)
            yield value

    def __len__(self) -> int:
        return len(self._values)


class Generation(Extension):
    """The tag that marks the assistant's text; it renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        """Return the statements inside the tag."""
        next(parser.stream)
        found: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return found


class TemplateDict:
    """`dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return `dict(...)`."""
        pay(text_size([*args, kwargs]))
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return `dict.fromkeys(...)`."""
        pay(text_size(args))
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """Template variables that outlive a block; names with a leading underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # an attribute may be called self
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # without the values: nested ones would be written out without a charge


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template has no attribute {name!r}: rename it")


def _filtered(node: Any, name: str, *arguments: Any) -> nodes.Filter:
    constants = [nodes.Const(argument, lineno=node.lineno) for argument in arguments]
    return nodes.Filter(node, name, constants, [], None, None, lineno=node.lineno)


def _num_nodes(node: nodes.Node) -> int:
    return sum(1 for _ in node.find_all(nodes.Node))


def _written(value: Any) -> Any:
    """Charge a value that is about to be converted to text."""
    if not isinstance(value, str):
        pay(text_size(value))
    return value


def _listed(values: Any) -> Any:
    """Return values as a list if their length is unknown."""
    return list(Counted(values)) if isinstance(values, Iterator) else values


def _compared(operands: Sequence[Any], names: Sequence[str]) -> bool:
    """Charge and evaluate a chain of comparisons."""
    is_true = True
    for left, right, name in zip(operands, operands[1:], names, strict=False):
        values = _listed(right) if name in ("in", "notin") else right
        pay(cost_of_comparison(name, left, values))
        is_true = OPERATORS[name](left, values)
        if not is_true:
            break
    return is_true


def _hashed(key: Any) -> Any:
    """Charge a key that is about to be hashed."""
    if isinstance(key, tuple):
        pay(text_size(key))
    return key


@pass_context  # a filter of the context is not evaluated when the template is compiled
def _begun(_: Any, num_nodes: int) -> None:
    """Charge the execution of a body."""
    pay(num_nodes)


def _charged(value: Any) -> Any:
    pay(size_of(value))
    return value


def _paying(name: str, function: Any) -> Any:
    @wraps(function)  # keeps the marker of filters whose first argument is the context
    def paid(*args: Any, **kwargs: Any) -> Any:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        if len(args) > first:
            args = (*args[:first], _iterated(name, args[first]), *args[first + 1 :])
        pay(1 + cost_of_filter(name, args[first:], kwargs))
        return _charged(function(*args, **kwargs))

    return paid


def _paying_test(name: str, function: Any) -> Any:
    @wraps(function)  # keeps the marker of tests whose first argument is the environment
    def paid(*args: Any) -> Any:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        if name == "in" and len(args) > 1:
            args = (args[0], _listed(args[1]), *args[2:])
        pay(1 + cost_of_test(name, args[first:]))
        return function(*args)

    return paid


def _iterated(name: str, value: Any) -> Any:
    """Return the value of a filter in a form whose iteration is charged."""
    if name == "join" or name in COMPARES:
        return _listed(value)
    if isinstance(value, Iterator):
        return iter(Counted(value))
    if name in ITERATES and hasattr(value, "__len__"):
        pay(STEP * len(value))
    return value


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
