"""Tiny random heads, and the forward pass of the EAGLE family in plain equations, one row at a time."""

from __future__ import annotations

import contextlib
import hashlib
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.heads.base import FeatureHead, TargetParts
from draftree.heads.config import HeadConfig
from draftree.heads.folders import head_class, write_head
from draftree.heads.vocabulary import DraftVocabulary
from draftree.models.base import EmbeddingFacts

HIDDEN, VOCAB, LAYERS = 16, 40, 4

VARIANTS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle", "features": (-1,), "draft_vocab_size": VOCAB, "own_output": False, "fc_bias": True},
    "eagle-own": {
        "kind": "eagle",
        "features": (-1,),
        "draft_vocab_size": VOCAB,
        "own_embedding": True,
        "num_layers": 2,
    },
    "eagle3": {},
    "eagle3-full": {"draft_vocab_size": VOCAB, "own_output": False, "features": (0, 2, -1)},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "eagle3-before-fc": {"norm_before_fc": True, "norm_before_residual": True, "own_embedding": True},
    "eagle3-qwen3": {"qk_norm": True, "attention_bias": True, "output_bias": True, "num_layers": 2},
    "eagle3-llama3-rope": {
        "rope": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}
"""Values of `HeadConfig` besides the sizes, by name."""


def head_config(variant: str = "eagle3", **values: Any) -> HeadConfig:
    sizes: dict[str, Any] = {
        "kind": "eagle3",
        "features": (1, 2, 3),
        "target_hidden": HIDDEN,
        "hidden": HIDDEN,
        "vocab_size": VOCAB,
        "draft_vocab_size": 24,
        "depth": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "intermediate": 24,
        "max_length": 64,
    }
    return HeadConfig(**{**sizes, **VARIANTS[variant], **values})


def random_head(config: HeadConfig, seed: int = 0, scale: float = 0.5) -> FeatureHead:
    """A head whose products have this spread, and every second token of the target, or all."""
    generator = torch.Generator().manual_seed(seed)
    step = config.vocab_size / config.draft_vocab_size
    ids = torch.tensor([int(step * row) for row in range(config.draft_vocab_size)])
    head = head_class(config.kind)(config, DraftVocabulary(ids, config.vocab_size))
    assert isinstance(head, FeatureHead)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            spread = 0.2 if parameter.dim() == 1 else scale if name.endswith("proj.weight") else 1.0
            noise = torch.randn(parameter.shape, generator=generator) * spread
            parameter.copy_(1 + noise if "norm" in name else noise)
            parameter.requires_grad_(False)
    return head.eval()


def saved_head(**values: Any) -> str:
    """Path of the folder of a random head, the same in every process, written once for all."""
    config = head_config(**values)
    name = hashlib.sha256(repr(config).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"draftree-test-head-{name}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as place:
            write_head(random_head(config), Path(place) / "head")
            with contextlib.suppress(OSError):  # another process was first
                (Path(place) / "head").rename(folder)
    return str(folder)


def random_parts(seed: int = 1, *, vocab: int = VOCAB, hidden: int = HIDDEN, num_layers: int = LAYERS) -> TargetParts:
    generator = torch.Generator().manual_seed(seed)
    embedding, output = (torch.randn(vocab, hidden, generator=generator) for _ in range(2))
    return TargetParts(embedding, output, EmbeddingFacts(1.0, 1.0), lambda states: states * 0.5, num_layers)


def reference_logits(
    head: FeatureHead, parts: TargetParts, tokens: list[int], features: Tensor, path: list[int]
) -> Tensor:
    """Logits after the text and after every token of a drafted path, shape (1 + path, draft vocabulary).

    Args:
        head: of the EAGLE family.
        parts: of the target.
        tokens: the text.
        features: hidden states of all its tokens but the last, shape (tokens - 1, layers, hidden).
        path: drafted tokens.
    """
    c, w = head.config, {name: tensor.double() for name, tensor in head.state_dict().items()}
    embedding = w.get("embed_tokens.weight", parts.embedding.double())
    output = w.get("lm_head.weight", parts.output.double()[head.vocabulary.ids])
    keys: list[list[Tensor]] = [[] for _ in range(c.num_layers)]
    values: list[list[Tensor]] = [[] for _ in range(c.num_layers)]
    frequencies, scaling = _frequencies(c)
    frequencies = frequencies.float().double()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + c.epsilon) * w[name]

    def linear(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0.0)

    def turned(x: Tensor, position: int) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        cos, sin = torch.cos(position * frequencies) * scaling, torch.sin(position * frequencies) * scaling
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def attention(i: int, x: Tensor, position: int) -> Tensor:
        name = f"layers.{i}.self_attn"
        q, k, v = (linear(x, f"{name}.{part}_proj").view(-1, c.head_dim) for part in "qkv")
        if c.qk_norm:
            q, k = norm(q, f"{name}.q_norm.weight"), norm(k, f"{name}.k_norm.weight")
        keys[i].append(turned(k, position))
        values[i].append(v)
        mixed = []
        for head_index, query in enumerate(turned(q, position)):
            group = head_index // (c.num_heads // c.num_kv_heads)
            scores = torch.stack([key[group] @ query for key in keys[i]]) / math.sqrt(c.head_dim)
            mixed.append(torch.softmax(scores, 0) @ torch.stack([value[group] for value in values[i]]))
        return linear(torch.cat(mixed), f"{name}.o_proj")

    def before(position: int) -> Tensor:
        g = features[position - 1].double()
        if c.kind == "eagle":
            return parts.finish(g[0]).double()
        if c.fc_norm:
            g = torch.stack([norm(g[i], f"fc_norm.{i}.weight") for i in range(len(g))])
        joined = g.flatten()
        return linear(norm(joined, "input_norm.weight") if c.norm_before_fc else joined, "fc")

    def state_of(token: int, x: Tensor, position: int) -> Tensor:
        e = embedding[token]
        if c.kind == "eagle":
            x = linear(torch.cat((e, x)), "fc")
        for i in range(c.num_layers):
            name = f"layers.{i}"
            normed = x if c.kind == "eagle" and i == 0 else norm(x, f"{name}.input_layernorm.weight") if i else x
            if c.kind == "eagle3" and i == 0:
                own = norm(x, f"{name}.hidden_norm.weight")
                normed = torch.cat((norm(e, f"{name}.input_layernorm.weight"), own))
                x = own if c.norm_before_residual else x
            x = x + attention(i, normed, position)
            inner = norm(x, f"{name}.post_attention_layernorm.weight")
            gate = linear(inner, f"{name}.mlp.gate_proj")
            x = x + linear(gate * torch.sigmoid(gate) * linear(inner, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
        return x

    state = torch.zeros(c.hidden)
    for position in range(1, len(tokens)):
        state = state_of(tokens[position], before(position), position)
    found = []
    for position, token in enumerate([None, *path], len(tokens) - 1):
        normed = state if c.kind == "eagle" else norm(state, "norm.weight")
        if token is not None:
            state = state_of(token, normed if c.norm_output else state, position)
            normed = state if c.kind == "eagle" else norm(state, "norm.weight")
        found.append(output @ normed)
    return torch.stack(found)


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain causal attention, any number of leading dimensions."""
    group = query.shape[-2] // key.shape[-2]
    q, k, v = (part.transpose(-2, -3) for part in (query, *(x.repeat_interleave(group, -2) for x in (key, value))))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores.masked_fill(~seen, -math.inf).softmax(-1) @ v).transpose(-2, -3)


def _frequencies(c: HeadConfig) -> tuple[Tensor, float]:
    """Llama-3 scaling and none."""
    rope = c.rope
    plain = rope["rope_theta"] ** -(torch.arange(0, c.head_dim, 2).double() / c.head_dim)
    if rope["rope_type"] == "default":
        return plain, 1.0
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    found = []
    for frequency in plain.tolist():
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append((1 - smooth) * frequency / factor + smooth * frequency)
    return torch.tensor(found).double(), 1.0
