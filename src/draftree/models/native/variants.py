"""Variants of the native kernels: the instruction sets that they are compiled for, and which of them this machine runs.

The C sources choose their instructions by the macros that a compiler defines for these flags. A variant has one set of
flags on every machine and for every compiler, so that its logits are the same bits wherever it runs.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from draftree.core.errors import ConfigurationError
from draftree.core.host import cpu_info

__all__ = ["VARIABLE", "VARIANTS", "Variant", "native_variants", "preferred_variants", "runnable_variants"]

VARIABLE = "DRAFTREE_VARIANT"
"""Environment variable that selects a variant by name; the best one of this machine if unset."""


@dataclass(frozen=True, slots=True)
class Variant:
    """An instruction set.

    Attributes:
        name: its name in file names and in `DRAFTREE_VARIANT`.
        flags: flags of gcc and clang.
        zig_cpu: the same as a value of zig's `-mcpu`.
        features: the CPU features that it needs, as Linux names them, without underscores.
    """

    name: str
    flags: tuple[str, ...] = ()
    zig_cpu: str = "baseline"
    features: frozenset[str] = frozenset()


def _x86(name: str, *features: str) -> Variant:
    flags = ("-march=x86-64", *(f"-m{feature}" for feature in features))
    zig_cpu = "+".join(("x86_64", *(feature.replace("-", "_") for feature in features)))
    return Variant(name, flags, zig_cpu, frozenset(feature.replace("-", "") for feature in features))


_AVX2 = ("avx2", "fma", "f16c", "bmi2", "popcnt")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

VARIANTS: Mapping[str, tuple[Variant, ...]] = MappingProxyType(
    {
        "x86_64": (
            _x86("amx", *_AVX512, "avx512vnni", "avx512bf16", "amx-tile", "amx-int8", "amx-bf16"),
            _x86("avx512-bf16", *_AVX512, "avx512vnni", "avx512bf16"),
            _x86("avx512-vnni", *_AVX512, "avx512vnni"),
            _x86("avx512", *_AVX512),
            _x86("avx2-vnni", *_AVX2, "avxvnni"),
            _x86("avx2", *_AVX2),
            _x86("sse2"),
        ),
        "aarch64": (
            Variant(
                "neon-dotprod",
                ("-march=armv8.2-a+dotprod",),
                "generic+v8_2a+dotprod",
                frozenset(("asimddp", "atomics")),
            ),
            Variant("neon", ("-march=armv8-a",), "generic"),
        ),
    }
)
"""The variants of each architecture, best first. The last one runs everywhere."""


def native_variants() -> tuple[Variant, ...]:
    """Return all variants of this machine's architecture, best first."""
    machine = platform.machine().lower()
    return VARIANTS.get({"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), (Variant("portable"),))


def runnable_variants() -> tuple[Variant, ...]:
    """Return the variants that this machine's processor runs, best first."""
    features = _cpu_features()
    return tuple(variant for variant in native_variants() if variant.features <= features)


def preferred_variants() -> tuple[Variant, ...]:
    """Return the variants to try on this machine, in this order; one alone if `DRAFTREE_VARIANT` names it.

    Raises:
        ConfigurationError: `DRAFTREE_VARIANT` names no variant that this machine runs.
    """
    variants = runnable_variants()
    if name := os.environ.get(VARIABLE):
        chosen = tuple(variant for variant in variants if variant.name == name)
        if not chosen:
            names = ", ".join(variant.name for variant in variants)
            raise ConfigurationError(f"{VARIABLE} is {name!r}, but this machine runs {names}: name one or unset it")
        return chosen
    if cpu_info("vendor_id") == "GenuineIntel":
        # Intel's products of bfloat16 pairs without tiles take four times as long as products of float32 numbers,
        # which have half as many terms.
        return tuple(variant for variant in variants if variant.name != "avx512-bf16")
    return variants


def _cpu_features() -> frozenset[str]:
    if not sys.platform.startswith("linux"):
        return _reported_by_torch()
    words = (cpu_info("flags") or cpu_info("Features") or "").split()
    return frozenset(word.replace("_", "") for word in words)


def _reported_by_torch() -> frozenset[str]:
    import torch

    features: set[str] = set()
    if sys.platform == "darwin" and platform.machine() == "arm64":
        features |= {"asimddp", "atomics"}  # Apple's processors all have them
    elif torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        features |= set(_AVX2)
    return frozenset(features)
