"""A process with the pretended card, which decodes what it is told line by line. Not a test itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any, TextIO

SUPPORT = Path(__file__).parent


TRITON = {
    "TRITON_INTERPRET": "1",
    "ATEN_CPU_CAPABILITY": "default",  # a number is computed alike at every place of a tensor
}


class CardProcess:
    """Starts the process and sends it jobs. `is_exact`: whether its targets are, by Triton's interpreter."""

    def __init__(self, device_type: str = "cuda", *, is_exact: bool = False) -> None:
        roots = [str(SUPPORT), str(SUPPORT.parents[1] / "src")]
        path = os.pathsep.join([*roots, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, __file__, device_type, *["exact"] * is_exact],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "HF_DEACTIVATE_ASYNC_LOAD": "1",  # threads do not see the card
                **(TRITON if is_exact else {}),
            },
        )

    def run(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process with the card ended"
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise AssertionError(result["error"])
        return result

    def close(self) -> None:
        self._process.communicate()


def answer(jobs: TextIO, results: TextIO, device_type: str, *, is_exact: bool = False) -> None:
    import torch

    from draftree import LLM, SamplingParams
    from draftree.loading import transformers_model
    from draftree.loading.load import load_model
    from draftree.loading.transformers_model import wrap_model
    from draftree.models.check import rounds_alike
    from draftree.models.kv import slots
    from draftree.models.torch.layers import TorchLayers
    from draftree.models.torch.static import Shapes
    from families import fresh
    from pretended_card import CardTensor, insert_card

    torch.set_num_threads(1)
    slots.MIN_LENGTH = 128  # without the attention kernel, passes copy the keys of whole slots
    with torch.device("cpu"):
        torch.empty(0)  # torch notes its functions at the first use of a device context
    card = insert_card(device_type, has_triton=is_exact)
    if is_exact:
        transformers_model.rounds_alike = partial(rounds_alike, lengths=(9,))
        TorchLayers.compile = lambda self, trial: None  # torch's compiler does not know the card
    targets: dict[str, Any] = {}

    def loaded(target: Any) -> Any:
        if isinstance(target, str):
            return load_model(target, device=device_type)
        shapes = Shapes(exact=is_exact) if device_type == "cuda" else None
        return wrap_model(fresh("llama", **target).to(device_type), shapes=shapes)

    def decode(job: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(job["target"], sort_keys=True)
        if key not in targets:
            targets[key] = loaded(job["target"])
        target, rounds = targets[key], []

        def note(record: Any) -> None:
            counts = card.taken()
            rounds.append(
                {
                    "waits": counts.waits.total(),
                    "launches": counts.launches.total(),
                    "replays": counts.replays,
                    "captures": counts.captures,
                    "lines": {**counts.waits, **counts.launches},
                }
            )

        llm = LLM(target, job["draft"], on_round=note, **job["options"])
        texts, cached = [], []
        for prompts in job["turns"]:
            rounds.clear()
            card.taken()
            completions = llm.generate(prompts, SamplingParams(**job["params"]))
            texts.append([{"tokens": list(done.token_ids), "logprobs": logprobs_of(done)} for done in completions])
            cached.append([done.stats.cached_tokens for done in completions])
        return {
            "texts": texts,
            "cached": cached,
            "rounds": rounds,
            "is_exact": llm.is_exact,
            "is_on_card": all(isinstance(part, CardTensor) for part in target.model.model.parameters()),
            "why_eager": None if target.model.static is None else target.model.static.why_eager,
        }

    def faults() -> dict[str, Any]:
        """Return what is raised and counted by a few operations."""
        tensor = torch.arange(4.0, device="cuda")
        reasons: dict[str, Any] = {}

        def attempt(name: str, work: Any) -> None:
            try:
                work()
            except RuntimeError as error:
                reasons[name] = str(error)

        def captured(work: Any) -> Any:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                return graph, work()

        attempt("mix", lambda: tensor + torch.ones(4))
        attempt("wait in a capture", lambda: captured(tensor.tolist))
        attempt("copy in a capture", lambda: captured(lambda: torch.ones(4, device="cuda") + torch.ones(4).cuda()))
        graph, total = captured(lambda: (tensor * 2)[2:] + 1)
        tensor.add_(0)
        graph.replay()
        card.taken()
        tensor[[0, 1]]
        torch.ones(2).to("cuda")
        torch.ones(2).pin_memory().to("cuda", non_blocking=True)
        reasons["replayed"] = total.tolist()
        reasons["waits"] = {line.partition("(")[2][:-1]: count for line, count in card.taken().waits.items()}
        return reasons

    for line in jobs:
        try:
            job = json.loads(line)
            result = {"faults": faults()} if "faults" in job else decode(job)
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps(result), file=results, flush=True)


def logprobs_of(done: Any) -> Any:
    """Return the log-probabilities of the tokens of a text, or None."""
    if done.logprobs is None:
        return None
    return [entry.logprob for entry in done.logprobs]


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)  # what the package prints is no result
        answer(sys.stdin, pipe, sys.argv[1], is_exact="exact" in sys.argv)
