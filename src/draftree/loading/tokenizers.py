"""The tokenizer of a model folder: loaded by transformers at first, later from its file alone if that is equivalent."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from importlib.metadata import version
from pathlib import Path

from draftree.core.errors import panics_as_errors
from draftree.core.files import code_named_in
from draftree.loading.warm_start.store import Store, digest_of
from draftree.text import plain
from draftree.text.plain import FILE, PlainFacts, plain_facts, plain_tokenizer
from draftree.text.tokenizer import Tokenizer
from draftree.version import __version__

logger = logging.getLogger(__name__)

FILES = ("*token*", "vocab*", "merges*", "chat_template*", "config.json", "additional_chat_templates/*")
"""All files that tokenizers of transformers may read."""
LIBRARIES = ("transformers", "tokenizers", "jinja2")


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer | None:
    """Load a tokenizer as `Tokenizer.load`, but without transformers if a first start verified that its file suffices.

    Raises:
        ModelLoadError: the tokenizer files are damaged, or need code of the folder.
    """
    store = Store()
    runs_code = trust_remote_code and bool(code_named_in(folder))
    if runs_code or not store.is_on or not (folder / FILE).is_file():
        return Tokenizer.load(folder, trust_remote_code=trust_remote_code)
    where = str(folder.resolve())
    name = f"{folder.name}-{hashlib.sha256(where.encode()).hexdigest()[:16]}.tokenizer"
    files = sorted({path for pattern in FILES for path in folder.glob(pattern) if path.is_file()})
    made_for = {
        "folder": where,
        "files": [[path.name for path in files], digest_of(files)],
        "versions": [__version__, digest_of([Path(plain.__file__)]), *map(version, LIBRARIES)],
    }
    kept = store.get(name, made_for)
    if kept is not None and kept["plain"] is not None:
        return plain_tokenizer(folder, PlainFacts(**kept["plain"]))
    loaded = Tokenizer.load(folder)
    if kept is None and loaded is not None:
        facts = _facts(loaded, folder)
        logger.info("%s: its tokenizer %s transformers", folder, "needs" if facts is None else "can do without")
        store.put(name, made_for, {"plain": None if facts is None else dataclasses.asdict(facts)})
    return loaded


def _facts(loaded: Tokenizer, folder: Path) -> PlainFacts | None:
    try:
        with panics_as_errors():
            return plain_facts(loaded.backend, folder)
    except Exception as error:  # custom tokenizers may raise anything
        logger.info("%s: its tokenizer was not compared: %s", folder, error)
        return None
