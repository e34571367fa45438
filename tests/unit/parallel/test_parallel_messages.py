"""Messages of rank 0: what is read is what was written, and malformed messages are refused."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from draftree.models.base import ALL_LAYERS, Close, Commit, Extend, Fork, LayerSubset, Pass, Truncate
from draftree.models.table import TableLM, hashed
from draftree.parallel.messages import (
    HEADER,
    NUMBER_BYTES,
    VERSION,
    Ask,
    Flag,
    MessageError,
    MessageReader,
    MessageWriter,
    Open,
    Question,
    Reserve,
    Run,
)

SPLIT = HEADER * NUMBER_BYTES


@pytest.fixture
def slots() -> dict[int, Any]:
    model = TableLM(hashed(5, seed=1))
    return {slot.id: slot for slot in (model.open(), model.open(), model.open())}


def read(reader: MessageReader, message: bytes, slots: dict[int, Any]) -> tuple[Flag, list[Any]]:
    header, rest = message[:SPLIT], message[SPLIT:]
    assert MessageReader.rest_of(header) == len(rest)
    flag, operations = reader.read(header, rest, slots)
    return flag, list(operations)


def test_operations_are_read_as_they_were_written(slots: dict[int, Any]) -> None:
    writer, reader = MessageWriter(), MessageReader()
    edits = [Commit(slots[1], [0, 1, 3], [4, 6]), Truncate(slots[2], 7), Fork(slots[0], 5), Close(slots[1])]
    jobs = [
        Extend(slots[0], [7, 7, 9], range(-1, 2), logits_at=range(3)),
        Extend(slots[2], [4, 5, 6, 1], [-1, 0, 0, 1]),
        Extend(slots[1], [3], [-1], logits_at=()),
    ]
    part = LayerSubset(3, frozenset({1}), frozenset({0, 2}))
    writer.open()
    writer.reserve(4, 200)
    writer.edits(edits)
    writer.ask(Ask(Question.FINAL_NORM, 64))
    writer.run(Pass(jobs, part, (0, 5)), 3)
    assert len(writer) == 8
    flag, found = read(reader, writer.take(), slots)
    assert flag is Flag.WORK
    assert found[:2] == [Open(), Reserve(4, 200)]
    assert found[2:6] == [Commit(slots[1], [0, 1, 3], [4, 6]), *edits[1:]]
    assert found[6] == Ask(Question.FINAL_NORM, 64)
    run = found[7]
    assert isinstance(run, Run)
    assert (run.num_open, run.pass_.layers, run.pass_.capture) == (3, part, (0, 5))
    for one, other in zip(run.pass_.jobs, jobs, strict=True):
        assert (list(one.tokens), list(one.parents)) == (list(other.tokens), list(other.parents))
        assert one.slot is other.slot
        assert one.num_logits == other.num_logits
    assert run.pass_.jobs[1].logits_at is None
    writer.run(Pass([jobs[0]]), 3)
    _, found = read(reader, writer.take(), slots)
    assert found[0].pass_.layers == ALL_LAYERS
    assert read(reader, writer.take(Flag.STOP), slots) == (Flag.STOP, [])


def test_a_chain_takes_a_few_numbers(slots: dict[int, Any]) -> None:
    sizes = []
    for length in (10, 1000):
        writer = MessageWriter()
        writer.run(Pass([Extend(slots[0], [5] * length, range(-1, length - 1), logits_at=[length - 1])]), 1)
        sizes.append(len(writer.take()))
    assert sizes[1] - sizes[0] == 990 * NUMBER_BYTES, "tokens only"


def test_malformed_messages_are_refused(slots: dict[int, Any]) -> None:
    writer = MessageWriter()
    writer.run(Pass([Extend(slots[0], [5, 6], [-1, -1])]), 1)
    message = array("q", writer.take())
    for place, value, reason in (
        (0, 1, "same version"),
        (1, VERSION + 1, "same version"),
        (2, 1 << 40, "same version"),
        (3, 1, "instead of message 0"),
        (4, 9, "instead of message 0"),
        (5, 2, "ends within an operation"),
        (6, 99, "does not exist"),
        (8, 9, "not open|ends within"),
        (13, 88, "which is not open"),
        (16, 7, "ends within a list"),
    ):
        wrong = array("q", message)
        wrong[place] = value
        with pytest.raises(MessageError, match=reason):
            read(MessageReader(), wrong.tobytes(), slots)
    with pytest.raises(MessageError, match="after its last operation"):
        header = array("q", message[:HEADER])
        header[2] += 1
        MessageReader.rest_of(header.tobytes())
        list(MessageReader().read(header.tobytes(), array("q", [*message[HEADER:], 1]).tobytes(), slots)[1])
