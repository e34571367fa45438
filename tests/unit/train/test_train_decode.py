"""Logits of training level s are those of the drafter at depth s when the tokens agree, after rejected drafts too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftree.drafters.growing.head_stepper import HeadStepper
from draftree.heads.target_parts import TargetParts
from draftree.heads.torch_passes import TorchPasses
from draftree.train.batches import collate
from draftree.train.data.texts import Text
from draftree.train.unroll import unroll
from head_samples import head_config, random_head, random_parts
from head_texts import HeadText, hidden_states

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
PROMPT = 5
STEPS = 4


def parts() -> TargetParts:
    found = random_parts()
    return replace(found, embedding=found.embedding.double(), output=found.output.double())


@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3.1", "eagle3-qwen3", "eagle3-full"])
@torch.no_grad()
def test_logits_of_a_level_are_those_of_the_drafter(variant: str) -> None:
    head = random_head(head_config(variant)).double()
    head.bind(parts())
    features = hidden_states(head, TOKENS[:-1])
    text = Text(torch.tensor(TOKENS), PROMPT, features, features[:, 0], None, 0.0, 0, 0)
    batch = collate([text], device=torch.device("cpu"), dtype=torch.float64)
    levels = [head.logits(states) for states in unroll(head, batch, STEPS)]

    drafted = HeadText(HeadStepper(TorchPasses(head, torch.device("cpu"))), head, TOKENS[:PROMPT]).read()
    for chain, start in enumerate(range(PROMPT - 1, text.num_rows)):
        own = TOKENS[start + 1 : start + STEPS]
        room = min(STEPS, text.num_rows - start)
        # a sibling of the first node is drafted and rejected in every round
        tokens = [own[0] ^ 1, *own] if own else []
        tree = [-1, -1, *range(1, len(own))][: len(tokens)]
        sizes = [2, *[1] * (len(own) - 1)] if own else []
        found = drafted.levels(tokens, tree, sizes)
        for level in range(room):
            row = found[level][0 if level == 0 else -1][head.vocabulary.ids]
            torch.testing.assert_close(levels[level][chain].double(), row.double(), rtol=1e-4, atol=1e-4)
        drafted.write([TOKENS[start + 1]] if start + 1 < len(TOKENS) else [], ())
