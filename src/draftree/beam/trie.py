"""Sets of token sequences as a trie in compressed rows, so that a step needs no loop over tokens.

The layout follows STATIC (arXiv 2602.22647): the children of all nodes are stored one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from draftree.core.errors import ConfigurationError

OUTSIDE = -1  # node of a completion that has left the trie, or ended


class TokenTrie:
    """The sequences that a completion may be. Immutable; may be shared by any number of searches.

    Args:
        sequences: token ids, each sequence with at least one. A completion ends after a sequence that begins no other;
            after one that does, an end token is allowed beside the continuations.

    Raises:
        ConfigurationError: there is no sequence, or an empty one.

    Example:
        >>> trie = TokenTrie([[5, 2], [5, 7, 2]])
        >>> trie.children(trie.step(0, 5)).tolist()
        [2, 7]
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        ordered = sorted({tuple(int(token) for token in sequence) for sequence in sequences})
        if not ordered or not ordered[0]:
            raise ConfigurationError("a trie needs at least one sequence, and each needs at least one token id")
        if min(min(sequence) for sequence in ordered) < 0:
            raise ConfigurationError("a trie holds token ids, which are whole numbers of at least 0")
        tokens: list[int] = []
        parents: list[int] = []
        path: list[int] = [0]
        last: tuple[int, ...] = ()
        ends: list[int] = []
        for sequence in ordered:
            pairs = enumerate(zip(last, sequence, strict=False))
            shared = next((place for place, (old, new) in pairs if old != new), min(len(last), len(sequence)))
            del path[shared + 1 :]
            for token in sequence[shared:]:
                tokens.append(token)
                parents.append(path[-1])
                path.append(len(tokens))
            last = sequence
            ends.append(path[-1])
        # node i + 1 has tokens[i]; rows of children are sorted by parent, then token
        order = np.lexsort((np.array(tokens), np.array(parents)))
        self._tokens = np.array(tokens, dtype=np.int64)[order]
        self._nodes = order.astype(np.int64) + 1
        counts = np.bincount(np.array(parents), minlength=len(tokens) + 1)
        self._starts = np.concatenate(([0], np.cumsum(counts)))
        self._ends_inside = np.zeros(len(counts), dtype=bool)
        self._ends_inside[ends] = counts[ends] > 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self._starts) - 1

    @property
    def has_inner_ends(self) -> bool:
        """Whether a sequence begins another."""
        return bool(self._ends_inside.any())

    def inner_ends(self, nodes: Sequence[int]) -> np.ndarray:
        """Return the indices of nodes at which a sequence ends and another goes on, int64."""
        at = np.array(nodes, dtype=np.int64)
        return np.flatnonzero((at != OUTSIDE) & self._ends_inside[np.maximum(at, 0)])

    def children(self, node: int) -> np.ndarray:
        """Return the allowed tokens after a node, ascending, int64."""
        return self._tokens[:0] if node == OUTSIDE else self._tokens[self._starts[node] : self._starts[node + 1]]

    def step(self, node: int, token: int) -> int:
        """Return the node after a token, or `OUTSIDE`; 0 is the root."""
        children = self.children(node)
        index = int(np.searchsorted(children, token))
        if index < len(children) and children[index] == token:
            return int(self._nodes[self._starts[node] + index])
        return OUTSIDE

    def allowed(self, nodes: Sequence[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and tokens below `vocab_size` of all allowed continuations, int64; each node is a row."""
        children = [self.children(node) for node in nodes]
        rows = np.repeat(np.arange(len(nodes)), list(map(len, children)))
        tokens = np.concatenate([self._tokens[:0], *children])
        fits = tokens < vocab_size
        return rows[fits], tokens[fits]
