"""The service of a verify server: frames of devices, over a WebSocket or POST, become rounds of the engine."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, final

from fastapi import APIRouter, FastAPI, Query, Request, Response, WebSocket, WebSocketDisconnect

from draftree.core.errors import InvalidRequestError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.types import RoundRecord
from draftree.models.source import EncoderDecoder
from draftree.options import RequestOptions
from draftree.remote.address import FrameError
from draftree.remote.protocol import VERSION, DraftedText, WalkedText, encode, pack_walk, read_params, read_request
from draftree.remote.split.messages import SPLIT_REQUESTS
from draftree.remote.tokenizers import files_digest, tokenizer_files, tokenizer_fingerprint
from draftree.serve.errors import ApiError, JsonResponse, api_error, unavailable
from draftree.serve.gate import MAX_RETRY_SECONDS
from draftree.serve.pool import ServedModel
from draftree.serve.request import ERRORS, model_of, require_choices, server_of, within_limits
from draftree.serve.server import Server
from draftree.serve.verify import MAX_FRAME_BYTES, VerifySettings
from draftree.serve.verify.layers import LayerService
from draftree.serve.verify.sessions import DraftedByClient, OpenText, Session, Talk, WrittenAlone
from draftree.text.tokenizer import Tokenizer

DRAFT_LABEL = "remote"


async def open_text(server: Server, session: Session, message: Mapping[str, Any], *, now: float) -> OpenText:
    """Queue a text with what is written of it."""
    model = session.model
    vocab = model.llm.llm.model.vocab_size
    if any(token >= vocab for token in (*message["prompt"], *message["output"])) or not message["prompt"]:
        raise FrameError(f"the prompt is empty, or has a token beyond the vocabulary of {vocab}", code="bad_token")
    if message["output"] and len(message["output"]) >= message["limit"]:
        raise InvalidRequestError(
            f"the text has {len(message['output'])} tokens, and its limit is {message['limit']}: it has ended, so it "
            "cannot be opened"
        )
    name = f"verify-{uuid.uuid4().hex}"
    is_plain = message["plain"]
    options = RequestOptions.of(
        read_params(message["params"], seed=message["seed"], max_tokens=message["limit"]),
        draft=None if is_plain else "none",
        request_id=name,
        trace=not is_plain,
        owner=session.key.name,
        drafted_by_client=not is_plain,
        written=message["output"],
    )
    require_choices(server.settings, options, {})
    prompt = list(message["prompt"])
    options = within_limits(server.settings, model, prompts=[prompt], options=options)
    meter = server.meters[model.name]
    meter.register(name, "none" if is_plain else DRAFT_LABEL)
    try:
        submission = await model.llm.submit(prompt, options)
    except BaseException:
        meter.release(name)
        raise
    kind = WrittenAlone if is_plain else DraftedByClient
    return kind(message["text"], model.llm, submission, now)


RETRY_STATUS = frozenset({429, 503})


def error_frame(error: Exception, number: int | None) -> bytes:
    """Return the reply for an error; texts of unexpected errors are not shown."""
    if isinstance(error, FrameError):
        return encode({"t": "error", "id": number, "code": error.code, "message": str(error), "status": 422})
    known = api_error(error)
    frame: dict[str, Any] = {"t": "error", "id": number, "code": known.code or "refused", "message": known.message}
    frame |= {"status": known.status, "param": known.param}
    if known.status in RETRY_STATUS:
        seconds = known.headers.get("Retry-After", "1")
        frame["retry_ms"] = 1000 * min(MAX_RETRY_SECONDS, int(seconds) if seconds.isdigit() else 1)
    return encode(frame)


logger = logging.getLogger(__name__)

WATCH_SHARE = 0.25  # sessions and texts are looked through after this share of the shorter of lease and parking time


@final
class VerifyService:
    def __init__(self, server: Server, settings: VerifySettings, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.settings, self.counts = settings, Counter[str]()
        self.sessions: dict[str, Session] = {}
        self.layers = LayerService(settings, clock, lambda: server.gate.is_closed)
        self._server, self._clock = server, clock
        self._round_seconds: dict[str, float] = {}  # seconds of the last round of every text, by its request id
        self._facts: dict[str, dict[str, Any]] = {}
        self._stop_listening: list[Callable[[], None]] = []
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_texts(self) -> int:
        return sum(len(session.texts) for session in self.sessions.values()) + self.layers.num_active

    def status(self) -> dict[str, int]:
        repeated = sum(session.num_repeated for session in self.sessions.values())
        return {
            "sessions": len(self.sessions),
            "texts": self.num_texts,
            "repeated": repeated,
            **self.counts,
            **self.layers.counts,
        }

    async def answer(self, frame: bytes, talk: Talk) -> bytes:
        """Return the reply to a frame; an error is a reply, too."""
        self.counts["frames"] += 1
        self.counts["bytes_up"] += len(frame)
        number = None
        try:
            more = SPLIT_REQUESTS if self.settings.split else {}
            message = read_request(frame, max_bytes=MAX_FRAME_BYTES, more=more)
            number = message.get("id")
            if message["t"] == "hello":
                reply = encode(await self._hello(message, talk))
            else:
                session = self._session(message, talk)
                reply = await session.answered(message["id"], lambda: self._work(session, message))
        except FrameError as error:
            talk.num_bad += error.code not in ("session_lost", "out_of_order")
            self.counts["refused"] += 1
            reply = error_frame(error, number)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            reply = error_frame(unavailable("shutting_down"), number)  # the session ended during its request
        except Exception as error:
            reply = error_frame(error, number)
        self.counts["bytes_down"] += len(reply)
        return reply

    async def _work(self, session: Session, message: dict[str, Any]) -> bytes:
        """Answer a request of a session; errors become the answer."""
        actions = {
            "open": self._open,
            "verify": self._verify,
            "read": self._read,
            "close": self._close,
            "ping": self._ping,
            "bye": self._bye,
            "join": self.layers.join,
            "begin": self.layers.begin,
            "rows": self.layers.rows,
        }
        try:
            reply = await actions[message["t"]](session, message)
        except Exception as error:
            self.counts["refused"] += isinstance(error, FrameError | InvalidRequestError)
            return error_frame(error, message["id"])
        finally:
            session.expires = self._clock() + self.settings.lease
        return encode({**reply, "id": message["id"]})

    def _session(self, message: dict[str, Any], talk: Talk) -> Session:
        token = message["s"]
        if token is not None:
            talk.session = self.sessions.get(token)
        session = talk.session
        if session is None or session.token not in self.sessions or session.key.name != talk.key.name:
            talk.session = None
            raise FrameError("there is no such session: begin a new one with hello", code="session_lost")
        session.expires = self._clock() + self.settings.lease
        return session

    async def _hello(self, message: dict[str, Any], talk: Talk) -> dict[str, Any]:
        if self._server.gate.is_closed:
            raise unavailable("shutting_down")
        if talk.session is not None:  # a connection has one session
            await self._drop(talk.session)
        model = self._server.pool.get(message["model"], talk.key)
        facts = await self._facts_of(model)
        # after the last wait: others may have begun sessions in the meantime
        count = sum(session.key.name == talk.key.name for session in self.sessions.values())
        most = max(1, math.ceil(self.settings.max_sessions * self._server.settings.key_share))
        if len(self.sessions) >= self.settings.max_sessions or count >= most:
            text = f"{len(self.sessions)} sessions are open, {count} with this API key: retry later"
            raise ApiError(429, text, code="sessions_full", headers={"Retry-After": "2"})
        session = Session(talk.key, model, self._clock() + self.settings.lease)
        self.sessions[session.token] = talk.session = session
        self.counts["hellos"] += 1
        if self._watching is None:
            self._watching = asyncio.create_task(self._sweep_again())
        return {"t": "welcome", "v": VERSION, "s": session.token, **facts}

    async def _facts_of(self, model: ServedModel) -> dict[str, Any]:
        """Return the part of a greeting that depends on the model alone.

        The first call measures its passes; its rounds are observed from then on.
        """
        if model.name in self._facts:
            return self._facts[model.name]
        llm = model.llm.llm
        target = model.llm.llm.model
        settings = self.settings
        if isinstance(target, EncoderDecoder):
            raise ApiError(400, f"the model '{model.name}' has an encoder: drafts are verified for causal models")
        costs = await model.llm.pass_costs(1 + settings.max_nodes)
        facts = {
            "model": model.name,
            "vocab": target.vocab_size,
            "context": min(target.max_length, llm.engine.longest),
            "eos": list(llm.requests.eos_ids),
            "tokenizer": await model.llm.prompts.with_tokenizer(tokenizer_fingerprint),
            "exact": target.is_exact,
            "trees": target.supports_trees,
            "nodes": settings.max_nodes,
            "texts": settings.max_texts,
            "lease": settings.lease,
            "passes": [[rows, seconds] for rows, seconds in sorted(costs.items())],
        }
        if model.name not in self._facts:
            self._facts[model.name] = facts
            self._stop_listening.append(model.llm.on_round(self._note_round))
        return self._facts[model.name]

    def _note_round(self, record: RoundRecord) -> None:
        """Note the seconds of a round; on the engine's thread, before its updates are sent."""
        for row in record.sequences:
            if row.request_id in self._round_seconds:
                self._round_seconds[row.request_id] = record.total_seconds

    async def _open(self, session: Session, message: dict[str, Any]) -> dict[str, Any]:
        number = message["text"]
        if self._server.gate.is_closed:
            raise unavailable("shutting_down")
        self._drop_done(session)
        if number in session.texts:
            raise FrameError(f"text {number} is open already: take another number")
        if len(session.texts) >= self.settings.max_texts:
            raise FrameError(f"{len(session.texts)} texts are open: close one first", code="too_many_texts")
        session.texts[number] = text = await open_text(self._server, session, message, now=self._clock())
        if isinstance(text, DraftedByClient):
            self._round_seconds[text.submission.request_id] = 0.0
        self.counts["opened"] += 1
        return {"t": "opened"}

    async def _verify(self, session: Session, message: dict[str, Any]) -> dict[str, Any]:
        start, drafts = self._clock(), message["x"]
        texts = [self._checked(session, draft) for draft in drafts]
        self.counts["asked"] += len(drafts)
        results = await asyncio.gather(
            *(text.verify(draft.tree) for text, draft in zip(texts, drafts, strict=True)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        walks = [result for result in results if isinstance(result, WalkedText)]
        passed = max(self._round_seconds.get(text.submission.request_id, 0.0) for text in texts)
        queue = max(0.0, self._clock() - start - passed)
        self.counts["rounds"] += len(walks)
        self.counts["drafted"] += sum(len(draft.tree) for draft in drafts)
        self.counts["accepted"] += sum(len(walk.path) for walk in walks)
        self._drop_done(session)
        times = [round(queue * 1e6), round(passed * 1e6)]
        # with many texts, each should have fewer nodes in its next draft
        allowance = max(1, min(self.settings.max_nodes, self.settings.max_rows // max(1, self.num_texts)))
        return {"t": "walk", "x": [pack_walk(walk) for walk in walks], "us": times, "n": allowance}

    def _checked(self, session: Session, draft: DraftedText) -> DraftedByClient:
        text: DraftedByClient = session.expected(DraftedByClient, draft.text)
        target, most = session.model.llm.llm.model, self.settings.max_nodes
        text.check(draft, max_nodes=most, vocab_size=target.vocab_size, may_branch=target.supports_trees)
        text.used = self._clock()
        return text

    async def _read(self, session: Session, message: dict[str, Any]) -> dict[str, Any]:
        text: WrittenAlone = session.expected(WrittenAlone, message["text"])
        text.used = self._clock()
        tokens, is_done = await text.read(message["start"])
        self.counts["streamed"] += len(tokens)
        return {"t": "tokens", "x": tokens, "done": is_done}

    async def _close(self, session: Session, message: dict[str, Any]) -> dict[str, Any]:
        await self._end(session, message["texts"])
        await self.layers.end(session, message["texts"])
        return {"t": "closed"}

    async def _ping(self, session: Session, message: dict[str, Any]) -> dict[str, Any]:
        return {"t": "pong"}

    async def _bye(self, session: Session, message: dict[str, Any]) -> dict[str, Any]:
        self.sessions.pop(session.token, None)
        await self._end(session, list(session.texts))
        await self.layers.end(session)
        return {"t": "closed"}

    def _drop_done(self, session: Session) -> None:
        """Forget drafted texts that have ended, and texts whose last tokens were sent."""
        for number, text in list(session.texts.items()):
            if text.is_over:
                self._forget(session, session.texts.pop(number))

    def _forget(self, session: Session, text: OpenText) -> None:
        name = text.submission.request_id
        self._round_seconds.pop(name, None)
        self._server.meters[session.model.name].release(name)

    async def _end(self, session: Session, numbers: Sequence[int]) -> None:
        for number in numbers:
            text = session.texts.pop(number, None)
            if text is not None:
                await text.close()
                self._forget(session, text)

    async def sweep(self) -> None:
        """End idle sessions whose lease is over, and free the slots of texts without a draft for a while."""
        now = self._clock()
        idle = [session for session in self.sessions.values() if not session.is_answering]
        for session in [session for session in idle if session.expires <= now]:
            logger.info("a session of key %s ended with its lease", session.key.name)
            self.counts["expired"] += 1
            await self._drop(session)
        for session in [session for session in idle if session.token in self.sessions]:
            for text in list(session.texts.values()):
                if isinstance(text, DraftedByClient) and text.used + self.settings.park <= now:
                    text.used = now
                    await text.park()
                    self.counts["parked"] += 1
            self.counts["parked"] += await self.layers.park(session, before=now - self.settings.park)

    async def _drop(self, session: Session) -> None:
        self.sessions.pop(session.token, None)
        for text in session.texts.values():
            self._forget(session, text)
        await session.close()
        await self.layers.end(session)

    async def _sweep_again(self) -> None:
        pause = WATCH_SHARE * min(self.settings.lease, self.settings.park)
        while True:
            await asyncio.sleep(pause)
            try:
                await self.sweep()
            except Exception:  # this task frees the slots of clients that vanished as long as the server runs
                logger.exception("idle sessions could not be ended; the next attempt is in %.1f s", pause)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for session in list(self.sessions.values()):
            await self._drop(session)
        for stop in self._stop_listening:
            stop()
        self._stop_listening = []


router = APIRouter(tags=["verify"], responses=ERRORS)
PATH = "/v1/verify"
CONTENT_TYPE = "application/msgpack"
MAX_BAD_FRAMES = 8
POLICY_VIOLATION = 1008
UNSUPPORTED_DATA = 1003


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
    service = service_of(server)
    talk = Talk(key)
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
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if content_type != CONTENT_TYPE:
        raise ApiError(
            415, f"the content type is '{content_type[:60]}': send a frame as {CONTENT_TYPE}", code="content_type"
        )
    talk = Talk(server.key_of(request))
    reply = await service_of(server).answer(await request.body(), talk)
    return Response(reply, media_type=CONTENT_TYPE)


@router.get(f"{PATH}/tokenizer", summary="The tokenizer's files")
async def tokenizer(
    request: Request, model: str | None = None, known: Annotated[list[str] | None, Query()] = None
) -> Response:
    """Return the tokenizer's files as texts by name; in their place their digest if the device has them (`known`)."""
    served = model_of(request, model)

    def files(tokenizer: Tokenizer | None) -> dict[str, Any]:
        texts = tokenizer_files(tokenizer)
        digest = files_digest(texts)
        return {"model": served.name, **({"known": digest} if digest in (known or ()) else {"files": texts})}

    return JsonResponse(await served.llm.prompts.with_tokenizer(files))
