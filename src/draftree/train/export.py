"""Export of drafters: heads in the layouts of other servers, whole models as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from draftree.core.errors import ModelLoadError
from draftree.core.files import JsonError, read_json
from draftree.heads.folders import is_head, read_head
from draftree.heads.writers import SGLANG, SPECULATORS, ExportTarget, export_for_sglang, export_for_vllm, require_empty
from draftree.loading.load import load_model
from draftree.loading.resolve import resolve_model

MODEL_TOKENS = 4
"""Tokens that a whole model drafts in a round, in the printed flags."""
WRITERS = {SPECULATORS: export_for_vllm, SGLANG: export_for_sglang}


def export_drafter(folder: Path, *, to: str, target: str, output: Path, served_as: str | None = None) -> list[str]:
    """Write a drafter for another project's server.

    Args:
        folder: folder of a head in a layout that can be read, or of a whole model of transformers.
        to: a name of `WRITERS`.
        target: the target: a catalogue name, folder or hub id.
        output: new or empty folder.
        served_as: name of the target in the files; None for its folder.

    Returns:
        Command lines that serve it.

    Raises:
        ConfigurationError: the server has no such drafters, or the output folder is not empty.
        ModelError: the drafter or the target cannot be loaded.
    """
    if is_whole_model(folder):
        return _export_model(folder, to=to, target=served_as or str(resolve_model(target)), output=output)
    head = read_head(folder)
    return WRITERS[to](head, export_target(target, served_as), output)


def export_target(name: str, served_as: str | None = None) -> ExportTarget:
    """Return the facts and the output head of a target.

    Raises:
        ModelError: it cannot be loaded.
    """
    loaded = load_model(name, device="cpu", kernels="torch")
    if loaded.folder is None:
        raise ModelLoadError(f"'{name}' has no folder: exports name one")
    facts, output = loaded.model.embedding_facts(), loaded.model.output_head()
    values = read_json(loaded.folder / "config.json")
    return ExportTarget(
        served_as or str(loaded.folder),
        str((values.get("architectures") or [""])[0]),
        loaded.model.num_layers,
        output.shape[1],
        output if facts.logit_scale == 1.0 else output * facts.logit_scale,
    )


def is_whole_model(folder: Path) -> bool:
    """Return whether the folder is that of a model of transformers, and not of a head."""
    names = _architectures(folder)
    return bool(names) and all(name.endswith("ForCausalLM") for name in names) and not is_head(folder)


def _architectures(folder: Path) -> list[str]:
    try:
        found = read_json(folder / "config.json").get("architectures")
    except (FileNotFoundError, JsonError):
        return []
    return [str(name) for name in found] if isinstance(found, list) else []


def _export_model(folder: Path, *, to: str, target: str, output: Path) -> list[str]:
    """Copy a whole model: servers read the layout of transformers."""
    require_empty(output)
    shutil.copytree(folder, output, dirs_exist_ok=True, ignore=shutil.ignore_patterns("draftree.json"))
    if to == SPECULATORS:
        asked = {"method": "draft_model", "model": str(output), "num_speculative_tokens": MODEL_TOKENS}
        return [f"vllm serve {target} --speculative-config '{json.dumps(asked)}'"]
    return [
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {output} --speculative-num-steps {MODEL_TOKENS} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {MODEL_TOKENS + 1}"
    ]
