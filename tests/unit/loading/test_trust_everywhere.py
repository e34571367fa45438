"""Every call that loads something through transformers passes `trust_remote_code`.

`GenerationConfig` is left out: it runs no code of a checkpoint and would keep the argument as a setting.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])


def test_every_call_passes_trust_remote_code() -> None:
    count = 0
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                if getattr(getattr(node.func, "value", None), "id", "") == "GenerationConfig":
                    continue
                count += 1
                given = [keyword.arg for keyword in node.keywords]
                assert "trust_remote_code" in given, f"{path.relative_to(ROOT)}, line {node.lineno}"
    assert count >= 10, "the calls are not found any more"
