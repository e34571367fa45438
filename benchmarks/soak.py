"""Random arrivals, aborts, slow readers, bad parameters and injected faults, for a given time.

The engine's integrity is checked after every step, its thread's before every request, and every text against the one
of its request alone.

    python benchmarks/soak.py                                  # a table, ten seconds
    python benchmarks/soak.py smollm2-135m-instruct --draft suffix --seconds 600

Prints counts and memory as JSON; exit status 1 if anything was lost, leaked or wrong. Texts are compared where the
model is exact (`LLM.is_exact`); elsewhere a near-tie may turn out otherwise in other company.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.core.errors import DraftreeError, GenerationError, InvalidRequestError, QueueFullError
from draftree.loading.load import load_model
from draftree.models.base import Commit, Edit, LanguageModel
from draftree.models.table import TableLM, hashed

SYSTEMS = (
    "You are a helpful assistant who answers in one short sentence and never says more than is asked for.",
    "Continue the story. Once upon a time there was a little dog who lived in a house with a red door, and",
)
ENDS = ("What is a tree?", "Tom", "Count to ten: 1, 2, 3,", "", "The dog said to the cat that", "Why? Because")
FAULT = "injected by the soak"
OUTCOMES = ("done", "left", "cancelled", "failed", "refused", "queue full")


@dataclasses.dataclass(frozen=True)
class Request:
    """Request and its texts when nothing else runs."""

    prompt: list[int]
    params: SamplingParams
    texts: tuple[tuple[int, ...], ...] = ()


def requests_for(llm: LLM, rng: random.Random, count: int) -> list[Request]:
    """Requests with common beginnings, of all kinds of parameters."""
    found = []
    for number in range(count):
        if llm.tokenizer is None:
            prompt = [1 + i * i % 9 for i in range(rng.choice((1, 30, 30, 120)))] + [number % llm.model.vocab_size]
        else:
            prompt = llm.tokenizer.encode(rng.choice(SYSTEMS) * rng.choice((1, 1, 8)) + " " + rng.choice(ENDS))
        temperature = rng.choice((0.0, 0.7, 1.0))
        params = SamplingParams(
            max_tokens=rng.choice((1, 8, 24, 60)),
            temperature=temperature,
            seed=number,
            n=rng.choice((1, 1, 3)) if temperature else 1,
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.2)),
            stop=None if llm.tokenizer is None else rng.choice((None, None, ".")),
        )
        found.append(Request(prompt, params))
    return found


def alone(llm: LLM, request: Request) -> Request:
    """Return the request with its texts when nothing else runs."""
    texts = tuple(done.token_ids for done in llm.generate(request.prompt, request.params))
    return dataclasses.replace(request, texts=texts)


def bad(llm: LLM, rng: random.Random) -> tuple[Any, Any]:
    """A prompt and parameters that must be refused."""
    return rng.choice(
        [
            ([], SamplingParams()),
            ([llm.model.vocab_size], SamplingParams()),
            ([1], SamplingParams(max_tokens=10 * llm.model.max_length)),
            ([1] * (llm.model.max_length + 1), SamplingParams()),
            ([1], SamplingParams(prediction=[1, 2])),
        ]
    )


def faulty(function: Callable[..., Any], rng: random.Random, rate: float, counts: Counter[str]) -> Callable[..., Any]:
    """Return a function that raises at random."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if rng.random() < rate:
            counts["faults"] += 1
            raise RuntimeError(FAULT)
        return function(*args, **kwargs)

    return call


def break_now_and_then(llm: LLM, rng: random.Random, rate: float, counts: Counter[str]) -> None:
    """Let every phase of a round raise with this probability."""
    parts = llm.engine.parts
    places = [(parts.target, "run"), (parts.verifier, "verify_many")]
    for choice in parts.drafters:
        places += [(choice.planner, "budgets"), (choice.planner, "observe")]
        places += [(choice.drafter, "draft"), (choice.drafter, "observe")]
    for owner, name in places:
        setattr(owner, name, faulty(getattr(owner, name), rng, rate, counts))
    parts.target.apply = _faulty_commits(parts.target, rng, rate, counts)  # type: ignore[method-assign]


def _faulty_commits(model: LanguageModel, rng: random.Random, rate: float, counts: Counter[str]) -> Callable[..., Any]:
    """`apply` that raises now and then if a round commits; no caller recovers from a slot that does not close."""
    apply = model.apply
    raising = faulty(apply, rng, rate, counts)

    def call(edits: Sequence[Edit]) -> Any:
        return (raising if any(isinstance(edit, Commit) for edit in edits) else apply)(edits)

    return call


def check_every_step(llm: LLM, counts: Counter[str]) -> None:
    """Check the integrity after every step."""
    engine, step = llm.engine, llm.engine.step

    def checked() -> Any:
        stepped = step()
        engine.check_integrity()
        counts["steps"] += 1
        return stepped

    engine.step = checked  # type: ignore[method-assign]


class Soak:
    """Clients of one AsyncLLM, and their results."""

    def __init__(self, llm: AsyncLLM, requests: Sequence[Request], *, rng: random.Random, clients: int) -> None:
        self.llm = llm
        self.requests = requests
        self.rng = rng
        self.clients = clients
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, seconds: float) -> None:
        """Run all clients until the time is over."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(end) for _ in range(self.clients)))

    async def _client(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(self.rng.expovariate(20))
            await asyncio.wrap_future(self.llm._driver.call(self.llm._driver.check_integrity))
            kind = self.rng.choices(("read", "slow", "leave", "cancel", "bad", "rush"), (8, 2, 2, 2, 1, 1))[0]
            self.counts["submitted"] += 1
            try:
                await getattr(self, f"_{kind}")(self.rng.choice(self.requests))
            except QueueFullError:
                self.counts["queue full"] += 1
            except InvalidRequestError:
                self.counts["refused"] += 1
            except (DraftreeError, RuntimeError) as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        if FAULT not in str(error):
            self.wrong.append(f"failed with {error!r}")
        self.counts["failed"] += 1

    def _check(self, request: Request, texts: Sequence[tuple[int, ...]], *, whole: bool) -> None:
        if not self.llm.llm.is_exact:
            return
        for wanted, got in zip(request.texts, texts, strict=True):
            if got != (wanted if whole else wanted[: len(got)]):
                self.wrong.append(f"seed {request.params.seed}: {got} instead of {wanted}")

    async def _read(self, request: Request, *, wait: bool = True) -> None:
        try:
            priority = self.rng.choice((0, 0, 1))
            done = await self.llm.generate(request.prompt, request.params, priority=priority, wait=wait)
        except GenerationError as error:
            self._failed(error)
            return
        self.counts["done"] += 1
        self._check(request, [text.token_ids for text in done], whole=True)

    async def _rush(self, request: Request) -> None:
        await self._read(request, wait=False)

    async def _slow(self, request: Request) -> None:
        await self._listen(request, delay=0.05)

    async def _leave(self, request: Request) -> None:
        await self._listen(request, delay=0.0, pieces=self.rng.randrange(1, 6))

    async def _listen(self, request: Request, *, delay: float, pieces: int | None = None) -> None:
        single = dataclasses.replace(request.params, n=1)
        shown, last = "", None
        updates = self.llm.stream_updates(request.prompt, single)
        async for update in updates:
            shown += "".join(piece.text for piece in update.pieces)
            last = update
            if pieces is not None and (pieces := pieces - 1) == 0:
                break
            await asyncio.sleep(delay)
        await updates.aclose()
        assert last is not None, "a stream that is done has a last update"
        self.counts["done" if last.is_last else "left"] += 1
        one = dataclasses.replace(request, texts=request.texts[:1])
        self._check(one, [tuple(last.sequence.history.output.tolist())], whole=last.is_last)
        if not "".join(last.sequence.texts).startswith(shown):
            self.wrong.append(f"seed {request.params.seed}: shown was {shown!r}")

    async def _cancel(self, request: Request) -> None:
        task = asyncio.ensure_future(self.llm.generate(request.prompt, request.params))
        await asyncio.sleep(self.rng.expovariate(10))
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(done, Exception):
            raise done
        self.counts["done" if isinstance(done, list) else "cancelled"] += 1

    async def _bad(self, request: Request) -> None:
        prompt, params = bad(self.llm.llm, self.rng)
        await self.llm.generate(prompt, params)
        self.wrong.append(f"{prompt[:3]} {params} was not refused")


def resident_megabytes() -> int:
    """Return the resident memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * 4096 // 10**6


async def soak(given: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the results."""
    rng = random.Random(given.seed)
    # loaded once, with the facts from its files, such as the end tokens
    model: Any = TableLM(hashed(12, seed=5), order=3) if given.model == "table" else load_model(given.model)
    plain = LLM(model, "none", prefix_cache_size=0)
    requests = [alone(plain, one) for one in requests_for(plain, rng, given.requests)]
    again = AsyncLLM(model, given.draft, max_batch_size=given.batch, max_waiting=8)
    async with again as llm:
        run = Soak(llm, requests, rng=rng, clients=given.clients)
        check_every_step(llm.llm, run.counts)
        break_now_and_then(llm.llm, rng, given.faults, run.counts)
        first = min(given.seconds, 0.2 * given.seconds + 5)
        await run.run(first)
        early = resident_megabytes()
        await run.run(given.seconds - first)
        late = resident_megabytes()
        stats = llm.prefix_stats
    llm.llm.engine.check_integrity()
    llm.llm.forget()
    if left := llm.llm.model.num_open:
        run.wrong.append(f"{left} slots are still open")
    if lost := run.counts["submitted"] - sum(run.counts[kind] for kind in OUTCOMES):
        run.wrong.append(f"{lost} requests are not accounted for")
    return {
        "model": given.model,
        "draft": given.draft,
        "is_exact": plain.is_exact,
        "seconds": given.seconds,
        "clients": given.clients,
        "counts": dict(sorted(run.counts.items())),
        "prefixes": dataclasses.asdict(stats),
        "megabytes_early": early,
        "megabytes_late": late,
        "wrong": run.wrong[:20],
        "num_wrong": len(run.wrong),
    }


def main() -> int:
    """Parse, soak, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="table", help="as for LLM, or 'table'")
    parser.add_argument("--draft", default="ngram,min=1")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--requests", type=int, default=24, help="different requests that are repeated")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--faults", type=float, default=0.002, help="probability that a call of a part raises")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("draftree").setLevel(logging.CRITICAL)  # injected faults are expected
    print(json.dumps(found := asyncio.run(soak(given)), indent=2))
    return 1 if found["num_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
