"""DFlash and DSpark: a block of masked tokens is predicted at once, with the target's hidden states as keys and values.

The context of every layer are keys and values of `hidden_norm(fc(features))`, by the layer's own products. The block is
the anchor and masked tokens; its rows see each other. Slot k is at the position of the anchor plus k. It predicts the
token after its position if the anchor predicts (`anchor_predicts`), and the token at its position otherwise. DSpark
adds a bias of low rank by the token before, and an estimate of acceptance; DFlash2 and XPress have files of their own.

Sources: DFlash, arXiv 2602.06036; DSpark, github.com/deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from draftree.core.errors import ConfigurationError
from draftree.core.tensors import to_device
from draftree.heads.base import BlockAttend, BlockHead, BlockNodes, BlockRows, TargetParts
from draftree.heads.config import DFLASH, DFLASH2, DSPARK, XPRESS, HeadConfig
from draftree.heads.dflash2 import BlockConvolution, CandidateSelector
from draftree.heads.layers import Norm, Perceptron, Products, Rotary, Shared, rotate
from draftree.heads.vocabulary import DraftVocabulary
from draftree.heads.xpress import Refiner
from draftree.models.base import EmbeddingFacts

Angles = tuple[Tensor, Tensor]


class BlockLayer(nn.Module):
    """Decoder layer whose rows also attend to the context."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Products(config, config.hidden)
        self.mlp = Perceptron(config)
        self.input_layernorm = Norm(config.hidden, config.epsilon)
        self.post_attention_layernorm = Norm(config.hidden, config.epsilon)
        self.attention_conv = BlockConvolution(config) if config.conv_taps else None
        self.mlp_conv = BlockConvolution(config) if config.conv_taps else None
        self._index = index
        self._window = config.windows[index] if config.windows else 0
        self._is_causal = config.causal or (bool(self._window) and config.causal_windows)

    def read(self, context: Tensor, angles: Angles, attend: BlockAttend) -> None:
        """Keep keys and values of context rows, shape (rows, hidden)."""
        key = rotate(self.self_attn.key(context), *angles)
        attend.context(self._index, None, key, self.self_attn.value(context), window=self._window)

    def forward(self, x: Tensor, angles: Angles, attend: BlockAttend) -> Tensor:
        """Return the outputs of the rows of blocks, shape (sequences, rows, hidden)."""

        def attention(normed: Tensor) -> Tensor:
            mixed = attend.block(
                self._index,
                rotate(self.self_attn.query(normed), *angles),
                rotate(self.self_attn.key(normed), *angles),
                self.self_attn.value(normed),
                is_causal=self._is_causal,
                window=self._window,
            )
            return self.self_attn.out(mixed)

        x = x + _convolved(self.attention_conv, attention, self.input_layernorm(x))
        return x + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(x))


def _convolved(convolution: BlockConvolution | None, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the outputs of a part of a layer, between the convolutions around it."""
    if convolution is None:
        return part(x)
    x, kernel = convolution.before(x)
    return convolution.after(part(x), kernel)


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
        self._has_first_step = not config.anchor_predicts

    @property
    def width(self) -> int:
        """Width of the memory along a path; 0 without one."""
        return 0 if self.joint_proj is None else self._rank

    def start(self, states: Tensor, anchors: Tensor) -> Tensor | None:
        """Return the memory before level 0; arguments as in `BlockHead.start`."""
        if not self.width:
            return None
        memory = states.new_zeros(len(anchors), self.width)
        # trained with the anchor's own slot as the first step, if that does not predict
        return self._step(memory, anchors, states[:, 0])[1] if self._has_first_step else memory

    def forward(self, nodes: BlockNodes) -> tuple[Tensor, Tensor | None]:
        """Return logits and the memory."""
        before, memory = self._step(nodes.memory, nodes.tokens, nodes.states)
        return nodes.logits + self.markov_w2(before).float(), memory

    def _step(self, memory: Tensor | None, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the code of tokens, shape (nodes, rank), and the memory after them."""
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
        return before, memory


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
    """Head of kind `dflash`, `dflash2`, `dspark` or `xpress`."""

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
        self.markov_head = MarkovHead(config) if config.markov_rank and config.kind in (DFLASH, DSPARK) else None
        self.candidate_selector = CandidateSelector(config) if config.kind == DFLASH2 else None
        self.refiner_head = Refiner(config) if config.kind == XPRESS else None
        self.confidence_head = ConfidenceHead(config) if config.has_confidence else None
        self.has_bias = config.markov_rank > 0
        self.first_slot = 0 if config.anchor_predicts else 1
        self.rotary = Rotary(config.rope, config.head_dim, config.max_length)
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
        if self.config.layer:
            neutral = EmbeddingFacts(1.0, 1.0, bias=parts.facts.bias)
            parts = replace(parts, facts=replace(neutral, **self.config.layer))
        embedding = None if self.embed_tokens is None else self.embed_tokens.weight
        output = None if self.lm_head is None else self.lm_head.weight
        self._shared = Shared(parts, self.vocabulary, embedding, output)

    def run(self, rows: BlockRows, attend: BlockAttend) -> Tensor:
        """Return the states of all slots after the final norm; the anchor's slot may not predict."""
        context = self.hidden_norm(self.fc(rows.features.flatten(-2).to(self.fc.weight.dtype)))
        anchors = to_device(rows.anchors, context.device)
        slots = torch.arange(self.config.block_size, device=context.device)
        places = rows.positions[anchors][:, None] + slots
        tables = self.rotary.tables_at(places, context)
        before = _angles(tables, rows.positions - 1)
        inside = _angles(tables, places)
        x = self.shared.embed(self._tokens(rows.tokens[anchors])).to(context.dtype)
        for layer in self.layers:
            assert isinstance(layer, BlockLayer)
            layer.read(context, before, attend)
            x = layer(x, inside, attend)
        return self.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        return self.shared.logits(states)

    @property
    def shared(self) -> Shared:
        """Embedding and output."""
        assert self._shared is not None, "a head is bound to a target before it runs"
        return self._shared

    def _tokens(self, anchors: Tensor) -> Tensor:
        """Return the tokens of blocks, shape (sequences, rows): the anchor and masks."""
        assert self.config.mask_token_id is not None, "tested by the configuration"
        masks = anchors.new_full((len(anchors), self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat((anchors[:, None], masks), dim=1)

    def start(self, states: Tensor, anchors: Tensor, previous: Tensor) -> Tensor | None:
        if self.refiner_head is not None:
            return self.refiner_head.start(states, previous)
        return None if self.markov_head is None else self.markov_head.start(states, anchors)

    def follow(self, nodes: BlockNodes) -> tuple[Tensor, Tensor | None]:
        bias = self.markov_head or self.candidate_selector or self.refiner_head
        assert bias is not None, "has_bias was tested"
        logits, memory = bias(nodes)
        return logits, memory

    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor | None:
        if self.confidence_head is None:
            return None
        before = None
        if self.confidence_head.reads_token:
            assert self.markov_head is not None, "tested in the constructor"
            before = self.markov_head.markov_w1(tokens)
        return self.confidence_head(states, before)
