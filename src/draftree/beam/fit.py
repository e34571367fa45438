"""Checks of the parameters of a search against its prompt and its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftree.beam.opening import BeamPrompt, require_source
from draftree.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from draftree.beam.params import BeamSearchParams
    from draftree.beam.state import TextSearch
    from draftree.models.base import LanguageModel


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
    if params.allowed_trie is not None and params.allowed_trie.has_inner_ends and not text.ends:
        raise InvalidRequestError(
            "allowed_trie has a sequence that begins another, and this search has no end token that could end it: give "
            "stop_token_ids, or do not set ignore_eos",
            param="allowed_trie",
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


def require_models(model: LanguageModel, prompt: BeamPrompt, params: BeamSearchParams) -> None:
    """Check that all models of a search take its prompt and share their vocabulary.

    Args:
        model: the model that is searched.
        prompt: tokens, or a source.
        params: names the other models.

    Raises:
        InvalidRequestError: the message names the parameter.
    """
    require_source(model, prompt, "prompts")
    for other in params.models:
        require_source(other, prompt, "models")
    if params.lm_model is not None:
        require_source(params.lm_model, BeamPrompt(prompt.tokens), "lm_model")
    for name, others in (("models", params.models), ("lm_model", [params.lm_model])):
        for other in others:
            if other is not None and other.vocab_size != model.vocab_size:
                raise InvalidRequestError(
                    f"a model of {name} has {other.vocab_size} tokens, and the model that is searched has "
                    f"{model.vocab_size}: give a model with the same vocabulary",
                    param=name,
                )
    if params.reads_attention and prompt.source is None:
        name = "coverage_penalty" if params.coverage_penalty else "return_attention"
        raise InvalidRequestError(
            f"{name} needs cross-attention, which encoder-decoder models have: leave it out", param=name
        )
