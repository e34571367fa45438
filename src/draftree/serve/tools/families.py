"""Functions that a request offers, and the formats of their calls by model family."""

from __future__ import annotations

import difflib
import json
import re
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.core.errors import suggestion
from draftree.sampling.grammar.ebnf import Dispatch, Marker, Part, Ref, Rules, characters, literal, terminal
from draftree.sampling.grammar.languages import complement, ranges_of
from draftree.sampling.grammar.schema import SchemaError, schema_text
from draftree.sampling.grammar.schema_grammar import Form, SchemaCompiler
from draftree.serve.errors import invalid
from draftree.serve.reasoning import HARMONY
from draftree.serve.tools.parser import SPACE, Family
from draftree.text.chat.messages import has_images

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
MAX_TOOLS = 128
KEYS = ("name", "description", "parameters", "strict")
LIKENESS = 0.75  # similarity from which another field counts as a misspelt one; the rest is for the chat template


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call; templates get its `tool` as the client sent it."""

    name: str
    schema: Mapping[str, Any]
    is_strict: bool
    tool: Mapping[str, Any]


def functions_of(tools: object) -> tuple[Function, ...]:
    """Check definitions of tools in the form of /v1/chat/completions."""
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise invalid(f"'tools' must be a list of at most {MAX_TOOLS} tools", "tools")
    functions = tuple(_function(tool, f"tools[{number}]") for number, tool in enumerate(tools))
    names = [function.name for function in functions]
    for number, name in enumerate(names):
        if name in names[:number]:
            message = f"two tools have the name '{name}': rename one of them"
            raise invalid(message, f"tools[{number}].function.name")
    return functions


def _function(tool: Any, place: str) -> Function:
    def require(is_right: bool, path: str, reason: str) -> None:
        if not is_right:
            raise invalid(f"'{path}' {reason}", path)

    is_function = isinstance(tool, Mapping) and tool.get("type") == "function"
    require(is_function, place, 'must have the form {"type": "function", "function": {…}}')
    inner, place = tool.get("function"), f"{place}.function"
    require(isinstance(inner, Mapping), place, "must be an object with a name")
    for key in set(inner).difference(KEYS):
        close = difflib.get_close_matches(key, KEYS, n=1, cutoff=LIKENESS)
        require(not close, f"{place}.{key}", f"is unknown: did you mean '{next(iter(close), '')}'?")
    name, strict = inner.get("name"), inner.get("strict")
    is_name = isinstance(name, str) and NAME.fullmatch(name) is not None
    require(is_name, f"{place}.name", "must have 1 to 64 letters, digits, dots, dashes and underscores")
    require(isinstance(inner.get("description"), str | None), f"{place}.description", "must be text")
    require(isinstance(strict, bool | None), f"{place}.strict", "must be true or false")
    return Function(name, _schema(inner.get("parameters"), f"{place}.parameters"), bool(strict), tool)


def _schema(parameters: object, place: str) -> Mapping[str, Any]:
    if parameters is None or parameters == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise invalid(f"'{place}' must be a JSON schema of the type object", place)
    try:
        schema: Mapping[str, Any] = {"type": "object", **json.loads(schema_text(parameters))}
    except ValueError as error:
        raise invalid(f"'{place}' is not a JSON schema: {error}", place) from error
    return schema


def required_name(choice: object, functions: tuple[Function, ...]) -> str | None:
    """Return the function that a choice names; None if it names none."""
    if choice is None or choice == "none" or (choice == "auto" and not functions):
        return None
    if not functions:
        raise invalid("'tool_choice' needs 'tools': leave it out", "tool_choice")
    if choice in ("auto", "required"):
        return None
    inner = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        form = '{"type": "function", "function": {"name": "…"}}'
        raise invalid(f'\'tool_choice\' must be "none", "auto", "required" or {form}', "tool_choice")
    if name not in {function.name for function in functions}:
        message = (
            f"'tool_choice' names a function that is not in 'tools': {suggestion(name, [f.name for f in functions])}"
        )
        raise invalid(message, "tool_choice")
    return name


SHORT_ID = 9  # length of the ids of calls that Mistral's templates accept
# Grammars: the parts of rules around the arguments of a call.


def _call(family: Family, name: str, arguments: Part) -> list[Part]:
    if family.is_xml:
        return [literal(f"<function={name}>\n"), arguments, literal("</function>")]
    # names have no characters that JSON escapes
    return [literal(f'{{"name": "{name}", "{family.arguments_key}": '), arguments, literal("}")]


def _forced(family: Family, rules: Rules, call: Ref, *, is_parallel: bool) -> list[Part]:
    """Return the parts of an answer that is calls."""
    if family.closing:
        marked = rules.add([literal(f"{family.opening[0]}\n"), call, literal(f"\n{family.closing}")])
        return [marked, *_more(rules, "\n", marked, is_parallel=is_parallel)]
    if family.allows_list:
        return ['"["', call, *_more(rules, ", ", call, is_parallel=is_parallel), '"]"']
    return [call]


def _free(
    family: Family, rules: Rules, call: Ref, named: Ref, *, marker: Marker, is_parallel: bool
) -> list[list[Part]]:
    """Return the alternatives of an answer that is any text with calls in it.

    The rules are `call`, without a marker, and `named`, a name and arguments for families that know it.
    """
    if family.closing:
        body = rules.add(['"\\n"', call, literal(f"\n{family.closing}")])
        return [[Dispatch(body.name, marker, is_parallel)]]
    body = _after_marker(family, rules, call, named, is_parallel=is_parallel)
    if not family.is_bare:
        return [[Dispatch(body.name, marker, is_parallel)]]
    # a text that begins with a brace is a call, and one that begins with the beginning of a marker
    text = rules.add([Dispatch(body.name, marker, is_repeated=False)])
    start: list[list[Part]] = [[], [terminal(marker), body], _bare(rules, call, is_parallel=is_parallel)]
    first = ""
    if isinstance(marker, str):
        first = marker[0]
        rest = rules.reserve()
        rules.define(rest, [[], [literal(first), Ref(rest)], [_others(marker[:2]), text]])
        start.append([literal(first), Ref(rest)])
    start.append([_others(first + "{" + SPACE), text])
    return [["[ \\t\\r\\n]*", rules.add(*start)]]


def _marked(
    family: Family, rules: Rules, call: Ref, named: Ref, *, marker: Marker, is_parallel: bool
) -> list[list[Part]]:
    """Return the alternatives of an answer that is calls with markers; arguments as for `free`."""
    if family.closing:
        return [_forced(family, rules, call, is_parallel=is_parallel)]
    body = _after_marker(family, rules, call, named, is_parallel=is_parallel)
    bare = [_bare(rules, call, is_parallel=is_parallel)] if family.is_bare else []
    return [[terminal(marker), body], *bare]


def _bare(rules: Rules, call: Ref, *, is_parallel: bool) -> list[Part]:
    return [call, *_more(rules, "; ", call, is_parallel=is_parallel)]


def _after_marker(family: Family, rules: Rules, call: Ref, named: Ref, *, is_parallel: bool) -> Ref:
    """Return the rule of what follows a marker that nothing closes."""
    if family.is_bare:
        return rules.add(_bare(rules, call, is_parallel=is_parallel))
    listed: list[Part] = ['" "?', *_forced(family, rules, call, is_parallel=is_parallel)]
    return rules.add(listed, *([[named]] if family.is_named else []))


def _more(rules: Rules, between: str, call: Ref, *, is_parallel: bool) -> list[Part]:
    return [Ref(rules.add([literal(between), call]).name, 0, None)] if is_parallel else []


def _others(signs: str) -> str:
    return characters(complement(ranges_of((ord(sign), ord(sign)) for sign in signs)))


FAMILIES = (
    Family("qwen3-coder", ("<tool_call>", "<function="), ("<tool_call>",), "</tool_call>", is_xml=True),
    Family("hermes", ("<tool_call>",), ("<tool_call>",), "</tool_call>", ("<arg_key>",), allows_list=True),
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        allows_list=True,
        is_named=True,
        new_id=lambda: "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SHORT_ID)),
    ),
    Family("llama", ('"parameters": ', "ipython"), ("<|python_tag|>",), arguments_key="parameters", is_bare=True),
    # its calls are messages, which are split from the text together with the reasoning; an answer has one call
    Family("harmony", ("<|channel|>", "functions."), ()),
)
"""The known families; the first whose marks are in a template is used."""
GENERIC = Family("generic", (), ("<tool_call>",), "</tool_call>", allows_list=True)
"""The format of models whose template reads no tools."""


def family_of(template: str) -> Family | None:
    return next((family for family in FAMILIES if family.matches(template)), None)


INTRODUCTION = """You can call these functions:
{functions}

To call one, answer with its name and its arguments:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>"""


def without_tools(messages: Iterable[Mapping[str, Any]], functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Return messages in which functions, calls and results are text.

    The functions are described in the system message, or in the first message, since some templates have no place for a
    system message. Results are messages of the user; those that follow each other are one.
    """
    made: list[dict[str, Any]] = []
    for message in messages:
        is_result = message["role"] == "tool"
        content = message["content"] if has_images([message]) else _text(message)
        if is_result:
            content = _joined("<tool_response>", content, "</tool_response>")
        if made and (is_result or message["role"] == "user") and made[-1].get("follows_result"):
            made[-1]["content"] = _joined(made[-1]["content"], content)
            made[-1]["follows_result"] = is_result
            continue
        rest = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id", "name")}
        made.append({**rest, "role": "user" if is_result else message["role"], "content": content})
        made[-1]["follows_result"] = is_result
    for message in made:
        del message["follows_result"]
    if functions:
        lines = "\n".join(json.dumps(function.tool["function"], ensure_ascii=False) for function in functions)
        introduction, content = INTRODUCTION.format(functions=lines), made[0]["content"]
        made[0]["content"] = _joined(f"{introduction}\n", content) if content else introduction
    return made


def _joined(*contents: str | Sequence[Any]) -> str | list[Any]:
    """Return contents as one with line ends between them: a text, or parts if some are parts."""
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n".join(texts)
    parts: list[Any] = []
    for content in contents:
        if parts:
            parts.append({"type": "text", "text": "\n"})
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    parts = [content if isinstance(content, str) else "\n".join(part["text"] for part in content)]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written = f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
        parts.append(f"<tool_call>\n{written}\n</tool_call>")
    return "\n".join(filter(None, parts))


ANY_PARAMETERS = '("<parameter=" [^<>=\\n]+ ">\\n" ([^<] | "<" [^/])* "\\n</parameter>\\n")*'


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of an answer with calls.

    `prefix` is EBNF of the reasoning before it, None for that of the model's format; `unenforced` is what narrows
    the arguments and is not in the grammar, by place in the body.
    """

    ebnf: str
    prefix: str | None
    unenforced: Mapping[str, str]


def call_grammar(
    family: Family,
    functions: Mapping[int, Function],
    *,
    is_forced: bool,
    is_parallel: bool,
    answer: str | None = None,
    specials: Mapping[str, int],
) -> CallGrammar:
    """Return the grammar of one call or more, or of any text with calls in it.

    An answer that is not forced is free up to the beginning of a call, and the arguments of functions that are not
    strict are free, too; with `answer`, the JSON schema of an answer without calls, it is not. Functions are by
    their number in the request.
    """
    rules = Rules()
    unenforced: dict[str, str] = {}
    arguments = {
        function.name: _arguments(
            rules, family, function, number, unenforced, is_strict=is_forced or function.is_strict
        )
        for number, function in functions.items()
    }
    prefix = None
    if not family.opening:
        root = _message(rules, arguments, answer, is_forced=is_forced, specials=specials)
        prefix = HARMONY.thoughts(specials)
    else:
        marker = specials.get(family.opening[0], family.opening[0])
        call = rules.add(*(_call(family, name, part) for name, part in arguments.items()))
        arguments_mark = f"({terminal(specials.get('[ARGS]', '[ARGS]'))})?"
        named = rules.add(*([literal(name), arguments_mark, part] for name, part in arguments.items()))
        if is_forced:
            root = rules.add(_forced(family, rules, call, is_parallel=is_parallel))
        elif answer is None:
            root = rules.add(*_free(family, rules, call, named, marker=marker, is_parallel=is_parallel))
        else:
            text = SchemaCompiler(rules).add(answer)
            root = rules.add([text], *_marked(family, rules, call, named, marker=marker, is_parallel=is_parallel))
    ebnf = rules.text(root)
    assert ebnf is not None, "each function has arguments"
    return CallGrammar(ebnf, prefix, unenforced)


def _message(
    rules: Rules, arguments: Mapping[str, Part], answer: str | None, *, is_forced: bool, specials: Mapping[str, int]
) -> Ref:
    """Return the rule of the last message in harmony: a call, or an answer if no call is forced."""
    start, channel, constrain, message, end = HARMONY.terminals(specials)
    to = ((f"commentary to=functions.{name} ", part) for name, part in arguments.items())
    call: list[Part] = [
        channel,
        rules.add(*([literal(header), constrain, '"json"', message, part] for header, part in to)),
    ]
    if is_forced:
        return rules.add(call)
    text = rules.reserve()
    rules.define(text, [[], [HARMONY.sign(specials), Ref(text)]])
    body = Ref(text) if answer is None else SchemaCompiler(rules).add(answer)
    preamble: list[Part] = [channel, '"commentary"', message, Ref(text), end, start, '"assistant"']
    return rules.add([channel, '"final"', f'(" "? {constrain} "json")?', message, body], call, [*preamble, *call])


def _arguments(
    rules: Rules, family: Family, function: Function, number: int, unenforced: dict[str, str], *, is_strict: bool
) -> Part:
    place = f"tools[{number}].function.parameters"
    if family.is_xml and not is_strict:
        return ANY_PARAMETERS
    compiler = SchemaCompiler(rules)
    schema = schema_text(function.schema) if is_strict else '{"type": "object"}'
    try:
        arguments = compiler.add(schema, Form.ARGUMENTS if family.is_xml else Form.JSON)
    except SchemaError as error:
        raise invalid(f"'{place}' cannot be enforced: {error}", place) from error
    if arguments.name not in rules.productive():
        raise invalid(f"'{place}' cannot be enforced: no arguments follow the schema", place)
    if compiler.unenforced():
        unenforced[place] = "; ".join(compiler.unenforced())
    return arguments
