"""Images in the messages of a conversation: their parts, their placeholders, and control tokens beside them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from draftree.core.errors import InvalidRequestError
from draftree.text.chat import images
from draftree.text.chat.images import PlacedImage, read_images
from draftree.text.chat.messages import conversation_of, has_images
from draftree.text.tokenizer import Tokenizer
from text_backends import CHAT_TEMPLATE, byte_level

CONTENT = "{{ message['content'] }}"
PARTS = "{% for part in message['content'] %}{{ '<img>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
EITHER = f"{{% if message['content'] is string %}}{CONTENT}{{% else %}}{PARTS}{{% endif %}}"


def tokenizer(content: str) -> Tokenizer:
    return Tokenizer(byte_level(CHAT_TEMPLATE.replace(CONTENT, content)))


def asked(text: str, *images: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def test_images_stand_in_their_order() -> None:
    messages = [*asked("a", "one.png"), {"role": "assistant", "content": "b"}, *asked("c", b"two", "three.png")]
    conversation = conversation_of(messages)
    assert [image.source for image in conversation.images] == ["one.png", b"two", "three.png"]
    assert [image.place for image in conversation.images] == [
        "messages[0].content[0].image",
        "messages[2].content[0].image",
        "messages[2].content[1].image",
    ]
    assert conversation.texts() == ["a", "b", "c"]
    assert has_images(messages)
    assert not has_images([{"role": "user", "content": [{"type": "text", "text": "a"}]}])
    assert not has_images("image")


def test_the_template_writes_placeholders() -> None:
    text, images = tokenizer(EITHER).chat_with_images(asked("fox", "one.png", "two.png"), add_generation_prompt=False)
    assert text == "<s><|im_start|>user\n<img><img>fox<|im_end|>\n"
    assert [image.source for image in images] == ["one.png", "two.png"]


def test_a_template_for_lists_of_parts_gets_them() -> None:
    encoder = tokenizer(PARTS)
    messages = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "dog"}]
    ids = encoder.apply_chat_template(messages, add_generation_prompt=False)
    assert ids == tokenizer(CONTENT).apply_chat_template(messages, add_generation_prompt=False)
    opened = encoder.apply_chat_template(messages, continue_final_message=True)
    assert encoder.decode(opened, False).endswith("assistant\ndog")
    typed = [{"role": "user", "content": "fox <|im_end|>"}]
    assert encoder.apply_chat_template(typed) == tokenizer(CONTENT).apply_chat_template(typed)
    typed.append({"role": "assistant", "content": "dog </s>"})
    theirs = tokenizer(CONTENT).apply_chat_template(typed, continue_final_message=True)
    assert encoder.apply_chat_template(typed, continue_final_message=True) == theirs


def test_a_typed_control_token_is_refused_beside_an_image() -> None:
    encoder = tokenizer(EITHER)
    with pytest.raises(InvalidRequestError, match="a message has a control token, and the chat has images"):
        encoder.chat_with_images(asked("fox <|im_end|>", "one.png"))
    text, _ = encoder.chat_with_images(asked("fox <|im_end|>", "one.png"), allow_control_tokens=True)
    assert "fox <|im_end|><|im_end|>" in text


def test_a_model_of_text_names_the_image() -> None:
    with pytest.raises(InvalidRequestError, match="a message has an image"):
        tokenizer(EITHER).apply_chat_template(asked("fox", "one.png"))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image": "one.png"},
        {"type": "image_url"},
    ],
)
def test_a_part_without_an_image_is_refused(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="Part 0 of message 0 of the chat names no image"):
        conversation_of([{"role": "user", "content": [part]}])


def read(source: Any) -> Any:
    return read_images([PlacedImage(source, "picture")])[0]


def test_what_is_no_image_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notes.png"
    path.write_text("not an image")
    with pytest.raises(
        InvalidRequestError, match=r"^'picture': the image cannot be read \(its format is not re"
    ) as error:
        read(path)
    assert error.value.param == "picture"
    monkeypatch.setattr(images, "MAX_BYTES", 5)
    with pytest.raises(InvalidRequestError, match=f"^'picture': the image '{path}' has 12 bytes, and 5 are allowed"):
        read(path)
    with pytest.raises(InvalidRequestError, match=r"the image 'file:.+' cannot be read: .+surrogates not allowed"):
        read("file:\ud800")


@pytest.mark.parametrize(("mode", "form"), [("I;16", "PNG"), ("I;16", "TIFF"), ("I;16B", "TIFF"), ("I", "TIFF")])
def test_grey_pixels_of_16_bits_are_scaled(mode: str, form: str) -> None:
    values = np.array([[0, 257, 256 * 100, 65535]])
    kind = {"I;16": "<u2", "I;16B": ">u2", "I": "i4"}[mode]
    buffer = io.BytesIO()
    Image.fromarray(values.astype(kind)).save(buffer, form)
    pixels = np.asarray(read(buffer.getvalue()))
    assert pixels.tolist() == [[[0] * 3, [1] * 3, [100] * 3, [255] * 3]]


@pytest.mark.parametrize("pixels", [np.full((2, 2), 70000, np.int32), np.full((2, 2), 0.5, np.float32)])
def test_pixels_without_a_known_range_are_refused(pixels: Any) -> None:
    with pytest.raises(InvalidRequestError, match="whose range is not known"):
        read(Image.fromarray(pixels))
