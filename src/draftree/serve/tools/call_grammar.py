"""Grammars of calls: one that forces calls, and one that lets any text stand before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from draftree.sampling.grammar.ebnf import Part, Rules, literal, terminal
from draftree.sampling.grammar.schema import SchemaError, schema_text
from draftree.sampling.grammar.schema_grammar import ARGUMENTS, PLAIN, SchemaCompiler
from draftree.serve.errors import invalid
from draftree.serve.tools.families import Family
from draftree.serve.tools.functions import Function

__all__ = ["CallGrammar", "call_grammar"]

ANY_PARAMETERS = '("<parameter=" [^<>=\\n]+ ">\\n" ([^<] | "<" [^/])* "\\n</parameter>\\n")*'
"""Parameters of a function without a schema that is enforced."""


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The grammar of an answer with calls.

    Attributes:
        ebnf: the grammar.
        unenforced: what narrows the arguments and is not in the grammar, by place in the body.
    """

    ebnf: str
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

    Args:
        family: the format of calls.
        functions: the allowed functions, by their number in the request.
        is_forced: whether the answer is calls and nothing else; otherwise it is free up to the beginning of a call, and
            the arguments of functions that are not strict are free, too.
        is_parallel: whether several calls are allowed.
        answer: JSON schema of an answer without calls; None for any text.
        specials: ids of special tokens by their text.

    Raises:
        ApiError: a schema that cannot be enforced at all.
    """
    rules = Rules()
    unenforced: dict[str, str] = {}
    arguments = {
        function.name: _arguments(
            rules, family, function, number, unenforced, is_strict=is_forced or function.is_strict
        )
        for number, function in functions.items()
    }
    marker = specials.get(family.opening[0], family.opening[0])
    call = rules.add(*(family.call(name, part) for name, part in arguments.items()))
    arguments_mark = f"({terminal(specials.get('[ARGS]', '[ARGS]'))})?"
    named = rules.add(*([literal(name), arguments_mark, part] for name, part in arguments.items()))
    if is_forced:
        root = rules.add(family.forced(rules, call, is_parallel=is_parallel))
    elif answer is None:
        root = rules.add(*family.free(rules, call, named, marker=marker, is_parallel=is_parallel))
    else:
        compiler = SchemaCompiler(rules)
        text = compiler.add(answer)
        root = rules.add([text], *family.marked(rules, call, named, marker=marker, is_parallel=is_parallel))
    ebnf = rules.text(root)
    assert ebnf is not None, "each function has arguments"
    return CallGrammar(ebnf, unenforced)


def _arguments(
    rules: Rules, family: Family, function: Function, number: int, unenforced: dict[str, str], *, is_strict: bool
) -> Part:
    place = f"tools[{number}].function.parameters"
    if family.is_xml and not is_strict:
        return ANY_PARAMETERS
    compiler = SchemaCompiler(rules)
    schema = schema_text(function.schema) if is_strict else '{"type": "object"}'
    try:
        arguments = compiler.add(schema, ARGUMENTS if family.is_xml else PLAIN)
    except SchemaError as error:
        raise invalid(f"'{place}' cannot be enforced: {error}", place) from error
    if arguments.name not in rules.productive():
        raise invalid(f"'{place}' cannot be enforced: no arguments follow the schema", place)
    if compiler.unenforced():
        unenforced[place] = "; ".join(compiler.unenforced())
    return arguments
