"""Encoding of server-sent events."""

from __future__ import annotations

import json

import pytest

from draftree.serve.sse import ChunkEncoder, event

FIELDS = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": 'a "name"'}


@pytest.mark.parametrize("own", [{"choices": []}, {"choices": [{"text": "é\n\u2028}"}], "usage": None}])
def test_a_chunk_is_the_event_of_all_its_fields(own: dict[str, object]) -> None:
    found = ChunkEncoder(FIELDS).event(own)
    assert found == event({**FIELDS, **own})
    assert json.loads(found.removeprefix(b"data: ")) == {**FIELDS, **own}


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        ChunkEncoder(FIELDS).event({"choices": [float("nan")]})
