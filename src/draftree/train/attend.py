"""Attention of training on a head's own steps.

At step 0 every row attends to the rows of its text up to itself. At step s the row of a chain attends to the step-0
rows up to the chain's start, which have true hidden states, and to the chain's own rows of steps 1 to s. Decoding sees
the same: after verification the keys of accepted tokens are computed again from true hidden states.

Source: training-time test, EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftree.train.batches import Batch

__all__ = ["UnrollAttention"]


class UnrollAttention:
    """`Attend` of a batch; call `next_step` between steps."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._step = 0
        self._true: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of step 0 by layer, padded, shape (texts, heads, longest, head_dim)."""
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Keys and values of later steps by layer, shape (chains, heads, head_dim)."""
        self._hidden: Tensor | None = None

    def next_step(self) -> None:
        """Go to the next step."""
        self._step += 1

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend as `Attend` does.

        Rows are those of the batch at step 0, where queries may be those of the chains only, and its chains afterwards.
        """
        groups = query.shape[-2] // key.shape[-2]
        key, value = (part.repeat_interleave(groups, dim=-2) for part in (key, value))
        return self._first(layer, query, key, value) if self._step == 0 else self._later(layer, query, key, value)

    def _first(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, chains = self._batch.rows, self._batch.chain_rows
        is_whole = len(query) == len(key)
        key, value = (rows.padded(part).transpose(1, 2) for part in (key, value))
        self._true[layer], self._own[layer] = (key, value), []
        if is_whole:
            query = rows.padded(query).transpose(1, 2)
            # padding is at the end, where causal rows of the text do not look
            found = scaled_dot_product_attention(query, key, value, is_causal=True)
            return rows.flat(found.transpose(1, 2))
        query = chains.padded(query).transpose(1, 2)
        found = scaled_dot_product_attention(query, key, value, attn_mask=~self._is_hidden())
        return chains.flat(found.transpose(1, 2))

    def _later(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        chains = self._batch.chain_rows
        own = self._own[layer]
        own.append((key, value))
        true_key, true_value = self._true[layer]
        scaled = query / math.sqrt(query.shape[-1])
        scores = chains.padded(scaled).transpose(1, 2) @ true_key.transpose(-1, -2)
        scores = scores.float().masked_fill(self._is_hidden(), -math.inf)
        # one key of each step: products of rows, without a matrix
        diagonal = torch.stack([(scaled * one).sum(-1) for one, _ in own], dim=-1).float()
        weights = torch.cat((scores, chains.padded(diagonal).transpose(1, 2)), dim=-1).softmax(dim=-1)
        weights = weights.to(query.dtype)
        longest = true_key.shape[2]
        found = chains.flat((weights[..., :longest] @ true_value).transpose(1, 2))
        shares = chains.flat(weights[..., longest:].transpose(1, 2))
        for step, (_, one) in enumerate(own):
            found = found + shares[..., step, None] * one
        return found

    def _is_hidden(self) -> Tensor:
        """Return which true rows come after the start of each chain, shape (texts, 1, chains, rows)."""
        if self._hidden is None:
            batch = self._batch
            # places of rows count from the start of their text's line
            start = batch.chain_rows.padded(batch.rows.places[batch.chains] % batch.rows.longest)
            columns = torch.arange(batch.rows.longest, device=start.device)
            self._hidden = (columns > start[..., None])[:, None]
        return self._hidden
