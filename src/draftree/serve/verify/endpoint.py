"""The endpoint of verify frames: a WebSocket, POST with one frame, and the tokenizer's files."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query, Request, Response, WebSocket, WebSocketDisconnect

from draftree.remote.tokenizers import files_digest, tokenizer_files
from draftree.serve.errors import ApiError, JsonResponse
from draftree.serve.request import ERRORS, model_of, server_of
from draftree.serve.server import Server
from draftree.serve.verify import VerifySettings
from draftree.serve.verify.service import VerifyService
from draftree.serve.verify.sessions import Talk
from draftree.text.tokenizer import Tokenizer

router = APIRouter(tags=["verify"], responses=ERRORS)
PATH = "/v1/verify"
CONTENT_TYPE = "application/msgpack"
MAX_BAD_FRAMES = 8
POLICY_VIOLATION, UNSUPPORTED_DATA = 1008, 1003


def mount(app: FastAPI, server: Server, settings: VerifySettings) -> None:
    server.verify = VerifyService(server, settings)
    app.include_router(router)


def service_of(server: Server) -> VerifyService:
    assert isinstance(server.verify, VerifyService), "the endpoint is mounted with its service"
    return server.verify


@router.websocket(PATH)
async def converse(socket: WebSocket) -> None:
    """Answer frames one by one until the client leaves."""
    server: Server = socket.app.state.server
    try:
        key = server.keys.authenticate(socket.headers.get("authorization"))
    except ApiError as error:
        await socket.send_denial_response(error.response())
        return
    await socket.accept()
    service, talk = service_of(server), Talk(key)
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        frame = message.get("bytes")
        if frame is None:
            await socket.close(UNSUPPORTED_DATA, "frames are binary msgpack maps")
            return
        reply = await service.answer(frame, talk)
        try:
            await socket.send_bytes(reply)
        except (WebSocketDisconnect, RuntimeError):
            return  # the client left; the answer is kept for its next connection
        if talk.num_bad >= MAX_BAD_FRAMES:
            await socket.close(POLICY_VIOLATION, "too many unreadable frames")
            return


@router.post(PATH, summary="Answer one frame of the verify protocol", response_class=Response)
async def answer(request: Request) -> Response:
    """Answer one frame; for clients and proxies without WebSockets."""
    server = server_of(request)
    given = request.headers.get("content-type", "").partition(";")[0].strip()
    if given != CONTENT_TYPE:
        raise ApiError(415, f"the content type is '{given[:60]}': send a frame as {CONTENT_TYPE}", code="content_type")
    talk = Talk(server.key_of(request))
    reply = await service_of(server).answer(await request.body(), talk)
    return Response(reply, media_type=CONTENT_TYPE)


@router.get(f"{PATH}/tokenizer", summary="The tokenizer's files")
async def tokenizer(
    request: Request, model: str | None = None, known: Annotated[list[str] | None, Query()] = None
) -> Response:
    """Return the tokenizer's files as texts by name; in their place their digest if the device has them (`known`)."""
    served = model_of(request, model)

    def files(found: Tokenizer | None) -> dict[str, Any]:
        texts = tokenizer_files(found)
        digest = files_digest(texts)
        return {"model": served.name, **({"known": digest} if digest in (known or ()) else {"files": texts})}

    return JsonResponse(await served.llm.prompts.with_tokenizer(files))
