"""Images of a prompt: PIL images from data URLs, files and bytes, within limits."""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from draftree.core.errors import InvalidRequestError, import_extra
from draftree.core.files import expanded

MAX_BYTES = 32 << 20  # largest encoded image
MAX_PIXELS = 1 << 26  # most pixels of all images of a prompt: 192 MiB in RGB. A small file can describe any size.
MAX_IMAGES = 64  # most images of one prompt
MAX_16_BITS = (1 << 16) - 1
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a prompt, and the name of the field or argument that holds it."""

    source: Any  # a PIL image, the bytes of a file, a data URL, a `file:` URL or a path
    place: str


def read_images(sources: Iterable[PlacedImage]) -> list[Any]:
    """Return images as PIL images in RGB, upright.

    Raises:
        InvalidRequestError: an image is damaged, remote, or of another kind, or they are too large or too many.
    """
    import_extra("images", "images need", error=InvalidRequestError)
    placed = list(sources)
    if len(placed) > MAX_IMAGES:
        raise InvalidRequestError(f"the prompt has {len(placed)} images, and {MAX_IMAGES} are allowed")
    images: list[Any] = []
    for each in placed:
        most = MAX_PIXELS - sum(image.width * image.height for image in images)
        try:
            images.append(_read_image(each.source, most=most))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"'{each.place}': {error}", param=each.place) from error
    return images


def _read_image(source: Any, *, most: int) -> Any:
    """Return an image of at most so many pixels."""
    from PIL import Image, ImageOps

    if isinstance(source, Image.Image):
        image = source
    else:
        data = _bytes_of(source)
        if len(data) > MAX_BYTES:
            raise InvalidRequestError(f"the image has {len(data)} bytes, and {MAX_BYTES} are allowed: make it smaller")
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Exception as error:  # Pillow raises various exceptions for damaged files
            raise _damaged(error) from error
    width, height = image.size
    if not 0 < width * height <= most:
        raise InvalidRequestError(
            f"an image has {width} x {height} pixels, and the images of a prompt may have {MAX_PIXELS}: make it smaller"
        )
    try:
        upright = ImageOps.exif_transpose(image)
        upright.load()
    except Exception as error:  # as above
        raise _damaged(error) from error
    return (_of_8_bits(upright) if upright.mode[0] in "IF" else upright).convert("RGB")


def _of_8_bits(image: Any) -> Any:
    """Return a grey image of 16-bit pixels with 8 bits: Pillow itself would cut off its values."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > MAX_16_BITS:
        raise InvalidRequestError("the image has pixels of 32 bits, whose range is not known: save it with 8 bits")
    return Image.fromarray((pixels.astype(np.float32) * (255 / MAX_16_BITS)).round().astype(np.uint8))


def _damaged(error: Exception) -> InvalidRequestError:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):  # its words are the address of a stream
        reason = "its format is not recognized"
    else:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
    return InvalidRequestError(f"the image cannot be read ({reason}): give a whole {', '.join(FORMATS)} file")


def _bytes_of(source: Any) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str | os.PathLike):
        raise InvalidRequestError(
            f"an image is of type {type(source).__name__}: give a PIL image, bytes, a path or a data URL"
        )
    spelled = os.fspath(source)
    scheme, separator, rest = str(spelled).partition(":")
    if separator and scheme.lower() == "data":
        return bytes_of_data_url(rest)
    if separator and scheme.lower() in ("http", "https"):
        raise InvalidRequestError(
            f"the image '{shown(spelled)}' is a remote URL, and these are not fetched: give a data URL or a file"
        )
    try:
        path = expanded(_local_path(rest) if separator and scheme.lower() == "file" else spelled)
        if path.stat().st_size > MAX_BYTES:
            raise InvalidRequestError(
                f"the image '{path}' has {path.stat().st_size} bytes, and {MAX_BYTES} are allowed: make it smaller"
            )
        return path.read_bytes()
    except InvalidRequestError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(f"the image '{shown(str(spelled))}' cannot be read: {reason}") from error


def _local_path(rest: str) -> Path:
    return Path(os.fsdecode(unquote_to_bytes(rest.removeprefix("//").removeprefix("localhost"))))


def bytes_of_data_url(rest: str) -> bytes:
    """Return the content of a data URL without its scheme."""
    kind, separator, content = rest.partition(",")
    if not separator or not kind.lower().rstrip().endswith(";base64"):
        raise InvalidRequestError(
            "the data URL of an image has another form: write data:image/png;base64, and the file in base64"
        )
    return bytes_of_base64(content)


def bytes_of_base64(content: str) -> bytes:
    if len(content) * 3 // 4 > MAX_BYTES + 3:
        raise InvalidRequestError(f"the image has more than {MAX_BYTES} bytes: make it smaller")
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"the image is not valid base64 ({error}): encode the bytes of the file") from error


def shown(url: str) -> str:
    """Return a URL or path, shortened for a message."""
    return url if len(url) <= 80 else f"{url[:77]}..."


def image_of(part: Any, place: str) -> PlacedImage | None:
    """Return the image that a content part of type "image" or "image_url" names; None if it names none.

    `part`: the part. `place`: where the part is, such as "messages[0].content[1]".
    """
    for key in ("image_url",) if part["type"] == "image_url" else ("image", "url", "path"):
        value = part.get(key)
        if isinstance(value, PlacedImage):
            return value
        if isinstance(value, dict):
            key, value = f"{key}.url", value.get("url")
        if value is not None:
            return PlacedImage(value, f"{place}.{key}")
    return None
