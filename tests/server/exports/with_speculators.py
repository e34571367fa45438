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
    values = json.loads((Path(folder) / "config.json").read_text())
    read = config.to_dict()
    stored = load_file(Path(folder) / "model.safetensors")
    held = SpeculatorModel.from_pretrained(folder).state_dict()
    return {
        "type": config.speculators_model_type,
        "kept": sorted(name for name, value in values.items() if name in read and read[name] == value),
        "changed": sorted(name for name, value in values.items() if name in read and read[name] != value),
        "not stored": sorted(set(held) - set(stored)),
        "equal": sorted(name for name in stored if name in held and bool((held[name] == stored[name]).all())),
        "stored": sorted(stored),
        "tokens": config.speculators_config.proposal_methods[0].speculative_tokens,
    }


if __name__ == "__main__":
    print(json.dumps({Path(folder).name: facts(folder) for folder in sys.argv[1:]}))
