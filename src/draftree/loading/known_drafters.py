"""Published drafters of known targets: which exist for a model, which are on this machine, and why one does not fit.

`known_drafters.json` lists targets and their drafters; entries of the user in the configuration folder come first. A
model is known by its hub id, by the base model that its card, its configuration or its GGUF header names, by its name,
or, if it is a local folder or file without any of these, by its shape. Nothing here uses the network.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, DraftreeError, ModelLoadError, ModelNotFoundError
from draftree.core.files import HUB_SNAPSHOT, MALFORMED, config_folder, expanded, read_json
from draftree.heads.config import KINDS, MTP
from draftree.loading.resolve import HUB_ID, PATH_LIKE, WAYS_TO_NAME, gguf_path, hub_cache
from draftree.remote.address import is_remote
from draftree.weights.cache import Cache
from draftree.weights.catalogue import CATALOGUE
from draftree.weights.convert_gguf import ARCHITECTURES
from draftree.weights.folders import (
    LAYERS,
    TEXT_CONFIGS,
    VOCABULARY,
    WEIGHTS_INDEX,
    WIDTHS,
    check_model_folder,
    weight_files,
)
from draftree.weights.gguf_file import GgufFile, read_gguf
from draftree.weights.install import entry_is_here

DATA = Path(__file__).with_name("known_drafters.json")
FORMAT = 1
BESIDE = "beside the model"
IN_PACKAGE = "in this package"
"""Where heads of this package are, which `auto` knows by the weights of their target."""
OWN_FOLDER = "drafters"
"""Folder in the user's configuration: files `*.json` as the package's, and folders of heads."""
SIBLING = "model"
"""Kind of a whole, smaller model; other kinds are those of heads."""
CONFIG, CARD, TOKENIZER = "config.json", "README.md", "tokenizer.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownDrafter:
    """One drafter of a target, as its publisher or the user describes it."""

    kind: str  # of a head, such as "eagle3", or `SIBLING`; also kinds that are not read
    id: str = ""  # hub id, name of the catalogue, of a head of this package, or a folder; empty for MTP in the target
    revision: str | None = None  # commit or branch at the hub; None for the newest
    licence: str | None = None  # of the weights
    bytes: int | None = None  # size of its files
    source: str = ""  # who says that it is for this target
    verified: bool = False  # whether the source was read when the entry was written
    speedup: float | None = None  # median relative to plain decoding, if this project has measured it
    measured: str = ""  # where and how
    tokens_per_round: float | None = None  # acceptance length, if someone has published or measured it
    drafted: int | None = None  # tokens of the chains that it was measured with; None if unknown
    accepted: str = ""  # of which texts, and who says so
    note: str = ""

    @property
    def first_rate(self) -> float | None:
        """Acceptance of the first token by that record, if all tokens of a chain are accepted as often; None without.

        A chain of k tokens writes 1 + p + p^2 + ... + p^k of them in a round; without k, p is at least 1 - 1/tokens.
        """
        if self.tokens_per_round is None:
            return None
        low, high = 1.0 - 1.0 / self.tokens_per_round, 1.0
        while self.drafted is not None and high - low > 1e-6:
            rate = (low + high) / 2
            is_more = sum(rate**level for level in range(self.drafted + 1)) > self.tokens_per_round
            low, high = (low, rate) if is_more else (rate, high)
        return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes that a drafter depends on; None for unknown ones."""

    model_type: str | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    vocab_size: int | None = None

    def difference(self, other: Shape) -> str | None:
        """Return the first size that differs from another shape's, in words; unknown sizes differ from none."""
        for name, ours in asdict(self).items():
            theirs = getattr(other, name)
            if ours is None or theirs is None or ours == theirs:
                continue
            if name == VOCABULARY and abs(ours - theirs) <= PADDING:
                continue
            return f"its {name} is {theirs} instead of {ours}"
        return None


PADDING = 512
"""Vocabularies whose sizes differ by no more may be one, padded differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTarget:
    models: tuple[str, ...]  # hub ids, or names of the catalogue
    drafters: tuple[KnownDrafter, ...]  # best first
    shape: Shape = Shape()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model as far as it is known without loading it."""

    name: str  # as the user spells it
    names: Mapping[str, str]  # hub ids and names that it goes by, each with the way: "id", "base model" or "name"
    place: Path | None  # its folder or GGUF file; None if it is not on this machine
    shape: Shape
    is_local: bool  # whether the user named a folder or a file

    @property
    def is_file(self) -> bool:
        return self.place is not None and self.place.is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDrafter:
    """A drafter that may fit a target."""

    known: KnownDrafter
    matched: str  # how it was found: "id", "base model", "name", "shape", "folder" or "tokenizer"
    place: Path | None  # its folder or GGUF file; None if it is not on this machine
    where: str | None  # where that is, in words
    reason: str | None  # why it does not fit; None if it does, as far as its files say

    @property
    def label(self) -> str:
        """Name in lists and notes."""
        return self.known.id or self.known.kind

    @property
    def description(self) -> str:
        """The name with kind, size and licence, as far as they are known."""
        known = self.known
        if not known.id:
            return "the MTP layer"
        size = None if known.bytes is None else f"{known.bytes / 1e9:.1f} GB"
        facts = filter(None, ("a smaller model" if known.kind == SIBLING else known.kind, size, known.licence))
        return f"{known.id} ({', '.join(facts)})"


# The lists of drafters


def known_targets() -> Iterator[tuple[KnownTarget, bool]]:
    """Yield all targets, and whether the user added them: those come first. Lists of `wrong_lists` are left out."""
    for path in own_lists():
        with suppress(ConfigurationError):
            yield from ((target, True) for target in read_targets(path))
    yield from ((target, False) for target in read_targets(DATA))


def own_lists() -> list[Path]:
    own = own_folder()
    return [] if own is None else sorted(own.glob("*.json"))


def wrong_lists() -> list[str]:
    """Return what is wrong with lists of the user."""
    reasons = []
    for path in own_lists():
        try:
            read_targets(path)
        except ConfigurationError as error:
            reasons.append(str(error))
    return reasons


def own_folder() -> Path | None:
    folder = config_folder()
    return None if folder is None else folder / OWN_FOLDER


def read_targets(path: Path) -> list[KnownTarget]:
    """Return the targets of a file.

    Raises:
        ConfigurationError: it is unreadable, or a value is missing, unknown or of another type.
    """
    place = ""
    try:
        values = read_json(path)
        if values["format"] != FORMAT:
            raise ConfigurationError(f"'{path}' has format {values['format']!r}, and this program reads {FORMAT}")
        targets = []
        for number, target in enumerate(_typed(values["targets"], list)):
            place = f"targets[{number}]: "
            models = tuple(_typed(model, str) for model in _typed(target["models"], list))
            drafters = tuple(_drafter(drafter) for drafter in _typed(target["drafters"], list))
            targets.append(KnownTarget(models=models, shape=_shape(target.get("shape", {})), drafters=drafters))
        return targets
    except ConfigurationError:
        raise
    except (OSError, *MALFORMED) as error:
        raise ConfigurationError(
            f"'{path}' is not a list of drafters ({place}{error}): correct it, or remove it; the guide on the "
            "automatic drafter describes the format"
        ) from error


def _shape(values: Mapping[str, Any]) -> Shape:
    shape = Shape(**values)
    for name, value in asdict(shape).items():
        if value is not None:
            _typed(value, str if name == "model_type" else int)
    return shape


def _drafter(values: Mapping[str, Any]) -> KnownDrafter:
    drafter = KnownDrafter(**values)
    for name in ("kind", "id", "source", "measured", "accepted", "note"):
        _typed(getattr(drafter, name), str)
    numbers = (("bytes", int), ("speedup", float | int), ("tokens_per_round", float | int), ("drafted", int))
    for name, kind in (("revision", str), ("licence", str), *numbers):
        if getattr(drafter, name) is not None:
            _typed(getattr(drafter, name), kind)
    most = math.inf if drafter.drafted is None else drafter.drafted + 1
    if drafter.tokens_per_round is not None and not 1 <= drafter.tokens_per_round <= most:
        raise ValueError(f"tokens_per_round is {drafter.tokens_per_round}: it must be from 1 to drafted + 1")
    return drafter


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} has the wrong type")
    return value


# The target


def describe_target(name: str, folder: Path | None = None) -> Target:
    """Describe a model by its files, without loading it; a hub id that is not on this machine by its name alone.

    Args:
        name: as for `resolve_model`.
        folder: its folder, if that is known.

    Raises:
        ModelNotFoundError: there is no such folder or file, or the name cannot be one.
    """
    if is_remote(name):
        raise ModelNotFoundError(f"'{name}' is a model on a verify server: name a model on this machine or at the hub")
    if (file := gguf_path(name)) is not None:
        return _described_file(name, file)
    path = expanded(name)
    is_local = name not in CATALOGUE and bool(name.strip()) and path.is_dir()
    if folder is None and is_local and not (path / CONFIG).is_file():
        raise ModelNotFoundError(
            f"there is no model in '{name}', which has no {CONFIG}: check the path; {WAYS_TO_NAME}"
        )
    if folder is None:
        folder = path if is_local else _folder_of(name)
    is_path = path.is_file() or name.lower().endswith(".gguf") or not HUB_ID.fullmatch(name)
    if folder is None and name not in CATALOGUE and is_path:
        raise ModelNotFoundError(f"there is no model '{name}': check the path; {WAYS_TO_NAME}")
    ids: dict[str, str] = {} if is_local else {name: "id"}
    if folder is None:
        return Target(name=name, names=ids, place=None, shape=Shape(), is_local=False)
    if match := HUB_SNAPSHOT.search(f"{folder}/"):
        ids[f"{match[1]}/{match[2]}"] = "id"
    settings = _settings(folder)
    named = settings.get("_name_or_path")
    for base in (*base_models(folder), *([named] if isinstance(named, str) and "/" in named else [])):
        if HUB_ID.fullmatch(base):
            ids.setdefault(base, "base model")
    if is_local:
        ids.setdefault(path.resolve().name, "name")
    return Target(name=name, names=ids, place=folder, shape=_shape_in(settings), is_local=is_local)


def _folder_of(name: str) -> Path | None:
    """Return the folder of a model by name, if it is on this machine."""
    cache = Cache()
    if name in CATALOGUE:
        return cache.folder(name) if entry_is_here(CATALOGUE[name], cache) else None
    return cache.folder(name) if cache.manifest(name) is not None else snapshot_of(name)


def snapshot_of(repository: str, revision: str | None = None) -> Path | None:
    """Return the folder of a hub repository in the cache of the hub's client, if it is there.

    The client's own search imports far more than these few lines, and every start of a model looks for drafters.
    """
    if not HUB_ID.fullmatch(repository):
        return None
    place = hub_cache() / f"models--{repository.replace('/', '--')}"
    try:
        commit = (place / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = revision or next((path.name for path in sorted(place.glob("snapshots/*"))), "")
    folder = place / "snapshots" / commit
    try:
        return folder if commit and (folder / CONFIG).is_file() else None
    except OSError:  # no permission, or a name that no file can have
        return None


def _settings(folder: Path) -> dict[str, Any]:
    """Return the content of `config.json`; empty if it is missing or damaged, which its own readers report."""
    try:
        return read_json(folder / CONFIG)
    except (OSError, *MALFORMED):
        return {}


def _shape_in(settings: Mapping[str, Any]) -> Shape:
    """Return the sizes of a configuration, or of the language model inside it."""
    inner = next((part for key in TEXT_CONFIGS if isinstance(part := settings.get(key), Mapping)), {})
    values = {**settings, **{key: value for key, value in inner.items() if value is not None}}

    def size(*names: str) -> int | None:
        value = next((values[name] for name in names if values.get(name) is not None), None)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return Shape(
        model_type=_family(values.get("model_type")),
        hidden_size=size(*WIDTHS),
        num_hidden_layers=size(*LAYERS),
        vocab_size=size(VOCABULARY),
    )


def _family(model_type: Any) -> str | None:
    """Return a type of model in the spelling of the list: GGUF files and inner configurations have others."""
    if not isinstance(model_type, str):
        return None
    plain = re.sub(r"[^a-z0-9]", "", model_type.lower().removesuffix("_text"))
    return FAMILIES.get(plain, plain)


FAMILIES = {"qwen3moe": "qwen3_moe", "qwen3next": "qwen3_next", "gptoss": "gpt_oss"}
"""Types that the list names, by their letters."""


_FRONT_MATTER = re.compile(r"\A---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_BASE_MODEL = re.compile(r"^base_model:[ \t]*(\S.*)?$((?:\n[ \t]*-[ \t]*\S+[ \t]*$)*)", re.MULTILINE)
MAX_CARD = 1 << 16


def base_models(folder: Path) -> list[str]:
    """Return the models that the front matter of a model card names as `base_model`."""
    try:
        with (folder / CARD).open(encoding="utf-8", errors="replace") as stream:
            front = _FRONT_MATTER.match(stream.read(MAX_CARD))
    except OSError:
        return []
    match = _BASE_MODEL.search(front[1]) if front else None
    if match is None:
        return []
    words = [match[1]] if match[1] else re.findall(r"-[ \t]*(\S+)", match[2])
    return [word for text in words for word in re.findall(r"[^\s,'\"\[\]]+", text)]


def _described_file(name: str, file: Path) -> Target:
    """Describe a GGUF file by its header; its name alone if the header cannot be read here."""
    ids: dict[str, str] = {}
    shape = Shape()
    try:
        header = read_gguf(file)
        for key, value in header.metadata.items():
            if re.fullmatch(r"general\.(base_model\.\d+|source)\.repo_url", key) and isinstance(value, str):
                base = re.sub(r"^https?://[^/]+/", "", value).strip("/")
                if HUB_ID.fullmatch(base):
                    ids.setdefault(base, "base model")
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        shape = Shape(
            model_type=_family(header.metadata.get("general.architecture")),
            hidden_size=header.setting("embedding_length", 0) or None,
            num_hidden_layers=header.setting("block_count", 0) or None,
            vocab_size=len(tokens) if isinstance(tokens, list) else None,
        )
        if isinstance(spelled := header.metadata.get("general.name"), str) and spelled.strip():
            ids.setdefault(spelled.strip().replace(" ", "-"), "name")
    except (OSError, DraftreeError):
        pass  # the loader reports it
    ids.setdefault(file.stem, "name")
    return Target(name=name, names=ids, place=file, shape=shape, is_local=True)


# The drafters of a target


_QUANTIZED = re.compile(
    r"([-_.](gguf|fp8|fp16|bf16|f16|f32|nvfp4|mxfp[48]|awq|gptq|bnb|mlx|autoround|dynamic|block|unsloth|int[48]|w\da\d+"
    r"|[48]-?bits?|i?q\d\w*|ud|quantized|qat))+$",
    re.IGNORECASE,
)
"""What names of quantized copies append to that of the model."""


def bare_name(name: str) -> str:
    """Return the last part of an id or a name without what quantized copies append, in small letters.

    Llama 3.1 was published as Meta-Llama-3.1 first, which many copies are still named after.
    """
    return _QUANTIZED.sub("", name.rpartition("/")[2]).lower().removeprefix("meta-")


def matches(target: Target) -> list[tuple[KnownTarget, str, bool]]:
    """Return the known targets that a model is, how it was recognised, and whether the user added them."""
    spelled = {name.lower(): way for name, way in target.names.items()}
    bare = {bare_name(name): way if way != "id" else "name" for name, way in reversed(list(target.names.items()))}
    recognised = []
    for known, is_own in known_targets():
        ways = [spelled[model.lower()] for model in known.models if model.lower() in spelled]
        ways += [bare[bare_name(model)] for model in known.models if bare_name(model) in bare]
        if ways and not (ways[0] == "name" and target.is_local and target.shape.difference(known.shape)):
            recognised.append((known, ways[0], is_own))
    has_base = any("/" in name for name in target.names)
    if not recognised and target.is_local and not has_base and None not in asdict(target.shape).values():
        recognised = [
            (known, "shape", is_own)
            for known, is_own in known_targets()
            if None not in asdict(known.shape).values() and known.shape.difference(target.shape) is None
        ]
    return recognised


def find_drafters(target: Target) -> list[FoundDrafter]:
    """Return all drafters for a target, in the order in which `auto` tries them.

    First layers in its checkpoint; then heads on this machine, those of the user first; published ones that are not
    here; siblings on this machine, the smallest first.
    """
    named: dict[bool, list[FoundDrafter]] = {True: [], False: []}
    for known, way, is_own in matches(target):
        named[is_own].extend(_named(drafter, known, way, target) for drafter in known.drafters)
    own = own_folder()
    found = [
        *_in_checkpoint(target),
        *named[True],
        *(_folder_heads(own, "in the configuration folder", target) if own is not None else ()),
        *_beside(target),
        *named[False],
        *_siblings(target),
    ]
    unique: dict[str, FoundDrafter] = {}
    for drafter in found:
        key = str(drafter.place or drafter.known.id) if drafter.known.id else drafter.known.kind
        first = unique.setdefault(key, drafter)
        if first.known.tokens_per_round is None:  # layers of the checkpoint are also in the list
            record = {name: getattr(drafter.known, name) for name in ("tokens_per_round", "drafted", "accepted")}
            unique[key] = replace(first, known=replace(first.known, **record))
    return sorted(unique.values(), key=_rank)


def _rank(found: FoundDrafter) -> int:
    if found.known.kind == MTP and not found.known.id:
        return 0
    if found.place is None:
        return 2
    return 3 if found.known.kind == SIBLING else 1


def reader_reason(kind: str) -> str | None:
    """Return why drafters of a kind cannot be used; None if they can. Variants are written after a dot (eagle3.1)."""
    if kind.partition(".")[0] in (SIBLING, *KINDS):
        return None
    return f"heads of kind '{kind}' are not read: {', '.join(KINDS)} are"


def _named(known: KnownDrafter, made_for: KnownTarget, way: str, target: Target) -> FoundDrafter:
    """Return a drafter of the list with its place on this machine, if it has one."""
    place, where = place_of(known)
    reason = reader_reason(known.kind)
    if reason is None and (difference := made_for.shape.difference(target.shape)) is not None:
        reason = f"it is for {made_for.models[0]}, and {difference}"
    if reason is None and known.kind == MTP and not known.id and target.place is not None:
        reason = "the files here have no MTP layers that can be read"  # else `_in_checkpoint` has found them
    if reason is None and place is None and known.id not in ("", *CATALOGUE) and not HUB_ID.fullmatch(known.id):
        reason = "there is no such folder or file"
    found = FoundDrafter(known=known, matched=way, place=place, where=where, reason=reason)
    return found if reason is not None else replace(found, reason=reason_against(found, target))


def reason_against(found: FoundDrafter, target: Target) -> str | None:
    """Return why the files of a drafter do not fit a target; None if they do, or are not here."""
    if found.place is None:
        return None
    check = sibling_reason if found.known.kind == SIBLING else head_reason
    return check(found.place, target)


def place_of(known: KnownDrafter) -> tuple[Path | None, str | None]:
    """Return the folder or GGUF file of a drafter on this machine, and where it is in words."""
    if not known.id:
        return None, None
    if known.kind != SIBLING and Path(known.id).name == known.id:
        from draftree.heads.shipped import head_folder, shipped_heads  # here, since it imports torch

        is_shipped = any(head.name == known.id for head in shipped_heads())
        return (head_folder(known.id), IN_PACKAGE) if is_shipped else (None, None)
    if known.id in CATALOGUE:
        folder = _folder_of(known.id)
        return folder, None if folder is None else "in the cache"
    path = expanded(known.id)
    if PATH_LIKE.match(known.id) or path.is_absolute():
        return (path, "named by you") if path.exists() else (None, None)
    snapshot = snapshot_of(known.id, known.revision)
    return snapshot, None if snapshot is None else "in the hub cache"


MTP_NAME = re.compile(r"(?:.*\.)?mtp[._].*|.*\.eh_proj\.weight")


def _in_checkpoint(target: Target) -> Iterator[FoundDrafter]:
    """Yield the MTP layers in the target's own files, if a reader recognises them."""
    if target.place is None or target.is_file:
        return
    from draftree.heads.layouts import SAFE, HeadFolder, mtp  # here, since it imports torch

    folder = HeadFolder(target.place)
    try:
        if (target.place / WEIGHTS_INDEX).is_file():
            names: Iterable[str] = read_json(target.place / WEIGHTS_INDEX)["weight_map"]
        elif (target.place / SAFE).is_file():
            names = folder.shapes
        else:
            return  # pickled weights would be read as a whole
        if not any(map(MTP_NAME.fullmatch, names)) or not mtp.recognise(folder):
            return
    except (OSError, DraftreeError, *MALFORMED):
        return  # the loader of the target reports it
    yield FoundDrafter(
        known=KnownDrafter(kind=MTP, source="the model's own files", verified=True),
        matched="folder",
        place=target.place,
        where="in the checkpoint",
        reason=head_reason(target.place, target),
    )


HEAD_KEYS = frozenset(
    ("speculators_model_type", "dflash_config", "eagle_config", "medusa_num_heads", "markov_rank", "draft_vocab_size")
)
HEAD_CLASSES = re.compile(r"eagle|dflash|dspark|medusa|speculator|assistant", re.IGNORECASE)
MOST_FOLDERS = 256
"""Folders that are looked at in one place."""


def _head_kind(settings: Mapping[str, Any]) -> str | None:
    """Return the kind of head that a configuration describes, "head" if it does not name it; None for a whole model."""
    classes = settings.get("architectures")
    classes = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    is_head = HEAD_KEYS & settings.keys() or any(map(HEAD_CLASSES.search, classes))
    if not is_head and not str(settings.get("model_type")).endswith("_assistant"):
        return None
    return str(settings.get("speculators_model_type") or "head")


def _folder_heads(place: Path, where: str, target: Target) -> Iterator[FoundDrafter]:
    """Yield the heads in the folders of a place."""
    for folder in _folders_in(place):
        settings = _settings(folder)
        kind = _head_kind(settings)
        if not settings and (target.place is None or place != target.place.absolute().parent):
            kind = "head"  # its configuration is damaged, and only heads are in such places
        if kind is not None and folder != target.place:
            reason = head_reason(folder, target)
            if reason is None:
                from draftree.heads.folders import read_config

                kind = read_config(folder).kind
            known = KnownDrafter(kind=kind, id=str(folder), source="its own files", verified=True)
            yield FoundDrafter(known=known, matched="folder", place=folder, where=where, reason=reason)


def _beside(target: Target) -> Iterator[FoundDrafter]:
    """Yield the heads inside a target's folder, and in folders next to it; of a file, in its folder."""
    for place in _places_beside(target):
        yield from _folder_heads(place, BESIDE, target)
    for file in _small_files(target):
        if HEAD_CLASSES.search(kind := _architecture(file)):
            known = KnownDrafter(kind=kind, id=str(file), source="its own header", verified=True)
            reason = "heads in GGUF files are not read: use its folder of safetensors"
            yield FoundDrafter(known=known, matched="folder", place=file, where=BESIDE, reason=reason)


def _small_files(target: Target) -> list[Path]:
    """Return the GGUF files next to a GGUF file that are small enough to draft for it."""
    if target.place is None or not target.is_file:
        return []
    largest = MOST_SHARE * target.place.stat().st_size
    files = [path for path in target.place.parent.glob("*.gguf") if path.is_file()]
    return sorted(path for path in files if path.stat().st_size <= largest)


def _architecture(file: Path) -> str:
    """Return the architecture that the header of a GGUF file names; empty if it cannot be read."""
    try:
        return str(GgufFile(file).metadata.get("general.architecture", ""))
    except (OSError, DraftreeError):
        return ""


def _places_beside(target: Target) -> list[Path]:
    if target.place is None:
        return []
    place = target.place.absolute()
    if target.is_file:
        return [place.parent]
    return [place] if not target.is_local else [place, place.parent]


def _folders_in(place: Path) -> list[Path]:
    try:
        return sorted(path for path in itertools.islice(place.iterdir(), MOST_FOLDERS) if (path / CONFIG).is_file())
    except OSError:
        return []


def head_reason(folder: Path, target: Target) -> str | None:
    """Return why the head in a folder is not for a target; None if its files do not say so. Reads no tensor."""
    from draftree.heads.folders import check_head  # here, since it imports torch

    try:
        config = check_head(folder)
    except DraftreeError as error:
        return str(error).removeprefix(f"'{folder}': ")
    shape = target.shape
    for name, made_for, actual in (
        ("hidden states", config.target_hidden, shape.hidden_size),
        ("a vocabulary", config.vocab_size, shape.vocab_size if not target.is_file else None),
    ):
        if actual is not None and made_for != actual:
            return f"it is for a model with {name} of {made_for}, and this one has {actual}"
    layers = shape.num_hidden_layers
    if layers is not None and max(config.features) > layers:
        return f"it reads hidden state {max(config.features)}, and this model has {layers} layers"
    trained_for = [config.target_name] if config.kind != MTP else []
    others = [name for name in (*trained_for, *base_models(folder)) if "/" in name and HUB_ID.fullmatch(name)]
    bare = {bare_name(name) for name in target.names}
    has_base = any("/" in name or name in CATALOGUE for name in target.names)
    if others and has_base and folder != target.place and not bare & set(map(bare_name, others)):
        return f"it was trained for {others[0]}"
    return None


def require_head(folder: Path, *, width: int | None, vocab_size: int, num_layers: int) -> None:
    """Read a head completely, and run its layer once if it is one of MTP, all on the CPU.

    Args:
        folder: the head's.
        width: that of the target's hidden states; None if it is unknown.
        vocab_size: number of rows of its output head.
        num_layers: number of its layers.

    Raises:
        DraftreeError: its tensors are not those of its layout, its layer cannot be used, or the sizes differ.
    """
    import torch

    from draftree.heads.base import FeatureHead, TargetParts
    from draftree.heads.folders import read_head
    from draftree.models.base import EmbeddingFacts

    head = read_head(folder)
    hidden = width or head.config.target_hidden
    dtype = next(head.parameters()).dtype
    # rows of zeros that take no memory
    rows = torch.zeros(1, hidden, dtype=dtype).expand(vocab_size, -1)
    parts = TargetParts(rows, rows, EmbeddingFacts(1.0, 1.0), lambda states: states, num_layers)
    head.require_target(parts)
    if not isinstance(head, FeatureHead) or head.config.kind != MTP:
        return
    head.bind(parts)
    one = torch.ones(1, 1, dtype=torch.long)
    try:
        before = head.project(torch.zeros(1, 1, len(head.config.features), hidden, dtype=dtype))
        head.run(one, before, one, lambda layer, query, key, value: torch.zeros_like(query))
    except (RuntimeError, *MALFORMED) as error:
        raise ModelLoadError(f"the layer of its MTP head cannot run ({error})") from error


# Smaller models with the same tokenizer

MOST_SHARE = 1 / 5
"""Size of a sibling's weights, relative to the target's, beyond which drafting with it hardly pays."""


def _siblings(target: Target) -> Iterator[FoundDrafter]:
    """Yield the smaller models on this machine that have the target's tokenizer, the smallest first."""
    size = _weight_bytes(target.place) if target.place is not None else None
    if size is None or target.place is None or target.shape.vocab_size is None:
        return
    if not target.is_file and _settings(target.place).get("is_encoder_decoder"):
        return
    small = []
    for place, where in _models_here(target):
        other = _weight_bytes(place)
        if other is not None and other <= MOST_SHARE * size:
            small.append((other, str(place), place, where))
    for other, _, place, where in sorted(small):
        if sibling_reason(place, target, must_compare=True) is None:
            match = HUB_SNAPSHOT.search(f"{place}/")
            name = f"{match[1]}/{match[2]}" if match else place.name if place.parent == Cache().models else str(place)
            known = KnownDrafter(kind=SIBLING, id=name, bytes=other, source="its tokenizer", verified=True)
            yield FoundDrafter(known=known, matched="tokenizer", place=place, where=where, reason=None)


def _models_here(target: Target) -> Iterator[tuple[Path, str]]:
    """Yield folders and GGUF files that may be siblings, each with where it is."""
    cache = Cache()
    for name, entry in CATALOGUE.items():
        if entry.form != "whisper" and entry_is_here(entry, cache):
            yield cache.folder(name), "in the cache"
    for place in sorted(hub_cache().glob("models--*--*")):
        if (folder := snapshot_of(place.name.removeprefix("models--").replace("--", "/", 1))) is not None:
            yield folder, "in the hub cache"
    for place in _places_beside(target):
        yield from ((folder, BESIDE) for folder in _folders_in(place))
    yield from ((file, BESIDE) for file in _small_files(target))


def _weight_bytes(place: Path) -> int | None:
    """Return the size of a model's weights; None if they are pickled, incomplete or those of a head."""
    try:
        if place.is_file():
            return place.stat().st_size
        if _head_kind(_settings(place)) is not None:
            return None
        return sum(path.stat().st_size for path in weight_files(place)) or None
    except (OSError, DraftreeError, *MALFORMED):
        return None


def sibling_reason(place: Path, target: Target, *, must_compare: bool = False) -> str | None:
    """Return why a smaller model cannot draft for a target; None if it can.

    `must_compare` demands that the tokenizers could be compared, for models that no list names.
    """
    try:
        if place.is_dir():
            check_model_folder(place)
            settings = _settings(place)
            size, is_causal = _shape_in(settings).vocab_size, not settings.get("is_encoder_decoder")
        elif (name := _architecture(place)) not in ARCHITECTURES:
            return f"its architecture '{name}' is not that of a model that can be read"
        else:
            size, is_causal = None, True
    except DraftreeError as error:
        return str(error)
    if not is_causal:
        return "it is an encoder-decoder model"
    if target.place is None:
        return None
    wanted = target.shape.vocab_size
    if size is not None and wanted is not None and abs(size - wanted) > PADDING:
        return f"its vocabulary has {size} tokens, and the model's {wanted}"
    if _is_same_file(target.place / TOKENIZER, place / TOKENIZER):
        return None
    ours, theirs = _tokens_in(target.place), _tokens_in(place)
    if ours is None or theirs is None:
        return "its tokenizer cannot be compared with the model's" if must_compare else None
    common = ours.keys() & theirs.keys()
    if len(common) < max(len(ours), len(theirs)) - PADDING or any(ours[index] != theirs[index] for index in common):
        return "its tokens are not the model's"
    return None


def _tokens_in(place: Path) -> dict[int, str] | None:
    """Return the tokens of a folder or a GGUF file by id, without added ones; None if they are in another format."""
    try:
        if place.is_file():
            return dict(enumerate(GgufFile(place).metadata["tokenizer.ggml.tokens"]))
        vocabulary = read_json(place / TOKENIZER)["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score
            return {index: str(pair[0]) for index, pair in enumerate(vocabulary)}
        return {int(index): token for token, index in vocabulary.items()}
    except (OSError, DraftreeError, *MALFORMED):
        return None


def _is_same_file(one: Path, other: Path) -> bool:
    """Return whether two files have the same bytes; they are compared without being parsed."""
    try:
        return one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()
    except OSError:
        return False
