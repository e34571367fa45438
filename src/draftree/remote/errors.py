"""Errors of the connection to a verify server, and of frames."""

from __future__ import annotations

from draftree.core.errors import DraftreeError, GenerationError

__all__ = ["ConnectionLostError", "FrameError", "RefusedError", "SessionLostError", "UnreachableError"]


class FrameError(DraftreeError):
    """A frame that cannot be read.

    Attributes:
        code: machine-readable reason.
    """

    def __init__(self, message: str, *, code: str = "bad_frame") -> None:
        super().__init__(message)
        self.code = code


class ConnectionLostError(DraftreeError):
    """A connection ended or timed out; the same frame can be sent again over a new one."""


class UnreachableError(GenerationError):
    """The server did not answer for as long as the client waits."""


class RefusedError(GenerationError):
    """The server refuses a request, and would refuse it again.

    Attributes:
        code: the server's machine-readable reason.
        retry_ms: milliseconds after which the server may accept it; None if it will not.
    """

    def __init__(self, message: str, *, code: str, retry_ms: int | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_ms = code, retry_ms


class SessionLostError(DraftreeError):
    """The server does not know the session, or a text of it, any more: texts have to be opened again."""
