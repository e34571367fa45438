"""Loaded models: what is known of them besides their passes, their tokenizers, and their sampling defaults."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftree.core.errors import (
    ConfigurationError,
    InvalidRequestError,
    ModelLoadError,
    VocabularyMismatchError,
    panics_as_errors,
)
from draftree.core.files import code_named_in, read_json
from draftree.loading.records import Store, digest_of
from draftree.models.base import LanguageModel
from draftree.remote.tokenizers import tokenizer_fingerprint
from draftree.sampling.params import NEUTRAL, Sampling, SamplingParams
from draftree.text import plain
from draftree.text.plain import FILE, PlainFacts, plain_facts, plain_tokenizer
from draftree.text.tokenizer import Tokenizer
from draftree.version import __version__

if TYPE_CHECKING:
    from draftree.models.native.model import NativeModel


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: LanguageModel
    folder: Path | None  # folder of its files, if it was loaded from files
    eos_ids: tuple[int, ...]  # tokens that end a text
    name: str  # name in messages
    # kernels of its passes: "native" with the instructions in brackets, "torch", or "graphs" with the reason
    # against capturing them in brackets, if there is one
    kernels: str = "torch"
    quantization: str | None = None  # of its weights; None for no quantization
    fallback_reason: str | None = None  # why the native kernels are not used; None if they are, or were not requested
    runs_code: bool = False  # whether its files name Python code of their own that may run
    sampling: Sampling = NEUTRAL  # defaults of sampling parameters, if it was not loaded from files
    # fingerprint of the tokenizer that a remote target needs; None if any may be given
    tokenizer_sha: str | None = None

    @classmethod
    def native(
        cls, model: NativeModel, folder: Path | None, eos_ids: tuple[int, ...], *, name: str, quantization: str | None
    ) -> LoadedModel:
        return cls(model, folder, eos_ids, name, f"native ({model.instructions})", quantization)

    @property
    def kernels_note(self) -> str | None:
        """One line if the options allowed native kernels on a CPU but torch is used; else None."""
        if self.fallback_reason is None or self.folder is None or self.model.device.type != "cpu":
            return None
        return f"kernels: {self.kernels} ({self.fallback_reason})"


logger = logging.getLogger(__name__)

TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "chat_template*", "config.json", "additional_chat_templates/*")
"""All files that tokenizers of transformers may read."""
TOKENIZER_LIBRARIES = ("transformers", "tokenizers", "jinja2")


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Tokenizer | None:
    """Load a tokenizer as `Tokenizer.load`, without transformers if a first start found that its file suffices."""
    store = Store()
    runs_code = trust_remote_code and bool(code_named_in(folder))
    if runs_code or not store.is_on or not (folder / FILE).is_file():
        return Tokenizer.load(folder, trust_remote_code=trust_remote_code)
    where = str(folder.resolve())
    name = f"{folder.name}-{hashlib.sha256(where.encode()).hexdigest()[:16]}.tokenizer"
    files = sorted({path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()})
    made_for = {
        "folder": where,
        "files": [[path.name for path in files], digest_of(files)],
        "versions": [__version__, digest_of([Path(plain.__file__)]), *map(version, TOKENIZER_LIBRARIES)],
    }
    kept = store.get(name, made_for)
    if kept is not None and kept["plain"] is not None:
        return plain_tokenizer(folder, PlainFacts(**kept["plain"]))
    loaded = Tokenizer.load(folder)
    if kept is None and loaded is not None:
        facts = _plain_facts(loaded, folder)
        logger.info("%s: its tokenizer %s transformers", folder, "needs" if facts is None else "can do without")
        store.put(name, made_for, {"plain": None if facts is None else dataclasses.asdict(facts)})
    return loaded


def _plain_facts(loaded: Tokenizer, folder: Path) -> PlainFacts | None:
    try:
        with panics_as_errors():
            return plain_facts(loaded.backend, folder)
    except Exception as error:  # custom tokenizers may raise anything
        logger.info("%s: its tokenizer was not compared: %s", folder, error)
        return None


GENERATION_CONFIG = "generation_config.json"


def sampling_in(folder: Path | None) -> Sampling:
    path = None if folder is None else folder / GENERATION_CONFIG
    if path is None or not path.is_file():
        return NEUTRAL
    return sampling_of(read_json(path), str(path))


def sampling_of(settings: Mapping[str, Any], place: str) -> Sampling:
    values: dict[str, Any] = {field.name: settings.get(field.name) for field in dataclasses.fields(Sampling)}
    try:
        return SamplingParams(**values).sampling
    except InvalidRequestError as error:
        raise ModelLoadError(
            f"{place}: {error}; correct it, or ignore its sampling by generation_config='none' "
            "(--generation-config none)"
        ) from error


def sampling_note(sampling: Sampling) -> str:
    """Return the defaults in one sentence; empty if there are none."""
    changes = {name: value for name, value in dataclasses.asdict(sampling).items() if value != getattr(NEUTRAL, name)}
    if not changes:
        return ""
    listed = ", ".join(f"{name}={value:g}" for name, value in changes.items())
    return f"sampling defaults of the model: {listed} (generation_config 'none' turns them off)"


def kernels_of_drafter(target: LoadedModel) -> str:
    """Return the kernels of a drafter's model: the target's, if they were chosen explicitly.

    Fallback kernels of the target do not restrict its drafter.
    """
    if target.kernels.startswith("graphs"):
        return "graphs"
    return "torch" if target.kernels == "torch" and target.fallback_reason is None else "auto"


def require_exact(loaded: LoadedModel) -> None:
    """Raise for a model whose logits depend on the other rows of a pass."""
    if loaded.model.is_exact:
        return
    reason = loaded.fallback_reason or "its passes run in PyTorch"
    raise ConfigurationError(
        f"exact was requested, but a pass of '{loaded.name}' over several rows may round differently from one over one "
        f"row: {reason}; leave exact out, or use a model, a device and a dtype that native kernels support"
    )


def require_layers(layers: Sequence[int], target: LoadedModel) -> None:
    """Refuse a drafter that needs hidden states of layers that the target does not have."""
    count = target.model.num_layers
    strange = [layer for layer in layers if not -count - 1 <= layer <= count]
    if strange:
        raise ConfigurationError(
            f"this drafter needs hidden states of layer {strange[0]}, but '{target.name}' has {count} layers "
            "that can be told apart: use another target, or another drafter"
        )
    if layers:
        target.model.require_capture([layer if layer >= 0 else count + 1 + layer for layer in layers])


def tokenizer_of(loaded: LoadedModel, tokenizer: Any, *, trust_remote_code: bool = False) -> Tokenizer | None:
    if isinstance(tokenizer, str | os.PathLike):
        raise ConfigurationError(
            f"tokenizer is {os.fspath(tokenizer)!r}: give a loaded one, such as from AutoTokenizer.from_pretrained"
        )
    if tokenizer is not None:
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor that reads images, too
        wrapped = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)
        if loaded.tokenizer_sha is not None:
            require_same_tokenizer(wrapped, loaded.tokenizer_sha)
        return wrapped
    if loaded.folder is None:
        return None
    return load_tokenizer(Path(loaded.folder), trust_remote_code=trust_remote_code)


def eos_ids_of(loaded: LoadedModel, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return ids of the tokens that end a text: those of the model's settings, or else the tokenizer's.

    Generation and benchmarks use this function, so that they end texts alike.
    """
    eos = None if tokenizer is None else tokenizer.eos_token_id
    return loaded.eos_ids or (() if eos is None else (eos,))


def require_same_tokenizer(tokenizer: Tokenizer | None, wanted: str) -> None:
    if tokenizer is not None and tokenizer_fingerprint(tokenizer) != wanted:
        raise VocabularyMismatchError(
            f"the tokenizer of {tokenizer.name} is not the one of the verify server: leave the tokenizer out to fetch "
            "the server's"
        )
