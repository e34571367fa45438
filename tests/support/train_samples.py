"""A tiny target, texts that it wrote with its hidden states, and heads for it. Not a test itself."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.core.noise import Noise, gumbel
from draftree.heads.base import FeatureHead, TargetParts
from draftree.heads.eagle import Eagle3Head
from draftree.heads.vocabulary import DraftVocabulary
from draftree.models.base import EmbeddingFacts
from draftree.train.data.shards import Text, TopRows
from draftree.train.head import HeadOptions, fresh, head_config
from draftree.train.head_trainee import HeadTrainee
from draftree.train.settings import Limits, TrainSettings

VOCAB, HIDDEN, LAYERS = 64, 16, 3
FEATURES = (0, 1, 2)
PROMPT, ANSWER = 6, 24


@functools.cache
def tiny_target() -> Any:
    """A random llama; its texts depend mostly on the last tokens."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=96,
        tie_word_embeddings=False,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # large embeddings and a sharp output: texts do not fall into a cycle at once, and can be learned
        model.model.embed_tokens.weight.mul_(2)
        model.lm_head.weight.mul_(2)
    return model


def target_parts() -> TargetParts:
    model = tiny_target()
    return TargetParts(
        model.model.embed_tokens.weight.detach(),
        model.lm_head.weight.detach(),
        EmbeddingFacts(1.0, 1.0),
        torch.no_grad()(model.model.norm),
        LAYERS,
    )


@torch.no_grad()
def states_of(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Features, outputs of the last layer and logits of token ids of shape (texts, tokens)."""
    model, seen = tiny_target(), []
    hook = model.model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    found = model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    hook.remove()
    hidden = (*found.hidden_states[:LAYERS], seen[0])
    return torch.stack([hidden[layer] for layer in FEATURES], dim=2), seen[0], found.logits


@functools.cache
def texts(count: int, temperature: float = 0.0, *, seed: int = 0, answer: int = ANSWER, top: int = 0) -> list[Text]:
    """Texts as the engine writes them, by passes over the whole text."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCAB, (count, PROMPT), generator=generator)
    seeds = [1000 * seed + text for text in range(count)]
    for position in range(PROMPT, PROMPT + answer):
        logits = states_of(tokens)[2][:, -1]
        if temperature:
            keys = [Noise(one).keys(position) for one in seeds]
            logits = logits / temperature + gumbel(keys, torch.arange(VOCAB))
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    features, last, logits = (states[:, :-1] for states in states_of(tokens))
    return [
        Text(
            tokens=tokens[text],
            prompt_length=PROMPT,
            features=features[text],
            last=None if top else last[text],
            top=_top(logits[text], top) if top else None,
            temperature=temperature,
            seed=seeds[text],
            prompt_id=text,
        )
        for text in range(count)
    ]


def _top(logits: Tensor, count: int) -> TopRows:
    lse = logits.logsumexp(-1)
    values, ids = logits.topk(count, dim=-1)
    return TopRows(ids, values - lse[:, None], lse)


def shorter(text: Text, tokens: int) -> Text:
    """The first tokens of a text."""
    rows = tokens - 1
    assert text.last is not None
    return Text(
        text.tokens[:tokens],
        text.prompt_length,
        text.features[:rows],
        text.last[:rows],
        None,
        text.temperature,
        text.seed,
        text.prompt_id,
    )


def tiny_head(*, draft_vocab: int = VOCAB, seed: int = 0, **variants: Any) -> FeatureHead:
    """A new head for the tiny target; a draft vocabulary of the first tokens."""
    parts = target_parts()
    config = head_config(
        tiny_target().config, parts, FEATURES, HeadOptions(), draft_vocab=draft_vocab, depth=3, name="tiny"
    )
    vocabulary = DraftVocabulary(torch.arange(draft_vocab), VOCAB)
    return fresh(Eagle3Head(config.changed(**variants), vocabulary), parts, trains_output=False, seed=seed)


def perturbed(head: FeatureHead, scale: float = 0.3, seed: int = 5) -> FeatureHead:
    """The head with random weights, none of which is near 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if not name.startswith("lm_head"):
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return head


def settings(**more: Any) -> TrainSettings:
    given: dict[str, Any] = {
        "limits": Limits(steps=20),
        "batch_tokens": 256,
        "learning_rate": 5e-3,
        "warm_up": 4,
        "evaluate_every": 10,
        "depth": 3,
        "dtype": "float32",
    }
    return TrainSettings(**(given | more))


def trainee(
    head: FeatureHead, own: TrainSettings, *, data: Sequence[Text] | None = None, unseen: int = 12
) -> HeadTrainee:
    """The head with texts of the tiny target; the last ones are unseen."""
    data = texts(60) if data is None else data
    seen = len(data) - unseen
    return HeadTrainee(head, target_parts(), data, range(seen), range(seen, len(data)), own)
