"""A target behind a socket: sends passes and edits in JSON lines, and gets logits and hidden states as bytes.

The server replays what it gets. It opens slots in the same order as the client, so slots have the same ids.
"""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import threading
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from draftree.models.base import Close, Commit, CountedSlot, Edit, Fork, LanguageModel, Pass, PassResult, Slot, Truncate
from draftree.models.process import decode, encode
from draftree.sampling.logits import TensorLogits


@final
class RemoteModel(LanguageModel):
    """The client.

    Args:
        address: host and port of a `Server`.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address)
        self._file = self._socket.makefile("rb")
        facts = self._ask({"facts": True})
        self.vocab_size, self.max_length, self.supports_trees, self.num_layers, self.is_exact = facts
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.passes = 0

    def _ask(self, request: dict[str, Any]) -> Any:
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(self._file.readline())

    def _tensor(self, shape: Sequence[int]) -> Tensor:
        (size,) = struct.unpack("!Q", self._file.read(8))
        return torch.frombuffer(bytearray(self._file.read(size)), dtype=torch.float32).reshape(tuple(shape))

    def reserve(self, num_slots: int, length: int) -> None:
        """Reserve on the server."""
        self._ask({"reserve": [num_slots, length]})

    def open(self) -> CountedSlot:
        """Open a slot on the server."""
        return CountedSlot(self._ask({"open": True}))

    def require_capture(self, layers: Sequence[int]) -> None:
        """Every model of the tests captures all layers."""

    def run(self, pass_: Pass) -> PassResult:
        """Let the server run the pass."""
        shapes = self._ask({"pass": encode(pass_).hex()})
        tensors = [self._tensor(shape) for shape in shapes]
        for job in pass_.jobs:
            slot = job.slot
            assert isinstance(slot, CountedSlot)
            slot.num_tentative += len(job.tokens)
        self.passes += 1
        return PassResult.of_jobs(pass_.jobs, TensorLogits(tensors[0]), tensors[1] if len(tensors) > 1 else None)

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Let the server apply the edits, and note what they change."""
        opened = iter(self._ask({"edits": encode(edits).hex()}))
        found: list[Slot] = []
        for edit in edits:
            slot = edit.slot
            assert isinstance(slot, CountedSlot)
            match edit:
                case Commit() | Truncate():
                    slot.note(edit)
                case Fork(_, length):
                    found.append(CountedSlot(next(opened), length))
                case Close():
                    pass
        return found

    def disconnect(self) -> None:
        """End the connection."""
        self._file.close()
        self._socket.close()


class Server(socketserver.TCPServer):
    """Serves one model to one client at a time.

    Args:
        model: runs the passes.
    """

    allow_reuse_address = True

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(("127.0.0.1", 0), _Replay)
        self.model = model
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()
        self.thread.join()


class _Replay(socketserver.StreamRequestHandler):
    server: Server

    def handle(self) -> None:
        model = self.server.model
        slots: dict[int, Slot] = {}
        while line := self.rfile.readline():
            request = json.loads(line)
            tensors: list[Tensor] = []
            answer: Any = None
            if "facts" in request:
                answer = [model.vocab_size, model.max_length, model.supports_trees, model.num_layers, model.is_exact]
            elif "reserve" in request:
                model.reserve(*request["reserve"])
            elif "open" in request:
                slot = model.open()
                slots[slot.id] = slot
                answer = slot.id
            elif "pass" in request:
                result = model.run(decode(bytes.fromhex(request["pass"]), slots))
                tensors = [result.logits.tensor(), *([] if result.hidden is None else [result.hidden])]
                answer = [list(tensor.shape) for tensor in tensors]
            else:
                edits = decode(bytes.fromhex(request["edits"]), slots)
                closed = [edit.slot.id for edit in edits if isinstance(edit, Close)]
                opened = model.apply(edits)
                for number in closed:
                    del slots[number]
                slots |= {slot.id: slot for slot in opened}
                answer = [slot.id for slot in opened]
            self.wfile.write(json.dumps(answer).encode() + b"\n")
            for tensor in tensors:
                data = tensor.float().contiguous().numpy().tobytes()
                self.wfile.write(struct.pack("!Q", len(data)) + data)
            self.wfile.flush()
        for slot in slots.values():
            model.close(slot)
