"""Heads that draft in one pass: DFlash against transformers, DSpark, P-EAGLE and Medusa against their equations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from block_samples import (
    FLASH,
    MEDUSA,
    PARALLEL,
    PRESS,
    SECOND,
    SPARK,
    VOCABULARY,
    WIDTH,
    BlockTexts,
    config_of,
    random_head,
    random_parts,
)
from draftree.heads.base import BlockHead, BlockNodes, BlockRows, TargetParts
from draftree.heads.dflash import DFlashHead
from draftree.heads.dflash2 import BlockConvolution
from draftree.heads.medusa import MedusaHead
from draftree.heads.peagle import ParallelEagle, PEagleHead
from draftree.models.torch.inspection import cache_name
from head_samples import causal

FEATURES = 3


def rows_of(counts: list[int], *, num_features: int = FEATURES) -> BlockRows:
    noise = torch.Generator().manual_seed(5)
    total = sum(counts)
    places = torch.cat([torch.arange(1, count + 1) for count in counts])
    features = torch.randn(total, num_features, WIDTH, generator=noise)
    return BlockRows(features, torch.randint(0, 40, (total,), generator=noise), places, counts)


def parts_of_rows(rows: BlockRows, first: int, last: int) -> BlockRows:
    return BlockRows(rows.features[first:last], rows.tokens[first:last], rows.positions[first:last], [last - first])


def bound(config: Any) -> tuple[DFlashHead, TargetParts]:
    head, parts = random_head(config), random_parts(config)
    head.bind(parts)
    assert isinstance(head, DFlashHead)
    return head, parts


def run(head: BlockHead, rows: BlockRows) -> Tensor:
    return BlockTexts(head, len(rows.counts)).run(rows).states


def reference(head: DFlashHead) -> Any:
    """The model of transformers with the weights of our head."""
    from transformers import MuseGlimmerAssistantConfig
    from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

    config = head.config
    library: Any = MuseGlimmerAssistantConfig
    made = library(
        hidden_size=config.hidden, intermediate_size=config.intermediate, num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim,
        rms_norm_eps=config.epsilon, rope_parameters=dict(config.rope), block_size=config.block_size,
        mask_token_id=config.mask_token_id, target_layer_ids=[layer - 1 for layer in config.features],
        layer_types=["sliding_attention" if width else "full_attention" for width in config.windows or (0, 0)],
        sliding_window=max(config.windows, default=2049) - 1, attn_implementation="eager",
    )  # fmt: skip
    model = MuseGlimmerAssistantModel(made).eval()
    theirs = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({theirs.get(name, name): part for name, part in head.state_dict().items()})
    return model


def hidden_ahead(size: int, length: int) -> Tensor:
    """Additive mask of a causal block after a context."""
    return torch.full((1, 1, size, length + size), -torch.inf).triu(length + 1)


@pytest.mark.parametrize(("windows", "causal"), [((), False), ((5, 0), False), ((), True)])
def test_dflash_computes_what_transformers_does_round_by_round(windows: tuple[int, ...], causal: bool) -> None:
    from transformers.cache_utils import DFlashCache

    head, parts = bound(config_of(FLASH, windows=windows, causal=causal))
    model = reference(head)
    cache = DFlashCache(config=model.config)
    cache.activate_past_recording()
    rows, text, size = rows_of([9]), BlockTexts(head), head.config.block_size
    for first, last in ((0, 4), (4, 5), (5, 9)):
        new = parts_of_rows(rows, first, last)
        cache.set_previous_accepted_tokens(last - first)
        if first:
            cache.crop(-size)
        tokens = torch.tensor([[int(new.tokens[-1]), *[head.config.mask_token_id] * (size - 1)]])
        theirs = model(
            noise_embeds=parts.embedding[tokens],
            context_hidden_states=new.features.flatten(1)[None],
            position_ids=torch.arange(first, last + size)[None],
            attention_mask={"full_attention": hidden_ahead(size, last)} if causal else None,
            **{cache_name(model.forward): cache},
        ).last_hidden_state[0]
        ours = text.run(new).states[0]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert text.slots[0].length == 9
    expected = run(head, rows)[0]
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    logits = head.logits(ours[None])[0]
    torch.testing.assert_close(logits, ours @ parts.output.T, rtol=1e-4, atol=1e-5)


def test_texts_of_a_batch_do_not_see_each_other() -> None:
    head, _ = bound(config_of(FLASH))
    rows = rows_of([3, 1, 6])
    together = run(head, rows)
    for text, (first, last) in enumerate(((0, 3), (3, 4), (4, 10))):
        alone = run(head, parts_of_rows(rows, first, last))
        torch.testing.assert_close(together[text], alone[0], rtol=1e-4, atol=1e-5)


def test_the_last_rows_of_the_context_count() -> None:
    head, _ = bound(config_of(FLASH))
    rows = rows_of([4])
    before = run(head, rows)
    rows.features[-1] += 1
    assert not torch.allclose(before, run(head, rows), atol=1e-3)


@pytest.mark.parametrize("values", [{"windows": (6, 6), "causal_windows": True}, {"causal": True}])
def test_causal_blocks_hide_later_slots(values: dict[str, Any]) -> None:
    head, _ = bound(config_of(FLASH, **values))
    free, _ = bound(config_of(FLASH))
    rows = rows_of([4])
    changed, at_first = head.config.changed(mask_token_id=46), run(head, rows)
    other = random_head(changed)
    other.bind(random_parts(changed))
    assert isinstance(other, DFlashHead)
    torch.testing.assert_close(run(other, rows)[0, 0], at_first[0, 0])
    assert not torch.allclose(run(free, rows)[0, 0], at_first[0, 0])


@pytest.mark.parametrize("anchor_predicts", [True, False])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_bias_of_dspark_follows_its_equations(kind: str, anchor_predicts: bool) -> None:
    config = config_of(SPARK, markov_type=kind, anchor_predicts=anchor_predicts)
    head, _ = bound(config)
    weights, rank = head.state_dict(), config.markov_rank
    states = run(head, rows_of([3, 2]))
    path = torch.tensor([[7, 3, 9], [1, 40, 2]])
    memory = head.start(states, path[:, 0], path[:, 0])
    for level in range(3):
        slot = level + head.first_slot
        logits = torch.zeros(2, config.draft_vocab_size)
        bias, memory = head.follow(
            BlockNodes(path[:, level], torch.tensor([level] * 2), states[:, slot], logits, memory)
        )
        for text in range(2):
            # all slots up to this one from the beginning, as in training
            known = [path[text, 0].item()] * head.first_slot + path[text, : level + 1].tolist()
            torch.testing.assert_close(bias[text], expected_bias(weights, kind, rank, known, states[text]))
    assert head.num_levels == (4 if anchor_predicts else 3)


def expected_bias(weights: dict[str, Tensor], kind: str, rank: int, tokens: list[int], states: Tensor) -> Tensor:
    memory = torch.zeros(rank)
    for slot, token in enumerate(tokens):
        code = weights["markov_head.markov_w1.weight"][token]
        if kind == "gated":
            joined = torch.cat((states[slot], code))
            gate = weights["markov_head.gate_proj.weight"] @ joined + weights["markov_head.gate_proj.bias"]
            code = code * torch.sigmoid(gate)
        elif kind == "rnn":
            joined = torch.cat((memory, code, states[slot]))
            mixed = weights["markov_head.joint_proj.weight"] @ joined + weights["markov_head.joint_proj.bias"]
            gate, new, out = mixed[:rank], mixed[rank : 2 * rank], mixed[2 * rank :]
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(new)
            code = torch.tanh(out)
    return weights["markov_head.markov_w2.weight"] @ code


def test_the_convolutions_of_dflash2_follow_their_equations() -> None:
    config = config_of(SECOND, conv_taps=3)
    convolution = random_head(config).get_submodule("layers.0.mlp_conv")
    assert isinstance(convolution, BlockConvolution)
    weights, x = convolution.state_dict(), torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(3))
    kernels = (x @ weights["kernel_projection.weight"].T).view(2, 4, 2, 3, WIDTH // config.conv_group)

    def expected(inputs: Tensor, place: int) -> Tensor:
        result = torch.zeros_like(inputs)
        for text, row, channel in itertools.product(range(2), range(4), range(WIDTH)):
            for tap in range(min(3, row + 1)):
                dynamic = kernels[text, row, place, tap, channel // config.conv_group]
                factor = weights["base_kernel"][place, tap, channel] + dynamic
                result[text, row, channel] += factor * inputs[text, row - tap, channel]
        return result

    inputs, kernel = convolution.before(x)
    torch.testing.assert_close(inputs, expected(x, 0))
    torch.testing.assert_close(convolution.after(x.flip(2), kernel), expected(x.flip(2), 1))


def test_dflash2_ranks_the_best_tokens_again() -> None:
    head, _ = bound(config_of(SECOND))
    weights, states = head.state_dict(), run(head, rows_of([3, 2]))
    logits, tokens = head.logits(states)[:, 1], torch.tensor([7, 40])
    assert head.start(states, tokens, tokens) is None
    found, memory = head.follow(BlockNodes(tokens, torch.tensor([0, 0]), states[:, 1], logits, None))
    assert memory is None
    for text, token in enumerate(tokens.tolist()):
        best = logits[text].topk(5).indices.tolist()
        code = weights["candidate_selector.hidden_projection.weight"] @ states[text, 1]
        code = code * weights["candidate_selector.predecessor_codebook"][token]
        for other in range(VOCABULARY):
            score = logits[text, other] + code @ weights["candidate_selector.successor_codebook"][other]
            torch.testing.assert_close(found[text, other], score if other in best else torch.tensor(-torch.inf))


@pytest.mark.parametrize("anchor_predicts", [True, False])
def test_the_bias_of_xpress_is_that_of_the_whole_block(anchor_predicts: bool) -> None:
    head, _ = bound(config_of(PRESS, anchor_predicts=anchor_predicts))
    weights = {name.removeprefix("refiner_head."): part for name, part in head.state_dict().items()}
    states = run(head, rows_of([3, 2]))
    tokens = torch.tensor([[11, 7, 3, 9, 5], [2, 1, 40, 2, 8]])  # the token before the anchor, the anchor, drafts
    before = tokens[:, head.config.anchor_predicts :][:, : head.config.block_size]
    mean = states.mean(1, keepdim=True).expand_as(states)
    parts = [states @ weights["down_h.weight"].T, mean @ weights["down_g.weight"].T]
    codes = torch.cat([*parts, weights["token_embed.weight"][before]], -1) @ weights["in_proj.weight"].T
    x = codes + torch.einsum("rkj,njr->nkr", weights["mix_l"].tril(), codes)
    gate = F.silu(x @ weights["mlp_gate.weight"].T) * (x @ weights["mlp_up.weight"].T)
    wanted = (x + gate @ weights["mlp_down.weight"].T) @ weights["readout.weight"].T
    memory = head.start(states, tokens[:, 1], tokens[:, 0])
    for level in range(head.num_levels):
        slot = level + head.first_slot
        nodes = BlockNodes(tokens[:, 1 + level], torch.tensor([level] * 2), states[:, slot], 0 * wanted[:, 0], memory)
        bias, memory = head.follow(nodes)
        torch.testing.assert_close(bias, wanted[:, slot], rtol=1e-4, atol=1e-5)


def test_the_confidence_of_dspark_follows_its_equation() -> None:
    head, _ = bound(config_of(SPARK))
    weights = head.state_dict()
    states, tokens = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3)), torch.tensor([5, 11])
    joined = torch.cat((states, weights["markov_head.markov_w1.weight"][tokens]), dim=1)
    expected = torch.sigmoid(joined @ weights["confidence_head.proj.weight"][0] + weights["confidence_head.proj.bias"])
    found = head.confidence(tokens, states)
    assert found is not None
    torch.testing.assert_close(found, expected)
    assert bound(config_of(FLASH))[0].confidence(tokens, states) is None


@pytest.mark.parametrize("layers", [1, 2])
def test_every_level_of_p_eagle_sees_the_text_and_the_masks_before_it(layers: int) -> None:
    config = config_of(PARALLEL, num_layers=layers, fc_norm=True)
    head, parts = random_head(config), random_parts(config)
    head.bind(parts)
    assert isinstance(head, PEagleHead)
    rows, block = rows_of([6]), ParallelEagle(head)
    text = BlockTexts(block)
    for first, last in ((0, 4), (4, 6)):
        found = text.run(parts_of_rows(rows, first, last)).states
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


def test_p_eagle_of_one_level_is_eagle_3() -> None:
    config = config_of(PARALLEL, depth=1)
    head = random_head(config)
    head.bind(random_parts(config))
    assert isinstance(head, PEagleHead)
    rows = rows_of([3, 2])
    found = run(ParallelEagle(head), rows)
    expected = head.run(rows.tokens[:3], head.project(rows.features[:3]), rows.positions[:3], causal)
    torch.testing.assert_close(found[0, 0], expected[-1], rtol=1e-4, atol=1e-5)
    assert found.shape == (2, 1, WIDTH)


def test_medusa_computes_its_equations() -> None:
    config = config_of(MEDUSA)
    head, parts = random_head(config), random_parts(config)
    head.bind(parts)
    assert isinstance(head, MedusaHead)
    rows = rows_of([2, 3], num_features=1)
    states = run(head, rows)
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
