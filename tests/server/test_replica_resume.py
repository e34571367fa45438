"""Streams of lost replicas, completed by other streams of the same texts; without ray."""

from __future__ import annotations

import random

import pytest

from draftree.serve.ray.resume import DivergedError, StreamRecord
from replica_streams import TEXTS, chat_events, data_of, response_events, summary_of


@pytest.mark.parametrize("seed", range(60))
def test_a_stream_cut_anywhere_is_completed_by_other_streams_of_the_same_texts(seed: int) -> None:
    rng = random.Random(seed)
    record, received = StreamRecord(), []
    streams = [chat_events(1000 * seed + n) for n in range(3)]
    for number, events in enumerate(streams):
        if number:
            record.restart()
        is_last = number == len(streams) - 1
        for event in events if is_last else events[: rng.randrange(1, len(events) - 2)]:
            kept = record.push(event)
            received += [kept] if kept is not None else []
    whole = summary_of(streams[0])
    assert summary_of(received)[0][0]["content"] == TEXTS[0]
    assert "".join(received).isascii()
    composed = summary_of(received)
    for answers in (whole[0], composed[0]):
        for answer in answers.values():
            assert len(answer.pop("ids")) == 1
    assert composed == whole


@pytest.mark.parametrize("cut_at", range(1, 6))
def test_a_stream_of_the_responses_api_is_completed_with_one_numbering_and_one_set_of_ids(cut_at: int) -> None:
    record = StreamRecord()
    first, second = response_events(1), response_events(2)
    received = [kept for event in first[:cut_at] if (kept := record.push(event)) is not None]
    assert received == first[:cut_at]
    record.restart()
    received += [kept for event in second if (kept := record.push(event)) is not None]
    events = data_of(received)
    assert "".join(event.get("delta", "") for event in events) == TEXTS[0]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    items = {event.get("item_id") or event["item"]["id"] for event in events if "item_id" in event or "item" in event}
    assert len(items) == 1
    assert [e["type"] for e in events if "delta" not in e] == [e["type"] for e in data_of(first) if "delta" not in e]
    assert all(event.startswith("event: response.") for event in received)


def test_a_repeated_stream_with_another_text_is_refused() -> None:
    record = StreamRecord()
    for event in chat_events(1)[:-5]:
        record.push(event)
    record.restart()
    with pytest.raises(DivergedError):
        for event in chat_events(2, ["Once upon a night", TEXTS[1]]):
            record.push(event)
