"""Extensions that are one file each: a drafter, a drafter that reads features, and a target behind a socket.

Each file is copied to a temporary folder and used from there: alone, in batches, with cached prefixes, as a part of a
merged drafter and in trees. Texts are those of plain decoding.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import draftree.drafters
from draftree import LLM, SamplingParams
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.models.torch.hf import HFModel
from families import fresh
from native_samples import in_c, native

FILES = Path(__file__).parents[1] / "support" / "added"
SYSTEM = [(7 * place) % 50 + 3 for place in range(40)]
PROMPTS = [[*SYSTEM, 5, 6, 5, 6], [*SYSTEM, 9, 9, 9], [4, 5, 6, 4, 5, 6, 4, 5], [11, 12]]
PARAMS = [SamplingParams(max_tokens=24, temperature=0.7 * (place % 2), seed=place) for place in range(len(PROMPTS))]
MODELS = [
    pytest.param(lambda: HFModel(fresh("llama")), id="torch"),
    pytest.param(lambda: native("llama"), marks=in_c, id="C"),
]


def texts(llm: LLM) -> list[list[int]]:
    """Batches twice, the second time with cached prefixes, then each prompt alone."""
    done = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS, PARAMS)]
    done += [llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert llm.prefix_stats.hits > 0
    return [list(one.token_ids) for one in done]


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The drafters, as files of a folder of their own."""
    for name in ("features", "repeat"):
        shutil.copy(FILES / f"{name}_drafter.py", tmp_path / f"{name}.py")
    monkeypatch.setattr(draftree.drafters, "__path__", [*draftree.drafters.__path__, str(tmp_path)])
    yield
    for name in ("features", "repeat"):
        sys.modules.pop(f"draftree.drafters.{name}", None)


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("draft", ["repeat", "repeat,k=2+ngram,min=1", "features+repeat"])
def test_a_drafter_in_one_file(added: None, build: Any, draft: str) -> None:
    llm = LLM(build(), draft=draft, plan="fixed")
    assert texts(llm) == texts(LLM(build(), "none"))
    assert sum(one.stats.draft_tokens for one in llm.generate(PROMPTS, PARAMS)) > 0


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("draft", ["features", "features,k=2+suffix", "ngram,min=1+features"])
def test_a_drafter_that_reads_features_in_one_file(added: None, build: Any, draft: str) -> None:
    model = build()
    llm = LLM(model, draft=draft, plan="fixed", prefill_chunk_size=16)
    assert texts(llm) == texts(LLM(build(), "none"))
    seen = importlib.import_module("draftree.drafters.features").FeaturesDrafter.seen
    assert len(seen) > 50
    for tokens, start, rows in seen[::7]:
        assert len(rows) == len(tokens) - start, "every token that was read has its rows"
        assert torch.allclose(rows, features(model, tokens)[start:], atol=2e-4)
    assert sum(start == 0 for _, start, _ in seen) > 0.9 * len(seen), "prompts and cached prefixes have rows"
    assert sum(one.stats.accepted_tokens for one in llm.generate(PROMPTS, PARAMS)) > 0


def features(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    slot = model.open()
    job = Extend(slot, tokens, range(-1, len(tokens) - 1), logits_at=())
    hidden = model.run(Pass([job], capture=(0, 1, model.num_layers))).hidden
    model.close(slot)
    assert hidden is not None
    return hidden


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[ModuleType]:
    shutil.copy(FILES / "remote_model.py", tmp_path / "remote_model.py")
    spec = importlib.util.spec_from_file_location("remote_model", tmp_path / "remote_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["remote_model"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["remote_model"]


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("draft", [None, "suffix,min=1", "repeat,k=2+ngram,min=1", "features+suffix"])
def test_a_target_behind_a_socket_in_one_file(added: None, remote: ModuleType, build: Any, draft: str | None) -> None:
    served = build()
    server = remote.Server(served)
    client = remote.RemoteModel(server.server_address)
    try:
        llm = LLM(client, draft=draft, **({} if draft is None else {"plan": "fixed"}))
        assert texts(llm) == texts(LLM(build(), "none"))
        assert client.passes > 20
        llm.engine.check_integrity()
        llm.forget()
    finally:
        client.disconnect()
        server.stop()
    assert served.num_open == 0, "the server closes the slots of a client that leaves"
