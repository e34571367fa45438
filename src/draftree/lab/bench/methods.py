"""The methods of a benchmark in the user's notation: `DRAFT`, `DRAFT@PLAN`, `DRAFT@PLAN@VERIFY`.

An @ is followed by a planner or a verifier, in any order: `ngram@heuristic`, `model:stories15m,k=4@token`.
Every method has a job, and transformers' methods for the same job are its peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.build import choose_methods
from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.files import shown_name
from draftree.core.registry import Spec
from draftree.drafters import DRAFTERS, drafts
from draftree.lab.bench.records import OURS, PEER
from draftree.options import AUTO_DRAFT, NO_DRAFT
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import Guarantee

PLAIN = "plain"
DEFAULT_VERIFY = "coupled"


@dataclass(frozen=True, slots=True)
class OurMethod:
    """Arguments of `LLM`; the draft "none" is plain decoding.

    Attributes:
        draft_is_pass: whether drafting runs a model: its seconds count as passes, not as overhead.
    """

    draft: str
    verify: str
    plan: str | None
    draft_is_pass: bool


@dataclass(frozen=True, slots=True)
class PeerMethod:
    """Arguments of `model.generate`.

    Attributes:
        exit_layers: `assistant_early_exit`: the model's first layers are its assistant.
        assistant_tokens: fixed draft length; None keeps transformers' own default and its confidence threshold.
    """

    lookup_tokens: int | None = None
    assistant: str | None = None
    exit_layers: int | None = None
    assistant_tokens: int | None = None

    @property
    def is_plain(self) -> bool:
        return self.lookup_tokens is None and self.assistant is None and self.exit_layers is None


@dataclass(frozen=True, slots=True)
class Method:
    """One way to generate the texts: a row of the table.

    Attributes:
        job: methods of one job are comparable across engines.
    """

    name: str
    job: str
    how: OurMethod | PeerMethod

    @property
    def engine(self) -> str:
        return OURS if isinstance(self.how, OurMethod) else PEER

    @property
    def is_plain(self) -> bool:
        return self.job == PLAIN

    def to_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"name": self.name, "engine": self.engine, "job": self.job}
        if isinstance(self.how, OurMethod):
            shown["draft_is_pass"] = self.how.draft_is_pass
            shown["verify"] = self.how.verify
            shown["plan"] = self.how.plan
        return shown


def our_methods(specs: Sequence[str], *, plans: Sequence[str] = (), verify: str = DEFAULT_VERIFY) -> list[Method]:
    """Return plain decoding first, then every draft; a draft without its own planner is run with each of `plans`."""
    methods = [Method(PLAIN, PLAIN, OurMethod(NO_DRAFT, verify, None, draft_is_pass=False))]
    if any(text.split("@")[0] == AUTO_DRAFT for text in specs):
        raise ConfigurationError(
            f"drafter '{AUTO_DRAFT}' is another one on other machines, and a benchmark names what it measures: "
            f"'draftree explain MODEL --draft {AUTO_DRAFT}' shows the drafter that it stands for"
        )
    drafting = [text for text in specs if drafts(text)]
    if plans and not drafting:
        raise ConfigurationError(f"planner '{plans[0]}' was given, but there is no drafter: add --draft ngram")
    for text in drafting:
        methods.extend(_method(*split) for split in _splits(text, plans, verify))
    for method in methods:
        assert isinstance(method.how, OurMethod)
        choose_methods(method.how.draft, method.how.verify, method.how.plan)
    _require_unique(methods)
    return methods


def lossy_notes(methods: Iterable[Method], temperature: float) -> tuple[str, ...]:
    """Return a note on methods whose texts do not have the model's distribution; empty if there are none."""
    lossy = [
        method.name
        for method in methods
        if isinstance(method.how, OurMethod)
        and not method.is_plain
        and VERIFIERS.find(VERIFIERS.parse(method.how.verify)[0].name).promise(temperature) is Guarantee.LOSSY
    ]
    if not lossy:
        return ()
    are = "is" if len(lossy) == 1 else "are"
    return (
        f"{', '.join(lossy)} {are} lossy at temperature {temperature:g}: texts are not distributed as the model's own",
    )


def peer_methods(ours: Iterable[Method], *, batch: int) -> list[Method]:
    """Return transformers' methods for the same jobs, plain first. It drafts only for single prompts."""
    found = [Method("transformers", PLAIN, PeerMethod())]
    for method in ours:
        if batch == 1 and not method.is_plain:
            found.extend(_peers_of(method))
    return list(dict.fromkeys(found))


def jobs_without_peer(ours: Iterable[Method], peers: Iterable[Method]) -> list[str]:
    """Return our methods whose job transformers does not support here."""
    offered = {peer.job for peer in peers}
    return [method.name for method in ours if method.job not in offered]


def _splits(text: str, plans: Sequence[str], verify: str) -> list[tuple[str, str | None, str]]:
    draft, *parts = text.split("@")
    if not drafts(draft):
        raise ConfigurationError(f"method '{text}': plain decoding takes no @; its verifier is set by --verify")
    planners = PLANNERS.names()
    verifiers = VERIFIERS.names()
    own_plan = own_verify = None
    for part in parts:
        name = part.split(":")[0].split(",")[0]
        if name in planners and own_plan is None:
            own_plan = part
        elif name in verifiers and own_verify is None:
            own_verify = part
        elif name in planners or name in verifiers:
            raise ConfigurationError(f"method '{text}' has two planners or two verifiers: give one of each")
        else:
            raise ConfigurationError(
                f"method '{text}' has '{part}' after @, which is neither a planner nor a verifier: "
                f"{suggestion(name, [*planners, *verifiers])}"
            )
    chosen: Sequence[str | None] = [own_plan] if own_plan is not None or not plans else plans
    return [(draft, plan, own_verify or verify) for plan in chosen]


def _method(draft: str, plan: str | None, verify: str) -> Method:
    specs = DRAFTERS.parse(draft)
    shown = "+".join(str(_without_folder(spec)) for spec in specs)
    tail = [part for part in (plan, None if verify == DEFAULT_VERIFY else verify) if part is not None]
    draft_is_pass = any(cls.describe(config).runs_model for cls, config in map(DRAFTERS.configure, specs))
    return Method("@".join([shown, *tail]), _job(specs), OurMethod(draft, verify, plan, draft_is_pass=draft_is_pass))


def _job(specs: Sequence[Spec]) -> str:
    """Return the job of drafters: their names and models, without options."""
    bare = (Spec(spec.name, _without_folder(spec).argument) for spec in specs)
    return "+".join(str(spec) for spec in bare)


def _without_folder(spec: Spec) -> Spec:
    return spec if spec.argument is None else Spec(spec.name, shown_name(spec.argument), spec.options)


def _peers_of(method: Method) -> list[Method]:
    assert isinstance(method.how, OurMethod)
    specs = DRAFTERS.parse(method.how.draft)
    if len(specs) > 1 or specs[0].name not in ("ngram", "model", "early-exit"):
        return []
    spec = specs[0]
    drafter, config = DRAFTERS.configure(spec)
    k = drafter.describe(config).depth
    if spec.name == "ngram":
        return [Method(f"transformers lookup k={k}", method.job, PeerMethod(lookup_tokens=k))]
    if spec.name == "early-exit":
        name = f"transformers early exit {config.layers}"
        return [
            Method(name, method.job, PeerMethod(exit_layers=config.layers)),
            Method(f"{name} k={k}", method.job, PeerMethod(exit_layers=config.layers, assistant_tokens=k)),
        ]
    name = f"transformers assistant {_without_folder(spec).argument}"
    return [
        Method(name, method.job, PeerMethod(assistant=spec.argument)),
        Method(f"{name} k={k}", method.job, PeerMethod(assistant=spec.argument, assistant_tokens=k)),
    ]


def _require_unique(methods: Sequence[Method]) -> None:
    names = [method.name for method in methods]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"method '{name}' is given {names.count(name)} times: give it once")
