"""Devices that run the first layers of a tiny model, for tests of a split by layers. Not a test itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.loading.first_layers import load_first_layers
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.models.base import Extend, Pass
from draftree.options import ModelOptions
from draftree.remote.address import RemoteAddress
from draftree.remote.link import Connector, Link
from draftree.remote.split.messages import StateFormat
from draftree.remote.split.target import SplitModel
from draftree.serve.pool import ServedModel
from draftree.serve.verify import VerifySettings
from serving import CONTEXT, NAME, Running, running_server, tiny_tokenizer
from verify_clients import IMPATIENT

LAYERS, SPLIT, HIDDEN = 4, 2, 64
SPLIT_SETTINGS = VerifySettings(split=SPLIT)


RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "lfm2": {"layer_types": ["full_attention", "full_attention", "conv", "conv"], "block_multiple_of": 32},
}
"""Families with recurrent layers on both sides of the split, and on the server's only."""


def split_model(seed: int = 1, family: str = "llama") -> Any:
    """A random model of four layers, whose passes can run in C."""
    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        **RECURRENT.get(family, {}),
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                scale = 0.75 if "lm_head" in name else 0.25
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def save_split_model(folder: Path, seed: int = 1, family: str = "llama") -> Path:
    split_model(seed, family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def split_server(
    folder: Path, *, settings: VerifySettings = SPLIT_SETTINGS, kernels: str = "auto", **options: Any
) -> Iterator[Running]:
    """A verify server of the model that takes hidden states."""
    llm = AsyncLLM(str(folder), None, kernels=kernels, dtype="float32")
    with running_server([ServedModel(NAME, llm)], verify=settings, **options) as running:
        yield running


@contextmanager
def split_device(
    server: Running | str,
    folder: Path,
    draft: Any = f"early-exit:{SPLIT}",
    *,
    split: int = SPLIT,
    states: str = "float32",
    picks: str = "device",
    kernels: str = "auto",
    connector: Connector | None = None,
    **options: Any,
) -> Iterator[LLM]:
    """An `LLM` whose first layers run here."""
    url = server if isinstance(server, str) else server.url
    address = RemoteAddress.parse(f"remote:{url}?split={split}&weights={folder}&states={states}&picks={picks}")
    local = load_first_layers(ModelOptions(folder, dtype="float32", device="cpu", kernels=kernels), split)
    link = Link(address, None, patience=IMPATIENT, connector=connector, takes_bytes=True)
    model = SplitModel(link, local, address)
    loaded = LoadedModel(model, None, link.welcome.eos_ids, "split", tokenizer_sha=link.welcome.tokenizer)
    try:
        yield LLM(loaded, draft, tokenizer=tiny_tokenizer(), **options)
    finally:
        model.disconnect()


@functools.cache
def whole_llm(folder: Path, kernels: str = "auto") -> LLM:
    """The whole model in this process, with plain decoding."""
    return LLM(str(folder), None, kernels=kernels, dtype="float32")


def whole_texts(
    folder: Path, prompts: Sequence[Any], params: Sequence[SamplingParams], *, kernels: str = "auto"
) -> list[list[int]]:
    """The texts by plain decoding of the whole model in this process, one by one."""
    llm = whole_llm(folder, kernels)
    return [list(llm.generate([prompt], one)[0].token_ids) for prompt, one in zip(prompts, params, strict=True)]


def rounded_text(folder: Path, kind: str, prompt: list[int], count: int) -> list[int]:
    """The greedy text of the function that rounds states after the first layers, token by token in this process.

    Returned states are rounded as well, as those of a server that returns states.
    """
    local = load_first_layers(ModelOptions(folder, dtype="float32", device="cpu"), SPLIT)
    whole: Any = load_model(str(folder), dtype="float32").model
    first, rest, text = local.open(), whole.open(), list(prompt)

    def rounded(states: torch.Tensor) -> torch.Tensor:
        form = StateFormat(kind, states.shape[1])
        return form.unpack(form.pack(states).tobytes(), len(states))

    while len(text) < len(prompt) + count:
        new = text[first.length :]
        chain = range(-1, len(new) - 1)
        states = local.run(Pass([Extend(first, new, chain)], capture=(SPLIT,))).hidden
        assert states is not None
        result = whole.run_rest(
            [Extend(rest, [0] * len(new), chain)], rounded(states[:, 0]), first=SPLIT, capture=[LAYERS]
        )
        logits = local.read_out(rounded(result.hidden[-1])).tensor()
        text.append(int(logits[0].argmax()))
        local.commit(first, range(len(new)))
        whole.commit(rest, range(len(new)))
    return text[len(prompt) :]
