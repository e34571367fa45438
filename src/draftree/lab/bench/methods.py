"""The methods of a benchmark in the user's notation: `DRAFT`, `DRAFT@PLAN`, `DRAFT@PLAN@VERIFY`.

An @ is followed by a planner or a verifier, in any order: `ngram@heuristic`, `model:stories15m,k=4@token`.
Every method has a job, and transformers' methods for the same job are its peers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
        fields: dict[str, Any] = {"name": self.name, "engine": self.engine, "job": self.job}
        if isinstance(self.how, OurMethod):
            fields |= {"draft_is_pass": self.how.draft_is_pass, "verify": self.how.verify, "plan": self.how.plan}
        return fields


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
        methods += _methods(text, plans, verify)
    for method in methods:
        assert isinstance(method.how, OurMethod)
        choose_methods(method.how.draft, method.how.verify, method.how.plan)
    for name, count in Counter(method.name for method in methods).items():
        if count > 1:
            raise ConfigurationError(f"method '{name}' is given {count} times: give it once")
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
    are = f"{', '.join(lossy)} {'is' if len(lossy) == 1 else 'are'}"
    note = f"{are} lossy at temperature {temperature:g}: texts are not distributed as the model's own"
    return (note,) if lossy else ()


def peer_methods(ours: Iterable[Method], *, batch: int) -> list[Method]:
    """Return transformers' methods for the same jobs, plain first. It drafts only for single prompts."""
    peers = [peer for method in ours if batch == 1 and not method.is_plain for peer in _peers_of(method)]
    return list(dict.fromkeys([Method("transformers", PLAIN, PeerMethod()), *peers]))


def jobs_without_peer(ours: Iterable[Method], peers: Iterable[Method]) -> list[str]:
    """Return our methods whose job transformers does not support here."""
    offered = {peer.job for peer in peers}
    return [method.name for method in ours if method.job not in offered]


def _methods(text: str, plans: Sequence[str], verify: str) -> Iterator[Method]:
    """Yield the methods of a drafter in the user's notation: one, or one for each of `plans`."""
    draft, *parts = text.split("@")
    if not drafts(draft):
        raise ConfigurationError(f"method '{text}': plain decoding takes no @; its verifier is set by --verify")
    planners = PLANNERS.names()
    verifiers = VERIFIERS.names()
    chosen: dict[str, str] = {}
    for part in parts:
        name = part.split(":")[0].split(",")[0]
        if name not in planners and name not in verifiers:
            raise ConfigurationError(
                f"method '{text}' has '{part}' after @, which is neither a planner nor a verifier: "
                f"{suggestion(name, [*planners, *verifiers])}"
            )
        kind = "plan" if name in planners else "verify"
        if kind in chosen:
            raise ConfigurationError(f"method '{text}' has two planners or two verifiers: give one of each")
        chosen[kind] = part
    verify = chosen.get("verify", verify)
    specs = DRAFTERS.parse(draft)
    shown = "+".join(str(_without_folder(spec)) for spec in specs)
    # methods of one job have the same drafters and models, whatever their options
    job = "+".join(str(Spec(spec.name, _without_folder(spec).argument)) for spec in specs)
    draft_is_pass = any(cls.describe(config).runs_model for cls, config in map(DRAFTERS.configure, specs))
    every: Sequence[str | None] = [chosen.get("plan")] if "plan" in chosen or not plans else plans
    for plan in every:
        tail = [part for part in (plan, None if verify == DEFAULT_VERIFY else verify) if part is not None]
        yield Method("@".join([shown, *tail]), job, OurMethod(draft, verify, plan, draft_is_pass=draft_is_pass))


def _without_folder(spec: Spec) -> Spec:
    return spec if spec.argument is None else Spec(spec.name, shown_name(spec.argument), spec.options)


def _peers_of(method: Method) -> list[Method]:
    """Return transformers' methods for a job, with its own draft length and with the drafter's."""
    assert isinstance(method.how, OurMethod)
    spec, *others = DRAFTERS.parse(method.how.draft)
    if others or spec.name not in ("ngram", "model", "early-exit"):
        return []
    drafter, config = DRAFTERS.configure(spec)
    k = drafter.describe(config).depth
    match spec.name:
        case "ngram":
            return [Method(f"transformers lookup k={k}", method.job, PeerMethod(lookup_tokens=k))]
        case "early-exit":
            name = f"transformers early exit {config.layers}"
            how = PeerMethod(exit_layers=config.layers)
        case _:
            name = f"transformers assistant {_without_folder(spec).argument}"
            how = PeerMethod(assistant=spec.argument)
    return [Method(name, method.job, how), Method(f"{name} k={k}", method.job, replace(how, assistant_tokens=k))]
