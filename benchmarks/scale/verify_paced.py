"""A verify server whose passes take a given time, under many devices: measured, and simulated.

    python benchmarks/scale/verify_paced.py --texts texts.jsonl --devices 1 2 4 8 16 32 --rtt 0 20 100 --out FILE

Server, sessions, batches, queue, connections and devices are real; the target is a tiny random model whose passes wait
until a given time is over (`--pass-ms` and `--row-ms`), as if it were a large one. So the passes do not compete for the
processor with other programs, and many devices fit. `--texts` is a file of `verify_capacity.py record`: devices replay
its pattern of drafted and written tokens on texts of the tiny model. A run of one device without a round trip
calibrates the server's time per step and the device's time per round; all other rows are predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from soak_server import free_port
from verify_capacity import Recording, Text, measured, simulated

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.analysis.fleet.simulation import FleetSettings
from draftree.bench.provenance import machine, now, versions
from draftree.core.tree import TokenTree
from draftree.loading.load import LoadedModel
from draftree.loading.targets import load_target
from draftree.models.base import Edit, LanguageModel, Pass, PassResult, Slot
from draftree.models.memory import Footprint

VOCABULARY, PROMPT, TOKENS = 512, 32, 48
JITTER = 0.003
"""Seconds by which trees that left together may arrive apart; predictions change little between 3 and 12 ms."""


class PacedModel(LanguageModel):
    """A model whose passes take a given time.

    Args:
        inner: computes the passes.
        fixed: seconds of a pass.
        row: seconds of each row.
    """

    def __init__(self, inner: LanguageModel, fixed: float, row: float) -> None:
        self.inner, self._fixed, self._row = inner, fixed, row
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
        end = time.perf_counter() + self._fixed + self._row * sum(len(job.tokens) for job in pass_.jobs)
        found = self.inner.run(pass_)
        time.sleep(max(0.0, end - time.perf_counter()))
        return found

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """As of the inner model."""
        return self.inner.apply(edits)


class PacedCurve:
    """The cost of these passes for the simulator.

    Args:
        fixed: seconds of a pass.
        row: seconds of each row.
    """

    def __init__(self, fixed: float, row: float) -> None:
        self._fixed, self._row = fixed, row

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        """Return the seconds of a pass."""
        return self._fixed + self._row * rows


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
    return load_target(model, "auto", "auto", kernels="torch", quantization=None)


def serve(given: argparse.Namespace) -> None:
    """Serve the paced model until the process ends."""
    import uvicorn

    from draftree.serve.app import create_app
    from draftree.serve.pool import ModelPool, ServedModel
    from draftree.serve.run import SWITCH_SECONDS
    from draftree.serve.served import ModelChoice
    from draftree.serve.settings import ServerSettings
    from draftree.serve.verify.settings import VerifySettings

    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_SECONDS)
    loaded = tiny()
    loaded = replace(loaded, model=PacedModel(loaded.model, given.pass_ms / 1000, given.row_ms / 1000))
    pool = ModelPool([ServedModel("paced", AsyncLLM(loaded, None, max_batch_size=64, prefix_cache_size=given.kept))])
    settings = ServerSettings(models=(ModelChoice("paced", "paced", ()),), max_concurrent_requests=64)
    app = create_app(settings, pool, verify=VerifySettings(max_sessions=256))
    uvicorn.run(app, port=given.serve, log_level="warning", ws="websockets-sansio")


@contextmanager
def served(given: argparse.Namespace) -> Iterator[str]:
    """The server in a process of its own; yields its URL."""
    port = free_port()
    command = [sys.executable, __file__, "--serve", str(port)]
    command += ["--pass-ms", str(given.pass_ms), "--row-ms", str(given.row_ms), "--kept", str(given.kept)]
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


def replayed(recording: Recording, count: int) -> list[Text]:
    """Texts of the tiny model with the recorded pattern of drafts: right tokens as far as they were accepted."""
    llm, found = LLM(tiny()), []
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=TOKENS)
    prompts = [[(place * 7 + token * 13) % VOCABULARY for token in range(PROMPT)] for place in range(count)]
    for place, (prompt, done) in enumerate(zip(prompts, llm.generate(prompts, params, progress=False), strict=True)):
        output, own = list(done.token_ids), recording.texts[place % len(recording.texts)]
        trees, written, start = list[TokenTree](), list[int](), 0
        while start < TOKENS:
            turn = len(trees) % len(own.trees)
            right = min(own.written[turn] - 1, TOKENS - start - 1)
            nodes = max(right, min(len(own.trees[turn]), TOKENS - start - 1))
            tokens = output[start : start + right]
            wrong = [(token + 1) % VOCABULARY for token in output[start + right : start + nodes]]
            trees.append(TokenTree((*tokens, *wrong), tuple(range(-1, nodes - 1))))
            written.append(right + 1)
            start += right + 1
        found.append(Text(prompt, output, trees, written))
    return found


def rows(url: str, texts: list[Text], draft: float, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Calibrate, then measure and predict."""
    fixed, row = given.pass_ms / 1000, given.row_ms / 1000
    curve = PacedCurve(fixed, row)

    def run(count: int, rtt: float, *, drafts: bool) -> tuple[list[float], list[float]]:
        return asyncio.run(measured(url, texts[:count], rtt=rtt, draft=draft, drafts=drafts))

    run(1, 0.0, drafts=True)
    alone, passed = run(1, 0.0, drafts=True)
    beside = [took - fixed - row * (1 + len(tree)) for tree, took in zip(texts[0].trees[1:], passed[1:], strict=True)]
    server = statistics.median(beside)
    device = (alone[0] - sum(passed)) / len(passed) - draft
    yield {"kind": "host", "overhead": server, "client_overhead": device, "draft_ms": 1000 * draft}
    for milliseconds in given.rtt:
        for count in given.devices:
            for drafts in (False, True):
                rtt = milliseconds / 1000
                seconds, _ = run(count, rtt, drafts=drafts)
                settings = settings_of(server, device, rtt if drafts else None)
                expected = simulated(curve, texts[:count], settings, rtt=rtt, draft=draft)
                found, predicted = (1000 * statistics.fmean(one) / TOKENS for one in (seconds, expected))
                yield {
                    "kind": "clients",
                    "arm": "drafts" if drafts else "streams",
                    "rtt_ms": milliseconds,
                    "devices": count,
                    "ms_per_token": round(found, 3),
                    "simulated": round(predicted, 3),
                    "ratio": round(predicted / found, 3),
                    "load_average": round(os.getloadavg()[0], 2),
                }


def settings_of(server: float, device: float, trip: float | None) -> FleetSettings:
    """Return the settings of one replica."""
    if trip is None:
        return FleetSettings(max_batch=64, overhead=server)
    return FleetSettings(max_batch=64, overhead=server, round_trip=trip, client_overhead=device, jitter=JITTER)


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=int, help="port; serve the paced model")
    parser.add_argument("--texts", type=Path)
    parser.add_argument("--draft-ms", type=float, default=20.0)
    parser.add_argument("--pass-ms", type=float, default=40.0)
    parser.add_argument("--row-ms", type=float, default=0.4)
    parser.add_argument("--kept", type=int, default=8, help="finished texts whose prompts are not read again")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rtt", type=float, nargs="+", default=[0, 20, 100], help="milliseconds")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given)
        return
    torch.set_num_threads(1)
    recording = Recording.read(given.texts, given.draft_ms)
    texts = replayed(recording, max(given.devices))
    header = {"kind": "header", "date": now(), "machine": machine(torch.device("cpu")), "versions": versions()}
    header |= {"pass_ms": given.pass_ms, "row_ms": given.row_ms, "draft": recording.draft}
    rounds = [[[len(t), n] for t, n in zip(x.trees, x.written, strict=True)] for x in texts]
    header |= {"prompt_tokens": PROMPT, "output": TOKENS, "rounds": rounds}
    with served(given) as url, given.out.open("a", encoding="utf-8") as out:
        for line in chain([header], rows(url, texts, recording.draft_seconds, given)):
            out.write(json.dumps(line) + "\n")
            out.flush()
            if line["kind"] != "header":
                print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
