"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from draftree.core.errors import InvalidRequestError
from draftree.serve.api.chat import encoded_chat
from draftree.serve.errors import JsonResponse, invalid
from draftree.serve.pool import ServedModel
from draftree.serve.request import ERRORS, model_of, server_of
from draftree.serve.schema import ChatBody, DetokenizeBody, TokenizeBody, note, validated
from draftree.text.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"], responses=ERRORS)


@router.post("/tokenize", summary="Encode a text or a conversation")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids that a completion of this prompt, or an answer to these messages, would start from."""
    model = _model(body.model, request)
    tokens = await (_chat_ids(body, model, request) if body.prompt is None else _text_ids(body, body.prompt, model))
    names = _tokenizer(model).vocabulary() if body.return_token_strs else []
    found = {
        "count": len(tokens),
        "max_model_len": model.max_context,
        "tokens": tokens,
        "token_strs": [names[token] for token in tokens] if body.return_token_strs else None,
    }
    return JsonResponse(found)


@router.post("/detokenize", summary="Decode token ids")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    model = _model(body.model, request)
    try:
        return JsonResponse({"prompt": await model.llm.prompts.decode(body.tokens)})
    except InvalidRequestError as error:
        raise invalid(str(error), "tokens") from error


def _model(name: str | None, request: Request) -> ServedModel:
    if name is not None:
        return model_of(request, name)
    server = server_of(request)
    visible = server.pool.visible(server.key_of(request))
    if len(visible) != 1:
        names = ", ".join(model.name for model in visible)
        raise invalid(f"'model' is missing, and {len(visible)} models are served: name one of {names}", "model")
    return visible[0]


def _tokenizer(model: ServedModel) -> Tokenizer:
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise invalid(f"the model '{model.name}' has no tokenizer: it takes token ids only", "model")
    return tokenizer


async def _text_ids(body: TokenizeBody, prompt: str, model: ServedModel) -> list[int]:
    _tokenizer(model)
    for name in ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "tools"):
        if getattr(body, name) is not None:
            note(name, "is ignored: it belongs to 'messages'")
    return await model.llm.prompts.encode_text(prompt, add_special_tokens=body.add_special_tokens is not False)


async def _chat_ids(body: TokenizeBody, model: ServedModel, request: Request) -> Sequence[int]:
    if not model.supports_chat:
        raise invalid(f"the model '{model.name}' has no chat template: use 'prompt'", "messages")
    same = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
    chat = validated(ChatBody, {"model": model.name, **{name: getattr(body, name) for name in same}})
    ids = await encoded_chat(chat, request)
    return [*_tokenizer(model).start_ids, *ids] if body.add_special_tokens else ids
