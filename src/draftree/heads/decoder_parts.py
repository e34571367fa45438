"""Parts of heads that do not draft level by level: products of attention, embedding and output."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from draftree.heads.config import HeadConfig
from draftree.heads.layers import Norm
from draftree.heads.target_parts import TargetParts
from draftree.heads.vocabulary import DraftVocabulary


class Products(nn.Module):
    """Products before and after attention, with norms of queries and keys if the head has them.

    Args:
        config: the head.
        width: width of the input.
    """

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        self._shape = (config.num_heads, config.num_kv_heads, config.head_dim)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden, bias=config.output_bias)
        self.q_norm = Norm(config.head_dim, config.epsilon) if config.qk_norm else None
        self.k_norm = Norm(config.head_dim, config.epsilon) if config.qk_norm else None

    def query(self, x: Tensor) -> Tensor:
        """Return queries before rotation, shape (..., rows, heads, head_dim)."""
        found = self.q_proj(x).unflatten(-1, (self._shape[0], self._shape[2]))
        return found if self.q_norm is None else self.q_norm(found)

    def key(self, x: Tensor) -> Tensor:
        """Return keys before rotation, shape (..., rows, kv_heads, head_dim)."""
        found = self.k_proj(x).unflatten(-1, (self._shape[1], self._shape[2]))
        return found if self.k_norm is None else self.k_norm(found)

    def value(self, x: Tensor) -> Tensor:
        """Return values, shape (..., rows, kv_heads, head_dim)."""
        found: Tensor = self.v_proj(x).unflatten(-1, (self._shape[1], self._shape[2]))
        return found

    def out(self, mixed: Tensor) -> Tensor:
        """Return the output of attention, from shape (..., rows, heads, head_dim)."""
        found: Tensor = self.o_proj(mixed.flatten(-2))
        return found


class Shared:
    """Embedding and output of a head: its own tensors, or the target's.

    Args:
        parts: the target.
        vocabulary: the tokens that the head can propose.
        embedding: the head's own embedding, shape (vocabulary, hidden); None to use the target's.
        output: the head's own output, shape (draft vocabulary, hidden); None to use the target's rows.
    """

    def __init__(
        self, parts: TargetParts, vocabulary: DraftVocabulary, embedding: Tensor | None, output: Tensor | None
    ) -> None:
        self._embedding = parts.embedding if embedding is None else embedding
        self._scale = parts.facts.embedding_scale if embedding is None else 1.0
        self._facts = parts.facts if output is None else None
        ids = vocabulary.ids.to(parts.output.device)
        target = parts.output if vocabulary.is_full else parts.output[ids]
        self._output = target if output is None else output
        bias = parts.facts.bias if output is None else None
        self._bias = bias if bias is None or vocabulary.is_full else bias[ids.to(bias.device)]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings, shape (..., hidden)."""
        found = F.embedding(tokens, self._embedding)
        return found if self._scale == 1.0 else found * self._scale

    def logits(self, states: Tensor) -> Tensor:
        """Return logits of the draft vocabulary, float32."""
        found = F.linear(states.to(self._output.dtype), self._output).float()
        if self._bias is not None:
            found = found + self._bias
        return found if self._facts is None else self._facts.capped(found)
