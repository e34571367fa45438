"""Chat template rendering in a sandbox with a bounded amount of work.

A template is a program by the author of the model. The sandbox of jinja2 shields Python's internals, but allows
unbounded allocation and work. Here every operation whose work or result can exceed the template's own length is charged
to a budget before it runs: loops and calls by the size of their bodies, comparisons and hashes by the nested size of
their operands (a list that contains itself twice, 60 times over, has 2⁶⁰ elements to compare).
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, Set, ValuesView
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from importlib.metadata import version
from typing import Any

from jinja2 import TemplateError, TemplateRuntimeError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from draftree.core.errors import InvalidRequestError, suggestion
from draftree.text.chat.messages import KNOWN_KEYS, Conversation

# Upper bounds on the cost of chat template operations in characters, computed before each operation runs.
#
# A cost bounds the work of the operation, and what it adds to memory; each element of a list costs `ELEMENT`. Results
# that are no longer than the operands are charged afterwards.

BASE_BUDGET = 100_000_000  # in characters; about 100 MB at one byte each, and a second of work
BUDGET_PER_CHAR = 50  # characters added to the budget for each character of the messages
MAX_TEMPLATE_CHARS = 1_000_000
MAX_NUMBER = 1_000_000  # largest argument that is a width, a count or a precision
MAX_BITS = 4_096  # longest integer of a computation, in bits
ELEMENT = 16
MAX_VISITS = 1_000_000
TEXTS = (str, bytes)
LISTS = (list, tuple)
CONTAINERS = (*LISTS, Mapping, Set, KeysView, ValuesView, ItemsView)
NUMBER = re.compile(r"\d+")
TAKES_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")  # a format whose width is an argument
ANY_NUMBER = frozenset({"default", "d", "int", "float", "select", "reject", "selectattr", "rejectattr", "map", "attr"})
"""Filters whose numeric arguments are values, not sizes."""
WRITES_OUT = frozenset({"capitalize", "center", "e", "escape", "filesizeformat", "forceescape", "format"}).union(
    {"indent", "join", "lower", "pprint", "replace", "safe", "string", "striptags", "title", "tojson", "trim"},
    {"truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"},
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
    """The remaining budget of one rendering. Mutated by `pay`."""

    def __init__(self, num_chars: int) -> None:
        self._left = BASE_BUDGET + BUDGET_PER_CHAR * num_chars

    def pay(self, units: int) -> None:
        """Deduct units."""
        self._left -= units
        if self._left < 0:
            raise LimitError("it makes too long a text, or loops too often")


def size_of(value: Any) -> int:
    """Return the size of a value without the contents of its elements."""
    if isinstance(value, TEXTS):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, CONTAINERS) else 1


def text_size(value: Any) -> int:
    """Return the size of a value converted to text, with all its nested values."""
    total, visits, todo = 0, 0, [value]
    while todo:
        part = todo.pop()
        total, visits = total + size_of(part), visits + 1
        if isinstance(part, Mapping):
            todo += [*part.keys(), *part.values()]
        elif isinstance(part, CONTAINERS):
            todo += part
        if visits > MAX_VISITS:  # nested lists may contain each other
            raise LimitError(f"it visits more than {MAX_VISITS} nested values at once")
    return total


def cost_of_operator(operator: str, left: Any, right: Any) -> int:
    """Return the cost of `left operator right`."""
    if operator == "%" and isinstance(left, TEXTS):
        return cost_of_format(left, [right])
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise LimitError(f"it computes a number of more than {MAX_BITS} bits")
        return 1
    if operator == "*":
        for operand, count in ((left, right), (right, left)):
            if isinstance(operand, (*TEXTS, *LISTS)) and isinstance(count, int):
                return size_of(operand) * max(0, count)
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


def cost_of_test(name: str, values: Sequence[Any], named: Mapping[str, Any]) -> int:
    """Return the cost of a test; the tested value is the first of `values`."""
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
    """Return the cost of a call: methods of built-in types, and arguments that a recursive loop iterates over."""
    owner = getattr(called, "__self__", None)
    name = getattr(called, "__name__", "")
    if isinstance(owner, (*TEXTS, *LISTS, int, float)):
        for number in _numbers(arguments):
            _number(number)
    if isinstance(owner, TEXTS):
        return _cost_of_method(name, owner, arguments)
    # `changed` of a loop: whether the arguments are those of the last step
    if isinstance(owner, CONTAINERS) or name == "changed":
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
    """Return the cost of a filter; the filtered value is the first of `values`."""
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
    start = [*values[2:], *([named["start"]] if "start" in named else [])]
    if name == "sum" and not all(isinstance(number, int | float) for number in start):
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


def _numbers(values: Sequence[Any]) -> list[int]:
    """The integers among values, and in lists among them."""
    flat = [item for value in values for item in (value if isinstance(value, LISTS) else [value])]
    return [abs(item) for item in flat if isinstance(item, int) and not isinstance(item, bool)]


def _number(value: int) -> int:
    if value > MAX_NUMBER:
        raise LimitError(f"it uses a width or count of {value}")
    return value


OLDEST_JINJA = (3, 1, 6)  # older versions have sandbox escapes
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


def render_chat(template: str, conversation: Conversation, *, special_tokens: Mapping[str, Any]) -> str:
    values = [conversation.messages, conversation.tools, dict(conversation.variables)]
    token = _budget.set(Budget(text_size(values)))
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
    """Charge units to the budget of the current rendering."""
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
        self.filters = {name: _paying(name, function, cost_of_filter) for name, function in self.filters.items()}
        self.filters |= {
            "_counted": Counted,
            "_joined": self._joined,
            "_charged": _charged,
            "_compared": _compared,
            "_hashed": _hashed,
            "_begun": _begun,
        }
        self.tests = {
            name: _paying(name, function, cost_of_test, is_test=True) for name, function in self.tests.items()
        }

    def _parse(self, source: str, name: Any, filename: Any) -> nodes.Template:
        tree = Counting().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def concat(self, pieces: Iterable[str]) -> str:
        """Join output; called by compiled templates."""
        charged = []
        for piece in pieces:
            pay(1 + len(piece))
            charged.append(piece)
        return "".join(charged)

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

    def _charging_body(self, node: Any) -> Any:
        count = nodes.Const(_num_nodes(node), lineno=node.lineno)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(count, "_begun"), lineno=node.lineno))
        return node

    # every call of a macro or of `caller`, and every rendering of a block, which can render itself again
    visit_Macro = visit_CallBlock = visit_Block = _charging_body  # noqa: N815, by the nodes

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
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateDict:
    """`dict` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        pay(text_size([*args, kwargs]))
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
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
    is_true = True
    for left, right, name in zip(operands, operands[1:], names, strict=False):
        values = _listed(right) if name in ("in", "notin") else right
        pay(cost_of_comparison(name, left, values))
        is_true = OPERATORS[name](left, values)
        if not is_true:
            break
    return is_true


def _hashed(key: Any) -> Any:
    if isinstance(key, tuple):
        pay(text_size(key))
    return key


@pass_context  # a filter of the context is not evaluated when the template is compiled
def _begun(_: Any, num_nodes: int) -> None:
    pay(num_nodes)


def _charged(value: Any) -> Any:
    pay(size_of(value))
    return value


def _paying(name: str, function: Any, cost_of: Callable[..., int], *, is_test: bool = False) -> Any:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)  # keeps the marker of functions whose first argument is the context or the environment
    def paid(*args: Any, **kwargs: Any) -> Any:
        values = list(args[first:])
        if is_test and name == "in" and len(values) > 1:
            values[1] = _listed(values[1])
        elif values and not is_test:
            values[0] = _iterated(name, values[0])
        pay(1 + cost_of(name, values, kwargs))
        result = function(*args[:first], *values, **kwargs)
        return result if is_test else _charged(result)

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


FIXED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # variables of every rendering


def require_read(conversation: Conversation, template: str, name: str) -> None:
    """Raise unless the template reads the tools, calls, variables and keys of messages of a conversation."""
    reason = f"the chat template of {name} does not read"
    if conversation.tools and "tools" not in variables_of(template):
        raise InvalidRequestError(f"tools were given, but {reason} them: leave them out.", param="tools")
    if conversation.has_calls and "tool_calls" not in template:
        message = f"a message has tool_calls, but {reason} them: leave them out."
        raise InvalidRequestError(message, param="messages")
    for key in conversation.keys - KNOWN_KEYS:
        if not reads_key(template, key):
            message = f"a message has the key {key!r}, which {reason}: {suggestion(key, KNOWN_KEYS)}."
            raise InvalidRequestError(message, param="messages")
    if not conversation.variables:
        return
    names = variables_of(template) - FIXED - set(BoundedEnvironment().globals)
    known = [name for name in names if not name.endswith("_token")]
    for variable in conversation.variables:
        if variable not in known:
            hint = suggestion(variable, known) if known else "it reads no such variables"
            message = f"template_kwargs has {variable!r}, which {reason}: {hint}."
            raise InvalidRequestError(message, param="template_kwargs")


def reads_key(template: str, key: str) -> bool:
    """Return whether the source of a template has the name of a key of messages."""
    return re.search(rf"(?<!\w){re.escape(key)}(?!\w)", template) is not None


@lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """Return the names of the variables that a template reads."""
    try:
        return frozenset(find_undeclared_variables(BoundedEnvironment().parse(template)))
    except (TemplateError, RecursionError):
        return frozenset()  # rendering raises the error
