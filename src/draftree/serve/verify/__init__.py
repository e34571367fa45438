"""Verification of drafts that devices make: sessions, their sequences in the engine, and the endpoint of their frames.

A `Session` is a device's lease on its sequences. `service` turns frames into rounds of the engine: a sequence either
takes the drafts of its device or is written by the server alone. With `--split`, devices run the first layers, and
`layers` computes the rest from their hidden states, all waiting sequences in one pass. Requests are numbered and
answered once, so that a frame that is sent again changes nothing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from draftree.core.errors import ConfigurationError

MAX_NODES = 64  # most nodes of one text's tree: the room for tentative tokens in a slot
MAX_FRAME_BYTES = 1 << 20
WHOLE = ("max_sessions", "max_texts", "max_nodes", "max_rows", "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Limits of sessions and drafts."""

    max_sessions: int = 64  # open sessions; further ones are refused with a time to retry
    max_texts: int = 8  # open texts of one session
    max_nodes: int = MAX_NODES  # drafted tokens of one text in one round
    # drafted tokens of all texts that a pass should have; with many texts, devices are told to draft fewer each
    max_rows: int = 256
    lease: float = 120.0  # seconds without a request after which a session and its texts end
    # seconds without a draft after which the slot of a text is freed; its next draft reads it again, as far as it is
    # not a cached prefix
    park: float = 20.0
    split: int = 0  # first layers that devices may run themselves, to send hidden states in place of tokens; 0 for none

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_whole = field.name in WHOLE
            least = 0 if field.name == "split" else 1
            allowed = int if is_whole else (int, float)
            is_number = isinstance(value, allowed) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or (value < least if is_whole else value <= 0):
                kind = f"a whole number of at least {least}" if is_whole else "a number of seconds above 0"
                raise ConfigurationError(f"{field.name} is {value!r}: it must be {kind}")
        if self.max_nodes > MAX_NODES:
            raise ConfigurationError(f"max_nodes is {self.max_nodes}: it must be at most {MAX_NODES}")
