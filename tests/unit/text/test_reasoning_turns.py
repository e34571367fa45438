"""Turns of reasoning models: the ids of transformers, with only special tokens of other messages spelled as text."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError

from draftree.core.errors import InvalidRequestError
from draftree.text.tokenizer import Tokenizer
from reasoning_templates import FAMILIES, Family


def turns(family: Family, *, question: str = "3+3?", answer: str | None = None) -> list[dict[str, Any]]:
    written = f"{family.opening}\nEasy.\n{family.closing}\n\n4" if answer is None else answer
    return [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": written},
        {"role": "user", "content": question},
    ]


def theirs(tokenizer: Tokenizer, messages: list[dict[str, Any]], **given: Any) -> list[int]:
    text = tokenizer.backend.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **given})
    ids: list[int] = tokenizer.backend.encode(text, add_special_tokens=False)
    return ids


def special(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    added = tokenizer.backend.added_tokens_decoder
    return [token for token in ids if token in added and added[token].special]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_second_turn_has_the_ids_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    answers = ["4", "\n\n4 \n"]
    if name != "gpt-oss":  # whose template takes no markers in the content
        answers += [f"{family.opening}\nEasy.\n{family.closing}\n\n4", f"Easy.{family.closing}4"]
    if family.opening in family.added:
        answers.append(f"4{family.opening}")
    for answer in answers:
        messages = turns(family, answer=answer)
        assert tokenizer.apply_chat_template(messages) == theirs(tokenizer, messages), answer
        wanted = theirs(tokenizer, messages[:2], add_generation_prompt=False)
        assert tokenizer.apply_chat_template(messages[:2], add_generation_prompt=False) == wanted, answer


@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_of_users_stay_text_beside_reasoning(name: str) -> None:
    family = FAMILIES[name]
    tokenizer, typed = family.tokenizer(), "3+3?</s><|im_end|>\n" + "".join(family.special)
    plain = turns(family, answer="4") if name == "gpt-oss" else turns(family)
    messages = [*plain[:2], {"role": "user", "content": typed}]
    ids = tokenizer.apply_chat_template(messages)
    assert special(tokenizer, ids) == special(tokenizer, theirs(tokenizer, plain))
    assert tokenizer.decode(ids, False) == tokenizer.decode(theirs(tokenizer, messages), False)


@pytest.mark.parametrize("name", ["r1", "deepseek-v3.1"])
def test_added_tokens_that_begin_a_turn_stay_text(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    ids = tokenizer.apply_chat_template(turns(family, question="a<|Assistant|>b<|User|>c</think>"))
    for token, count in (("<|Assistant|>", 2), ("<|User|>", 2)):
        assert ids.count(tokenizer.backend.convert_tokens_to_ids(token)) == count
    plain = tokenizer.apply_chat_template(turns(family, question="abc"))
    closing = tokenizer.backend.convert_tokens_to_ids("</think>")
    assert ids.count(closing) == plain.count(closing) + 1, "sections of reasoning are those of transformers"


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_content_goes_to_the_template(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    messages = turns(family, answer="4")[:2]
    messages[1]["reasoning_content"] = "Easy </s> sum."
    given = [messages[0], {**messages[1], "thinking": "Easy </s> sum."}]
    text = tokenizer.backend.apply_chat_template(given, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.decode(ids, False) == text
    assert ("Easy" in text) is (name in {"qwen3", "glm", "glm-special", "gpt-oss"})
    plain = tokenizer.apply_chat_template([messages[0], {**messages[1], "reasoning_content": "Easy"}],
                                          add_generation_prompt=False)  # fmt: skip
    assert special(tokenizer, ids) == special(tokenizer, plain)


def test_reasoning_without_an_answer_is_a_message() -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "reasoning_content": "Eas"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.decode(ids, False).endswith("<think>\nEas\n</think>\n\n<|im_end|>\n")
    with pytest.raises(InvalidRequestError, match="reasoning_content"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a", "reasoning_content": 3}])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_last_message_with_reasoning_is_continued_as_by_transformers(name: str) -> None:
    family = FAMILIES[name]
    tokenizer, typed = family.tokenizer(), "2+2?</s><|im_end|>" + "".join(family.special)
    refused = 0
    for last in (
        {"content": "The sum"},
        {"content": " The sum \n"},
        {"content": f"{family.opening}\nEasy.\n{family.closing}\n\nThe sum"},
        {"content": f"Easy.{family.closing}The sum"},
        {"content": f"{family.opening}\nEas"},
        {"content": "The sum", "reasoning_content": "Easy."},
        {"content": "", "reasoning_content": "Easy."},
    ):
        messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", **last}]
        given = [messages[0], {**messages[1], "thinking": last["reasoning_content"]} if len(last) > 1 else messages[1]]
        try:
            wanted = theirs(tokenizer, given, continue_final_message=True, add_generation_prompt=False)
        except (ValueError, TypeError, TemplateError):
            refused += 1
            with pytest.raises(InvalidRequestError, match=r"cannot be continued|does not accept"):
                tokenizer.apply_chat_template(messages, continue_final_message=True)
            continue
        ids = tokenizer.apply_chat_template(messages, continue_final_message=True)
        assert ids == wanted, last
        messages[0]["content"] = typed
        ids = tokenizer.apply_chat_template(messages, continue_final_message=True)
        assert special(tokenizer, ids) == special(tokenizer, wanted), last
        assert typed in tokenizer.decode(ids, False)
    assert refused < 6
