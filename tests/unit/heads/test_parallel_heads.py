"""P-EAGLE against EAGLE-3's equations row by row, and Medusa against its own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from block_samples import MEDUSA, PARALLEL, VOCABULARY, WIDTH, config_of, random_head, random_parts
from draftree.drafters.growing.kept_rows import BlockPass, KeptRows
from draftree.heads.blocks import BlockRows
from draftree.heads.medusa import MedusaHead
from draftree.heads.peagle import ParallelEagle, PEagleHead


def rows_of(counts: list[int], num_features: int, first: int = 1) -> BlockRows:
    noise = torch.Generator().manual_seed(11)
    total = sum(counts)
    places = torch.cat([torch.arange(first, first + count) for count in counts])
    features = torch.randn(total, num_features, WIDTH, generator=noise)
    return BlockRows(features, torch.randint(0, VOCABULARY, (total,), generator=noise), places, counts)


@pytest.mark.parametrize("layers", [1, 2])
def test_every_level_of_p_eagle_sees_the_text_and_the_masks_before_it(layers: int) -> None:
    config = config_of(PARALLEL, num_layers=layers, fc_norm=True)
    head, parts = random_head(config), random_parts(config)
    head.bind(parts)
    assert isinstance(head, PEagleHead)
    rows, block, kept = rows_of([6], 3), ParallelEagle(head), KeptRows()
    for first, last in ((0, 4), (4, 6)):
        new = BlockRows(rows.features[first:last], rows.tokens[first:last], rows.positions[first:last], [last - first])
        pass_ = BlockPass([kept], new.counts)
        found = block.run(new, pass_)
        pass_.finish()
    # one causal text: the rows of the text, then the masks
    assert config.mask_token_id is not None
    masks = torch.full((config.depth - 1,), config.mask_token_id)
    learned = head.mask_hidden.view(1, 3, WIDTH).expand(config.depth - 1, -1, -1)
    before = head.project(torch.cat((rows.features, learned)))
    places = torch.arange(1, 7 + config.depth - 1)
    states = head.run(torch.cat((rows.tokens, masks)), before, places, causal)
    torch.testing.assert_close(found[0], states[5:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(block.logits(found)[0], head.logits(states[5:]), rtol=1e-4, atol=1e-5)
    assert block.num_levels == config.depth == found.shape[1]


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), value)


def test_p_eagle_of_one_level_is_eagle_3() -> None:
    config = config_of(PARALLEL, depth=1)
    head = random_head(config)
    head.bind(random_parts(config))
    assert isinstance(head, PEagleHead)
    rows = rows_of([3, 2], 3)
    found = ParallelEagle(head).run(rows, BlockPass([KeptRows(), KeptRows()], rows.counts))
    expected = head.run(rows.tokens[:3], head.project(rows.features[:3]), rows.positions[:3], causal)
    torch.testing.assert_close(found[0, 0], expected[-1], rtol=1e-4, atol=1e-5)
    assert found.shape == (2, 1, WIDTH)


def test_medusa_computes_its_equations() -> None:
    config = config_of(MEDUSA)
    head, parts = random_head(config), random_parts(config)
    head.bind(parts)
    assert isinstance(head, MedusaHead)
    rows = rows_of([2, 3], 1)
    states = head.run(rows, BlockPass([KeptRows(), KeptRows()], rows.counts))
    logits, weights = head.logits(states), head.state_dict()
    assert logits.shape == (2, 3, VOCABULARY)
    for text, row in enumerate((1, 4)):
        for level in range(3):
            x = parts.finish(rows.features[row, 0])
            for index in range(config.head_layers):
                name = f"medusa_head.{level}.{index}.linear"
                x = x + F.silu(weights[f"{name}.weight"] @ x + weights[f"{name}.bias"])
            expected = weights[f"medusa_head.{level}.{config.head_layers}.weight"] @ x
            torch.testing.assert_close(logits[text, level], expected, rtol=1e-4, atol=1e-5)
