"""Bodies of the type multipart/form-data (RFC 7578), parsed from bytes."""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message

from draftree.serve.errors import invalid

MAX_FIELDS = 64


@dataclass(frozen=True, slots=True)
class FormField:
    """A field of a form.

    Attributes:
        name: its name.
        filename: name of the file that it holds; None for a value.
        data: the content.
    """

    name: str
    filename: str | None
    data: bytes


def parse_form(content_type: str, body: bytes) -> list[FormField]:
    """Return the fields of a form in their order.

    Args:
        content_type: the header, with the boundary.
        body: the whole body.

    Raises:
        ApiError: 400, another type, or a malformed body.
    """
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str) or not boundary:
        raise invalid("the body must be a form with a file: send it as multipart/form-data", None)
    # the line break before a boundary belongs to the boundary
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"))
    if len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise _malformed("the last boundary is missing")
    if len(parts) - 2 > MAX_FIELDS:
        raise _malformed(f"it has more than {MAX_FIELDS} fields")
    return [_field(part) for part in parts[1:-1]]


def _field(part: bytes) -> FormField:
    head, blank, data = part.partition(b"\r\n\r\n")
    if not blank:
        raise _malformed("a field has no empty line after its headers")
    headers = Message()
    for line in head.split(b"\r\n"):
        name, colon, value = line.decode("utf-8", "replace").partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    named = headers.get_param("name", header="Content-Disposition")
    if headers.get_content_disposition() != "form-data" or not isinstance(named, str):
        raise _malformed("a field has no name")
    return FormField(named, headers.get_filename(), data)


def _malformed(reason: str) -> Exception:
    return invalid(f"the form cannot be read: {reason}", None, code="invalid_form")
