"""The choice of an incremental detokenization scheme for a tokenizer.

Almost every causal language model has a byte-level or a byte-fallback tokenizer. For these a table of the bytes of each
id gives the text without calling the tokenizer. Any other tokenizer decodes a short window of ids at a time. A scheme
is used only if it reproduces the tokenizer's own decoding of a fixed set of random id sequences; if none does, the text
is withheld until it is complete.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from draftree.text.streams.base import Decode, TextStream, byte_of_name
from draftree.text.streams.byte_fallback import ByteFallbackStream, FallbackDecoding
from draftree.text.streams.byte_level import ByteLevelStream, byte_level_bytes
from draftree.text.streams.window import WindowStream
from draftree.text.streams.withheld import WithheldStream

logger = logging.getLogger(__name__)

CHECK_SEQUENCES = 24
CHECK_LENGTH = 48


@dataclass(frozen=True, slots=True)
class TextScheme:
    """An incremental detokenization scheme.

    Attributes:
        open: opens a stream for one sequence.
        skipped: ids that are dropped before the stream.
        streams: whether text is available before the sequence is complete.
    """

    open: Callable[[], TextStream]
    skipped: frozenset[int]
    streams: bool = True

    def text_of(self, ids: Iterable[int]) -> str:
        """Return the joined pieces of a whole sequence."""
        stream = self.open()
        pieces = [stream.push(i) for i in ids if i not in self.skipped]
        return "".join(pieces) + stream.finish()


def choose_scheme(decode: Decode, tokens: Mapping[int, str], *, skipped: frozenset[int], decoder: Any) -> TextScheme:
    """Return the cheapest scheme that reproduces `decode`.

    Args:
        decode: the tokenizer's own decoding of a whole sequence.
        tokens: the written form of every id.
        skipped: ids that `decode` leaves out.
        decoder: the decoder object of the `tokenizers` library, if the tokenizer has one.
    """
    byte_ids = frozenset(
        i for i, token in tokens.items() if token.startswith("<0x") and byte_of_name(token) is not None
    )
    candidates = [WindowStream.opener(decode, byte_ids)]
    mirrored = _mirror(_decoder_steps(decoder), tokens)
    if mirrored is not None:
        candidates.insert(0, mirrored)
    checks = [(ids, decode(ids)) for ids in _check_sequences(tokens, byte_ids, skipped)]
    for opener in candidates:
        scheme = TextScheme(opener, skipped)
        if all(scheme.text_of(ids) == text for ids, text in checks):
            return scheme
    logger.warning("the text of this tokenizer cannot be streamed: each text is returned when its sequence is complete")
    return TextScheme(partial(WithheldStream, decode), frozenset(), streams=False)


def _mirror(steps: Sequence[dict[str, Any]], tokens: Mapping[int, str]) -> Callable[[], TextStream] | None:
    """Return an opener of streams equivalent to these decoder steps; None if they are of an unknown kind."""
    if _is_byte_level(steps):
        return ByteLevelStream.opener(tokens)
    decoding = _fallback_decoding(steps)
    return None if decoding is None else ByteFallbackStream.opener(tokens, decoding)


def bytes_by_token(decoder: Any) -> Callable[[str], bytes] | None:
    """Return a function from a token's written form to its bytes inside a text; None for an unknown kind of decoder.

    Args:
        decoder: the decoder object of the `tokenizers` library, if the tokenizer has one.
    """
    steps = _decoder_steps(decoder)
    if _is_byte_level(steps):
        return byte_level_bytes
    decoding = _fallback_decoding(steps)
    if decoding is None:
        return None

    def bytes_of(token: str) -> bytes:
        part = decoding.part_of(token)
        return bytes([part]) if isinstance(part, int) else part.encode("utf-8")

    return bytes_of


def _is_byte_level(steps: Sequence[dict[str, Any]]) -> bool:
    return [step.get("type") for step in steps] in (["ByteLevel"], ["ByteLevel", "Fuse"])


def _fallback_decoding(steps: Sequence[dict[str, Any]]) -> FallbackDecoding | None:
    kinds = [step.get("type") for step in steps]
    num_replaces = next((i for i, kind in enumerate(kinds) if kind != "Replace"), len(kinds))
    if kinds[num_replaces:] not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"]):
        return None
    patterns: list[tuple[Any, Any]] = [
        (step.get("pattern", {}).get("String"), step.get("content")) for step in steps[:num_replaces]
    ]
    if not all(old and isinstance(new, str) for old, new in patterns):
        return None
    strip: dict[str, Any] = steps[-1] if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
    if strip["stop"]:
        return None
    return FallbackDecoding(tuple(patterns), strip_character=strip["content"], strip_count=strip["start"])


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """Return the steps of a decoder object; empty if it does not describe them."""
    try:
        description = json.loads(decoder.__getstate__())
    except (AttributeError, TypeError, ValueError):
        return []
    return _flatten(description) if isinstance(description, dict) else []


def _flatten(description: dict[str, Any]) -> list[dict[str, Any]]:
    if description.get("type") != "Sequence":
        return [description]
    return [step for part in description.get("decoders", []) for step in _flatten(part)]


def _check_sequences(tokens: Mapping[int, str], byte_ids: frozenset[int], skipped: frozenset[int]) -> list[list[int]]:
    """Return reproducible random ids; short and byte tokens, where characters break, are frequent."""
    everything = sorted(tokens)
    short = [i for i in everything if len(tokens[i]) <= 2] or everything
    pools = (everything, short, sorted(byte_ids) or short, sorted(skipped) or everything)
    source = random.Random(0)
    sequences = []
    for number in range(CHECK_SEQUENCES if everything else 0):
        allowed = pools if number % 2 else (pools[number // 2 % 3],)  # mixed, and of one kind
        length = source.randint(1, CHECK_LENGTH)
        sequences.append([source.choice(source.choice(allowed)) for _ in range(length)])
    return sequences
