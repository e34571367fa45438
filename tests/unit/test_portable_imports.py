"""Every module can be imported where Python has no POSIX modules and functions, as on Windows."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import builtins, importlib, os, pkgutil, sys, types

import draftree

MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
NAMES = ("fork", "getegid", "geteuid", "getgid", "getuid", "killpg", "setsid", "sched_getaffinity", "sched_setaffinity",
         "sched_yield", "waitid")
real_import = builtins.__import__
portable_os = types.ModuleType("os")
portable_os.__dict__.update((name, value) for name, value in vars(os).items() if name not in NAMES)


def without_posix(name, globals=None, *others, **more):
    importer, root = str((globals or {}).get("__name__")), name.partition(".")[0]
    if importer.partition(".")[0] == "draftree" and root in MODULES:
        raise ImportError(f"{importer} imports {name}")
    module = real_import(name, globals, *others, **more)
    return portable_os if importer.partition(".")[0] == "draftree" and module is os else module


modules = [name for _, name, _ in pkgutil.walk_packages(draftree.__path__, "draftree.") if name != "draftree.__main__"]
builtins.__import__ = without_posix
failed = []
for name in modules:
    try:
        importlib.import_module(name)
    except Exception as error:
        if getattr(error, "name", None) == "ray":  # an extra
            continue
        failed.append(f"{name}: {error!r}")
sys.exit("\\n".join(failed) or (0 if len(modules) > 100 else "too few modules"))
"""


def test_no_module_needs_posix_to_be_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
