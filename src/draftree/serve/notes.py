"""Notes of a request: what it asks for without effect, named in `Warning` headers and the log.

The rule of every endpoint: what only asks for less, asks for nothing, or cannot change the meaning of the response is
accepted and noted here; what would change it is refused with an `ApiError`. With `--strict-fields` a note is an error.
"""

from __future__ import annotations

from draftree.serve.errors import invalid
from draftree.serve.records import current_record

__all__ = ["note"]


def note(field: str, reason: str) -> None:
    """Note that a field of the current request has no effect, or not its whole effect; once for each field.

    Args:
        field: its path in the body.
        reason: the rest of the sentence after the field, such as "is ignored: models stay loaded".

    Raises:
        ApiError: 400 with `--strict-fields`.
    """
    record = current_record()
    if record is None:
        return
    if record.is_strict:
        raise invalid(
            f"'{field}' {reason}; this server has --strict-fields: remove it", field, code="ignored_parameter"
        )
    record.notes.setdefault(field, f"'{field}' {reason}")
