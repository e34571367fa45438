"""Folders of Medusa: `medusa_lm_head.safetensors` or `.pt`, and a `config.json` with `medusa_num_heads`.

Source: github.com/FasterDecoding/Medusa (arXiv 2401.10774).
"""

from __future__ import annotations

import re

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import LAST_LAYER, MEDUSA, HeadConfig
from draftree.heads.layouts import MEDUSA_FILES, HeadFolder

NAME = "medusa"
PREFIX = "medusa_head."
_OUTPUT = re.compile(r"\d+\.(\d+)\.weight")


def recognise(folder: HeadFolder) -> bool:
    return "medusa_num_heads" in folder.values or any((folder.path / name).is_file() for name in MEDUSA_FILES)


def configure(folder: HeadFolder) -> HeadConfig:
    """Return the configuration. Sizes are those of the tensors: configurations do not name them."""
    shapes = {name.removeprefix(PREFIX): shape for name, shape in folder.shapes.items()}
    outputs = [match for match in map(_OUTPUT.fullmatch, shapes) if match]
    if not outputs or len(shapes[outputs[0].string]) != 2:
        raise ModelLoadError(f"it does not have the tensors of layout '{NAME}': missing: 0.1.weight")
    vocab_size, width = shapes[outputs[0].string]
    num_heads = folder.values.whole("medusa_num_heads", len(outputs))
    return HeadConfig(
        kind=MEDUSA,
        features=(LAST_LAYER,),
        target_hidden=width,
        hidden=width,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        depth=num_heads,
        num_layers=0,
        block_size=num_heads,
        head_layers=folder.values.whole("medusa_num_layers", int(outputs[0].group(1))),
        target_name=folder.values.text("base_model_name_or_path"),
    )


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors by our names."""
    return {PREFIX + name.removeprefix(PREFIX): tensor for name, tensor in folder.tensors().items()}
