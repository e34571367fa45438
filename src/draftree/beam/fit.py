"""Checks of the parameters of a search against its prompt and its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from draftree.beam.state import TextSearch


def require_fit(text: TextSearch, vocab_size: int, max_length: int, *, has_text: bool) -> None:
    """Check the parameters of a search against its prompt and its model.

    Args:
        text: the search, with its limits and end tokens.
        vocab_size: number of token ids.
        max_length: the model's maximum length.
        has_text: whether tokens can be decoded.

    Raises:
        InvalidRequestError: the message names the parameter.
    """
    params = text.params
    if text.limit < 1:
        raise InvalidRequestError(
            f"the prompt has {len(text.prompt)} tokens, which leaves no room in a context of {max_length}: shorten it",
            param="prompt",
        )
    if text.minimum > text.limit:
        raise InvalidRequestError(
            f"a text needs at least {text.minimum} tokens, but the limit is {text.limit} here: lower the minimum, "
            "or raise the limit",
            param="min_new_tokens",
        )
    if params.force_eos != "none" and not text.ends:
        raise InvalidRequestError(
            f"force_eos='{params.force_eos}' needs an end token, and this search has none: give stop_token_ids, or "
            "set force_eos to 'none'",
            param="force_eos",
        )
    if params.stop and not has_text:
        raise InvalidRequestError("stop strings need a tokenizer: give stop_token_ids instead", param="stop")
    forced = params.prefix_token_ids
    if len(forced) > text.limit:
        raise InvalidRequestError(
            f"prefix_token_ids has {len(forced)} tokens, but the limit is {text.limit}: shorten it, or raise "
            "max_new_tokens",
            param="prefix_token_ids",
        )
    for token in forced[:-1]:
        if token in text.ends:
            raise InvalidRequestError(
                f"prefix_token_ids holds token {token}, which ends a text, before its last place: remove the "
                "tokens after it",
                param="prefix_token_ids",
            )
    for name, ids in (("prefix_token_ids", forced), ("unk_token_id", (params.unk_token_id or 0,))):
        if any(token >= vocab_size for token in ids):
            raise InvalidRequestError(
                f"{name} holds a token outside of the vocabulary, which ends at {vocab_size - 1}", param=name
            )
