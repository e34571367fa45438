"""A model that answers every conversation with one text, as far as the request lets it. Not a test itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken
from torch import Tensor

from draftree.models.table import TableLM, hashed
from text_backends import byte_level
from tool_templates import CHAT_ONLY, HERMES

HEADER = "<|im_start|>assistant\n"
THINK = ("<think>", "</think>")
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
EMPTY = "<think>\n\n</think>\n\n"
CLOSES = "{% if false %}</think>{% endif %}"
REASONING = HERMES + CLOSES
"""A model that reads tools and writes the whole block."""
OPENED = CHAT_ONLY + CLOSES + "{% if add_generation_prompt %}<think>\n{% endif %}"
"""A model whose prompt has the opening marker."""
SWITCHED = CHAT_ONLY + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% if reasoning_effort %}Effort: {{ reasoning_effort }}{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }} functions.{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{% if false %}<|channel|><|constrain|>{% endif %}"
)


def scripted(
    text: str | Callable[[str], str], template: str = REASONING, *, certainty: float = 30.0, context: int = 4096
) -> dict[str, Any]:
    """Arguments of `LLM`: a model that writes a text after the header of an answer, and its tokenizer.

    Args:
        text: all that follows the header, the beginning that the template writes included; or a function that
            returns it for what precedes the header.
        template: the chat template.
        certainty: how much likelier the text's next token is than others.
        context: maximum length of a prompt and its text.
    """
    backend = byte_level(template)
    backend.add_tokens([AddedToken(one, normalized=False, special=False) for one in THINK])
    if template == CHANNELS:
        backend.add_special_tokens({"additional_special_tokens": list(HARMONY)}, replace_extra_special_tokens=False)
    header = "<|start|>assistant" if template == CHANNELS else HEADER
    noise, end = hashed(len(backend), 1), backend.eos_token_id

    def table(context: tuple[int, ...]) -> Tensor:
        logits = noise(context)
        decoded = backend.decode(context)
        prompt, _, written = decoded.partition(header) if template == CHANNELS else decoded.rpartition(header)
        reply = text if isinstance(text, str) else text(prompt)
        texts = (reply, EMPTY + reply.rpartition(THINK[1])[2].lstrip())
        rest = next((one[len(written) :] for one in texts if one.startswith(written)), None)
        if rest is not None:
            logits[backend.encode(rest, add_special_tokens=False)[0] if rest else end] += certainty
        return logits

    return {"model": TableLM(table, max_length=context), "tokenizer": backend}
