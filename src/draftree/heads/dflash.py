"""DFlash and DSpark: a block of masked tokens is predicted at once, with the target's hidden states as keys and values.

The context of every layer are keys and values of `hidden_norm(fc(features))`, by the layer's own products. The block is
the anchor and masked tokens; its rows see each other. Slot k is at the position of the anchor plus k. It predicts the
token after its position if the anchor predicts (`anchor_predicts`), and the token at its position otherwise. DSpark
adds a bias of low rank by the token before, and an estimate of acceptance.

Sources: DFlash, arXiv 2602.06036; DSpark, github.com/deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from draftree.core.errors import ConfigurationError
from draftree.core.tensors import to_device
from draftree.heads.base import BlockAttend, BlockHead, BlockRows, TargetParts
from draftree.heads.config import HeadConfig
from draftree.heads.layers import Norm, Perceptron, Products, Rotary, Shared, rotate
from draftree.heads.vocabulary import DraftVocabulary

Angles = tuple[Tensor, Tensor]


class BlockLayer(nn.Module):
    """Decoder layer whose rows also attend to the context."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Products(config, config.hidden)
        self.mlp = Perceptron(config)
        self.input_layernorm = Norm(config.hidden, config.epsilon)
        self.post_attention_layernorm = Norm(config.hidden, config.epsilon)
        self._index = index
        self._window = config.windows[index] if config.windows else 0
        self._is_causal = config.causal or (bool(self._window) and config.causal_windows)

    def read(self, context: Tensor, angles: Angles, attend: BlockAttend) -> None:
        """Keep keys and values of context rows, shape (rows, hidden)."""
        key = rotate(self.self_attn.key(context), *angles)
        attend.context(self._index, None, key, self.self_attn.value(context), window=self._window)

    def forward(self, x: Tensor, angles: Angles, attend: BlockAttend) -> Tensor:
        """Return the outputs of the rows of blocks, shape (sequences, rows, hidden)."""
        normed = self.input_layernorm(x)
        mixed = attend.block(
            self._index,
            rotate(self.self_attn.query(normed), *angles),
            rotate(self.self_attn.key(normed), *angles),
            self.self_attn.value(normed),
            is_causal=self._is_causal,
            window=self._window,
        )
        x = x + self.self_attn.out(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Bias of low rank by the token before."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        wide = config.hidden
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.gate_proj = nn.Linear(wide + rank, rank) if config.markov_type == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + wide, 3 * rank) if config.markov_type == "rnn" else None
        self._rank = rank

    @property
    def width(self) -> int:
        """Width of the memory along a path; 0 without one."""
        return 0 if self.joint_proj is None else self._rank

    def forward(self, memory: Tensor | None, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the bias and the memory; arguments as in `BlockHead.follow`."""
        before = self.markov_w1(tokens)
        states = states.to(before.dtype)
        if self.gate_proj is not None:
            before = torch.sigmoid(self.gate_proj(torch.cat((states, before), dim=-1))) * before
        elif self.joint_proj is not None:
            assert memory is not None, "a recurrent bias has a memory"
            joined = torch.cat((memory, before, states), dim=-1)
            gate, candidate, out = self.joint_proj(joined).chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            memory = gate * memory + (1 - gate) * torch.tanh(candidate)
            before = torch.tanh(out)
        return self.markov_w2(before).float(), memory


class ConfidenceHead(nn.Module):
    """Estimate of acceptance."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.reads_token = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden + (config.markov_rank if self.reads_token else 0), 1)

    def forward(self, states: Tensor, before: Tensor | None) -> Tensor:
        """Return probabilities, shape (nodes,), float32."""
        read = states if before is None else torch.cat((states, before.to(states.dtype)), dim=-1)
        return torch.sigmoid(self.proj(read)[..., 0].float())


def _angles(tables: Angles, positions: Tensor) -> Angles:
    """Return cosines and sines of positions, shape (..., 1, head_dim)."""
    return tables[0][positions].unsqueeze(-2), tables[1][positions].unsqueeze(-2)


@final
class DFlashHead(BlockHead):
    """Head of kind `dflash` or `dspark`."""

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__(config, vocabulary)
        if config.has_confidence and config.confidence_with_markov and not config.markov_rank:
            raise ConfigurationError("head: confidence_with_markov needs a markov_rank of at least 1")
        self.fc = nn.Linear(len(config.features) * config.target_hidden, config.hidden, bias=False)
        self.hidden_norm = Norm(config.hidden, config.epsilon)
        self.layers = nn.ModuleList(BlockLayer(config, index) for index in range(config.num_layers))
        self.norm = Norm(config.hidden, config.epsilon)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden) if config.own_embedding else None
        self.lm_head = nn.Linear(config.hidden, config.draft_vocab_size, bias=False) if config.own_output else None
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.has_confidence else None
        self.has_bias = self.markov_head is not None
        self.first_slot = 0 if config.anchor_predicts else 1
        self._rotary = Rotary(config.rope, config.head_dim, config.max_length)
        self._shared: Shared | None = None

    @property
    def num_levels(self) -> int:
        return self.config.block_size - (0 if self.config.anchor_predicts else 1)

    def bind(self, parts: TargetParts) -> None:
        """Set the parts that are shared with the target."""
        self.require_target(parts)
        if self.config.hidden != parts.hidden and (self.embed_tokens is None or self.lm_head is None):
            raise ConfigurationError(
                f"the head has width {self.config.hidden}, the target {parts.hidden}, and it does not bring its own "
                "embedding and output: its folder is incomplete"
            )
        embedding = None if self.embed_tokens is None else self.embed_tokens.weight
        output = None if self.lm_head is None else self.lm_head.weight
        self._shared = Shared(parts, self.vocabulary, embedding, output)

    def run(self, rows: BlockRows, attend: BlockAttend) -> Tensor:
        """Return the states of all slots after the final norm; the anchor's slot may not predict."""
        context = self.hidden_norm(self.fc(rows.features.flatten(-2).to(self.fc.weight.dtype)))
        anchors = to_device(rows.anchors, context.device)
        slots = torch.arange(self.config.block_size, device=context.device)
        places = rows.positions[anchors][:, None] + slots
        tables = self._rotary.tables_at(places, context)
        before = _angles(tables, rows.positions - 1)
        inside = _angles(tables, places)
        x = self._bound.embed(self._tokens(rows.tokens[anchors])).to(context.dtype)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            layer.read(context, before, attend)
            x = layer(x, inside, attend)
        return self.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        return self._bound.logits(states)

    @property
    def _bound(self) -> Shared:
        assert self._shared is not None, "a head is bound to a target before it runs"
        return self._shared

    def _tokens(self, anchors: Tensor) -> Tensor:
        """Return the tokens of blocks, shape (sequences, rows): the anchor and masks."""
        assert self.config.mask_token_id is not None, "tested by the configuration"
        masks = anchors.new_full((len(anchors), self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat((anchors[:, None], masks), dim=1)

    def start(self, states: Tensor, anchors: Tensor) -> Tensor | None:
        if self.markov_head is None or not self.markov_head.width:
            return None
        memory = states.new_zeros(len(anchors), self.markov_head.width)
        if self.config.anchor_predicts:
            return memory
        # trained with the anchor's own slot as the first step
        _, memory = self.markov_head(memory, anchors, states[:, 0])
        return memory

    def follow(self, memory: Tensor | None, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self.markov_head is not None, "has_bias was tested"
        bias, memory = self.markov_head(memory, tokens, states)
        return bias, memory

    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor | None:
        if self.confidence_head is None:
            return None
        before = None
        if self.confidence_head.reads_token:
            assert self.markov_head is not None, "tested in the constructor"
            before = self.markov_head.markov_w1(tokens)
        return self.confidence_head(states, before)
