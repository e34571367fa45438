"""Models, inputs and user code for the tests of the drop-in. Not a test itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

import draftree
from families import DRAFTER_DISTANCE, VOCAB_SIZE, fresh, prompts

PAD = 0


@functools.cache
def model_of(name: str = "llama") -> Any:
    """A tiny model as its user has loaded it."""
    return fresh(name)


@functools.cache
def assistant_of(name: str = "llama") -> Any:
    """A model that agrees with it now and then."""
    model = fresh(name)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.mul_(1 + DRAFTER_DISTANCE * torch.randn(parameter.shape, generator=generator))
    model.generation_config.num_assistant_tokens = 4
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def padded(*lengths: int) -> dict[str, Tensor]:
    """Prompts of these lengths, padded at the left."""
    rows, width = prompts(*lengths), max(lengths)
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def plain(model: Any, inputs: dict[str, Tensor], **settings: Any) -> Any:
    """What transformers writes by itself."""
    return model.generate(**inputs, **({"max_new_tokens": 24, "pad_token_id": PAD, "do_sample": False} | settings))


BOUND = ("streamer", "assistant_model", "tokenizer", "assistant_tokenizer")
"""Arguments that transformers drops: they are bound."""


def ours(model: Any, inputs: dict[str, Tensor], **settings: Any) -> Any:
    """What it writes through the drop-in; an assistant that is sometimes right drafts, if no drafter is named."""
    if not {"draft", "assistant_model", "prompt_lookup_num_tokens"} & settings.keys():
        settings["assistant_model"] = assistant_of()
    bound = functools.partial(draftree.generate, **{name: settings.pop(name) for name in BOUND if name in settings})
    return plain(model, inputs, custom_generate=bound, **settings)


class Recorder(LogitsProcessor):
    """Notes every call; forbids the even tokens at every third one, so that it must be called just as often."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[list[int]], Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append((input_ids.tolist(), scores.clone()))
        if len(self.calls) % 3 == 0:
            scores[:, ::2] = -float("inf")  # in place, as users do
        return scores


class EndsAt(StoppingCriteria):
    """Ends a row once it holds so many tokens above half of the vocabulary; notes every call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.calls: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls.append(input_ids.tolist())
        return (input_ids > VOCAB_SIZE // 2).sum(dim=1) >= self.count


class Listener:
    """A streamer that notes what it gets."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        """Note tokens."""
        self.calls.append(value.tolist())

    def end(self) -> None:
        """Note the end."""
        self.calls.append("end")
