"""Compact JSON of responses, errors in OpenAI's shape, and the handlers that turn every exception into one.

A response never contains a path, a traceback or the text of an unexpected exception; those go to the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftree.core.errors import (
    DraftreeError,
    EngineClosedError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RankError,
    UnsatisfiableError,
)
from draftree.remote.address import UnreachableError
from draftree.serve.records import record_of

encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Plain values to JSON text. ASCII only, so that any string can be sent; NaN raises."""


class JsonResponse(Response):
    media_type = "application/json"

    def __init__(self, content: Any, status: int = 200, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(encode_json(content).encode("ascii"), status, dict(headers or {}))


logger = logging.getLogger(__name__)

RETRY_SECONDS = 1
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Error types by status; all others are `invalid_request_error`."""
UNEXPECTED = "the server failed to process this request; its log has the reason under the request's id"


class ApiError(Exception):
    """An error response, whose message says what is wrong with which value, what is allowed, and what to do.

    `shape` returns the JSON body in the form of a protocol.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.type = type or TYPES.get(status, "invalid_request_error")
        self.headers = dict(headers or {})
        self.shape: Shape = openai_shape

    def body(self) -> dict[str, Any]:
        return self.shape(self)

    def response(self) -> Response:
        return JsonResponse(self.body(), self.status, headers=self.headers)


Shape = Callable[[ApiError], dict[str, Any]]  # function from an error to the JSON body of a protocol


def openai_shape(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def shaped_route(shape: Shape) -> type[APIRoute]:
    """Return the class of the routes of a protocol whose errors have another shape."""

    class ShapedRoute(APIRoute):
        error_shape = staticmethod(shape)

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def shaped(request: Request) -> Response:
                try:
                    return await handle(request)
                except (ApiError, DraftreeError, RequestValidationError) as error:
                    known = api_error(error)
                    known.shape = shape
                    raise known from error

            return shaped

    return ShapedRoute


NO_NAMES: Mapping[str, str] = {}


def invalid(message: str, param: str | None, *, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def api_error(error: BaseException) -> ApiError:
    """Return the response for any exception. An unexpected one is logged, and its text is not shown."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return validation_error(error)
    if isinstance(error, InvalidRequestError | UnsatisfiableError):
        return named_error(error)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)})
    if isinstance(error, EngineClosedError):
        return unavailable("shutting_down")
    if isinstance(error, DraftreeError):
        # its message may name files of this machine
        logger.error("a request failed: %s", error)
        if isinstance(error, RankError | UnreachableError):
            return unavailable("process_lost" if isinstance(error, RankError) else "verify_server_lost")
        return ApiError(500, "the generation failed; the server's log has the reason", code="generation_failed")
    logger.error("an unexpected error", exc_info=error)
    return ApiError(500, UNEXPECTED, code="internal_error")


def named_error(error: InvalidRequestError | UnsatisfiableError, names: Mapping[str, str] = NO_NAMES) -> ApiError:
    """Return the error of a library parameter with the body's field as `param`."""
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
    param = getattr(error, "param", None)
    return invalid(str(error), names.get(param, param) if param else None, code=code)


UNAVAILABLE = {
    "shutting_down": "the server is shutting down and accepts no requests: retry on another server, or later",
    "process_lost": (
        "a process that computes the model ended, and the server ends with it: retry on another server, or later"
    ),
    "verify_server_lost": "the verify server that holds the model does not answer: retry later",
    "loading": "the models are still loading: retry after the time in Retry-After",
    "no_replica": "no replica could complete this request: repeat it later",
}


def unavailable(code: str) -> ApiError:
    return ApiError(503, UNAVAILABLE[code], code=code, headers={"Retry-After": "5"})


def validation_error(error: RequestValidationError) -> ApiError:
    """Return the error of the first wrong field, with its dotted path as `param`."""
    errors = error.errors()
    # each alternative of a field has an error of its own: the deepest one is of the alternative that was meant
    first = max(
        (detail for detail in errors if detail["loc"][:2] == errors[0]["loc"][:2]),
        key=lambda detail: len(detail["loc"]),
    )
    kind, place = first["type"], list(first["loc"][1:])
    if kind == "json_invalid":
        return invalid("the body is not valid JSON: send one JSON object", None, code="invalid_json")
    field = first.get("ctx", {}).get("field")
    path = dotted([*place, field] if field else place)
    if field:
        return invalid(f"'{path}' {first['ctx']['reason']}", path, code=kind)
    if not path:
        return invalid("the body must be a JSON object, sent with content-type application/json", None)
    if kind == "missing":
        return invalid(f"the field '{path}' is missing: it is required", path, code="missing_required_parameter")
    reason = str(first["msg"]).removeprefix("Value error, ")
    return invalid(f"'{path}' is refused: {reason[:1].lower()}{reason[1:]}", path)


def dotted(place: list[Any]) -> str:
    """Return a location as a path such as `messages[0].content`, without the names of union members."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.removesuffix("[]").isidentifier() and part not in UNION_MEMBERS:
            path += f".{part}" if path else part
    return path


UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "dict", "list", "constrained-int"})
"""Names by which pydantic marks the alternatives of a field in an error's location."""


def add_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            known = api_error(error)
        elif error.status_code == 404:
            text = f"there is nothing at {request.url.path}: the API is described at /openapi.json"
            known = ApiError(404, text, code="not_found")
        elif error.status_code == 405:
            text = f"{request.method} is not allowed at {request.url.path}"
            known = ApiError(405, text, code="method_not_allowed", headers=error.headers)
        elif error.status_code == 400:
            known = invalid("the body cannot be read: send one JSON object in UTF-8", None, code="invalid_json")
        else:
            known = ApiError(error.status_code, str(error.detail), headers=error.headers)
        record_of(request.scope).error = known.code or known.type
        return known.response()

    for kind in (ApiError, DraftreeError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)
    app.add_middleware(UnexpectedErrors)


@dataclass(slots=True)
class UnexpectedErrors:
    """Turns any other exception into a response without details; innermost of the middleware."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noting(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, noting)
        except Exception as error:
            if scope["type"] != "http":
                raise
            response = api_error(error).response()
            if not has_started:
                await response(scope, receive, send)
