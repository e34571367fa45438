"""Submission of a client's text to the engine."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from draftree.core.errors import InvalidRequestError
from draftree.engine.given import GivenTrees
from draftree.remote.errors import FrameError
from draftree.remote.requests import read_params
from draftree.serve.server import Server
from draftree.serve.token_limits import require_choices, within_limits
from draftree.serve.verify.sessions import Session
from draftree.serve.verify.texts import DraftedByClient, OpenText, WrittenAlone

__all__ = ["open_text"]

DRAFT_LABEL = "remote"
"""Drafter of clients' texts in metrics."""


async def open_text(server: Server, session: Session, message: Mapping[str, Any], *, now: float) -> OpenText:
    """Queue a text with what is written of it.

    Args:
        server: limits and meters.
        session: of the text.
        message: a request of type `open`.
        now: on the clock of leases.

    Raises:
        FrameError: tokens beyond the vocabulary.
        ApiError: a limit of the server.
        DraftreeError: as `AsyncLLM.submit`.
    """
    model = session.model
    vocab = model.llm.llm.model.vocab_size
    if any(token >= vocab for token in (*message["prompt"], *message["output"])) or not message["prompt"]:
        raise FrameError(f"the prompt is empty, or has a token beyond the vocabulary of {vocab}", code="bad_token")
    if message["output"] and len(message["output"]) >= message["limit"]:
        raise InvalidRequestError(
            f"the text has {len(message['output'])} tokens, and its limit is {message['limit']}: it has ended, so it "
            "cannot be opened"
        )
    params = read_params(message["params"], seed=message["seed"], max_tokens=message["limit"])
    require_choices(server.settings, params, {})
    prompts = [list(message["prompt"])]
    params, (prompt,) = await within_limits(server.settings, model, prompts=prompts, params=params)
    name, given = f"verify-{uuid.uuid4().hex}", None if message["plain"] else GivenTrees()
    meter = server.meters[model.name]
    meter.register(name, "none" if given is None else DRAFT_LABEL)
    try:
        submission = await model.llm.submit(
            prompt,
            params,
            draft=None if given is None else "none",
            request_id=name,
            trace=given is not None,
            owner=session.key.name,
            given=given,
            written=message["output"],
        )
    except BaseException:
        meter.release(name)
        raise
    kind = WrittenAlone if given is None else DraftedByClient
    return kind(message["text"], model.llm, submission, now)
