"""Export of drafters: heads in the layouts of other servers, whole models as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.core.files import JsonError, read_json, write_json, write_whole
from draftree.heads.base import Head, TargetParts
from draftree.heads.calibration import CONFIDENCE
from draftree.heads.folders import is_head, read_head
from draftree.heads.layouts import CONFIG, SAFE, speculators
from draftree.heads.llama_cpp import LLAMA_CPP, export_for_llama_cpp, export_llama
from draftree.heads.quantized import packed
from draftree.heads.shipped import MANIFEST, MAX_BYTES, config_facts, manifest_json
from draftree.heads.vocabulary import EMBEDDING, OUTPUT, maps_of
from draftree.heads.writers import SGLANG, SPECULATORS, ExportTarget, export_for_sglang, export_for_vllm, require_empty
from draftree.loading.load import load_model
from draftree.loading.resolve import gguf_path, resolve_model
from draftree.train.finishing import CARD, RECIPE, card
from draftree.weights.catalogue import CATALOGUE

MODEL_TOKENS = 4  # tokens that a whole model drafts in a round, in the printed flags
WRITERS = {SPECULATORS: export_for_vllm, SGLANG: export_for_sglang}


def export_drafter(folder: Path, *, to: str, target: str, output: Path, served_as: str | None = None) -> list[str]:
    """Write a drafter, a head or a whole model of transformers, for another project's server.

    `output`: new or empty folder; new file for llama.cpp. `served_as`: name of the target in the files, for llama.cpp
    its GGUF file; None for its folder or file.
    """
    if to == LLAMA_CPP:
        tokens = gguf_path(served_as or target)
        if tokens is None:
            raise ConfigurationError(
                f"'{served_as or target}' is no GGUF file, and llama.cpp needs the target's: name it with --served-as"
            )
        if not is_whole_model(folder):
            return export_for_llama_cpp(read_head(folder), export_target(target, served_as), output, tokens=tokens)
        tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        return export_llama(read_json(folder / CONFIG), tensors, output, tokens=tokens)
    if is_whole_model(folder):
        return _export_model(folder, to=to, target=served_as or str(resolve_model(target)), output=output)
    head = read_head(folder)
    return WRITERS[to](head, export_target(target, served_as), output)


def export_target(name: str, served_as: str | None = None) -> ExportTarget:
    """Return the facts and the output head of a target."""
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
        facts.embedding_scale,
    )


def is_whole_model(folder: Path) -> bool:
    """Return whether the folder is that of a model of transformers, and not of a head."""
    try:
        names = read_json(folder / "config.json").get("architectures")
    except (FileNotFoundError, JsonError):
        return False
    is_model = isinstance(names, list) and names and all(str(name).endswith("ForCausalLM") for name in names)
    return bool(is_model) and not is_head(folder)


def _export_model(folder: Path, *, to: str, target: str, output: Path) -> list[str]:
    """Copy a whole model: servers read the layout of transformers."""
    require_empty(output)
    shutil.copytree(folder, output, dirs_exist_ok=True, ignore=shutil.ignore_patterns("draftree.json"))
    if to == SPECULATORS:
        config = {"method": "draft_model", "model": str(output), "num_speculative_tokens": MODEL_TOKENS}
        return [f"vllm serve {target} --speculative-config '{json.dumps(config)}'"]
    return [
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm STANDALONE "
        f"--speculative-draft-model-path {output} --speculative-num-steps {MODEL_TOKENS} "
        f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {MODEL_TOKENS + 1}"
    ]


# The folder of a head as this package ships it: small, with a manifest that names the target, recipe and model card.
#
# What equals the target's own rows (embedding, output head) is not stored. Matrices can be stored in 8 bits.


def ship_head(
    folder: Path,
    *,
    target: str,
    output: Path,
    licence: str | None = None,
    int8: bool = False,
) -> list[str]:
    """Write a trained head into a folder for `src/draftree/heads/shipped`.

    `output`: new or empty folder, named after the target. `licence`: of the head's weights; None for that of the target
    in the catalogue. `int8`: whether matrices are stored in 8 bits, with a scale for each row.
    """
    if licence is None:
        if target not in CATALOGUE:
            raise ConfigurationError(f"the licence of '{target}' is not known: give that of the head with --licence")
        licence = CATALOGUE[target].licence
    require_empty(output)
    try:
        recipe = read_json(folder / RECIPE)
    except (FileNotFoundError, JsonError) as error:
        raise ConfigurationError(
            f"'{folder}' has no readable '{RECIPE}' ({error}): give the folder that 'draftree train head' wrote"
        ) from error
    head = read_head(folder, dtype=torch.bfloat16)
    loaded = load_model(target, dtype="bfloat16", device="cpu", kernels="torch")
    if recipe.get("fingerprint") != loaded.model.fingerprint:
        raise ConfigurationError(
            f"the head in '{folder}' was trained for other weights ('{recipe.get('target')}') than '{loaded.name}': "
            "name its target"
        )
    tensors, left_out = own_tensors(head, TargetParts.of(loaded.model))
    config = head.config.changed(
        own_embedding=EMBEDDING in tensors, own_output=OUTPUT in tensors, target_name=Path(target).name
    )
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_matrix = tensor.is_floating_point() and tensor.dim() == 2
        stored |= packed(name, tensor) if int8 and is_matrix else {name: tensor}
    assert loaded.folder is not None, "it was loaded by name"
    output.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in stored.items()}, output / SAFE, metadata={"format": "pt"}
    )
    (output / SAFE).chmod(0o644)
    facts = recipe | {"target": config.target_name}
    manifest = manifest_json(loaded.model.fingerprint, config_facts(loaded.folder), licence)
    write_json(output / CONFIG, speculators.values(config) | {"torch_dtype": "bfloat16"}, indent=1)
    write_json(output / MANIFEST, manifest, indent=1)
    write_json(output / RECIPE, facts, indent=1)
    terms = (
        f"\n## Licence\n\nThe weights in this folder are under {licence}. They were trained on answers of the target, "
        "whose licence applies to them.\n"
    )
    write_whole(output / CARD, (card(facts, "EAGLE-3 head", f"head:{output.name}") + terms).encode())
    if (folder / CONFIDENCE).is_file():
        shutil.copyfile(folder / CONFIDENCE, output / CONFIDENCE)
    size = folder_bytes(output)
    if size > MAX_BYTES:
        shutil.rmtree(output)
        raise ConfigurationError(
            f"the head takes {size / 1e6:.1f} MB, and {MAX_BYTES / 1e6:.0f} MB are allowed: store it in 8 bits "
            "(--int8), train it without --train-output, or with a smaller --draft-vocab"
        )
    taken = f", without {' and '.join(left_out)}, which are the target's" if left_out else ""
    return [f"{output}: {size / 1e6:.1f} MB{taken}", *sorted(path.name for path in output.iterdir())]


def own_tensors(head: Head, parts: TargetParts) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors that a folder must hold, with the map of a reduced vocabulary, and the names of the others.

    `head`: the head, in bfloat16. `parts`: of its target; rows that are equal to these in bfloat16 are left out.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    rows = {EMBEDDING: parts.embedding, OUTPUT: parts.output[head.vocabulary.ids]}
    left_out = [
        name
        for name, matrix in rows.items()
        if name in tensors and torch.equal(tensors[name].bfloat16(), matrix.cpu().bfloat16())
    ]
    for name in left_out:
        del tensors[name]
    return tensors | {name: tensor.cpu() for name, tensor in maps_of(head.vocabulary).items()}, left_out


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
