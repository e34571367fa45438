"""A verify server whose passes take a given time, with meters of its threads: for measurements of everything else.

The target is a tiny random model; its passes wait until a given time is over, as if they were computed elsewhere. The
server runs in a process of its own, and `GET /meters` returns the CPU time of its event loop and of its engine.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from devices import Pattern, Text, replayed
from soak_server import free_port

from draftree import LLM, AsyncLLM
from draftree.core.types import RoundRecord
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.models.base import Edit, LanguageModel, Pass, PassResult, Slot
from draftree.models.memory import Footprint

VOCABULARY, PROMPT, TOKENS = 512, 32, 48
PROBE_LOOPS, PROBE_PRODUCTS = 1000, 2
"""Size of the fixed work whose time tells how fast the server's core is."""


class Meters:
    """CPU seconds of the threads of a server, and counts of what they did.

    Keys: `loop` and `engine` (CPU of the threads), `before` and `after` (of the engine, before a pass and after it),
    `inner` (in passes), `wall` (seconds of passes), `passes`, `rows`, `sequences`, `trees`, `reads`, `replies`, `waits`
    (how often the event loop slept), `woken` (arrivals and replies before which it slept), `opened`, CPU of a fixed
    work in every pass (`probe_loop`, `probe_product`), and CPU of the event loop for a lone client: up to the handover
    of a frame (`tree`, `read`, `open`), and from there to the end of the reply (`tree_reply`, and so on).
    """

    def __init__(self) -> None:
        self.sums = Counter[str]()
        self._engine_mark = self._loop_mark = 0.0
        self._kind = ""
        self._slept = 0
        self._collection = 0.0
        self._matrix = torch.full((96, 96), 0.01)

    def install(self, llm: AsyncLLM) -> None:
        """Observe rounds, messages and the event loop; call it on the loop, before the first client."""
        from starlette.websockets import WebSocket

        from draftree.serve.verify.service import VerifyService
        from draftree.serve.verify.sessions import WrittenAlone

        llm.on_round(self._note_round)
        give, read, send = llm.give, WrittenAlone.read, WebSocket.send_bytes
        open_text = VerifyService._open

        async def giving(*arguments: Any) -> None:
            self._note_arrival("tree", "trees")
            await give(*arguments)

        async def reading(text: WrittenAlone, start: int) -> tuple[list[int], bool]:
            self._note_arrival("read", "reads")
            return await read(text, start)

        async def opening(service: VerifyService, session: Any, message: dict[str, Any]) -> dict[str, Any]:
            self._note_arrival("open", "opened")
            return await open_text(service, session, message)

        async def sending(socket: WebSocket, frame: bytes) -> None:
            await send(socket, frame)
            self._mark(f"{self._kind}_reply")
            self._kind = ""

        llm.give, WrittenAlone.read, WebSocket.send_bytes = giving, reading, sending  # type: ignore[method-assign]
        VerifyService._open = opening  # type: ignore[method-assign]
        gc.callbacks.append(self._note_collection)
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select = selector.select

        def selecting(timeout: float | None = None) -> Any:
            found = select(0)
            if found or timeout == 0:
                return found
            self.sums["waits"] += 1
            return select(timeout)

        selector.select = selecting

    def _note_collection(self, phase: str, about: dict[str, int]) -> None:
        """Add the time of garbage collections, on whichever thread."""
        now = time.thread_time()
        if phase == "start":
            self._collection = now
        else:
            self.sums["collecting"] += now - self._collection
            self.sums["full_collections"] += about["generation"] == 2

    def _note_arrival(self, kind: str, count: str) -> None:
        self._mark(kind)
        self.sums[count] += 1
        self._kind = kind

    def _mark(self, name: str) -> None:
        """Add the CPU time of the event loop since the last mark."""
        now = time.thread_time()
        self.sums[name] += now - self._loop_mark
        self.sums["woken"] += self.sums["waits"] > self._slept
        self._loop_mark, self._slept = now, self.sums["waits"]

    def _note_round(self, record: RoundRecord) -> None:
        now = time.thread_time()
        self.sums["after"] += now - self._engine_mark
        self.sums["sequences"] += len(record.sequences)
        self._engine_mark = now

    def begin_pass(self) -> None:
        """Note the beginning of a pass."""
        now = time.thread_time()
        self.sums["before"] += now - self._engine_mark
        self._engine_mark = now

    def probe(self) -> None:
        """Do the fixed work, a loop of the interpreter and products of matrices, and note its CPU time."""
        start, total = time.thread_time(), 0
        for number in range(PROBE_LOOPS):
            total += number & 3
        middle = time.thread_time()
        for _ in range(PROBE_PRODUCTS):
            self._matrix @ self._matrix
        self.sums["probe_loop"] += middle - start
        self.sums["probe_product"] += time.thread_time() - middle

    def end_pass(self, seconds: float, rows: int) -> None:
        """Note the end of a pass."""
        now = time.thread_time()
        self.sums.update(passes=1, rows=rows)
        self.sums["wall"] += seconds
        self.sums["inner"] += now - self._engine_mark
        self._engine_mark = now

    def read(self) -> dict[str, float]:
        """Return all values; on the event loop's thread."""
        (engine,) = [one for one in threading.enumerate() if one.name == "draftree-engine"]
        assert engine.ident is not None, "the engine runs"
        cpu = time.clock_gettime(time.pthread_getcpuclockid(engine.ident))
        return {**self.sums, "loop": time.thread_time(), "engine": cpu}


class PacedModel(LanguageModel):
    """A model whose passes take a given time.

    Args:
        inner: computes the passes.
        fixed: seconds of a pass.
        row: seconds of each row.
        meters: of the server; None for none.
    """

    def __init__(self, inner: LanguageModel, fixed: float, row: float, meters: Meters | None = None) -> None:
        self.inner, self._fixed, self._row, self._meters = inner, fixed, row, meters
        self.vocab_size, self.max_length, self.supports_trees = inner.vocab_size, inner.max_length, inner.supports_trees
        self.device, self.dtype = inner.device, inner.dtype
        self.is_exact, self.fingerprint, self.self_check = inner.is_exact, inner.fingerprint, inner.self_check

    @property
    def footprint(self) -> Footprint:
        """As of the inner model."""
        return self.inner.footprint

    @property
    def num_open(self) -> int:
        """Open slots."""
        return self.inner.num_open

    def reserve(self, num_slots: int, length: int) -> None:
        """As of the inner model."""
        self.inner.reserve(num_slots, length)

    def open(self) -> Slot:
        """As of the inner model."""
        return self.inner.open()

    def run(self, pass_: Pass) -> PassResult:
        """Compute the pass, and wait until its time is over."""
        if self._meters is not None:
            self._meters.begin_pass()
        start, rows = time.perf_counter(), sum(len(job.tokens) for job in pass_.jobs)
        found = self.inner.run(pass_)
        if self._meters is not None:
            self._meters.probe()
        time.sleep(max(0.0, start + self._fixed + self._row * rows - time.perf_counter()))
        if self._meters is not None:
            self._meters.end_pass(time.perf_counter() - start, rows)
        return found

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """As of the inner model."""
        return self.inner.apply(edits)


def tiny() -> LoadedModel:
    """A tiny random model, the same in every process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, intermediate_size=48, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return load_model(model, kernels="torch")


def serve(port: int, fixed: float, row: float, kept: int) -> None:
    """Serve the paced model until the process ends."""
    import uvicorn

    from draftree.serve.app import create_app
    from draftree.serve.pool import ModelPool, ServedModel
    from draftree.serve.run import SWITCH_SECONDS
    from draftree.serve.settings import ModelChoice, ServerSettings
    from draftree.serve.verify import VerifySettings

    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    loaded, meters = tiny(), Meters()
    loaded = replace(loaded, model=PacedModel(loaded.model, fixed, row, meters))
    llm = AsyncLLM(loaded, None, max_batch_size=64, prefix_cache_size=kept)
    settings = ServerSettings(models=(ModelChoice("paced", "paced", ()),), max_concurrent_requests=64)
    app = create_app(settings, ModelPool([ServedModel("paced", llm)]), verify=VerifySettings(max_sessions=256))
    installed = list[Meters]()

    @app.get("/meters")
    async def read_meters() -> dict[str, float]:
        if not installed:
            meters.install(llm)
            installed.append(meters)
        return {**meters.read(), "known_pass": llm.llm.engine.paused.batcher.fixed}

    gc.collect()
    gc.freeze()  # as `draftree serve` does
    uvicorn.run(app, port=port, log_level="warning", ws="websockets-sansio")


@contextmanager
def served(fixed: float, row: float, kept: int) -> Iterator[str]:
    """The server in a process of its own, with passes of so many seconds; yields its URL."""
    port = free_port()
    command = [sys.executable, __file__, str(port), str(fixed), str(row), str(kept)]
    process = subprocess.Popen(command)
    try:
        for _ in range(1200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server runs"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def texts(patterns: Sequence[Pattern], count: int) -> list[Text]:
    """Texts of the tiny model with recorded patterns of drafts."""
    prompts = [[(place * 7 + token * 13) % VOCABULARY for token in range(PROMPT)] for place in range(count)]
    return replayed(LLM(tiny(), "none"), prompts, TOKENS, patterns)


def main() -> None:
    """Serve on a port."""
    parser = ArgumentParser(description=__doc__)
    for name, kind in (("port", int), ("fixed", float), ("row", float), ("kept", int)):
        parser.add_argument(name, type=kind)
    given = parser.parse_args()
    serve(given.port, given.fixed, given.row, given.kept)


if __name__ == "__main__":
    main()
