"""Facts on which the record of a start depends, and the digest of the logits that it computed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from draftree.loading.warm_start.store import Store, digest_of
from draftree.models.base import Extend, Pass
from draftree.models.check import EXACT_PARENTS, NATIVE_LENGTHS, exact_tokens
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import library
from draftree.models.native.model import NativeModel
from draftree.version import __version__
from draftree.weights.sums import WEIGHT_FILES

logger = logging.getLogger(__name__)

SETTINGS = ("config.json", "generation_config.json")
PATTERNS = ("*.json", *WEIGHT_FILES)
ROOT = Path(__file__).parents[2]
SOURCES = (
    *sorted((ROOT / "models" / "native").glob("*.py")),
    *sorted((ROOT / "loading" / "warm_start").glob("*.py")),
    ROOT / "models" / "check.py",
    ROOT / "loading" / "upcast.py",
)


@dataclass(frozen=True, slots=True)
class StartKey:
    """The model to be loaded, and its options.

    Attributes:
        name: name of its record.
        folder: folder of the model's files.
        quantization: of its packed weights; None for none.
        facts: all facts that the record depends on.
    """

    name: str
    folder: Path
    quantization: str | None
    facts: Mapping[str, Any]


def start_key(
    folder: Path, dtype: torch.dtype, quantization: str | None, *, is_needed: bool = False
) -> StartKey | None:
    """Return the key under which a native start is recorded; None if nothing is to be recorded, unless it is needed."""
    if not (Store().is_on or is_needed):
        return None
    where, kind = str(folder.resolve()), str(dtype).removeprefix("torch.")
    try:
        facts = {
            "folder": where,
            "dtype": kind,
            "quantization": quantization,
            "library": library().path.name,
            "versions": [__version__, digest_of(SOURCES), torch.__version__, version("transformers")],
            "files": [[name, *facts] for name, facts in _files(folder)],
            "settings": digest_of(path for name in SETTINGS if (path := folder / name).exists()),
        }
    except (NativeUnavailableError, OSError) as error:
        logger.info("%s: its start is not recorded: %s", folder, error)
        return None
    return StartKey(start_name(folder, kind, quantization), folder, quantization, facts)


def start_name(folder: Path, kind: str, quantization: str | None) -> str:
    """Return the name of the record of a folder's starts with a dtype and a quantization."""
    key = hashlib.sha256("\0".join((str(folder.resolve()), kind, str(quantization))).encode()).hexdigest()
    return f"{folder.name}-{key[:16]}"


def _files(folder: Path) -> list[tuple[str, tuple[int, int]]]:
    files = sorted({path for pattern in PATTERNS for path in folder.glob(pattern)})
    statuses = [(path.name, path.stat()) for path in files]
    return [(name, (status.st_size, status.st_mtime_ns)) for name, status in statuses]


@torch.inference_mode()
def digest(model: NativeModel) -> str:
    """Return a hash of the logits after a prefix, and in a tree batched with another sequence.

    The first start compared these passes bit by bit with others (`check.rounds_alike`): while their bits stay the
    same, `is_exact` holds.
    """
    tokens, length = exact_tokens(model.vocab_size), max(1, min(NATIVE_LENGTHS[0], model.max_length // 2))
    nodes = tokens[-len(EXACT_PARENTS) :]
    slot = model.open()
    chain = (
        model.run(Pass([Extend(slot, tokens[:length], range(-1, length - 1), logits_at=[length - 1])]))
        .logits.tensor()
        .clone()
    )
    model.commit(slot, range(length))
    other = model.fork(slot, length // 2)
    tree = model.run(Pass([Extend(other, tokens[:1], [-1]), Extend(slot, nodes, EXACT_PARENTS)])).logits.tensor()
    for opened in (slot, other):
        model.close(opened)
    return hashlib.sha256(b"".join(logits.contiguous().numpy().tobytes() for logits in (chain, tree))).hexdigest()
