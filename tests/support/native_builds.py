"""Builds of the C library for several sets of instructions."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from draftree.core.processor import cpu_info
from draftree.models.native.build import SLOW_PAIRS, NativeUnavailableError, built_library
from draftree.models.native.library import WITHOUT_TILES, Library, TilesRefusedError

CPU_FACTS = Path("/proc/cpuinfo")
BUILDS: dict[str, Sequence[str]] = {"this processor": []}
if platform.machine() == "x86_64":
    BUILDS |= {
        "no tiles": WITHOUT_TILES,
        "AVX-512": [*WITHOUT_TILES, "-mno-avx512bf16", "-mno-avx512vnni"],
        "SSE": ["-march=x86-64"],
    }
    if cpu_info("vendor_id") == "GenuineIntel":
        BUILDS["pairs"] = [*WITHOUT_TILES, f"-U{SLOW_PAIRS.removeprefix('-D')}"]
    else:
        BUILDS["without pairs"] = [*WITHOUT_TILES, SLOW_PAIRS]
    if torch.cpu._is_avx2_supported():
        BUILDS["AVX2"] = ["-march=haswell"]
    if CPU_FACTS.exists() and "avx_vnni" in CPU_FACTS.read_text("utf-8").split():
        BUILDS["AVX-VNNI"] = ["-march=haswell", "-mavxvnni"]


def built(name: str) -> Library:
    """The library of a build; skips if the compiler or the system does not support its instructions."""
    try:
        return Library(built_library(extra_flags=BUILDS[name]))
    except TilesRefusedError as error:
        pytest.skip(str(error))
    except NativeUnavailableError as error:
        if "unrecognized command" in str(error) or "unknown argument" in str(error):
            pytest.skip(str(error))
        raise
