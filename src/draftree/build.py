"""From specs to the parts of an engine: methods are chosen and checked first, weights are loaded last."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from draftree.core.errors import ConfigurationError, DraftreeError, require_extra
from draftree.core.host import SYSTEM_CLOCK, Clock, apply_threads
from draftree.core.registry import Spec
from draftree.core.tree import Draw
from draftree.drafters import DRAFTERS, drafts
from draftree.drafters.base import NO_DRAFTS, DraftContext, Drafter, DraftTraits, LoadedDraftModel
from draftree.drafters.learning.store import Learning, LearningStore, parse_learning, prepare_folder
from draftree.drafters.model import apart_reader, model_reader
from draftree.drafters.wrappers.ahead import ahead_of
from draftree.drafters.wrappers.merged import MergedDrafter, part_draw
from draftree.engine.parts import EngineParts, agree, require_picks
from draftree.engine.sequence import DraftChoice
from draftree.loading.auto_draft import (
    FALLBACK_DRAFTS,
    RACE_DRAFT,
    AutoCandidate,
    auto_candidates,
    fetched_candidates,
)
from draftree.loading.encoder_decoder import is_encoder_decoder_target
from draftree.loading.known_drafters import SIBLING
from draftree.loading.loaded import LoadedModel, kernels_of_drafter, require_layers
from draftree.loading.resolve import prepared_folder, require_extras
from draftree.models.base import Extend, LanguageModel, Pass, Slot
from draftree.options import AUTO_DRAFT, NO_DRAFT, ModelOptions
from draftree.parallel.entry import load_divided
from draftree.planners import PLANNERS
from draftree.planners.base import Planner, require_effect
from draftree.text.tokenizer import Tokenizer
from draftree.verifiers import VERIFIERS
from draftree.verifiers.base import Verifier


def require_positive(settings: object, *names: str) -> None:
    """Raise for settings of these names that are given and below 1."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} is {value}: it must be at least 1")


def load_for(options: ModelOptions) -> LoadedModel:
    """Load the target of a measurement, after setting the number of threads."""
    apply_threads(options.threads, options.affinity)
    loaded = load_divided(options)
    loaded.model.settle()
    return loaded


ROWS = (1, 4, 8, 16, 32, 64)
WIDE_ROWS = (1, 16, 64, 128, 256, 512, 1024)
"""Numbers of rows that are measured for models whose passes wait for their weights: large trees pay there. Fewer of the
small ones, which cost alike."""
MOST_TIMES = 8.0
"""A pass that costs so many times the shortest one ends the measurement of such models: few rounds write so many
tokens."""
PREFIX = 16
REPEATS = 5
ENOUGH_SECONDS = 0.05
"""Passes that take longer than this, several turns of another process, are not repeated."""

_MEASURED: WeakKeyDictionary[LanguageModel, dict[Clock, dict[int, float]]] = WeakKeyDictionary()


def costs_of(model: LanguageModel, *, max_rows: int, clock: Clock = SYSTEM_CLOCK) -> Mapping[int, float]:
    """Return seconds of passes by rows, up to at least `max_rows`; measured once per clock and model."""
    if (declared := model.known_costs(max_rows)) is not None:
        return declared
    known = _MEASURED.setdefault(model, {}).setdefault(clock, {})
    rows = WIDE_ROWS if model.streams_weights else ROWS
    needed = tuple(count for count in rows if count not in known and count <= _enough(max_rows, rows))
    if needed and not (model.streams_weights and _is_too_long(known)):
        known.update(measure_costs(model, max_rows=max_rows, rows=needed, clock=clock))
    return known


def measure_costs(
    model: LanguageModel, *, max_rows: int, rows: Sequence[int] = ROWS, clock: Clock = SYSTEM_CLOCK
) -> dict[int, float]:
    """Measure the seconds of a pass for each number of rows, after a short prefix; rounds refine them later.

    No pass is longer than the first of `rows` from `max_rows` on. Short passes are repeated and the fastest counts.
    Passes of models that stream their weights are long: the measurement ends where more rows cannot pay.
    """
    longest = min(_enough(max_rows, rows), model.max_length // 2)
    prefix = min(PREFIX, model.max_length - longest)
    model.reserve(model.num_open + 1, prefix + longest)
    slot = model.open_probe()
    try:
        model.run(Pass([Extend(slot, [0] * prefix, range(-1, prefix - 1), logits_at=(), settled=prefix)]))
        model.commit(slot, range(prefix))
        _run(model, slot, 1)  # the first pass with logits loads the output head
        costs: dict[int, float] = {}
        # all numbers of rows in turn, so that other work on the machine, which only adds time, spoils none alone
        for repeat in range(REPEATS):
            for count in (count for count in rows if count <= longest):
                if repeat and costs.get(count, math.inf) > ENOUGH_SECONDS:
                    continue
                for _ in range(0 if repeat else model.num_warm_ups):
                    _run(model, slot, count)
                model.synchronize()
                start = clock()
                model.run(Pass([Extend(slot, [0] * count, range(-1, count - 1))]))
                model.synchronize()
                costs[count] = min(costs.get(count, math.inf), clock() - start)
                model.commit(slot, ())
                if model.streams_weights and _is_too_long(costs):
                    break
    finally:
        model.close(slot)
    return costs


def _is_too_long(seconds: Mapping[int, float]) -> bool:
    """Return whether more rows than the measured ones cannot pay."""
    return bool(seconds) and max(seconds.values()) > MOST_TIMES * min(seconds.values())


def _run(model: LanguageModel, slot: Slot, count: int) -> None:
    """Run a pass over `count` rows; the slot is unchanged afterwards."""
    model.run(Pass([Extend(slot, [0] * count, range(-1, count - 1))]))
    model.commit(slot, ())


def _enough(max_rows: int, rows: Sequence[int]) -> int:
    return next((count for count in rows if count >= max_rows), rows[-1])


logger = logging.getLogger(__name__)

DEFAULT_PLAN = "adaptive"
"""Default planner if no draft can change the text."""
REPEATABLE_PLAN = "fixed"
"""Default planner if the text depends on the draft: a time-dependent plan would change the text of a seed."""


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A configured drafter that is not built yet."""

    name: str
    cls: type[Drafter[Any]]
    config: Any

    @property
    def traits(self) -> DraftTraits:
        """Its static facts."""
        return self.cls.describe(self.config)

    @property
    def models(self) -> list[str]:
        """Names of the models that it loads."""
        fields = dataclasses.fields(self.config)
        return [str(getattr(self.config, field.name)) for field in fields if field.metadata.get("names_model")]


@dataclass(frozen=True, slots=True)
class Methods:
    """Configured methods that fit together; no weights are loaded yet."""

    draft: str  # name of the drafter, by which requests choose it
    drafters: tuple[DraftMethod, ...]  # None for plain decoding, several for a merged tree
    traits: DraftTraits  # static facts of the drafters together
    draw: Draw  # how children are drawn, as agreed between drafters and verifier
    verifier: Verifier
    planner: Planner[Any]
    plan: str  # the planner's spec

    @property
    def source(self) -> str:
        """Name of the drafters together in the sources of a tree."""
        return "+".join(method.name for method in self.drafters)

    @property
    def draft_models(self) -> list[str]:
        """Names of the models that the drafters load."""
        return [name for method in self.drafters for name in method.models]


def choose_methods(draft: str | None, verify: str, plan: str | None) -> Methods:
    """Find and configure methods.

    For the drafter `auto`, which is chosen when the target is loaded, these are the methods of a stand-in without
    models: `suffix`, or plain decoding if that does not fit to the verifier.

    Raises:
        ConfigurationError: an unknown method or option, methods that do not fit together, or a missing extra.
        WeightsError: an extra for a drafter's model is missing.
    """
    if draft == AUTO_DRAFT:
        return _stand_in(verify, plan)
    verifier_class, verifier_config = VERIFIERS.configure(_only(VERIFIERS.parse(verify), "verifier", verify))
    drafters = _drafters(draft) if drafts(draft) else ()
    traits = NO_DRAFTS
    if drafters:
        each = [method.traits for method in drafters]
        traits = each[0] if len(each) == 1 else MergedDrafter.describe(each)
    # packages that are not installed are missed before the target is fetched or loaded
    if traits.reads_grammars:
        require_extra("grammar", "drafter 'grammar' needs", error=ConfigurationError)
    for name in [name for method in drafters for name in method.models]:
        require_extras(name)
    if not drafters and plan is not None:
        raise ConfigurationError(f"planner '{plan}' was given, but there is no drafter: name one, such as ngram")
    if plan is None:
        keeps_text = verifier_class.lossless and not verifier_class.needs_distributions
        plan = DEFAULT_PLAN if drafters and keeps_text and not traits.works_ahead else REPEATABLE_PLAN
    planner_class, planner_config = PLANNERS.configure(_only(PLANNERS.parse(plan), "planner", plan))
    draw = agree(str(draft), traits, verify, verifier_class) if drafters else Draw.FREE
    planner = planner_class(
        planner_config,
        default_depth=traits.depth,
        default_nodes=traits.nodes,
        parts=[method.traits.part(method.name) for method in drafters],
    )
    if drafters:
        require_effect(planner, plan=plan, draft=str(draft))
    return Methods(draft or NO_DRAFT, drafters, traits, draw, verifier_class(verifier_config), planner, plan)


def _stand_in(verify: str, plan: str | None) -> Methods:
    """Return methods for `auto` before the target is known; raises for a wrong verifier or planner."""
    try:
        methods = choose_methods(FALLBACK_DRAFTS[0], verify, plan)
    except ConfigurationError:
        methods = choose_methods(None, verify, None)
        if plan is not None:
            PLANNERS.configure(_only(PLANNERS.parse(plan), "planner", plan))
    return replace(methods, draft=AUTO_DRAFT)


def _drafters(draft: str) -> tuple[DraftMethod, ...]:
    if AUTO_DRAFT in (re.split("[,:]", part)[0].strip() for part in draft.split("+")):
        raise ConfigurationError(
            f"drafter '{draft}': '{AUTO_DRAFT}' stands alone and takes no options: it chooses a drafter for the model. "
            "Name drafters to merge them; the planner of draft sizes is chosen by 'plan'"
        )
    specs = DRAFTERS.parse(draft)
    if not drafts(specs[0].name.partition("+")[0].strip()):
        raise ConfigurationError(f"drafter '{draft}': '{NO_DRAFT}' means plain decoding and takes no options")
    methods = [DraftMethod(str(spec), *DRAFTERS.configure(spec)) for spec in specs]
    names = [method.name for method in methods]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigurationError(f"drafter '{draft}' names '{twice}' twice: name it once")
    return tuple(methods)


def _only(specs: list[Spec], kind: str, text: str) -> Spec:
    if len(specs) > 1:
        raise ConfigurationError(f"{kind} '{text}' names {len(specs)} methods: name one")
    return specs[0]


def require_sources(name: str, traits: DraftTraits) -> None:
    """Raise for drafters that cannot read the source of an encoder-decoder target."""
    if traits.runs_model and not traits.reads_sources:
        raise ConfigurationError(
            f"drafter '{name}' runs a part of a model or a head, and the target is an encoder-decoder model, whose "
            "source it cannot read: use model:NAME with a model of the same tokenizer, or suffix or ngram, which copy "
            "from the source too"
        )


def require_fit(methods: Methods, target: LoadedModel) -> None:
    """Check that a target can be used with the drafters; loads nothing.

    Raises:
        ConfigurationError: it scores chains only, has not the layers, or no such drafter works with its kind.
    """
    if methods.traits.branches and not target.model.supports_trees:
        raise ConfigurationError(
            f"this drafter drafts trees with branches, but '{target.name}' scores chains only: draft a chain"
        )
    if is_encoder_decoder_target(target):
        require_sources(methods.source, methods.traits)
    require_layers(methods.traits.features, target)


def build_parts(
    choices: Methods | Sequence[Methods],
    target: LoadedModel,
    tokenizer: Tokenizer | None,
    *,
    trust_remote_code: bool = False,
    load_draft: Callable[..., LoadedDraftModel] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    learning: LearningStore | None = None,
) -> EngineParts:
    """Load everything that the methods need besides the target; a model that several name is loaded once.

    Args:
        choices: the methods of every drafter that a request can choose, the default first.
        target: the target model.
        tokenizer: the target's tokenizer, None if it has none.
        trust_remote_code: whether Python code in the folders of drafters' models may run.
        load_draft: loads a drafter's model by name; None loads it from files.
        clock: clock of the planners and the records.
        learning: store of what drafters learn; None to learn nothing beyond one engine's memory.

    Raises:
        ConfigurationError: the drafter does not fit the target.
        ModelError: the drafter's model cannot be found or used.
    """
    choices = [choices] if isinstance(choices, Methods) else choices
    model = target.model
    kernels = kernels_of_drafter(target)
    load = load_draft or cache(
        model_reader(target, model.dtype, str(model.device), kernels=kernels, trust_remote_code=trust_remote_code)
    )
    apart = apart_reader(target.quantization, trust_remote_code=trust_remote_code)
    loaded: dict[str, DraftChoice | None] = {}
    for methods in choices:
        require_picks(model, methods.verifier, methods.traits)
        loaded[methods.draft] = None
        if methods.drafters:
            planner = methods.planner
            if planner.wants_costs:
                planner.learn_costs(costs_of(model, max_rows=1 + planner.default_nodes, clock=clock))
            require_fit(methods, target)
            drafter = build_drafter(methods, model, tokenizer, load=load, apart=apart, clock=clock, learning=learning)
            loaded[methods.draft] = DraftChoice(methods.source, drafter, methods.traits, planner, methods.draw)
    return EngineParts(model, choices[0].verifier, loaded, clock)


def build_drafter(
    methods: Methods,
    target: LanguageModel,
    tokenizer: Tokenizer | None,
    *,
    load: Callable[..., LoadedDraftModel],
    apart: Callable[..., LoadedDraftModel],
    clock: Clock,
    learning: LearningStore | None,
) -> Drafter[Any]:
    """Build the drafter of a spec; several are merged, and one with a model apart drafts ahead.

    `load` loads a drafter's model by name, and `apart` loads it in a process of its own.
    """

    def load_fitting(name: str, **weights: str) -> LoadedDraftModel:
        loaded = load(name, **weights)
        if methods.traits.branches and not loaded.model.supports_trees:
            raise ConfigurationError(f"drafter model '{name}' scores chains only: draft a chain with it")
        return loaded

    built: list[Drafter[Any]] = []
    num_drawing = 0
    for method in methods.drafters:
        draw = part_draw(method.traits.draws, methods.draw)
        shares_noise = methods.verifier.shares_noise
        context = DraftContext(target, tokenizer, draw, shares_noise, load_fitting, num_drawing, learning, apart)
        num_drawing += draw in (Draw.IID, Draw.WITHOUT_REPLACEMENT)
        drafter = method.cls(method.config, context)
        built.append(ahead_of(drafter, method.traits, target, clock) if method.traits.ahead else drafter)
    if len(built) == 1:
        return built[0]
    return MergedDrafter(
        built,
        [method.name for method in methods.drafters],
        traits=[method.traits for method in methods.drafters],
        draw=methods.draw,
        vocab_size=target.vocab_size,
        clock=clock,
    )


MOST_RIVALS = 3
"""Drafters that run a model, of which `auto` finds out the fastest while it writes."""


@dataclass(frozen=True, slots=True)
class AutoChoice:
    """The methods in the place of `draft="auto"` for one target, verifier and planner."""

    draft: str  # spec of the drafter; "none" if no drafter can be used
    plan: str | None  # spec of the planner; None for the default
    note: str  # the drafter and the reasons in one sentence
    published: Mapping[str, float] = field(default_factory=dict)  # for the race: see `engine.race.Race`


def decide(loaded: LoadedModel, verify: str, plan: str | None, *, download: bool = False) -> AutoChoice:
    """Choose the drafter of a loaded target for `draft="auto"`.

    In this order: the result that `draftree tune` kept for this model on this machine; a head trained here, or shipped
    with this package; MTP layers of the checkpoint; a known head on this machine; with `download`, one that is
    published for the model; a smaller model on this machine with the same tokenizer; `suffix`; plain decoding. Up to
    `MOST_RIVALS` drafters that run a model are merged unless one was measured here: see `engine.race`. A drafter that
    does not fit to the target, the verifier or the planner is left out.

    Raises:
        ConfigurationError: a planner was given, and no drafter fits.
    """
    candidates, left_out = auto_candidates(loaded)
    refused: dict[str, DraftreeError] = {}  # by the reason, which several specs of one drafter share
    chosen: list[AutoCandidate] = []
    draft = ""
    for candidate in _fetching(candidates, loaded, chosen) if download else candidates:
        if not candidate.draft:
            left_out += [] if chosen else [candidate.reason]
            continue
        if chosen and candidate.rival in ("", *(each.rival for each in chosen)):
            continue
        merged = (
            RACE_DRAFT.format("+".join(rival.rival for rival in (*chosen, candidate))) if chosen else candidate.draft
        )
        try:
            _require_fit(replace(candidate, draft=merged), loaded, verify, candidate.plan if plan is None else plan)
        except DraftreeError as error:
            if str(error) not in refused:
                left_out.append(f"'{candidate.draft}' cannot be used: {error}")
            refused[str(error)] = error
            continue
        chosen.append(candidate)
        draft = merged
        if not _can_race(candidate, verify, plan) or len(chosen) == MOST_RIVALS:
            break
    if chosen:
        reasons = "; ".join([*(candidate.reason for candidate in chosen), *left_out])
        note = f"draft {AUTO_DRAFT}: {draft} ({reasons})"
        known = {candidate.rival: candidate.found.known.first_rate for candidate in chosen if candidate.found}
        published = {spec: rate for spec, rate in known.items() if rate is not None}
        return AutoChoice(draft, chosen[0].plan if plan is None else plan, note, published)
    if plan is not None and refused:
        last = list(refused.values())[-1]
        raise ConfigurationError(f"draft '{AUTO_DRAFT}' finds no drafter for planner '{plan}': {last}") from last
    return AutoChoice(NO_DRAFT, None, f"draft {AUTO_DRAFT}: plain decoding ({'; '.join(left_out)})")


def _fetching(
    candidates: Iterable[AutoCandidate], loaded: LoadedModel, chosen: Sequence[AutoCandidate]
) -> Iterator[AutoCandidate]:
    """Yield candidates; while none is chosen, those that remain of a published one when it was downloaded."""
    for candidate in candidates:
        is_wanted = candidate.can_be_fetched and not chosen
        yield from fetched_candidates(candidate, loaded) if is_wanted else (candidate,)


def _can_race(candidate: AutoCandidate, verify: str, plan: str | None) -> bool:
    """Return whether a candidate can be merged with others, of which the planner chooses one in every round."""
    return bool(candidate.rival) and choose_methods(candidate.draft, verify, plan).plan.startswith(DEFAULT_PLAN)


def _require_fit(candidate: AutoCandidate, loaded: LoadedModel, verify: str, plan: str | None) -> None:
    """Raise if a candidate cannot be used."""
    if not drafts(candidate.draft):
        if plan is not None:
            raise ConfigurationError(f"a planner needs a drafter: '{plan}'")
        return
    methods = choose_methods(candidate.draft, verify, plan)
    require_fit(methods, loaded)
    for name in methods.draft_models:
        prepared_folder(name, fetch=False)
    candidate.require_fit(loaded, DRAFTERS.parse)
    if candidate.found is not None and candidate.found.known.kind == SIBLING:
        # its weights are not read before it is built, and damaged ones would end the start
        kernels = kernels_of_drafter(loaded)
        dtype, device = loaded.model.dtype, str(loaded.model.device)
        read = model_reader(loaded, dtype, device, kernels=kernels, trust_remote_code=loaded.runs_code)
        read(str(candidate.found.place))


def choose_each(options: ModelOptions) -> list[Methods]:
    """Find and configure the methods of every drafter that a request can choose, the default first.

    `auto` has the methods of a stand-in until the target is loaded: see `decide_each`. Drafters that cannot work with
    the target are refused before it is loaded.

    Raises:
        ConfigurationError: as `choose_methods`; no drafter, or the same one twice.
    """
    draft = NO_DRAFT if options.draft is None else options.draft
    names = [draft] if isinstance(draft, str) else list(draft)
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"draft is {draft!r}: give the name of a drafter, or a list of at least one name")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"draft names '{twice}' twice: name it once")
    any_drafts = any(map(drafts, names))
    each = [
        choose_methods(name, options.verify, options.plan if drafts(name) or not any_drafts else None) for name in names
    ]
    if is_encoder_decoder_target(options.model):
        for methods in each:
            require_sources(methods.draft, methods.traits)
    return each


def decide_each(
    each: Sequence[Methods], loaded: LoadedModel, options: ModelOptions
) -> tuple[list[Methods], AutoChoice | None]:
    """Replace `auto` by the drafter that is chosen for a loaded target.

    Returns:
        Methods of each drafter, in the same order; what `auto` stands for, None if it is not among them.

    Raises:
        ConfigurationError: as `decide` and `learning_of`.
    """
    if all(methods.draft != AUTO_DRAFT for methods in each):
        return list(each), None
    choice = decide(loaded, options.verify, options.plan, download=options.download_drafter)
    logger.info("'%s': %s", loaded.name, choice.note)
    decided: dict[str, Methods] = {}
    for methods in each:
        if methods.draft == AUTO_DRAFT:
            methods = choose_methods(choice.draft, options.verify, choice.plan)
        decided.setdefault(methods.draft, methods)
    learning_of(options.learn, list(decided.values()))
    return list(decided.values()), choice


def learning_of(learn: str | None, methods: Sequence[Methods]) -> Learning | None:
    """Read the settings of learning, and check them against the drafters; creates the folder.

    Raises:
        ConfigurationError: a malformed spec, a folder that cannot be used, or no drafter that learns.
    """
    if learn is None:
        return None
    learning = parse_learning(learn)
    if not any(each.traits.learns for each in methods):
        names = ", ".join(each.draft for each in methods)
        raise ConfigurationError(
            f"learn is '{learn}', but no drafter learns ({names}): use drafter 'suffix' with memory, "
            "'early-exit' or a head that drafts level by level, or leave it out"
        )
    if learning.options.folder is not None:
        prepare_folder(learning.options.folder)
    return learning


def store_of(learning: Learning | None, target: LanguageModel, *, user: object) -> LearningStore | None:
    """Return the store of one engine, which is saved and closed when its user or the process ends; None for None.

    Raises:
        ConfigurationError: the target has no fingerprint to bind files to.
    """
    if learning is None:
        return None
    store = LearningStore(learning, target.fingerprint)
    weakref.finalize(user, store.close)
    return store
