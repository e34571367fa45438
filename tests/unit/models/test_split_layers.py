"""A pass in two parts: the first layers anywhere, the others over their states; and logits of given states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftree.models.base import Extend, Pass
from draftree.models.kv.slotted import SlottedModel
from draftree.models.torch.hf import HFModel
from families import fresh
from native_samples import FAMILIES, SIZES, native, text

PROMPT, TREE, PARENTS = text(9), text(6), (-1, 0, 0, 1, -1, 4)


def model_of(kind: str, family: str) -> SlottedModel:
    return native(family) if kind == "native" else HFModel(fresh(family, **(SIZES | FAMILIES[family])))


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_other_layers_go_on_from_given_states(kind: str, family: str) -> None:
    """Prompt and tree in one pass each; a slot beside them shifts the rows of the second part."""
    model = model_of(kind, family)
    split, last = 1, model.num_layers
    whole, rest, beside = model.open(), model.open(), model.open()
    other: Any = Extend(beside, [0] * 3, range(-1, 2))
    for tokens, parents in ((PROMPT, range(-1, len(PROMPT) - 1)), (TREE, PARENTS)):
        wanted = model.run(Pass([Extend(whole, tokens, parents)], capture=(split, last)))
        assert wanted.hidden is not None
        middle, end = wanted.hidden[:, 0].clone(), wanted.hidden[:, 1].clone()
        logits = wanted.logits.tensor().clone()
        jobs = [Extend(rest, [0] * len(tokens), parents), other]
        found = model.run_rest(jobs, torch.cat([middle, middle[:3]]), first=split, capture=(last,))
        assert found.hidden is not None
        exact = kind == "native"
        close(found.hidden_of(0)[:, 0], end, exact=exact)
        close(found.of(0).tensor(), logits, exact=exact)
        close(model.read_out(end).tensor(), logits, exact=exact)
        close(model.read_out(end[2:3]).tensor(), logits[2:3], exact=exact)
        if len(parents) == len(PROMPT):
            model.commit(whole, range(len(tokens)))
            model.commit(rest, range(len(tokens)))
            model.commit(beside, range(3))
    assert model.num_open == 3, "a read-out leaves no slot"
    for slot in (whole, rest, beside):
        model.close(slot)


def close(found: torch.Tensor, wanted: torch.Tensor, *, exact: bool) -> None:
    if exact:
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
