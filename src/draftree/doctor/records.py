"""What `draftree doctor` is asked, and the plain records of what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftree.assembly import Methods, choose_methods
from draftree.bench.settings import require_positive
from draftree.bench.speeds import Speeds
from draftree.engine.memory import SlotEstimate
from draftree.loading.choices import require_known, resolve_device, resolve_dtype
from draftree.models.memory import Footprint
from draftree.text.vocab import VocabularyComparison


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """What is examined.

    Attributes:
        model: named as everywhere.
        draft: a drafter's spec; None for plain decoding.
        verify: the rule.
        dtype: of all models.
        device: of all models.
        kernels: what computes passes: "auto", "native" or "torch".
        quantization: of the target's weights; None for as they come.
        threads: of torch; None leaves its own choice.
        trust_remote_code: whether Python code that lies beside the weights may run, of the model and of the drafter's.
        length: tokens of a slot; None takes 2048, or the context where that is less.
        measure: whether speeds and passes are measured.
    """

    model: str
    draft: str | None = None
    verify: str = "coupled"
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    quantization: str | None = None
    threads: int | None = None
    trust_remote_code: bool = False
    length: int | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "threads", "length")
        require_known(self.kernels, self.quantization)
        resolve_dtype(self.dtype, resolve_device(self.device))

    def methods(self) -> Methods:
        """Found and matched; nothing is loaded."""
        return choose_methods(self.draft, self.verify, None)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The machine, and what passes could run on.

    Attributes:
        facts: processor, cores, instructions, memory, system.
        versions: of Python and the packages that matter.
        devices: that torch computes on.
        threads: of torch.
        caches: bytes of the processor's caches, from the nearest.
        free_bytes: of memory; None where the system does not say.
        compiler: path of the C compiler; None if there is none.
        instructions: what passes in C compute with; None if they cannot be had.
        why_not_native: why they cannot be had.
        native_bfloat16: whether the device multiplies bfloat16 by instructions of its own.
    """

    facts: dict[str, Any]
    versions: dict[str, Any]
    devices: tuple[str, ...]
    threads: int
    caches: tuple[int, ...]
    free_bytes: int | None
    compiler: str | None
    instructions: str | None
    why_not_native: str | None
    native_bfloat16: bool


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A loaded model. Errors are shares of the spread of the logits, None where there was no such check."""

    name: str
    family: str
    vocab_size: int
    max_length: int
    dtype: str
    device: str
    kernels: str
    why_torch: str | None
    quantization: str | None
    supports_trees: bool
    is_exact: bool
    chain_error: float | None
    tree_error: float | None
    tolerance: float | None
    footprint: Footprint


@dataclass(frozen=True, slots=True)
class DraftModelReport:
    """A model that drafts, and its vocabulary beside the target's; `vocabulary` is None without tokenizers."""

    model: ModelReport
    vocabulary: VocabularyComparison | None


@dataclass(frozen=True, slots=True)
class DraftReport:
    """A drafter.

    Attributes:
        spec: as it was asked for.
        nodes: of its widest tree.
        models: that it steps.
        note: what it decided when it was built.
        problem: why it cannot draft for this target; None if it can.
    """

    spec: str
    nodes: int
    models: tuple[DraftModelReport, ...]
    note: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class PassReport:
    """A pass over `rows` tokens, and the least that reading and multiplying take here."""

    rows: int
    seconds: float
    floor_seconds: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found; `speeds` and `passes` are there if they were measured."""

    machine: MachineReport
    model: ModelReport
    draft: DraftReport | None
    length: int
    memory: SlotEstimate
    speeds: Speeds | None
    passes: tuple[PassReport, ...]
    draft_pass_seconds: float | None
    expectations: tuple[str, ...]
