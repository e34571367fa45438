"""Prompts of image-text models through the drop-in: with images, in batches with padding, and with text alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import draftree
from draftree.core.errors import InvalidRequestError
from dropin_samples import padded, plain
from vision_samples import IMAGE, VISION, vision_model, with_images

VARIED = {"repetition_penalty": 1.4, "max_new_tokens": 16}
"""Tiny models with images repeat themselves else, and any drafter would be right."""


def ours(name: str, inputs: dict[str, Any], draft: str = "ngram,min=1", **settings: Any) -> Any:
    if draft != "none":
        settings = {"plan": "fixed", **settings}  # in so short texts another planner may never draft
    return plain(vision_model(name), inputs, custom_generate=draftree.generate, draft=draft, **settings)


@pytest.mark.parametrize("lengths", [(14,), (14, 9, 3)], ids=["one", "batch"])
@pytest.mark.parametrize("name", VISION)
def test_text_alone_is_written_as_by_generate(name: str, lengths: tuple[int, ...]) -> None:
    inputs = padded(*lengths)
    assert torch.equal(ours(name, inputs, **VARIED), plain(vision_model(name), inputs, **VARIED))


@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_token_kinds_that_are_all_text_are_accepted(name: str) -> None:
    inputs = padded(14)
    key = "token_type_ids" if name == "gemma3" else "mm_token_type_ids"
    inputs[key] = torch.zeros_like(inputs["input_ids"])
    assert torch.equal(ours(name, inputs, **VARIED), plain(vision_model(name), inputs, **VARIED))


@pytest.mark.parametrize("lengths", [(9,), (9, 4)], ids=["one", "batch"])
@pytest.mark.parametrize("name", VISION)
def test_text_after_an_image_is_written_as_by_generate(name: str, lengths: tuple[int, ...]) -> None:
    inputs, model = with_images(name, *lengths), vision_model(name)
    before = [model.config._attn_implementation, model.config.vision_config._attn_implementation]
    settings = {**VARIED, "return_dict_in_generate": True, "output_logits": True}
    wanted, got = plain(model, inputs, **settings), ours(name, inputs, **settings)
    assert torch.equal(got.sequences, wanted.sequences)
    assert sum(stats.draft_tokens for stats in got.stats) > 0
    for values, others in zip(got.logits, wanted.logits, strict=True):
        torch.testing.assert_close(values, others, atol=1e-4, rtol=1e-4)
    assert [model.config._attn_implementation, model.config.vision_config._attn_implementation] == before


@pytest.mark.parametrize("name", VISION)
def test_the_image_counts(name: str) -> None:
    """Else the test above would pass with a model that never sees its image."""
    inputs = with_images(name, 9, 4)
    other = inputs | {"pixel_values": inputs["pixel_values"].flip(-1)}
    settings = {**VARIED, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 2}
    one, two = (ours(name, given, **settings).logits[0] for given in (inputs, other))
    assert float((one - two).abs().max()) > 1e-3


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_samples_after_an_image_do_not_depend_on_the_drafter(name: str) -> None:
    inputs = with_images(name, 9, 4)
    settings = {**VARIED, "do_sample": True, "temperature": 0.8, "num_return_sequences": 2}
    texts = []
    vision_model(name)  # its random weights are drawn from the global generator, too
    for draft in ("none", "ngram,min=1", "early-exit,layers=1"):
        torch.manual_seed(5)
        texts.append(ours(name, inputs, draft, **settings))
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


def test_the_same_tokens_with_other_images_share_nothing() -> None:
    inputs = with_images("llava", 20, 20)
    inputs["input_ids"][1] = inputs["input_ids"][0]
    wanted = plain(vision_model("llava"), inputs, **VARIED)
    assert not torch.equal(wanted[0], wanted[1])
    assert torch.equal(ours("llava", inputs, **VARIED), wanted)


def test_a_prompt_that_ends_with_an_image_is_refused() -> None:
    inputs = with_images("llava", 9)
    width = int((inputs["input_ids"][0] == IMAGE).nonzero().max()) + 1
    cut = {name: value[:, :width] if name != "pixel_values" else value for name, value in inputs.items()}
    with pytest.raises(InvalidRequestError, match=f"ends with the image token {IMAGE}"):
        ours("llava", cut)


def test_video_is_refused_by_its_name() -> None:
    inputs = with_images("qwen2_vl", 9)
    inputs["pixel_values_videos"], inputs["video_grid_thw"] = inputs["pixel_values"], inputs["image_grid_thw"]
    ids = inputs["input_ids"]
    inputs["input_ids"] = torch.cat([ids[:, :2], ids[:, 2:10] - 1, ids], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE) + 2 * (inputs["input_ids"] == IMAGE - 1)
    with pytest.raises(InvalidRequestError, match=r"video.* neither video nor audio"):
        ours("qwen2_vl", inputs)
