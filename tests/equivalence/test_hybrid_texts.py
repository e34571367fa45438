"""Whole texts of models with recurrent layers: every drafter, the drop-in, the command line and the server."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.async_llm import AsyncLLM
from draftree.cli.main import run
from draftree.serve.pool import ServedModel
from dropin_samples import ours, padded, plain
from families import fresh, prompts, transformers_greedy
from native_samples import in_c, native
from recurrent_samples import RECURRENT, recurrent_model, recurrent_peer
from serving import HTTP, NAME, running_server
from target_heads import head_folder
from text_backends import byte_level

FAMILIES = ["qwen3_next", "lfm2", "granitemoehybrid"]
LENGTH = 20
RAGGED = prompts(3, 17, 9, 40)
PROMPTS = [*RAGGED, [*RAGGED[3], 5, 6, 7], RAGGED[3]]
QUESTION = {"role": "user", "content": "The quick brown fox jumps over the lazy dog"}
DRAFTS = [
    "none",
    "ngram,min=1+suffix",
    "lookahead",
    "synthetic,accept=0.7,width=3",
    "early-exit:1,tree=2-2-1",
    "layer-skip,attention=1",
    "model:SMALL,k=3",
    "model:SMALL,tree=3-2-1",
    "head:HEAD,tree=best-9",
    "prediction",
]


def small_model(family: str, **changes: Any) -> Any:
    """A draft model of the family that agrees with the target now and then."""
    model = fresh(family, **RECURRENT[family], **changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.15 * parameter.std())
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders by the names in `DRAFTS`, behind the family."""
    where, found = tmp_path_factory.mktemp("hybrids"), {}
    for family in FAMILIES:
        found[f"{family} SMALL"] = str(where / f"{family}-small")
        small_model(family).save_pretrained(found[f"{family} SMALL"])
        width = recurrent_peer(family).config.hidden_size
        found[f"{family} HEAD"] = str(head_folder(where, "eagle", target_hidden=width, hidden=width))
    return found


@functools.cache
def greedy_texts(family: str) -> list[list[int]]:
    return [transformers_greedy(recurrent_peer(family), ids, LENGTH) for ids in PROMPTS]


@functools.cache
def sampled_texts(family: str) -> list[list[int]]:
    llm = LLM(recurrent_model(family), "none", prefix_cache_size=0)
    return [written(llm, [ids], temperature=0.8)[0] for ids in PROMPTS]


def written(llm: LLM, texts: list[list[int]], **params: Any) -> list[list[int]]:
    done = llm.generate(texts, SamplingParams(max_tokens=LENGTH, seed=11, ignore_eos=True, **params))
    llm.engine.check_integrity()
    return [list(one.token_ids) for one in done]


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_text(family: str, draft: str, folders: dict[str, str]) -> None:
    for name in ("SMALL", "HEAD"):
        draft = draft.replace(name, folders[f"{family} {name}"])
    llm = LLM(recurrent_model(family), draft, plan=None if draft == "none" else "fixed")
    assert llm.model.footprint.state > 0
    given: dict[str, Any] = {"prediction": RAGGED[1]} if draft == "prediction" else {}
    assert written(llm, PROMPTS, temperature=0.0, **given) == greedy_texts(family)
    # from kept prefixes
    assert written(llm, PROMPTS, temperature=0.8, **given) == sampled_texts(family)
    assert llm.prefix_stats.cached_tokens > 2 * len(RAGGED[3])


@pytest.mark.parametrize("draft", ["suffix", "early-exit:1", "assistant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_drop_in_writes_the_tokens_of_generate(family: str, draft: str) -> None:
    model, inputs = recurrent_model(family), padded(14, 9, 3)
    drafter = {"assistant_model": small_model(family)} if draft == "assistant" else {"draft": draft}
    assert torch.equal(ours(model, inputs, **drafter), plain(model, inputs))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("hybrid") / "tiny"
    tokenizer = byte_level()
    model = fresh("qwen3_next", **RECURRENT["qwen3_next"], vocab_size=len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@functools.cache
def plain_chat(folder: Path) -> Any:
    return LLM(folder, "none").chat([QUESTION], SamplingParams(max_tokens=LENGTH, temperature=0.0))[0]


def test_generate_from_the_command_line(chat: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--temperature", "0", "--max-tokens", str(LENGTH), "--draft", "suffix", "--no-stream"]
    assert run(["generate", str(chat), QUESTION["content"], *arguments]) == 0
    assert plain_chat(chat).text.strip() in capfd.readouterr().out


def test_the_server_answers_and_continues_a_conversation(chat: Path) -> None:
    llm = AsyncLLM(chat, "suffix")
    with running_server([ServedModel(NAME, llm)]) as server:
        messages = [QUESTION]
        request = {"model": NAME, "max_tokens": LENGTH, "temperature": 0}
        answers = []
        for _ in range(2):
            reply = HTTP.post(f"{server.url}/v1/chat/completions", json={**request, "messages": messages}).json()
            answers.append(reply)
            text = reply["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
    assert answers[0]["choices"][0]["message"]["content"] == plain_chat(chat).text
    wanted = LLM(chat, "none").chat(messages[:3], SamplingParams(max_tokens=LENGTH, temperature=0.0))[0]
    assert answers[1]["choices"][0]["message"]["content"] == wanted.text
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= answers[0]["usage"]["prompt_tokens"]


@in_c
@pytest.mark.parametrize(
    ("family", "kind", "draft"),
    [
        *itertools.product(["qwen3_next"], ["bfloat16"], ["suffix", "early-exit:1,tree=2-2-1"]),
        *itertools.product(["bamba"], ["int8"], ["suffix", "synthetic,accept=0.7,width=3"]),
        *itertools.product(["lfm2"], ["float32"], ["layer-skip,attention=1", "quantized,tree=2-2-1"]),
    ],
)
def test_native_texts_have_the_same_bits(family: str, kind: str, draft: str) -> None:
    model = native(family, kind)
    for temperature in (0.0, 0.8):
        plain_llm, llm = LLM(model, "none", prefix_cache_size=0), LLM(model, draft, plan="fixed")
        wanted = [written(plain_llm, [ids], temperature=temperature)[0] for ids in PROMPTS]
        for _ in range(2):  # the second time from kept prefixes
            assert written(llm, PROMPTS, temperature=temperature) == wanted
        llm.forget()
