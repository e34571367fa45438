"""Chat templates: the same text as transformers, with bounded work."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from cli_samples import TEMPLATE, save_tiny_model
from draftree.core.errors import InvalidRequestError
from draftree.text.chat import templates
from draftree.text.chat.messages import Conversation
from draftree.text.chat.templates import TemplateStoppedError, render_chat
from draftree.text.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "  What is 2 + 2?\n"},
    {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4"},
    {"role": "user", "content": "And “3 + 3”?"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

DOUBLING = "{% set n = namespace(x='a') %}{% for i in range(40) %}"
BOMBS = {
    "a product": "{{ 'a' * 9000000000 }}",
    "a product from the right": "{{ 9000000000 * 'a' }}",
    "a list": "{% set x = [1] * 9000000000 %}",
    "products in steps": "{% set x = 'a' * 100000 %}{% set x = x * 100000 %}",
    "a power": "{{ 10 ** 9000000000 }}",
    "powers in steps": "{% set x = 2 ** 4000 %}{% set x = x ** 4000 %}",
    "bytes": "{{ 'a'.encode() * 9000000000 }}",
    "an integer's bytes": "{{ (5).to_bytes(9000000000, 'big') }}",
    "doubling by ~": "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by %": DOUBLING + "{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    "doubling by format": (
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = '{0}{0}'.format(n.x) %}{% endfor %}"
    ),
    "doubling by a block": (
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set x %}{{ n.x }}{{ n.x }}{% endset %}"
        "{% set n.x = x %}{% endfor %}"
    ),
    "doubling by join": DOUBLING + "{% set n.x = [n.x, n.x]|join %}{% endfor %}",
    "doubling by replace": (
        "{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}"
    ),
    "doubling by the filter replace": (DOUBLING + "{% set n.x = n.x|replace('a', 'aa') %}{% endfor %}"),
    "nested lists": (
        "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}"
    ),
    "a list of long texts": "{{ ['a' * 1000000] * 100000 }}",
    "a list of long texts as JSON": "{{ (['a' * 1000000] * 100000)|tojson }}",
    "a list of long texts in lower case": "{{ (['a' * 1000000] * 100000)|lower }}",
    "a default for many": "{{ range(100000)|map(attribute='x', default='a' * 1000000)|join }}",
    "a method that joins": "{{ ('a' * 1000000).join(['b'] * 100000) }}",
    "a method that joins a generator": "{{ ('a' * 1000000).join(range(100000)|map('string')) }}",
    "slices that are kept": (
        "{% set n = namespace(x=[]) %}{% set b = 'a' * 10000000 %}{% for i in range(1000) %}"
        "{% set n.x = n.x + [b[1:]] %}{% endfor %}"
    ),
    "a width": "{{ 'a'.center(9000000000) }}",
    "a width of a format": "{{ '%9000000000d' % 1 }}",
    "a width of a format that is given": "{{ '%*d' % (900000000, 1) }}",
    "a width of str.format": "{{ '{:9000000000}'.format(1) }}",
    "a width of str.format that is given": "{{ '{:{}}'.format(1, 900000000) }}",
    "a width of a filter": "{{ 'a'|center(9000000000) }}",
    "an indent": "{{ ('a\n' * 100000)|indent(100000) }}",
    "an indent of JSON": "{{ ([1] * 100000)|tojson(indent=1000000) }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(1000000) }}",
    "a table": "{{ ('a' * 100000).translate({97: 'b' * 1000000}) }}",
    "a table that is a list": "{{ ('a' * 100000).translate(['b' * 1000000] * 100) }}",
    "a precision": "{{ 1.5|round(900000000, 'ceil') }}",
    "slices of a filter": "{{ [1]|slice(9000000000)|list }}",
    "a batch": "{{ [1]|batch(9000000000, 'x')|list }}",
    "nested loops": (
        "{% for i in range(99999) %}{% for i in range(99999) %}{% for i in range(99999) %}"
        "{% endfor %}{% endfor %}{% endfor %}"
    ),
    "nested loops over one range": (
        "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}"
    ),
    "a loop that calls itself": "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "output without end": "{% for i in range(99999) %}{{ 'a' * 10000 }}{% endfor %}",
    "a sum of lists": "{{ ([[1] * 1000] * 1000)|sum(start=[]) }}",
    "a long comparison in a loop": (
        "{% set a = 'a' * 1000000 %}{% set b = 'a' * 1000000 %}{% for i in range(99999) %}{{ a == b }}{% endfor %}"
    ),
    "a long search in a loop": (
        "{% set a = 'a' * 1000000 %}{% for i in range(99999) %}{{ 'b' in a }}{{ a.find('b') }}{% endfor %}"
    ),
    "a search from the right": "{{ ('a' * 1000000).rfind('b' + 'a' * 500000) }}",
    "an item of a long list": "{{ 'b' * 100000 in ['a' * 100000] * 100000 }}",
    "a long body": "{% for i in range(99999) %}{% for j in range(9) %}"
    + "{% set x = i %}" * 1000
    + "{% endfor %}{% endfor %}",
    "a long macro": "{% macro m() %}"
    + "{% set x = 1 %}" * 9999
    + "{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "a long block": "{% for i in range(99999) %}{{ self.b() }}{% endfor %}{% block b %}"
    + "{% set x = 1 %}" * 9999
    + "{% endblock %}",
    "filters without a result": (
        "{% for i in range(99) %}{% set x = 'a' * 1000000 %}{% endfor %}{% set r = range(99999) %}"
        "{% for i in r %}{{ r|select('none')|list|length }}{{ r|map('int')|sum }}{% endfor %}"
    ),
    "a filter that copies the rest": "{{ ('(' * 100000 ~ 'a' ~ ')' * 100000)|urlize }}",
    "breaks of a long word": "{{ ('a' * 1000000)|wordwrap(1) }}",
    "a slow encoding": "{{ ('\u00e4' * 1000000).encode('punycode') }}",
    "a long number": "{{ ('f' * 1000000)|int(base=16) // ('e' * 500000)|int(base=16) }}",
    "a format as a test": "{{ '%900000000d' is odd }}",
    "views of dictionaries": (
        "{% set n = namespace(x={}) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x}.values() %}{% endfor %}"
        "{{ n.x }}"
    ),
}
NESTED = (  # x and y hold themselves twice, 60 times over: as lists, as tuples, and as dictionaries
    "{{% set n = namespace(x={0}, y={0}) %}}{{% for i in range(60) %}}{{% set n.x = {1} %}}"
    "{{% set n.y = {2} %}}{{% endfor %}}{{% set x = n.x %}}{{% set y = n.y %}}"
)
LISTS = NESTED.format("[1]", "[n.x, n.x]", "[n.y, n.y]")
TUPLES = NESTED.format("(1, 1)", "(n.x, n.x)", "(n.y, n.y)")
OBJECTS = NESTED.format("{}", "{'a': n.x, 'b': n.x}", "{'a': n.y, 'b': n.y}")
USES = {
    LISTS: (
        "x == y", "x != y", "x < y", "x <= y", "x > y", "x >= y", "0 < 1 != x == y", "x in [y]", "x not in [y]",
        "x is eq y", "x is ne y", "x is lessthan y", "x is in [y]", "x is lower", "[x, y]|sort", "[x, y]|max",
        "[x, y]|min", "[x, y]|map('list')|sort", "[y]|select('eq', x)|list", "[{'a': y}]|selectattr('a', 'eq', x)|list",
        "[{'a': x}, {'a': y}]|groupby('a')", "{1: x, 2: y}|dictsort(by='value')", "[y].index(x)", "[y].count(x)",
        "[{'a': x}]|map(attribute='a', default=y)|sort", "x in [y]|map('list')", "{1: x} == {1: y}", "(x,) == (y,)",
        "{% for z in [x, y] %}{{ loop.changed(z) }}{% endfor %}",
    ),
    TUPLES: (
        "{x: 1}", "{1: 2}[x]", "{1: 2}.get(x)", "x in {1: 2}", "[x]|unique|list", "dict([(x, 1)])",
        "dict.fromkeys([x])",
        "{'a': x}.items() == {'a': y}.items()", "{'a': x}.items() - {'a': y}.items()",
        "{'a': 1}.keys().isdisjoint([x])",
    ),
    OBJECTS: ("x == y", "x in [y]", "x.values()"),
}  # fmt: skip


def render(template: str, messages: list[dict[str, str]] = MESSAGES, **changes: Any) -> str:
    tokens = changes.pop("special_tokens", TOKENS)
    return render_chat(template, Conversation(list(messages), **changes), special_tokens=tokens)


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_computes_too_much_is_stopped(name: str) -> None:
    with pytest.raises(TemplateStoppedError, match="the template was stopped, because"):
        render(BOMBS[name])


@pytest.mark.parametrize(("values", "use"), [(values, use) for values, uses in USES.items() for use in uses])
def test_a_use_of_values_nested_beyond_measure_is_stopped(
    values: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_VISITS", 10_000)  # the default takes a second to count
    with pytest.raises(TemplateStoppedError, match="it visits more than"):
        render(f"{values}{use if use.startswith('{%') else '{{ ' + use + ' }}'}")


def test_a_namespace_does_not_write_out_its_values() -> None:
    doubled = "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}"
    assert render(doubled + "{{ n }}") == "<Namespace>"


def test_a_template_that_is_too_long_is_stopped() -> None:
    with pytest.raises(TemplateStoppedError, match="1000001 characters"):
        render("a" * 1_000_001)


TEMPLATES = {
    "chatml": (
        "{% for message in messages %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "loop variables": (
        "{%- for m in messages -%}{{ loop.index0 }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} "
        "{{ loop.cycle('a', 'b') }} {{ m.role|upper }}{% if loop.index == 3 %}{% break %}{% endif %}\n{%- endfor -%}"
    ),
    "slices and namespaces": (
        "{% set ns = namespace(found=false, last=messages|length - 1) %}{{ bos_token }}"
        "{% for m in messages[::-1] %}{% if m.role == 'assistant' and not ns.found %}{% set ns.found = true %}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}{% endfor %}{{ ns.found }}{{ ns.last }}"
        "{% for m in messages[1:] %}{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    ),
    "macros and blocks": (
        "{% macro turn(m, sep='|') %}{{ sep }}{{ m['content']|replace('2', 'two')|trim }}{% endmacro %}"
        "{% set body %}{% for m in messages if m.role != 'system' %}{{ turn(m, sep='/') }}{% endfor %}{% endset %}"
        "{{ body ~ '!' ~ messages|length }}{% generation %}{{ 'said' }}{% endgeneration %}"
    ),
    "JSON and formats": (
        "{{ messages|tojson(indent=2) }}{{ '%s has %d' % (messages[0].role, 3) }}{{ '{:>8}|{}'.format('x', 2) }}"
        "{{ messages|map(attribute='role')|join(', ') }}{{ dict(a=1).items()|list }}{{ tools is none }}{{ unknown }}"
        "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list }}{{ 2 ** 10 + 7 % 4 * 3 }}"
    ),
    "of the samples": TEMPLATE,
}


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = Tokenizer.load(save_tiny_model(tmp_path_factory.mktemp("model"), chat=True))
    assert tokenizer is not None
    return tokenizer.backend


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("opens", [True, False])
def test_the_text_is_that_of_transformers(name: str, opens: bool, backend: Any) -> None:
    theirs = backend.apply_chat_template(
        MESSAGES, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=opens, **TOKENS
    )
    assert render(TEMPLATES[name], add_generation_prompt=opens) == theirs


def test_long_conversations_are_within_bounds() -> None:
    long = [{"role": "user", "content": "word " * 2_000}, {"role": "assistant", "content": "x\n" * 500}] * 500
    for name in ("chatml", "slices and namespaces", "macros and blocks"):
        assert len(render(TEMPLATES[name], long)) > 100_000


def test_a_tokenizer_refuses_the_conversation_in_one_sentence(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "chat_template", BOMBS["a product"])
    with pytest.raises(InvalidRequestError, match=r"does not accept this conversation \(the template was stopped"):
        Tokenizer(backend).apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__mro__ }}", "{% set ns = namespace(__class__=1) %}"],
)
def test_internals_of_python_are_out_of_reach(template: str) -> None:
    with pytest.raises(SecurityError):
        render(template)
