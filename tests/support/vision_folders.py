"""Folders of tiny image-text models with tokenizer and processor, and pictures for them. Not a test itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizersTokenizer
from transformers import PreTrainedTokenizerFast

from families import VOCAB_SIZE
from vision_samples import IMAGE, vision_model

CHAT_TEMPLATE = (
    "<bos> {% for message in messages %}{{ message['role'] }} {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% else %} {{ part['text'] }} {% endif %}{% endfor %}{% endif %} w80 "
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
"""A message's content may be a text, or parts; an image is a placeholder that the processor expands."""
PARTS_TEMPLATE = CHAT_TEMPLATE.replace("{{ message['content'] }}", "")
"""As that of Idefics 3: of a content that is a text it writes nothing."""


def tokenizer_of(
    words: dict[str, int], *, placeholder: str, template: str = CHAT_TEMPLATE, **settings: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer of the words w0, w1, …; some ids have other words, which are special tokens."""
    vocab = {f"w{number}": number for number in range(VOCAB_SIZE)}
    named = {"<unk>": 0, "<bos>": 1, "user": 81, "assistant": 82, "system": 83, **words}
    vocab = {word: number for word, number in vocab.items() if number not in named.values()} | named
    tokenizer = TokenizersTokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<bos>", *words)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<bos>",
        pad_token="<unk>",
        chat_template=template.replace("PLACEHOLDER", placeholder),
        **settings,
    )


def _gemma3(folder: Path) -> None:
    words = {"<image_soft_token>": IMAGE, "<start_of_image>": 92, "<end_of_image>": 93}
    names = dict(zip(("image_token", "boi_token", "eoi_token"), words, strict=True))
    tokenizer = tokenizer_of(words, placeholder=" <start_of_image> ", extra_special_tokens=names)
    _write(folder, tokenizer, "Gemma3Processor", image_seq_length=4)
    _write_images(folder, "Gemma3ImageProcessor", size={"height": 8, "width": 8})


def _gemma4(folder: Path) -> None:
    words = {"<image_soft_token>": IMAGE, "<start_of_image>": 92, "<end_of_image>": 93}
    words |= {"<audio>": 94, "<start_of_audio>": 95, "<end_of_audio>": 90}
    parts = ("image_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token")
    names = dict(zip(parts, words, strict=True))
    _write(
        folder, tokenizer_of(words, placeholder=" <image_soft_token> ", extra_special_tokens=names), "Gemma4Processor"
    )
    _write_images(folder, "Gemma4ImageProcessor", patch_size=2, pooling_kernel_size=2, max_soft_tokens=70)


def letters_of(words: dict[str, int], *, placeholder: str) -> PreTrainedTokenizerFast:
    """A tokenizer of letters with the same special tokens, for families that have a class of BPE tokenizers."""
    letters = "Ġw0123456789aeimnrstuy"
    vocab = {"<unk>": 0, "<bos>": 1, **{letter: 2 + place for place, letter in enumerate(letters)}, **words}
    tokenizer = TokenizersTokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<bos>", *words)])
    template = CHAT_TEMPLATE.replace("PLACEHOLDER", placeholder)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", chat_template=template)


def _qwen(folder: Path, kind: str, make: Callable[..., PreTrainedTokenizerFast] = tokenizer_of) -> None:
    words = {"<|video_pad|>": 90, "<|image_pad|>": IMAGE, "<|vision_start|>": 92, "<|vision_end|>": 93}
    placeholder = " <|vision_start|> <|image_pad|> <|vision_end|> "
    _write(folder, make(words, placeholder=placeholder), kind)
    _write_images(
        folder,
        "Qwen2VLImageProcessor",
        patch_size=2,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 16, "longest_edge": 128},
    )


def _llava(folder: Path) -> None:
    tokenizer = tokenizer_of({"<image>": IMAGE}, placeholder=" <image> ")
    settings = {"patch_size": 2, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    _write(folder, tokenizer, "LlavaProcessor", **settings)
    size = {"height": 4, "width": 4}
    _write_images(folder, "CLIPImageProcessor", size=size, crop_size=size)


def _mistral3(folder: Path) -> None:
    words = {"[IMG]": IMAGE, "[IMG_BREAK]": 92, "[IMG_END]": 93}
    _write(folder, tokenizer_of(words, placeholder=" [IMG] "), "PixtralProcessor", patch_size=2, spatial_merge_size=2)
    _write_images(folder, "PixtralImageProcessor", size={"longest_edge": 8}, patch_size=2)


def _idefics3(folder: Path, kind: str) -> None:
    words = {"<global-img>": 90, "<image>": IMAGE, "<fake_token_around_image>": 92, "<row_1_col_1>": 93}
    words |= {"<end_of_utterance>": 94}
    _write(folder, tokenizer_of(words, placeholder=" <image> ", template=PARTS_TEMPLATE), kind, image_seq_len=4)
    size = {"longest_edge": 8}
    _write_images(folder, kind.replace("Processor", "ImageProcessor"), size=size, max_image_size=size)


def _write(folder: Path, tokenizer: PreTrainedTokenizerFast, kind: str, **settings: Any) -> None:
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind, **settings}))


def _write_images(folder: Path, kind: str, **settings: Any) -> None:
    content = {"image_processor_type": kind, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **settings}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))


WRITERS: dict[str, Callable[[Path], None]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "idefics3": lambda folder: _idefics3(folder, "Idefics3Processor"),
    "llava": _llava,
    "mistral3": _mistral3,
    "qwen2_5_vl": lambda folder: _qwen(folder, "Qwen2_5_VLProcessor"),
    "qwen3_5": lambda folder: _qwen(folder, "Qwen3VLProcessor", letters_of),
    "qwen3_vl": lambda folder: _qwen(folder, "Qwen3VLProcessor"),
    "smolvlm": lambda folder: _idefics3(folder, "SmolVLMProcessor"),
}


def vision_folder(name: str, where: Path, *, is_wide: bool = False) -> Path:
    """A folder with the model of `vision_model`, its tokenizer and its processor."""
    folder = where / f"{name}-wide" if is_wide else where / name
    if not folder.exists():
        vision_model(name, is_wide=is_wide).save_pretrained(folder)
        WRITERS[name](folder)
    return folder


def picture(number: int = 0, size: tuple[int, int] = (12, 8)) -> Image.Image:
    """A picture of random pixels, (width, height)."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)
