"""Heads of the package: small folders for one target each, found by its weights, and chosen by `draft="auto"`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from block_samples import EAGLE_3, config_of, random_head
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.heads import shipped as catalogue
from draftree.heads.folders import read_head, write_head
from draftree.heads.quantized import expanded, packed
from draftree.heads.shipped import MAX_BYTES, config_facts, head_folder, shipped_heads
from draftree.loading.load import load_model
from draftree.train.export import folder_bytes, ship_head
from families import VOCAB_SIZE, drafter_folder

WIDTH, DRAFTED = 64, 60
SIZES: dict[str, Any] = {"target_hidden": WIDTH, "hidden": WIDTH, "vocab_size": VOCAB_SIZE, "draft_vocab_size": DRAFTED}
LLAMA = {"hidden_size": WIDTH, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 6}
NAME = "tiny"
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder("llama", tmp_path_factory.mktemp("models"), distance=0.0, **LLAMA)


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a head as training leaves it: its output head has the target's rows."""
    folder = tmp_path_factory.mktemp("trained") / "head"
    head = random_head(config_of(EAGLE_3, **SIZES, own_output=True, features=(2, 3, -1))).bfloat16()
    loaded = load_model(target, dtype="bfloat16", kernels="torch")
    with torch.no_grad():
        head.lm_head.weight.copy_(loaded.model.output_head()[head.vocabulary.ids])
    write_head(head, folder)
    recipe = {
        "target": str(target),
        "fingerprint": loaded.model.fingerprint,
        "data": {"texts": {"seen": 3, "unseen": 1}, "tokens": 90, "temperatures": [0.0], "prompts": []},
        "run": {"trained_predictions": 5, "updates": 2, "minutes": 0.1},
        "unseen": {},
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder


@pytest.fixture
def shipped(target: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one head."""
    ship_head(trained, target=str(target), output=tmp_path / "shipped" / NAME, licence="MIT")
    monkeypatch.setattr(catalogue, "FOLDERS", tmp_path / "shipped")
    return tmp_path / "shipped" / NAME


def test_rows_of_the_target_are_not_stored(target: Path, trained: Path, shipped: Path) -> None:
    assert "lm_head.weight" not in load_file(shipped / "model.safetensors")
    kept, whole = read_head(shipped), read_head(trained)
    assert not kept.config.own_output
    for name, tensor in kept.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])
    assert {path.name for path in shipped.iterdir()} == {
        "README.md", "config.json", "manifest.json", "model.safetensors", "recipe.json",
    }  # fmt: skip
    card = (shipped / "README.md").read_text()
    assert f"--draft head:{NAME} " in card
    assert "## Data" in card
    assert "under MIT" in card
    for path in shipped.glob("*.*"):
        assert str(target.parent) not in path.read_text(errors="replace"), "no folder of the trainer is shipped"


def test_an_output_head_of_its_own_is_stored(target: Path, trained: Path, tmp_path: Path) -> None:
    head = read_head(trained)
    with torch.no_grad():
        head.lm_head.weight.mul_(2)
    write_head(head, tmp_path / "other")
    (tmp_path / "other/recipe.json").write_bytes((trained / "recipe.json").read_bytes())
    ship_head(tmp_path / "other", target=str(target), output=tmp_path / "out", licence="MIT")
    assert torch.equal(read_head(tmp_path / "out").state_dict()["lm_head.weight"], head.lm_head.weight)


def test_matrices_in_8_bits_are_within_half_a_step(target: Path, trained: Path, tmp_path: Path) -> None:
    ship_head(trained, target=str(target), output=tmp_path / "wide", licence="MIT")
    ship_head(trained, target=str(target), output=tmp_path / "small", licence="MIT", int8=True)
    wide, small = read_head(tmp_path / "wide").state_dict(), read_head(tmp_path / "small").state_dict()
    assert wide.keys() == small.keys()
    for name, tensor in wide.items():
        if tensor.dim() != 2:
            assert torch.equal(tensor, small[name])
            continue
        step = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        rounding = small[name].float().abs() / 256  # of bfloat16
        assert bool(((tensor.float() - small[name].float()).abs() <= 0.5 * step + rounding).all())
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("wide", "small")]
    assert sizes[1] < 0.75 * sizes[0]


def test_a_row_of_zeros_stays_zero_and_wrong_scales_are_refused() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, -3.0]])
    stored = packed("w", rows)
    assert torch.equal(expanded(stored)["w"][0], torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(ModelLoadError, match="do not fit"):
        expanded({**stored, "w.int8_scale": torch.ones(3)})


def test_auto_takes_the_head_of_the_weights_and_keeps_the_text(target: Path, shipped: Path) -> None:
    plain = LLM(target, "none", dtype="float32")
    ids = plain.generate([[5, 6, 7]], GREEDY)[0].token_ids
    llm = LLM(target, "auto", dtype="float32", plan="fixed")
    assert llm.drafts == (f"head:{NAME}+suffix",)
    assert llm.draft_note == f"draft auto: head:{NAME}+suffix (trained for this model)"
    done = llm.generate([[5, 6, 7]], GREEDY)[0]
    assert done.token_ids == ids
    assert sum(done.stats.drafted_by_depth) > 0
    assert llm.generate([[5, 6, 7]], GREEDY, draft="auto")[0].token_ids == ids


def test_8_bit_weights_of_the_target_get_its_head_too(target: Path, shipped: Path) -> None:
    llm = LLM(target, "auto", quantization="int8")
    assert llm.drafts == (f"head:{NAME}+suffix",)
    assert llm.generate([[5, 6, 7]], GREEDY)[0].token_ids


def test_a_verifier_that_needs_distributions_gets_the_head_alone(target: Path, shipped: Path) -> None:
    llm = LLM(target, "auto", verify="token", dtype="float32")
    assert llm.drafts == (f"head:{NAME}",)
    assert "'head:tiny+suffix' cannot be used" in llm.draft_note


def other_weights(target: Path, place: Path) -> Path:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.add_(0.05)
    model.save_pretrained(place)
    return place


def test_other_weights_do_not_get_it(target: Path, shipped: Path, tmp_path: Path) -> None:
    llm = LLM(other_weights(target, tmp_path / "tuned"), "auto", dtype="float32")
    assert llm.drafts == ("suffix",)
    assert "was trained for other weights" in llm.draft_note


def test_another_configuration_of_the_same_weights_does_not_get_it(target: Path, shipped: Path, tmp_path: Path) -> None:
    other = tmp_path / "stretched"
    other.mkdir()
    for path in target.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    values = json.loads((other / "config.json").read_text())
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": 77777.0}
    (other / "config.json").write_text(json.dumps(values))
    llm = LLM(other, "auto", dtype="float32")
    assert llm.drafts == ("suffix",)
    assert "trained for another value of rope" in llm.draft_note


def test_a_name_of_the_package_precedes_a_folder(shipped: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert head_folder(NAME) == shipped
    assert head_folder(f"./{NAME}") == Path(NAME)
    assert head_folder("elsewhere") == Path("elsewhere")


def test_a_damaged_manifest_is_named(shipped: Path) -> None:
    (shipped / "manifest.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"manifest\.json is damaged"):
        shipped_heads()


def test_a_head_for_other_weights_is_not_shipped(
    target: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = other_weights(target, tmp_path / "tuned")
    options = ["--to", "package", "--target", str(other), "--output", str(tmp_path / "out")]
    assert run(["train", "export", str(trained), *options]) == 1
    assert "is not known: give that of the head with --licence" in capsys.readouterr().err
    assert run(["train", "export", str(trained), *options, "--licence", "MIT"]) == 1
    assert "was trained for other weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_writes_the_folder_and_refuses_options_of_others(
    target: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--target", str(target), "--output", str(tmp_path / "out"), "--licence", "MIT"]
    assert run(["train", "export", str(trained), "--to", "package", *options]) == 0
    assert "without lm_head.weight, which are the target's" in capsys.readouterr().out
    assert run(["train", "export", str(trained), "--to", "sglang", *options]) == 2
    assert "only --to package takes it" in capsys.readouterr().err


def test_a_folder_that_is_too_large_is_refused(
    target: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.train.export.MAX_BYTES", 5000)
    with pytest.raises(ConfigurationError, match="store it in 8 bits"):
        ship_head(trained, target=str(target), output=tmp_path / "out", licence="MIT")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("head", shipped_heads(), ids=lambda head: head.name)
def test_every_head_of_the_package_is_small_and_complete(head: catalogue.ShippedHead) -> None:
    assert folder_bytes(head.folder) <= MAX_BYTES
    assert head.licence
    read_head(head.folder)
    recipe = json.loads((head.folder / "recipe.json").read_text())
    assert recipe["fingerprint"] == head.fingerprint
    assert "## Data" in (head.folder / "README.md").read_text()


def test_no_file_of_the_package_is_ignored_by_git() -> None:
    """Builds of sdists and wheels leave ignored files out."""
    folder = Path(catalogue.__file__).parent
    names = [f"{folder}/some-model/{name}" for name in ("model.safetensors", "manifest.json", "README.md")]
    done = subprocess.run(["git", "check-ignore", *names], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.stdout == ""


def test_facts_of_older_files_are_equal(target: Path, tmp_path: Path) -> None:
    """transformers 4 writes rotary positions in other keys."""
    values = json.loads((target / "config.json").read_text())
    theta = values.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(values | {"rope_theta": theta, "rope_scaling": None}))
    assert config_facts(tmp_path) == config_facts(target)
