"""Hook of hatchling that puts libraries of the native kernels into a wheel; `make wheel` enables it."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARIES = Path("build/kernels")
"""Filled by `python -m draftree.models.native.build --to build/kernels`."""
MACOS = "macosx_11_0_arm64"
"""The first macOS on Arm."""


class KernelsHook(BuildHookInterface):
    """Adds `build/kernels/*.so` and names the platform in the wheel's tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Change the data of a wheel's build."""
        libraries = sorted((Path(self.root) / LIBRARIES).glob("*.so"))
        if not libraries:
            raise FileNotFoundError(f"{LIBRARIES} has no libraries: run make wheel")
        build_data["force_include"] |= {str(path): f"draftree/models/native/lib/{path.name}" for path in libraries}
        build_data["pure_python"] = False
        tag = MACOS if platform.system() == "Darwin" else sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"
