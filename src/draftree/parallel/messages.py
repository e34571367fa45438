"""Messages from rank 0 to the other ranks: operations on slots as flat 64-bit integers.

A message has a header of six numbers (`MAGIC`, `VERSION`, total length, number of the message, `Flag`, number of
operations) and then the operations of one round: the edits since the last pass, among them the commits that walks
decided, and the pass. Lists are a count and their values; ascending runs, such as the parents of a chain, are the
negative count and the first value.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from draftree.models.base import Close, Commit, Edit, Extend, Fork, LayerSubset, Pass, Slot, Truncate

__all__ = [
    "HEADER",
    "MAGIC",
    "VERSION",
    "Ask",
    "Flag",
    "MessageError",
    "MessageReader",
    "MessageWriter",
    "Operation",
    "Question",
    "Run",
]

MAGIC = 0x647261667472
VERSION = 1
HEADER = 6
"""Numbers of a header."""
NUMBER_BYTES = 8
MAX_NUMBERS = 1 << 26
"""Upper bound of a message's length; a larger one is malformed."""


class MessageError(RuntimeError):
    """A malformed message, or one that does not continue the last one."""


class Flag(IntEnum):
    """Purpose of a message."""

    WORK = 0
    STOP = 1


class _Code(IntEnum):
    OPEN = 1
    RESERVE = 2
    COMMIT = 3
    TRUNCATE = 4
    FORK = 5
    CLOSE = 6
    RUN = 7
    ASK = 8


class Question(IntEnum):
    """What all ranks compute together besides passes; rank 0 uses the result."""

    INPUT_EMBEDDING = 1
    OUTPUT_HEAD = 2
    EMBEDDING_FACTS = 3
    FINAL_NORM = 4


@dataclass(frozen=True, slots=True)
class Open:
    """Open an empty slot."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve memory; arguments of `LanguageModel.reserve`."""

    num_slots: int
    length: int


@dataclass(frozen=True, slots=True)
class Run:
    """Run a pass, with `num_open` slots open."""

    pass_: Pass
    num_open: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Compute something together; `width` of a row for `Question.FINAL_NORM`."""

    question: Question
    width: int = 0


Operation = Open | Reserve | Run | Ask | Edit


class MessageWriter:
    """The operations of the next message."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._count = 0
        self._sent = 0

    def __len__(self) -> int:
        return self._count

    def open(self) -> None:
        """Add `Open`."""
        self._add(_Code.OPEN)

    def reserve(self, num_slots: int, length: int) -> None:
        """Add `Reserve`."""
        self._add(_Code.RESERVE, num_slots, length)

    def edits(self, edits: Sequence[Edit]) -> None:
        """Add edits; before they are applied, because closed slots have no id."""
        for edit in edits:
            match edit:
                case Commit(slot, path, keep):
                    self._add(_Code.COMMIT, slot.id)
                    self._list(path)
                    self._list(keep)
                case Truncate(slot, length):
                    self._add(_Code.TRUNCATE, slot.id, length)
                case Fork(slot, length):
                    self._add(_Code.FORK, slot.id, length)
                case Close(slot):
                    self._add(_Code.CLOSE, slot.id)

    def run(self, pass_: Pass, num_open: int) -> None:
        """Add `Run`."""
        self._add(_Code.RUN, num_open, len(pass_.jobs))
        self._part(pass_.layers)
        self._list(pass_.capture)
        for job in pass_.jobs:
            self._numbers.append(job.slot.id)
            self._list(job.tokens)
            self._list(job.parents)
            self._numbers.append(job.logits_at is not None)
            self._list(() if job.logits_at is None else job.logits_at)

    def ask(self, ask: Ask) -> None:
        """Add `Ask`."""
        self._add(_Code.ASK, ask.question, ask.width)

    def take(self, flag: Flag = Flag.WORK) -> bytes:
        """Return the message, and begin the next one."""
        header = array("q", (MAGIC, VERSION, HEADER + len(self._numbers), self._sent, flag, self._count))
        message = header.tobytes() + self._numbers.tobytes()
        self._sent += 1
        self._numbers, self._count = array("q"), 0
        return message

    def _add(self, code: _Code, *values: int) -> None:
        self._count += 1
        self._numbers.extend((code, *values))

    def _list(self, values: Sequence[int]) -> None:
        numbers = array("q", values)
        count = len(numbers)
        if (
            count > 1
            and numbers[-1] - numbers[0] == count - 1
            and list(numbers) == [*range(numbers[0], numbers[-1] + 1)]
        ):
            self._numbers.extend((-count, numbers[0]))
        else:
            self._numbers.append(count)
            self._numbers.extend(numbers)

    def _part(self, part: LayerSubset) -> None:
        self._numbers.append(-1 if part.end is None else part.end)
        self._list(sorted(part.attention))
        self._list(sorted(part.mlp))


class MessageReader:
    """Reads messages in their order."""

    def __init__(self) -> None:
        self._received = 0
        self._numbers: Sequence[int] = ()
        self._at = 0

    @staticmethod
    def rest_of(header: bytes) -> int:
        """Return the number of bytes after a header.

        Raises:
            MessageError: this is no header of this version.
        """
        magic, version, length, *_ = array("q", header)
        if (magic, version) != (MAGIC, VERSION) or not HEADER <= length <= MAX_NUMBERS:
            raise MessageError(
                f"a message begins with {magic}, {version}, {length} and not with {MAGIC}, {VERSION} and a length: "
                "all processes need the same version of Draftree"
            )
        return (length - HEADER) * NUMBER_BYTES

    def read(self, header: bytes, rest: bytes, slots: Mapping[int, Slot]) -> tuple[Flag, Iterator[Operation]]:
        """Return the flag of a message and its operations on these slots; a slot must exist when it is used.

        Raises:
            MessageError: the message is malformed or out of order; also while the operations are read.
        """
        *_, number, flag, count = array("q", header)
        if number != self._received or flag not in (Flag.WORK, Flag.STOP):
            raise MessageError(f"message {number} with flag {flag} came instead of message {self._received}")
        self._received += 1
        self._numbers, self._at = array("q", rest), 0
        return Flag(flag), self._operations(count, slots)

    def _operations(self, count: int, slots: Mapping[int, Slot]) -> Iterator[Operation]:
        for _ in range(count):
            yield self._operation(slots)
        if self._at != len(self._numbers):
            raise MessageError(f"a message has {len(self._numbers) - self._at} numbers after its last operation")

    def _operation(self, slots: Mapping[int, Slot]) -> Operation:
        code = self._next()
        match code:
            case _Code.OPEN:
                return Open()
            case _Code.RESERVE:
                return Reserve(self._next(), self._next())
            case _Code.COMMIT:
                return Commit(self._slot(slots), self._list(), self._list())
            case _Code.TRUNCATE:
                return Truncate(self._slot(slots), self._next())
            case _Code.FORK:
                return Fork(self._slot(slots), self._next())
            case _Code.CLOSE:
                return Close(self._slot(slots))
            case _Code.RUN:
                num_open, jobs = self._next(), self._next()
                part, capture = self._part(), tuple(self._list())
                return Run(Pass([self._job(slots) for _ in range(jobs)], part, capture), num_open)
            case _Code.ASK:
                question, width = self._next(), self._next()
                if question not in set(Question):
                    raise MessageError(f"a message has the question {question}, which does not exist")
                return Ask(Question(question), width)
        raise MessageError(f"a message has the operation {code}, which does not exist")

    def _job(self, slots: Mapping[int, Slot]) -> Extend:
        slot, tokens, parents = self._slot(slots), self._list(), self._list()
        is_listed, logits_at = self._next(), self._list()
        return Extend(slot, tokens, parents, logits_at if is_listed else None)

    def _part(self) -> LayerSubset:
        end = self._next()
        return LayerSubset(None if end < 0 else end, frozenset(self._list()), frozenset(self._list()))

    def _slot(self, slots: Mapping[int, Slot]) -> Slot:
        number = self._next()
        if number not in slots:
            raise MessageError(f"a message names slot {number}, which is not open")
        return slots[number]

    def _list(self) -> list[int]:
        count = self._next()
        if count < 0:
            first = self._next()
            return list(range(first, first - count))
        if self._at + count > len(self._numbers):
            raise MessageError(f"a message ends within a list of {count} numbers")
        self._at += count
        return list(self._numbers[self._at - count : self._at])

    def _next(self) -> int:
        if self._at >= len(self._numbers):
            raise MessageError("a message ends within an operation")
        self._at += 1
        return self._numbers[self._at - 1]
