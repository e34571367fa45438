"""The resident memory of a GGUF file's weights is that of the file, in the first start and in later ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from block_files import written
from native_samples import in_c
from private_cache import private_cache

pytestmark = [
    in_c,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "resident.py"
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16}
"""Layers of 2.2 MB in 4 bits, a little more than a huge page."""
SHARE, SMALL = 0.1, 8 << 20
"""Growth beyond the size of the file: the promised share, and what does not depend on it (buffers of passes, heap)."""


@pytest.mark.parametrize(("kind", "others"), [("Q4_0", {}), ("Q4_K", {"ffn_down": "Q6_K", "attn_v": "Q5_0"})])
def test_resident_memory_is_that_of_the_file(kind: str, others: dict[str, str], tmp_path: Path) -> None:
    for name in ("large", "small"):
        (tmp_path / name).mkdir()
    large = written(tmp_path / "large", kind=kind, others=others, sizes=WIDE)
    small = written(tmp_path / "small", kind=kind)
    environment = os.environ | {"DRAFTREE_CACHE": private_cache(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(large), "--warm", str(small), "--child"]
    for start in ("first", "second"):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["file"] > 30 << 20
        assert found["private"] + found["weight_files"] < (1 + SHARE) * found["file"] + SMALL, (start, found)
        assert found["private"] + found["weight_files"] > 0.9 * found["weights"], (start, found)
