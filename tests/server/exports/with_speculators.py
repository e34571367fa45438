"""Loads heads by the classes of speculators: their configuration, and their tensors by name.

Usage: with_speculators.py FOLDER…
"""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file
from speculators import SpeculatorModel, SpeculatorModelConfig


def facts(folder: str) -> dict[str, object]:
    config = SpeculatorModelConfig.from_pretrained(folder)
    stored = load_file(Path(folder) / "model.safetensors")
    held = SpeculatorModel.from_pretrained(folder).state_dict()
    return {
        "type": config.speculators_model_type,
        "not stored": sorted(set(held) - set(stored)),
        "different": sorted(name for name in stored if name not in held or bool((held[name] != stored[name]).any())),
    }


if __name__ == "__main__":
    print(json.dumps({Path(folder).name: facts(folder) for folder in sys.argv[1:]}))
