"""Diagnosis of a model on this machine: kernels and reasons, self-check, memory, vocabularies, lower bounds of time.

All results are plain records; formatting is done elsewhere.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftree.build import Methods, build_parts, choose_methods, decide, load_for, require_positive
from draftree.core.errors import ConfigurationError, VocabularyMismatchError
from draftree.core.files import shown_name
from draftree.core.host import ProcessorFacts, ThreadChoice, own_choice, require_affinity
from draftree.drafters.base import LoadedDraftModel
from draftree.engine.memory import SlotEstimate, estimate_slots
from draftree.engine.parts import EngineParts
from draftree.lab.bench.passes import Speeds, bytes_of_pass, cache_sizes, measure_speeds, time_passes, weights_of_pass
from draftree.loading.blocks import GGUF
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel, kernels_of_drafter, load_tokenizer
from draftree.loading.options import has_native_bfloat16, resolve_device, resolve_place
from draftree.loading.provenance import machine, versions
from draftree.loading.resolve import gguf_path, prepared_folder
from draftree.models.base import LanguageModel
from draftree.models.memory import Footprint, free_memory
from draftree.models.native.build import NativeUnavailableError, find_compiler
from draftree.models.native.library import library
from draftree.options import AUTO_DRAFT, ModelOptions
from draftree.text.retokenize import VocabularyComparison, compare_vocabularies
from draftree.verifiers.base import Guarantee
from draftree.weights.gguf_file import BlockShare, block_shares, forget_gguf, read_gguf


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """The subject of a diagnosis.

    Attributes:
        length: tokens per slot; None means 2048, or the context length if that is less.
    """

    options: ModelOptions
    length: int | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "length")
        require_affinity(self.options.affinity)
        resolve_place(self.options)

    def methods(self) -> Methods:
        """Find and check the methods; loads nothing."""
        assert self.options.draft is None or isinstance(self.options.draft, str)
        return choose_methods(self.options.draft, self.options.verify, None)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The machine and its kernels.

    Attributes:
        facts: processor, cores, instructions, memory, system.
        processors: logical processors, physical cores and memory nodes that this process may use, and its quota.
        choice: the choice of threads and processors, and its reasons.
        caches: bytes of the processor's caches, nearest first.
        free_bytes: free memory; None if the system does not report it.
        instructions: instruction set of the native kernels; None if they are unavailable.
        native_bfloat16: whether the device has bfloat16 instructions.
    """

    facts: dict[str, Any]
    versions: dict[str, Any]
    devices: tuple[str, ...]
    threads: int
    processors: ProcessorFacts
    choice: ThreadChoice
    caches: tuple[int, ...]
    free_bytes: int | None
    compiler: str | None
    instructions: str | None
    why_not_native: str | None
    native_bfloat16: bool


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A loaded model.

    Errors are relative to the spread of the logits, None without such a check. `blocks` are the kinds of blocks of a
    model that runs on those of its GGUF file, empty for other models.
    """

    name: str
    family: str
    vocab_size: int
    max_length: int
    dtype: str
    device: str
    kernels: str
    fallback_reason: str | None
    quantization: str | None
    supports_trees: bool
    is_exact: bool
    chain_error: float | None
    tree_error: float | None
    tolerance: float | None
    footprint: Footprint
    blocks: tuple[BlockShare, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftModelReport:
    """A drafter's model and the comparison of its vocabulary; `vocabulary` is None without tokenizers."""

    model: ModelReport
    vocabulary: VocabularyComparison | None


@dataclass(frozen=True, slots=True)
class DraftReport:
    """A drafter.

    Attributes:
        nodes: nodes of its widest tree.
        problem: why it cannot draft for this target; None if it can.
    """

    spec: str
    nodes: int
    models: tuple[DraftModelReport, ...]
    note: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class PassReport:
    """Time of a pass over `rows` tokens, and the lower bound from memory bandwidth and arithmetic."""

    rows: int
    seconds: float
    floor_seconds: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The complete result; `speeds` and `passes` are present if they were measured."""

    machine: MachineReport
    model: ModelReport
    draft: DraftReport | None
    length: int
    memory: SlotEstimate
    speeds: Speeds | None
    passes: tuple[PassReport, ...]
    draft_pass_seconds: float | None
    expectations: tuple[str, ...]


CHEAP = 1.5
"""Highest cost, in passes over one token, of a pass that is still worth trying with model-free drafts."""


def expectations(
    machine: MachineReport,
    model: ModelReport,
    *,
    draft: DraftReport | None,
    memory: SlotEstimate | None,
    passes: Sequence[PassReport],
    draft_pass_seconds: float | None,
) -> Iterator[str]:
    """Yield one sentence for each relevant fact."""
    if model.is_exact:
        yield (
            "The same seed gives bit-identical text for every draft and every batch, "
            "under a verifier that preserves the text ('coupled')"
        )
    else:
        yield (
            "A pass over several tokens may round differently from one over one: near-ties can change the text of a "
            "seed" + ("; --exact prevents it with slower kernels" if model.device.startswith("cuda") else "")
        )
    if model.kernels.startswith("native"):
        yield f"Passes run in C with {machine.instructions}"
    elif model.fallback_reason is None:
        yield "Passes run through torch, as requested"
    else:
        advice = "; with a C compiler passes take a third of the time" if machine.compiler is None else ""
        yield f"Passes run through torch, because {model.fallback_reason}{advice}"
    if model.quantization is not None:
        yield (
            f"Weights of kind {model.quantization} make a different model: its text differs from that of {model.dtype} "
            "weights; 'draftree bench perplexity' measures the loss"
        )
    if memory is not None and memory.num_slots == 0:
        yield "No slot of this length fits into the free memory: lower --length, or free memory"
    if draft is not None and draft.problem is not None:
        yield f"The drafter cannot draft here: {draft.problem}"
    if draft is not None and draft.nodes and not model.supports_trees:
        yield "Only chains can be drafted: trees are not scored exactly by this family"
    if passes:
        yield from _on_speed(passes, draft=draft, draft_pass_seconds=draft_pass_seconds)
    else:
        yield "Add --measure for speeds: memory bandwidth, pass times, and the acceptance that a draft needs"


def _on_speed(
    passes: Sequence[PassReport], *, draft: DraftReport | None, draft_pass_seconds: float | None
) -> Iterator[str]:
    plain_pass = passes[0]
    yield (
        f"Plain decoding: about {1 / plain_pass.seconds:.0f} tokens/s; "
        f"no kernel can exceed {1 / plain_pass.floor_seconds:.0f} here"
    )
    if cheap := [entry for entry in passes[1:] if entry.seconds <= CHEAP * plain_pass.seconds]:
        yield (
            f"A draft of {cheap[-1].rows - 1} tokens that costs nothing pays if on average more than "
            f"{cheap[-1].seconds / plain_pass.seconds - 1:.2f} of them are accepted per round"
        )
    else:
        factor = passes[1].seconds / plain_pass.seconds
        yield f"A pass over {passes[1].rows} tokens costs {factor:.2f} passes: drafts need high acceptance"
    if draft is None or draft_pass_seconds is None:
        return
    share = draft_pass_seconds / plain_pass.seconds
    yield f"A pass of the drafter's model costs {share:.2f} target passes, for each level of a draft"
    if share >= 1:
        yield "That is at least a target pass: this drafter cannot pay"


ROWS = (1, 2, 4, 8, 16, 32, 64)
PREFIX = 128
REPEATS = 10
LENGTH = 2048


def examine_machine(device: str = "auto") -> MachineReport:
    """Examine the machine; builds the native library if it does not exist yet."""
    where = resolve_device(device)
    compiler = instructions = reason = None
    with contextlib.suppress(NativeUnavailableError):  # an existing library needs no compiler
        compiler = shlex.join(find_compiler())
    try:
        instructions = library().instructions
    except NativeUnavailableError as error:
        reason = str(error)
    processors, choice = own_choice()
    cards = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return MachineReport(
        facts=machine(where),
        versions=versions(),
        devices=("cpu", *cards),
        threads=torch.get_num_threads(),
        processors=processors,
        choice=choice,
        caches=tuple(cache_sizes()),
        free_bytes=free_memory(where),
        compiler=compiler,
        instructions=instructions,
        why_not_native=reason,
        native_bfloat16=has_native_bfloat16(where),
    )


def examine(
    settings: DoctorSettings, host: MachineReport, *, fetch: Callable[[str], object] = prepared_folder
) -> Diagnosis:
    """Load the models and examine them; `fetch` is called with the name of every model before any is loaded."""
    methods = settings.methods()
    for name in (settings.options.model, *methods.draft_models):
        fetch(name)
    target = load_for(settings.options)
    if settings.options.draft == AUTO_DRAFT:
        choice = decide(target, settings.options.verify, None)
        settings = replace(settings, options=replace(settings.options, draft=choice.draft))
        methods = choose_methods(choice.draft, settings.options.verify, choice.plan)
    length = min(LENGTH, target.model.max_length) if settings.length is None else settings.length
    if length > target.model.max_length:
        raise ConfigurationError(
            f"length {length} was requested, but the context of '{settings.options.model}' is "
            f"{target.model.max_length}: lower the length"
        )
    draft_models: list[tuple[LanguageModel, DraftModelReport]] = []
    parts = EngineParts(target.model, methods.verifier)
    draft = None
    if methods.drafters:
        parts, draft = _examine_draft(settings, methods, target, draft_models)
    memory = estimate_slots(parts, length)  # before measurements, which take memory of their own
    speeds, draft_seconds = None, None
    passes: tuple[PassReport, ...] = ()
    if settings.measure:
        speeds = measure_speeds(target.model.device, threads=torch.get_num_threads())
        passes = _passes(target, speeds)
        if draft_models:
            draft_seconds = sum(_pass_seconds(model, (1,))[0][1] for model, _ in draft_models)
    model = _model_report(target)
    notes = [*expectations(host, model, draft=draft, memory=memory, passes=passes, draft_pass_seconds=draft_seconds)]
    if methods.drafters and methods.verifier.promise(1.0) is Guarantee.LOSSY:
        notes.append(
            f"Verifier '{settings.options.verify}' is lossy above temperature 0: the text is not distributed as the "
            "model's own"
        )
    return Diagnosis(host, model, draft, length, memory, speeds, passes, draft_seconds, tuple(notes))


def _examine_draft(
    settings: DoctorSettings,
    methods: Methods,
    target: LoadedModel,
    draft_models: list[tuple[LanguageModel, DraftModelReport]],
) -> tuple[EngineParts, DraftReport]:
    """Return the parts, without a drafter that does not fit, and the report on the drafter; adds its models."""
    trusts = settings.options.trust_remote_code
    tokenizer = None if target.folder is None else load_tokenizer(target.folder, trust_remote_code=trusts)

    def load(name: str, quantization: str | None = None) -> LoadedDraftModel:
        loaded = load_model(
            name,
            dtype=target.model.dtype,
            device=settings.options.device,
            kernels=kernels_of_drafter(target),
            quantization=quantization,
            trust_remote_code=trusts,
        )
        other = None if loaded.folder is None else load_tokenizer(loaded.folder, trust_remote_code=trusts)
        vocabulary = None
        if other is not None and tokenizer is not None:
            vocabulary = compare_vocabularies(tokenizer.vocabulary(), other.vocabulary())
        draft_models.append((loaded.model, DraftModelReport(_model_report(loaded), vocabulary)))
        return LoadedDraftModel(loaded.model, other, name)

    parts = EngineParts(target.model, methods.verifier)
    note = ""
    problem = None
    try:
        parts = build_parts(methods, target, tokenizer, load_draft=load)
        note = parts.drafters[0].drafter.note
    except (ConfigurationError, VocabularyMismatchError) as error:
        problem = str(error)
    nodes = methods.planner.default_nodes
    reports = tuple(report for _, report in draft_models)
    return parts, DraftReport(str(settings.options.draft), nodes, reports, note, problem)


def _model_report(loaded: LoadedModel) -> ModelReport:
    model = loaded.model
    check = model.self_check
    family = ""
    if loaded.folder is not None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(loaded.folder, local_files_only=True, trust_remote_code=loaded.runs_code)
        family = str(config.model_type)
    path = gguf_path(loaded.name) if loaded.quantization == GGUF else None
    blocks = () if path is None else block_shares(read_gguf(path))
    forget_gguf()
    return ModelReport(
        name=shown_name(loaded.name),
        family=family,
        vocab_size=model.vocab_size,
        max_length=model.max_length,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        kernels=loaded.kernels,
        fallback_reason=loaded.fallback_reason,
        quantization=loaded.quantization,
        supports_trees=model.supports_trees,
        is_exact=model.is_exact,
        chain_error=None if check is None else check.chain_error,
        tree_error=None if check is None or not model.supports_trees else check.tree_error,
        tolerance=None if check is None else check.tolerance,
        footprint=model.footprint,
        blocks=blocks,
    )


def _passes(target: LoadedModel, speeds: Speeds) -> tuple[PassReport, ...]:
    assert target.folder is not None
    model = target.model
    weights = weights_of_pass(target.folder, trust_remote_code=target.runs_code)
    kind = {None: str(model.dtype).removeprefix("torch."), "int8": "int8"}.get(target.quantization, "int4")
    weight_bytes = bytes_of_pass(target)
    reports = []
    for rows, seconds in _pass_seconds(model, ROWS):
        read = weight_bytes + _prefix(model) * model.footprint.token
        floor = speeds.floor_seconds(read_bytes=read, operations=2.0 * weights * rows, kind=kind)
        reports.append(PassReport(rows, seconds, floor))
    return tuple(reports)


def _prefix(model: LanguageModel) -> int:
    return min(PREFIX, model.max_length // 2)


def _pass_seconds(model: LanguageModel, rows: tuple[int, ...]) -> list[tuple[int, float]]:
    prefix = _prefix(model)
    fitting = [count for count in rows if prefix + count <= model.max_length]
    records = time_passes(model, fitting, prefix=prefix, repeats=REPEATS)
    return [(record.rows, sorted(record.milliseconds)[REPEATS // 2] / 1e3) for record in records]
