"""The settings and result records of `draftree doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftree.assembly import Methods, choose_methods
from draftree.bench.settings import ExecutionSettings, require_positive
from draftree.bench.speeds import Speeds
from draftree.core.affinity import require_affinity
from draftree.core.processors import ProcessorFacts, ThreadChoice
from draftree.engine.memory import SlotEstimate
from draftree.loading.choices import require_known, require_kv_dtype, resolve_device, resolve_dtype
from draftree.models.memory import Footprint
from draftree.text.vocab import VocabularyComparison
from draftree.weights.block_kinds import BlockShare


@dataclass(frozen=True, slots=True)
class DoctorSettings(ExecutionSettings):
    """The subject of a diagnosis.

    Attributes:
        model: name of the model, in any supported form.
        draft: a drafter's spec; None for plain decoding.
        verify: the verifier.
        length: tokens per slot; None means 2048, or the context length if that is less.
        measure: whether speeds and passes are measured.
    """

    model: str
    draft: str | None = None
    verify: str = "coupled"
    length: int | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "threads", "length")
        require_known(self.kernels, self.quantization)
        require_affinity(self.affinity)
        require_kv_dtype(self.kv_dtype, self.kernels, self.device)
        resolve_dtype(self.dtype, resolve_device(self.device))

    def methods(self) -> Methods:
        """Find and check the methods; loads nothing."""
        return choose_methods(self.draft, self.verify, None)


@dataclass(frozen=True, slots=True)
class MachineReport:
    """The machine and its kernels.

    Attributes:
        facts: processor, cores, instructions, memory, system.
        versions: versions of Python and the relevant packages.
        devices: torch's devices.
        threads: CPU threads of passes.
        processors: logical processors, physical cores and memory nodes that this process may use, and its quota.
        choice: the choice of threads and processors, and its reasons.
        caches: bytes of the processor's caches, nearest first.
        free_bytes: free memory; None if the system does not report it.
        compiler: path of the C compiler; None if there is none.
        instructions: instruction set of the native kernels; None if they are unavailable.
        why_not_native: the reason why they are unavailable.
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
    why_torch: str | None
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
        spec: the requested spec.
        nodes: nodes of its widest tree.
        models: the models that it loads.
        note: its decisions during construction.
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
