"""Variables that a chat template reads; whatever it does not read would be ignored, and is refused."""

from __future__ import annotations

import re
from functools import lru_cache

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables

from draftree.core.errors import InvalidRequestError, suggestion
from draftree.text.chat.conversation import Conversation
from draftree.text.chat.messages import KNOWN_KEYS
from draftree.text.chat.templates import BoundedEnvironment

__all__ = ["reads_key", "require_read", "variables_of"]

FIXED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables of every rendering."""


def require_read(conversation: Conversation, template: str, name: str) -> None:
    """Raise unless the template reads the tools, calls, variables and keys of messages of a conversation.

    Args:
        conversation: the input of the template.
        template: its source.
        name: name of the model, for messages.

    Raises:
        InvalidRequestError: the template would ignore a part of the conversation.
    """
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
    known = frozenset(
        variable
        for variable in variables_of(template) - FIXED - set(BoundedEnvironment().globals)
        if not variable.endswith("_token")
    )
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
