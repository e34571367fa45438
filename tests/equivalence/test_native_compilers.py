"""gcc, clang and zig compile the same arithmetic: logits are equal bit for bit."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

from draftree.models.base import Extend, Pass
from draftree.models.native import decoder
from draftree.models.native.build import compile_variants, preferred_variants
from draftree.models.native.library import Library
from native_samples import DTYPES, lowered, text
from slot_samples import at_once, filled

COMPILERS = {name: found for name in ("gcc", "clang") if (found := shutil.which(name)) is not None}
if importlib.util.find_spec("ziglang") is not None:
    COMPILERS["zig"] = f"{sys.executable} -m ziglang cc"
REFERENCE = next(iter(COMPILERS), "")
FAMILIES = ("llama", "gemma2", "phi3", "gpt2", "qwen3_moe", "gpt_oss")
TREE = [-1, 0, 0, 2, -1, 4, 3, 6]


@pytest.fixture(scope="module", params=[name for name in ("gcc", "clang", "zig") if name != REFERENCE])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Library, Library]:
    """The best variant of this machine by the first compiler and by another one."""
    if request.param not in COMPILERS:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp("compiled")
    return _compiled(REFERENCE, folder / REFERENCE), _compiled(request.param, folder / request.param)


@functools.cache
def _compiled(name: str, folder: Path) -> Library:
    variant = preferred_variants()[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", COMPILERS[name])
        return Library(compile_variants([variant], folder)[variant])


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_compilers_give_the_same_bits(
    two: tuple[Library, Library], family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = []
    for library in two:
        monkeypatch.setattr(decoder, "library", lambda library=library: library)
        lm, prompt = lowered(family, kind), text(90)
        slot = filled(lm, prompt)
        tree = lm.run(Pass([Extend(slot, text(len(TREE)), TREE)])).logits.tensor()
        logits.append(torch.cat([at_once(lm, prompt), tree]))
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()
