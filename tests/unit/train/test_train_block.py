"""Block heads: training's states are those of decoding, and training raises acceptance at every depth."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.heads.base import BlockNodes, BlockRows, TargetParts
from draftree.heads.dflash import DFlashHead
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import collate
from draftree.train.block import GAIN_SIZE, OUTPUT_SIZE, OUTPUTS, BlockTrainee, fresh_block, seed_block
from draftree.train.head import HeadOptions, head_config
from draftree.train.loop import TrainingRun
from draftree.train.preparing import Processes
from draftree.train.settings import Limits
from train_samples import (
    FEATURES,
    PROMPT,
    VOCAB,
    perturbed,
    settings,
    shorter,
    target_parts,
    texts,
    tiny_head,
    tiny_target,
)

CPU = torch.device("cpu")
BLOCK = 3


def block_head(*, markov_rank: int = 8, layers: int = 1, parts: TargetParts | None = None):  # type: ignore[no-untyped-def]
    parts = parts or target_parts()
    base = head_config(
        tiny_target().config, parts, FEATURES, HeadOptions(layers), draft_vocab=VOCAB, depth=BLOCK, name="tiny"
    )
    config = base.changed(
        kind="dspark", qk_norm=True, block_size=BLOCK, mask_token_id=0, markov_rank=markov_rank, anchor_predicts=True
    )
    return fresh_block(DFlashHead(config, DraftVocabulary.full(VOCAB)), parts, trains_output=False, seed=0)


class OneBlock:
    """Attention of one text with one block at its end, as in decoding."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def context(self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, *, window: int = 0) -> None:
        assert query is None
        assert not window
        self.kept[layer] = key, value

    def block(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int = 0
    ) -> Tensor:
        assert not is_causal
        assert not window
        keys, values = (torch.cat(pair) for pair in zip(self.kept[layer], (key[0], value[0]), strict=True))
        groups = query.shape[2] // keys.shape[1]
        keys, values = (part.repeat_interleave(groups, dim=1) for part in (keys, values))
        scores = torch.einsum("shd,khd->hsk", query[0], keys) / math.sqrt(query.shape[-1])
        return torch.einsum("hsk,khd->shd", scores.softmax(-1), values)[None]


@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_states_of_every_anchor_are_those_of_decoding(layers: int) -> None:
    head = perturbed(block_head(layers=layers))
    own = texts(3)
    batch = collate([own[0], shorter(own[1], PROMPT + 4), own[2]], device=CPU, dtype=torch.float32)
    trainee = BlockTrainee(head, target_parts(), list(own), range(2), range(2, 3), settings())
    levels = list(trainee.states_of(batch, BLOCK))
    assert len(levels) == BLOCK
    chain = 0
    for text in batch.texts:
        for anchor in range(PROMPT - 1, text.num_rows):
            rows = BlockRows(text.features[:anchor], text.tokens[1 : anchor + 1], torch.arange(1, anchor + 1), [anchor])
            states = head.run(rows, OneBlock())[0]
            tokens = text.tokens[anchor : anchor + BLOCK]
            for level in range(min(BLOCK, text.num_rows - anchor)):
                assert torch.allclose(levels[level][chain], states[head.first_slot + level], atol=2e-5)
                state = states[None, head.first_slot + level]
                place = torch.tensor([level])
                nodes = BlockNodes(tokens[level : level + 1], place, state, head.logits(state), memory=None)
                wanted, _ = head.follow(nodes)
                found = trainee.logits_of(batch, level, torch.tensor([chain]), levels[level][chain][None])
                assert torch.allclose(found, wanted, atol=1e-4)
            chain += 1
    assert chain == batch.num_chains


def test_training_raises_acceptance_at_every_depth(tmp_path: Path) -> None:
    chosen = settings(
        limits=Limits(steps=120), evaluate_every=120, learning_rate=1e-2, batch_tokens=512, levels_from=0.0
    )
    data = texts(240)
    trainee = BlockTrainee(block_head(layers=2), target_parts(), list(data), range(200), range(200, 240), chosen)
    before = trainee.evaluate(None).modes[0.0].starts
    TrainingRun(trainee, chosen, tmp_path, Processes(CPU)).run()
    after = trainee.evaluate(None).modes[0.0].starts
    assert after.acceptance_length > before.acceptance_length + 0.4
    assert after.conditional[0] > before.conditional[0] + 0.2
    assert after.survival[1] > before.survival[1] + 0.1


def test_a_block_head_begins_with_the_weights_of_a_head() -> None:
    given = perturbed(tiny_head(draft_vocab=VOCAB))
    head = block_head()
    seed_block(head, given)
    first, layer = head.layers[0], given.layers[0]
    width = head.config.hidden
    assert torch.equal(head.fc.weight, given.fc.weight)
    assert torch.equal(head.norm.weight, given.norm.weight)
    assert torch.equal(first.mlp.down_proj.weight, layer.mlp.down_proj.weight)
    assert torch.equal(first.self_attn.q_proj.weight, layer.self_attn.q_proj.weight[:, :width])
    assert torch.equal(first.self_attn.v_proj.weight, layer.self_attn.v_proj.weight[:, width:])


@torch.no_grad()
def test_masked_rows_of_a_new_block_head_are_not_confident() -> None:
    parts = target_parts()
    # as in small models, a state near the embedding of a token predicts that token
    tied = replace(parts, output=3 * parts.embedding)
    data = list(texts(8))
    batch = collate(data, device=CPU, dtype=torch.float32)
    totals = []
    for head in (block_head(parts=tied), with_small_outputs(block_head(parts=tied))):
        trainee = BlockTrainee(head, tied, data, range(6), range(6, 8), settings())
        levels = list(trainee.states_of(batch, BLOCK))
        shares = [trainee.logits_of(batch, 1, torch.arange(batch.num_chains), levels[1]).softmax(-1).amax(-1).mean()]
        totals.append(float(shares[0]))
    assert totals[0] < 0.5 * totals[1]


def with_small_outputs(head: Any) -> Any:
    """The head as it was before `OUTPUT_SIZE` and `GAIN_SIZE`."""
    with torch.no_grad():
        for name, parameter in head.layers.named_parameters():
            if name.endswith(OUTPUTS):
                parameter.div_(OUTPUT_SIZE)
        head.norm.weight.div_(GAIN_SIZE)
    return head
