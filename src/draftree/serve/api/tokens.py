"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from draftree.core.errors import InvalidRequestError
from draftree.serve.api.chat import adds_prompt, template_messages, template_variables
from draftree.serve.errors import JsonResponse, invalid, named_error
from draftree.serve.pool import ServedModel
from draftree.serve.request import ERRORS, model_of, server_of
from draftree.serve.schema import DetokenizeBody, TokenizeBody, note
from draftree.serve.tools.plan import ToolPlan
from draftree.text.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"], responses=ERRORS)


@router.post("/tokenize", summary="Encode a text or a conversation")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids that a completion of this prompt, or an answer to these messages, would start from."""
    model = _model(body.model, request)
    tokens = await (_chat_ids(body, model) if body.prompt is None else _text_ids(body, body.prompt, model))
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


async def _chat_ids(body: TokenizeBody, model: ServedModel) -> list[int]:
    if not model.supports_chat:
        raise invalid(f"the model '{model.name}' has no chat template: use 'prompt'", "messages")
    tokenizer = _tokenizer(model)
    plan = await ToolPlan.load(tokenizer, body.tools)
    messages = plan.messages(template_messages(body.messages or (), model.chat_template), model.chat_template)
    try:
        ids = await model.llm.prompts.encode_chat(
            messages,
            tools=plan.tools,
            template_kwargs=template_variables(body.chat_template_kwargs, tokenizer),
            add_generation_prompt=adds_prompt(body),
            continue_final_message=bool(body.continue_final_message),
        )
    except InvalidRequestError as error:
        raise named_error(error, {"template_kwargs": "chat_template_kwargs"}) from error
    return [*tokenizer.start_ids, *ids] if body.add_special_tokens else ids
