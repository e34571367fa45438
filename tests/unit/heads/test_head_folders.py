"""Heads are stored in the layout of speculators and read again, or refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftree.core.errors import ModelError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from draftree.heads.folders import check_head, head_class, read_config, read_head, write_head
from head_samples import HIDDEN, VARIANTS, VOCAB, head_config, random_head


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_survives_its_folder(variant: str, tmp_path: Path) -> None:
    head = random_head(head_config(variant, target_name="some/target", target_architecture="LlamaForCausalLM", depth=3))
    write_head(head, tmp_path / "new" / "folder")
    found = read_head(tmp_path / "new" / "folder")
    assert found.config == head.config
    assert read_config(tmp_path / "new" / "folder").features == head.config.features
    assert found.vocabulary == head.vocabulary
    assert found.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in head.state_dict().items())
    assert not any(parameter.requires_grad for parameter in found.parameters())


def test_every_value_with_several_defaults_is_written(tmp_path: Path) -> None:
    write_head(random_head(head_config()), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["norm_before_residual"], values["norm_before_fc"]) == (False, False)
    assert (values["fc_norm"], values["norm_output"], values["target_hidden_size"]) == (False, False, HIDDEN)
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert values["transformer_layer_config"]["vocab_size"] == VOCAB
    assert values["transformer_layer_config"]["tie_word_embeddings"] is False
    method = values["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == 4
    assert method["proposal_type"] == values["speculators_config"]["default_proposal_method"] == "greedy"


def test_weights_are_cast_and_half_precision_is_kept(tmp_path: Path) -> None:
    write_head(random_head(head_config()).bfloat16(), tmp_path)
    assert next(read_head(tmp_path).parameters()).dtype == torch.bfloat16
    assert next(read_head(tmp_path, dtype=torch.float64).parameters()).dtype == torch.float64
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_weights_in_several_files_are_read(tmp_path: Path) -> None:
    head = random_head(head_config())
    write_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {name: file for file, own in parts.items() for name in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert read_head(tmp_path).vocabulary == head.vocabulary
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"two\.safetensors"):
        read_head(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "../x"}}))
    with pytest.raises(ModelLoadError, match=r"\.\./x.*files of its own folder"):
        read_head(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(ModelLoadError, match="weight_map"):
        read_head(tmp_path)


def change_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        change(values)
        (folder / "config.json").write_text(json.dumps(values))

    return apply


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def whole_model(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, folder / "model.safetensors")


LAYERS = "transformer_layer_config"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "no 'config.json'"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"no 'model\.safetensors'"),
    "not JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "hold a JSON object"),
    "cut weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"123456789"), "header too large"),
    "a whole model": (whole_model, "drafter 'model'"),
    "another type": (change_config(lambda v: v.update(speculators_model_type="dflash3")), "type 'dflash3'"),
    "no features": (change_config(lambda v: v.pop("eagle_aux_hidden_state_layer_ids")), "eagle_aux_hidden"),
    "wrong features": (change_config(lambda v: v.update(eagle_aux_hidden_state_layer_ids=[1, "2"])), "list of layers"),
    "no layers": (change_config(lambda v: v.pop(LAYERS)), LAYERS),
    "other layers": (change_config(lambda v: v[LAYERS].update(model_type="gpt2")), "model_type='gpt2'"),
    "no width": (change_config(lambda v: v[LAYERS].pop("hidden_size")), "hidden_size"),
    "a width in words": (change_config(lambda v: v[LAYERS].update(hidden_size="big")), "hidden_size='big'"),
    "an unknown rope": (change_config(lambda v: v[LAYERS]["rope_parameters"].update(rope_type="x")), "type 'x'"),
    "no proposals": (change_config(lambda v: v["speculators_config"].update(proposal_methods=[])), "proposal_methods"),
    "both norms": (change_config(lambda v: v.update(fc_norm=True, norm_before_fc=True)), "exclude each other"),
    "a flag in words": (change_config(lambda v: v.update(fc_norm="no")), "true or false"),
    "a missing tensor": (change_tensors(lambda t: t.pop("fc.weight")), r"missing: fc\.weight"),
    "an unknown tensor": (change_tensors(lambda t: t.update(x=torch.zeros(1))), "unexpected: x"),
    "another shape": (
        change_tensors(lambda t: t.update({"fc.weight": torch.zeros(2, 2)})),
        r"fc\.weight has 2x2 instead of 16x48",
    ),
    "no number": (
        change_tensors(lambda t: t["fc.weight"].view(-1)[3:4].fill_(torch.nan)),
        r"fc\.weight are infinite or not numbers",
    ),
    "no map": (change_tensors(lambda t: t.pop("d2t")), "no tensor 'd2t'"),
    "a short map": (change_tensors(lambda t: t.update(d2t=t["d2t"][:-1].clone())), "23 entries"),
    "another mask": (change_tensors(lambda t: t.update(t2d=~t["t2d"])), "contradict"),
    "a damaged map": (change_tensors(lambda t: t.update(d2t=t["d2t"] * 99)), "another target"),
}


OF_VALUES = ("no number", "another mask", "a damaged map")
"""Damages that headers do not show."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_with_the_reason(damage: str, tmp_path: Path) -> None:
    write_head(random_head(head_config()), tmp_path)
    spoil, words = DAMAGES[damage]
    spoil(tmp_path)
    with pytest.raises(ModelError, match=words) as caught:
        read_head(tmp_path)
    assert str(tmp_path) in str(caught.value)
    if damage not in OF_VALUES:
        with pytest.raises(ModelError, match=words):
            check_head(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        read_config(tmp_path / "none")


def test_kinds_without_a_class_or_layout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="eagle3"):
        head_class("unknown")
    head = random_head(head_config())
    head.config = head.config.changed(kind="medusa", features=(-1,), block_size=2)
    with pytest.raises(ModelLoadError, match="kind 'medusa'"):
        write_head(head, tmp_path)
