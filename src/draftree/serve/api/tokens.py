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

CHAT_FIELDS = ("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "tools")
router = APIRouter(tags=["tokens"], responses=ERRORS)


@router.post("/tokenize", summary="Encode a text or a conversation")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids that a completion of this prompt, or an answer to these messages, would start from."""
    model = _model(body.model, request)
    tokens: Sequence[int]
    if body.prompt is None:
        if not model.supports_chat:
            raise invalid(f"the model '{model.name}' has no chat template: use 'prompt'", "messages")
        fields = {name: getattr(body, name) for name in ("messages", *CHAT_FIELDS)}
        tokens = await encoded_chat(validated(ChatBody, {"model": model.name, **fields}), request)
        if body.add_special_tokens:
            tokens = [*_tokenizer(model).start_ids, *tokens]
    else:
        _tokenizer(model)
        for name in CHAT_FIELDS:
            if getattr(body, name) is not None:
                note(name, "is ignored: it belongs to 'messages'")
        special = body.add_special_tokens is not False
        tokens = await model.llm.prompts.encode_text(body.prompt, add_special_tokens=special)
    names = _tokenizer(model).vocabulary() if body.return_token_strs else []
    answer = {
        "count": len(tokens),
        "max_model_len": model.max_context,
        "tokens": list(tokens),
        "token_strs": [names[token] for token in tokens] if body.return_token_strs else None,
    }
    return JsonResponse(answer)


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
