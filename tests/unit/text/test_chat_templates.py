"""Chat templates: the same text as transformers, with bounded work."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from cli_samples import TEMPLATE, save_tiny_model
from draftree.core.errors import InvalidRequestError
from draftree.text.chat.conversation import Conversation
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
}


def render(template: str, messages: list[dict[str, str]] = MESSAGES, **changes: Any) -> str:
    tokens = changes.pop("special_tokens", TOKENS)
    return render_chat(template, Conversation(list(messages), **changes), special_tokens=tokens)


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_computes_too_much_is_stopped(name: str) -> None:
    with pytest.raises(TemplateStoppedError, match="the template was stopped, because"):
        render(BOMBS[name])


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
