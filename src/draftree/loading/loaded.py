"""A loaded model and its origin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftree.models.base import LanguageModel
from draftree.sampling.params import NEUTRAL, Sampling


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model and its origin.

    Attributes:
        model: the model.
        folder: folder of its files, if it was loaded from files.
        eos_ids: tokens that end a text.
        name: name in messages.
        kernels: kernels of its passes: "native" with the instructions in brackets, "torch", or "graphs" with the
            reason against capturing them in brackets, if there is one.
        quantization: of its weights; None for no quantization.
        why_torch: why the native kernels are not used; None if they are, or were not requested.
        runs_code: whether its files name Python code of their own that may run.
        sampling: defaults of sampling parameters, if it was not loaded from files.
        tokenizer_sha: fingerprint of the tokenizer that a remote target needs; None if any may be given.
    """

    model: LanguageModel
    folder: Path | None
    eos_ids: tuple[int, ...]
    name: str
    kernels: str = "torch"
    quantization: str | None = None
    why_torch: str | None = None
    runs_code: bool = False
    sampling: Sampling = NEUTRAL
    tokenizer_sha: str | None = None

    @property
    def kernels_note(self) -> str | None:
        """One line if the options allowed native kernels on a CPU but torch is used; else None."""
        if self.why_torch is None or self.folder is None or self.model.device.type != "cpu":
            return None
        return f"kernels: {self.kernels} ({self.why_torch})"
