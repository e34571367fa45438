from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftree.sampling.history import History

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS.filter(bool), st.lists(TOKENS, max_size=8), st.integers(0, 100))
def test_is_a_list_with_a_prompt_length(prompt: list[int], pieces: list[list[int]], capacity: int) -> None:
    history = History(prompt, capacity=capacity)
    written: list[int] = []
    for piece in pieces:
        history.append(piece)
        written += piece
        assert history.tokens.tolist() == prompt + written
        assert history.output.tolist() == written
        assert (len(history), history.num_output_tokens) == (len(prompt + written), len(written))
    assert history.tokens.dtype == np.int64
    assert history.prompt_length == len(prompt)


def test_tokens_since_a_place_are_a_list_of_their_own() -> None:
    history = History([1, 2, 3])
    history.append(range(4, 40))  # the array grows
    since = history.since(2)
    history.append([0])
    assert since == list(range(3, 40))
    assert history.since(len(history)) == []
