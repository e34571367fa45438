"""Images that requests name: the bytes of a data URL, or a file in the folder that the server offers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from draftree.core.errors import InvalidRequestError, harmless
from draftree.serve.errors import invalid
from draftree.serve.schema import ImagePart, TextPart
from draftree.text.chat.images import PlacedImage, bytes_of_data_url, shown
from draftree.text.chat.messages import IMAGES


def image_source(url: str, folder: str | None, *, place: str) -> bytes | Path:
    """Return the content of a data URL, or the path of a file in the folder; None offers no files.

    Raises:
        ApiError: a remote URL, a damaged data URL, or a file that is not offered.
    """
    scheme, separator, rest = url.partition(":")
    scheme = scheme.lower() if separator else ""
    if scheme == "data":
        try:
            return bytes_of_data_url(rest)
        except InvalidRequestError as error:
            raise invalid(f"'{place}' has no image: {error}", place) from error
    if scheme in ("http", "https"):
        raise invalid(f"'{place}' is a remote URL, and these are not fetched: send a data URL", place)
    if folder is None:
        raise invalid(f"'{place}' is no data URL, and this server reads no files (--image-folder): send one", place)
    root = Path(folder).resolve()
    try:
        name = os.fsdecode(unquote_to_bytes(rest.removeprefix("//"))) if scheme == "file" else url
        path = (root / name).resolve()
        is_offered = path.is_relative_to(root) and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        is_offered = False
    if not is_offered:
        raise invalid(f"'{place}': there is no file '{harmless(shown(url))}' in the image folder", place)
    return path


def with_sources(content: str | Sequence[TextPart | ImagePart], folder: str | None, *, place: str) -> Any:
    """Return a message's content with the source of each image in place of its URL."""
    if isinstance(content, str):
        return content
    return [_with_source(part, folder, f"{place}[{number}].image_url") for number, part in enumerate(content)]


def _with_source(part: TextPart | ImagePart, folder: str | None, place: str) -> dict[str, Any]:
    if not isinstance(part, ImagePart):
        return part.model_dump()
    url = part.image_url
    if not isinstance(url, str):
        url, place = url.url, f"{place}.url"
    place = part.place or place
    return {"type": "image", "image": PlacedImage(image_source(url, folder, place=place), place)}


def without_images(prompt: Any) -> Any:
    """Return a prompt for a log: the images of messages are left out, and sound is named."""
    if isinstance(prompt, bytes):
        return "(a sound file)"
    if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
        return prompt
    return [{**message, "content": _shown_content(message.get("content"))} for message in prompt]


def _shown_content(content: Any) -> Any:
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    return [{"type": "image"} if part.get("type") in IMAGES else part for part in content]
