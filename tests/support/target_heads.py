"""Folders of random heads of every kind for a tiny Llama. Not a test itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import block_samples
from draftree.heads.folders import write_head
from families import VOCAB_SIZE
from head_samples import head_config, random_head

WIDTH = 64
TARGET: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 4}
"""Sizes of the target."""
BLOCKS = ("dflash", "dflash2", "dspark", "xpress", "peagle", "medusa")
FULL = ("eagle", "eagle-own", "eagle3-full", "dflash", "dflash2", "xpress", "medusa")
"""Variants that draft all of the target's tokens; the others draft 60 of them."""


def head_folder(where: Path, variant: str = "eagle3", **values: Any) -> Path:
    """The folder of a head, the same at every call; `values` go into its configuration."""
    folder = where / "-".join([variant, *map(str, values.values())]).replace(", ", "_")  # a comma begins an option
    if folder.is_dir():
        return folder
    sizes: dict[str, Any] = {"target_hidden": WIDTH, "hidden": WIDTH, "vocab_size": VOCAB_SIZE, "max_length": 128}
    sizes |= {"draft_vocab_size": VOCAB_SIZE if variant in FULL else 60} | values
    if variant not in BLOCKS:
        write_head(random_head(head_config(variant, **sizes), scale=0.2), folder)
        return folder
    if variant != "medusa":
        sizes = {"features": (1, 2, 3)} | sizes
    head = block_samples.random_head(block_samples.config_of(block_samples.ALL[variant], **sizes))
    if variant != "medusa":
        write_head(head, folder)
        return folder
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2}))
    tensors = {name.removeprefix("medusa_head."): part.clone() for name, part in head.state_dict().items()}
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder
