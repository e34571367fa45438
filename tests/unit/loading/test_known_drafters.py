"""Known drafters: the package's list, what of it is on this machine, why one does not fit, and what `auto` chooses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from block_files import written
from cli_samples import save_tiny_model
from draftree import LLM, SamplingParams
from draftree.build import decide
from draftree.core.errors import ConfigurationError, ModelNotFoundError
from draftree.heads.config import KINDS
from draftree.heads.folders import write_folder
from draftree.heads.layouts import dflash
from draftree.loading import known_drafters
from draftree.loading.auto_draft import TrainedHead, TunedDraft, conditions_of, keep_trained, keep_tuned
from draftree.loading.known_drafters import (
    DATA,
    SIBLING,
    FoundDrafter,
    KnownDrafter,
    bare_name,
    base_models,
    describe_target,
    find_drafters,
    own_folder,
    read_targets,
    snapshot_of,
    wrong_lists,
)
from draftree.loading.load import load_model
from draftree.options import ModelOptions
from draftree.serve.settings import ServerSettings, choose_models
from draftree.weights.catalogue import CATALOGUE
from families import VOCAB_SIZE, drafter_folder
from hub_cache import COMMIT, put_in_hub
from mtp_targets import TARGETS, target_with_mtp
from private_cache import private_cache
from target_heads import TARGET, head_folder
from weights_samples import PIECES, random_weights, write_gguf

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = [5, 6, 7]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches and an empty configuration; the cache of the hub's client is returned."""
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.setenv("DRAFTREE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder("llama", tmp_path_factory.mktemp("models"), distance=0.0, **TARGET)


@pytest.fixture
def target(model: Path, tmp_path: Path) -> Path:
    """A model folder alone in its folder."""
    return Path(shutil.copytree(model, tmp_path / "models" / "tiny"))


def name_them(**values: Any) -> Path:
    """Write the user's list with one target; `values` are those of `KnownTarget`."""
    folder = own_folder()
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "mine.json"
    place.write_text(json.dumps({"format": 1, "targets": [{"models": ["maker/tiny"], **values}]}))
    return place


def found_for(name: str | Path) -> list[FoundDrafter]:
    return find_drafters(describe_target(str(name)))


def one(found: list[FoundDrafter]) -> FoundDrafter:
    (only,) = found
    return only


# The package's list

POPULAR = {
    "Qwen/Qwen3-0.6B": None,
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen/Qwen3-14B": "RedHatAI/Qwen3-14B-speculator.eagle3",
    "Qwen/Qwen3-32B": "RedHatAI/Qwen3-32B-speculator.eagle3",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    "Qwen/Qwen2.5-7B-Instruct-AWQ": "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen3.5-9B": "z-lab/Qwen3.5-9B-DFlash",
    "Qwen/Qwen3.8-27B": "RadixArk/Qwen3.8-27B-DSpark",
    "unsloth/Qwen3.8-27B-GGUF": "RadixArk/Qwen3.8-27B-DSpark",
    "google/gemma-4-E4B-it": "google/gemma-4-E4B-it-assistant",
    "google/gemma-4-31B-it": "RedHatAI/gemma-4-31B-it-speculator.eagle3",
    "openai/gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
    "openai/gpt-oss-120b": "z-lab/gpt-oss-120b-DFlash",
    "meta-llama/Llama-3.1-8B-Instruct": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
    "meta-llama/Llama-3.3-70B-Instruct": "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
    "deepseek-ai/DeepSeek-V4-Flash": "RedHatAI/DeepSeek-V4-Flash-speculator.dflash",
    "zai-org/GLM-5.3": "RedHatAI/GLM-5.3-speculator.dspark",
    "LiquidAI/LFM2.5-1.2B-Instruct": "LiquidAI/LFM2.5-1.2B-Instruct-DSpark",
    "HuggingFaceTB/SmolLM3-3B": None,
    "microsoft/phi-4": None,
}
"""Popular models, and the first published drafter of each that can be read."""


@pytest.mark.parametrize("name", POPULAR)
def test_popular_models_have_their_first_readable_drafter_without_a_network(name: str) -> None:
    found = found_for(name)
    assert all(each.place is None for each in found)
    published = [each for each in found if each.known.id and each.reason is None]
    assert (published[0].known.id if published else None) == POPULAR[name]
    unread = [each for each in found if each.known.kind not in (*KINDS, SIBLING)]
    assert all(f"heads of kind '{each.known.kind}' are not read" in str(each.reason) for each in unread)
    assert {each.known.id for each in unread} == {each.known.id for each in found if each.reason is not None}


def test_every_entry_of_the_list_is_complete() -> None:
    kinds = {*KINDS, SIBLING, "eagle3-mla", "jetspec++"}
    targets = read_targets(DATA)
    models = [model.lower() for target in targets for model in target.models]
    assert len(models) == len(set(models))
    for target in targets:
        ids = [drafter.id for drafter in target.drafters]
        assert len(ids) == len(set(ids))
        for drafter in target.drafters:
            assert drafter.kind in kinds
            assert drafter.source
            assert "/" in drafter.id or drafter.id in CATALOGUE or (drafter.kind == "mtp" and not drafter.id)
            assert (drafter.speedup is None) == (drafter.measured == "")
            assert (drafter.tokens_per_round is None) == (drafter.accepted == "")
            assert drafter.drafted is None or drafter.tokens_per_round is not None


@pytest.mark.parametrize(
    ("tokens", "drafted", "rate"),
    [(None, None, None), (1.65, 1, 0.65), (1.75, 2, 0.5), (1.0, 3, 0.0), (4.0, 3, 1.0), (2.0, None, 0.5)],
)
def test_the_acceptance_of_the_first_token_follows_from_tokens_per_round(
    tokens: float | None, drafted: int | None, rate: float | None
) -> None:
    known = KnownDrafter(kind="eagle3", tokens_per_round=tokens, drafted=drafted)
    assert known.first_rate == (None if rate is None else pytest.approx(rate, abs=1e-5))


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("Qwen/Qwen3-8B-FP8", "qwen3-8b"),
        ("unsloth/Qwen3-8B-unsloth-bnb-4bit", "qwen3-8b"),
        ("Qwen3-8B-UD-Q4_K_XL", "qwen3-8b"),
        ("RedHatAI/Qwen3-8B-quantized.w4a16", "qwen3-8b"),
        ("nvidia/Llama-3.3-70B-Instruct-NVFP4", "llama-3.3-70b-instruct"),
        ("google/gemma-4-12B-it-qat", "gemma-4-12b-it"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b-base"),
        ("poolside/Laguna-S-2.1", "laguna-s-2.1"),
    ],
)
def test_names_of_quantized_copies_are_those_of_the_model(name: str, bare: str) -> None:
    assert bare_name(name) == bare


# How a model is recognised


@pytest.mark.parametrize(
    "front",
    [
        "base_model: maker/tiny",
        "license: mit\nbase_model:\n- maker/tiny\ntags:\n- x",
        "base_model:\n  - other/one\n  - 'maker/tiny'",
        'base_model: ["maker/tiny"]',
    ],
)
def test_the_card_of_a_fine_tuned_model_names_its_base(front: str, target: Path) -> None:
    (target / "README.md").write_text(f"---\n{front}\n---\n# A model\nbase_model: not/this\n")
    assert "maker/tiny" in base_models(target)
    name_them(drafters=[{"kind": "eagle3", "id": "maker/head", "source": "me"}])
    found = one(found_for(target))
    assert (found.known.id, found.matched, found.reason) == ("maker/head", "base model", None)


def test_the_configuration_names_the_base_too(target: Path) -> None:
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**values, "_name_or_path": "maker/tiny"}))
    name_them(drafters=[{"kind": "dspark", "id": "maker/head", "source": "me"}])
    assert one(found_for(target)).matched == "base model"


SHAPE = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": VOCAB_SIZE}


def test_a_local_folder_without_a_name_is_known_by_its_shape(target: Path) -> None:
    unknown = target.rename(target.with_name("my model"))
    head = {"kind": "eagle3", "id": "maker/head", "source": "me"}
    name_them(drafters=[head], shape=SHAPE)
    assert one(found_for(unknown)).matched == "shape"
    (unknown / "README.md").write_text("---\nbase_model: other/model\n---\n")
    assert found_for(unknown) == [], "its card says that it is another model"
    (unknown / "README.md").unlink()
    name_them(drafters=[head], shape={**SHAPE, "num_hidden_layers": 5})
    assert found_for(unknown) == []


def test_a_folder_of_another_shape_is_not_the_model_of_its_name(target: Path) -> None:
    name_them(drafters=[{"kind": "eagle3", "id": "maker/head", "source": "me"}], shape={**SHAPE, "hidden_size": 32})
    assert found_for(target) == []
    (target / "README.md").write_text("---\nbase_model: maker/tiny\n---\n")
    reason = one(found_for(target)).reason
    assert reason == "it is for maker/tiny, and its hidden_size is 64 instead of 32"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    sizes = {"vocab_size": len(PIECES), "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    config = AutoConfig.for_model("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, **sizes)
    path = tmp_path / "files" / "model-Q8_0.gguf"
    path.parent.mkdir()
    write_gguf(random_weights(AutoModelForCausalLM.from_config(config), 0), path, "llama", name="A Model")
    return path


def test_a_gguf_file_is_known_by_its_header(gguf_file: Path) -> None:
    described = describe_target(str(gguf_file))
    shape = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": len(PIECES)}
    assert described.shape == known_drafters.Shape(**shape)  # type: ignore[arg-type]
    assert set(described.names) == {"A-Model", "model-Q8_0"}
    name_them(drafters=[{"kind": "dflash", "id": "maker/head", "source": "me"}], shape=shape)
    assert one(found_for(gguf_file)).matched == "shape"
    name_them(models=["maker/A-Model"], drafters=[{"kind": "mtp", "source": "me"}])
    found = one(found_for(gguf_file))
    assert (found.matched, found.reason) == ("name", "the files here have no MTP layers that can be read")


@pytest.mark.parametrize("name", ["remote:http://localhost:1", "/no/such/model", "./nowhere", " ", "a b"])
def test_what_cannot_be_a_model_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        describe_target(name)


# What is on this machine


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        describe_target(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="there is no model 'absent"):
        describe_target("absent.gguf")


def test_a_head_with_a_damaged_configuration_is_listed(target: Path, tmp_path: Path) -> None:
    for place in (target / "inside", target.parent / "beside"):
        shutil.copytree(head_folder(tmp_path / "heads"), place)
        (place / "config.json").write_text('{"speculators_model_type": ')
    found = one(found_for(target))  # a damaged folder beside the model may be that of another model
    assert found.place == target / "inside"
    assert "config.json" in str(found.reason)


def test_the_snapshot_of_a_repository_follows_its_reference(places: Path, target: Path) -> None:
    assert snapshot_of("maker/tiny") is None
    old = put_in_hub(places, "maker/tiny", target, commit="0ld", ref=None)
    assert snapshot_of("maker/tiny") == old, "downloaded by its commit alone"
    new = put_in_hub(places, "maker/tiny", target)
    assert snapshot_of("maker/tiny") == new
    assert snapshot_of("maker/tiny", "0ld") == old
    assert snapshot_of("maker/tiny", "gone") is None
    assert new.name == COMMIT


@pytest.mark.parametrize("reference", [b"\xff\xfe", b"0" * 5000], ids=["bytes", "long"])
def test_a_damaged_reference_hides_no_other_drafter(
    reference: bytes, target: Path, places: Path, tmp_path: Path
) -> None:
    put_in_hub(places, "maker/tiny", target)
    (places / "models--maker--tiny" / "refs" / "main").write_bytes(reference)
    shutil.copytree(head_folder(tmp_path / "heads", "dflash"), target.parent / "beside")
    assert one(found_for(target)).known.kind == "dflash"


def test_heads_are_found_in_the_order_of_auto(target: Path, places: Path, tmp_path: Path) -> None:
    own = own_folder()
    assert own is not None
    own.mkdir(parents=True)
    shutil.copytree(head_folder(tmp_path / "heads", "eagle3.1"), own / "kept")
    shutil.copytree(head_folder(tmp_path / "heads", "dflash"), target.parent / "beside")
    shutil.copytree(head_folder(tmp_path / "heads", "peagle"), target / "inside")
    put_in_hub(places, "maker/head", head_folder(tmp_path / "heads"))
    mine = str(head_folder(tmp_path / "heads", "dspark"))
    name_them(
        drafters=[
            {"kind": "dflash3", "id": "maker/new", "source": "me"},
            {"kind": "eagle3", "id": "maker/head", "source": "me"},
            {"kind": "eagle3", "id": "maker/absent", "source": "me", "revision": "v2"},
            {"kind": "dspark", "id": mine, "source": "me"},
        ]
    )
    found = found_for(target)
    assert [(each.label, each.where) for each in found] == [
        ("maker/head", "in the hub cache"),
        (mine, "named by you"),
        (str(own / "kept"), "in the configuration folder"),
        (str(target / "inside"), "beside the model"),
        (str(target.parent / "beside"), "beside the model"),
        ("maker/new", None),
        ("maker/absent", None),
    ]
    assert [each.known.kind for each in found[2:5]] == ["eagle3", "peagle", "dflash"]
    assert [each.label for each in found if each.reason is not None] == ["maker/new"]


@pytest.mark.parametrize(
    ("variant", "values", "reason"),
    [
        ("eagle3", {"target_hidden": 32, "hidden": 32}, "hidden states of 32, and this one has 64"),
        ("eagle3", {"vocab_size": 100}, "a vocabulary of 100, and this one has 96"),
        ("dflash", {"features": (1, 2, 7)}, "it reads hidden state 7, and this model has 4 layers"),
    ],
)
def test_heads_of_other_shapes_do_not_fit(
    variant: str, values: dict[str, Any], reason: str, target: Path, tmp_path: Path
) -> None:
    if variant == "dflash":
        values |= {"mask_token_id": 40}
    shutil.copytree(head_folder(tmp_path / "heads", variant, **values), target.parent / "head")
    assert reason in str(one(found_for(target)).reason)


def test_the_reason_against_a_head_is_that_of_its_reader(target: Path, places: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(head_folder(tmp_path / "heads"), target.parent / "head"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "speculators_model_type": "dflash3"}))
    found = one(found_for(target))
    assert found.known.kind == "dflash3"
    assert "config.json has speculators_model_type 'dflash3'" in str(found.reason)
    (folder / "config.json").write_text(json.dumps(values))
    assert one(found_for(target)).reason is None
    (folder / "model.safetensors").unlink()
    assert "its weights are missing" in str(one(found_for(target)).reason)


def test_a_head_says_for_which_model_it_was_trained(target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(head_folder(tmp_path / "heads"), target.parent / "head"))
    (folder / "README.md").write_text("---\nbase_model: maker/other\n---\n")
    assert one(found_for(target)).reason is None, "nothing says what the model is"
    (target / "README.md").write_text("---\nbase_model: maker/tiny\n---\n")
    assert one(found_for(target)).reason == "it was trained for maker/other"
    (folder / "README.md").write_text("---\nbase_model: maker/Tiny-FP8\n---\n")
    assert one(found_for(target)).reason is None


def test_the_layouts_of_others_are_found(target: Path, tmp_path: Path) -> None:
    from draftree.heads.folders import read_head

    head = read_head(head_folder(tmp_path / "heads", "dflash", features=(1, 2, 3)))
    write_folder(target.parent / "theirs", dflash.values(head.config), head.state_dict())
    found = one(found_for(target))
    assert (found.known.kind, found.reason) == ("dflash", None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"format": 1,\n"targets": nonsense}', "not JSON: Expecting value: line 2 column 12"),
        ('{"format": 2, "targets": []}', "format 2"),
        ('{"format": 1, "targets": [{"models": "a/b", "drafters": []}]}', "wrong type"),
        ('{"format": 1, "targets": [{"models": ["a/b"], "drafters": [{"kind": "eagle3", "url": "x"}]}]}', "'url'"),
        ('{"format": 1, "targets": [{"models": ["a/b"], "drafters": [{"kind": 3}]}]}', "(targets[0]: 3 has the wrong"),
        (
            '{"format": 1, "targets": [{"models": [], "drafters": [{"kind": "", "tokens_per_round": 3, "drafted": 1'
            "}]}]}",
            "tokens_per_round is 3: it must be from 1 to drafted + 1",
        ),
        ('{"format": 1, "targets": [{"drafters": []}]}', "models"),
        ('{"format": 1, "targets": [{"models": [], "shape": {"vocab_size": "9"}, "drafters": []}]}', "wrong type"),
    ],
)
def test_a_wrong_list_of_the_user_is_named(content: str, words: str, target: Path) -> None:
    place = name_them(drafters=[{"kind": "eagle3", "id": "maker/head"}])
    right = found_for(target)
    (place.parent / "wrong.json").write_text(content)
    assert found_for(target) == right
    (reason,) = wrong_lists()
    assert words in reason
    assert str(place.parent / "wrong.json") in reason


def test_a_folder_that_is_gone_is_not_published(target: Path, tmp_path: Path) -> None:
    name_them(drafters=[{"kind": kind, "id": str(tmp_path / kind)} for kind in ("eagle3", SIBLING)])
    assert {each.reason for each in found_for(target)} == {"there is no such folder or file"}


# MTP layers in the checkpoint


def test_mtp_layers_of_the_checkpoint_come_first_and_draft(tmp_path: Path) -> None:
    folder = target_with_mtp(TARGETS["glm"], tmp_path / "models" / "target")
    name_them(models=["maker/target"], drafters=[{"kind": "mtp", "tokens_per_round": 1.8, "drafted": 1}])
    found = one(found_for(folder))
    assert found.known.first_rate == pytest.approx(0.8), "its record is that of the list"
    assert (found.known.kind, found.where, found.place, found.reason) == ("mtp", "in the checkpoint", folder, None)
    plain = LLM(folder, "none", dtype="float32").generate([PROMPT], GREEDY)[0].token_ids
    llm = LLM(folder, dtype="float32", plan="fixed")
    assert llm.drafts == (f"head:{folder}+suffix",)
    assert "the MTP layer in the checkpoint" in llm.draft_note
    done = llm.generate([PROMPT], GREEDY)[0]
    assert done.token_ids == plain
    assert done.stats.draft_tokens > 5


def test_mtp_layers_that_cannot_run_are_left_out_with_the_reason(tmp_path: Path) -> None:
    folder = target_with_mtp(TARGETS["glm"], tmp_path / "models" / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.q_proj.weight_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(folder, dtype="float32", kernels="torch")
    assert llm.drafts == ("suffix",)
    assert "self_attn.q_proj.weight_scale' do not fit to a tensor" in llm.draft_note


# Smaller models with the same tokenizer


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model with the tokenizer of `small`, and many times its weights."""
    folder = save_tiny_model(tmp_path / "models" / "large", chat=False)
    values = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    known = {name: values[name] for name in ("vocab_size", "max_position_embeddings", "eos_token_id")}
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**known, **sizes)).save_pretrained(folder)
    return folder


def test_a_smaller_model_with_the_same_tokenizer_drafts(large: Path, places: Path, tmp_path: Path) -> None:
    small = save_tiny_model(tmp_path / "elsewhere" / "small", chat=False)
    snapshot = put_in_hub(places, "maker/small", small)
    found = one(found_for(large))
    assert (found.known.id, found.matched, found.where) == ("maker/small", "tokenizer", "in the hub cache")
    llm = LLM(large, dtype="float32", plan="fixed")
    assert llm.drafts == (f"model:{snapshot}+suffix",)
    assert "maker/small (a smaller model, 0.0 GB) in the hub cache" in llm.draft_note
    plain = LLM(large, "none", dtype="float32").generate("ab", GREEDY)[0]
    done = llm.generate("ab", GREEDY)[0]
    assert done.token_ids == plain.token_ids
    assert done.stats.draft_tokens > 5


def test_other_tokenizers_and_larger_models_do_not_draft(large: Path, tmp_path: Path) -> None:
    beside = save_tiny_model(large.parent / "small", chat=False)
    assert one(found_for(large)).where == "beside the model"
    tokenizer = json.loads((beside / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[1:3]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (beside / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert found_for(large) == []
    assert found_for(beside) == [], "the other one is larger"
    name_them(models=["maker/large"], drafters=[{"kind": "model", "id": str(beside), "source": "me"}])
    assert one(found_for(large)).reason == "its tokens are not the model's"
    assert LLM(large, dtype="float32").drafts == ("suffix",)


def test_a_smaller_gguf_file_drafts_for_one_next_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_drafters, "MOST_SHARE", 1 / 2)  # larger files take seconds to write
    folder = tmp_path / "files"
    folder.mkdir()
    large = written(folder, sizes={"hidden_size": 512, "intermediate_size": 768}).rename(folder / "large.gguf")
    (folder / "gone.gguf").symlink_to(folder / "nowhere")
    small = written(folder).rename(folder / "small.gguf")
    (folder / "plain.gguf").unlink()
    head = gguf.GGUFWriter(folder / "head.gguf", "eagle3")
    for write in (head.write_header_to_file, head.write_kv_data_to_file, head.write_tensors_to_file, head.close):
        write()
    found = {each.label: each for each in found_for(large)}
    assert found.keys() == {str(small), str(folder / "head.gguf")}
    assert "heads in GGUF files are not read" in str(found[str(folder / "head.gguf")].reason)
    llm = LLM(large, plan="fixed")
    assert llm.drafts == (f"model:{small}+suffix",)
    assert "head.gguf (eagle3) beside the model does not fit" in llm.draft_note
    plain = LLM(large, "none").generate([PROMPT], GREEDY)[0].token_ids
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == plain
    assert not list((tmp_path / "cache" / "models").glob("*/*.safetensors")), "nothing was converted"


@pytest.mark.parametrize("damage", ["missing", "shape", "NaN"])
def test_a_damaged_smaller_model_does_not_end_the_start(damage: str, large: Path) -> None:
    file = save_tiny_model(large.parent / "small", chat=False) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    part = tensors.pop(name)
    changed = {"missing": {}, "shape": {name: part[:, 1:].contiguous()}, "NaN": {name: part * torch.nan}}[damage]
    save_file(tensors | changed, file, metadata={"format": "pt"})
    llm = LLM(large, dtype="float32")
    assert llm.drafts == ("suffix",)
    assert ("are not numbers" if damage == "NaN" else name) in llm.draft_note


def test_tokens_are_compared_where_files_differ(large: Path, tmp_path: Path) -> None:
    beside = save_tiny_model(large.parent / "small", chat=False)
    tokenizer = json.loads((beside / "tokenizer.json").read_text())
    (beside / "tokenizer.json").write_text(json.dumps(tokenizer))  # the same content in other bytes
    assert one(found_for(large)).reason is None


# What `auto` chooses


def test_a_model_without_drafters_keeps_its_default(target: Path) -> None:
    llm = LLM(target, dtype="float32")
    assert llm.drafts == ("suffix",)
    assert (
        llm.draft_note == "draft auto: suffix (needs no training; this package has no trained drafter for this model)"
    )


def test_auto_takes_a_head_of_the_hub_cache_and_keeps_the_text(target: Path, places: Path, tmp_path: Path) -> None:
    snapshot = put_in_hub(places, "maker/head", head_folder(tmp_path / "heads"))
    known = {"kind": "eagle3", "id": "maker/head", "source": "me", "bytes": 5_000_000, "licence": "MIT"}
    name_them(drafters=[{**known, "tokens_per_round": 1.75, "drafted": 2}])
    published = decide(load_model(target, dtype="float32"), "coupled", None).published
    assert published == {f"head:{snapshot}": pytest.approx(0.5)}
    plain = LLM(target, "none", dtype="float32").generate([PROMPT], GREEDY)[0].token_ids
    llm = LLM(target, dtype="float32", plan="fixed")
    assert llm.drafts == (f"head:{snapshot}+suffix",)
    assert "(maker/head (eagle3, 0.0 GB, MIT) in the hub cache; " in llm.draft_note
    done = llm.generate([PROMPT], GREEDY)[0]
    assert done.token_ids == plain
    assert done.stats.draft_tokens > 5
    assert LLM(target, dtype="float32", verify="token").drafts == (f"head:{snapshot}",)


def test_up_to_three_drafters_race_and_the_text_is_kept(
    target: Path, hub: list[tuple[str, str | None]], tmp_path: Path
) -> None:
    kinds = ("dflash", "eagle3", "eagle3.1", "peagle")
    heads = [Path(shutil.copytree(head_folder(tmp_path / "heads", kind), target.parent / kind)) for kind in kinds]
    name_them(drafters=[{"kind": "eagle3", "id": "maker/head", "source": "me"}])
    model = load_model(target, dtype="float32")
    llm = LLM(model, download_drafter=True)
    assert llm.drafts == ("+".join((*(f"head:{head}" for head in heads[:3]), "suffix")),)
    assert llm.draft_note.count(" beside the model") == 3
    assert hub == [], "nothing is downloaded beside what is here"
    plain = LLM(model, "none").generate([PROMPT], GREEDY)[0].token_ids
    assert llm.generate([PROMPT], GREEDY)[0].token_ids == plain
    assert LLM(model, plan="fixed").drafts == (f"head:{heads[0]}+suffix",), "other planners do not compare"
    assert LLM(model, verify="token").drafts == (f"head:{heads[0]}",)


def test_a_head_that_does_not_fit_is_left_out_with_the_reason(target: Path, tmp_path: Path) -> None:
    wrong = head_folder(tmp_path / "heads", "eagle3", vocab_size=100)
    shutil.copytree(wrong, target.parent / "wrong")
    damaged = Path(shutil.copytree(head_folder(tmp_path / "heads"), target.parent / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"][:, 1:].contiguous()}, damaged / "model.safetensors")
    llm = LLM(target, dtype="float32")
    assert llm.drafts == ("suffix",)
    assert "does not fit: it is for a model with a vocabulary of 100, and this one has 96" in llm.draft_note
    assert llm.draft_note.count("fc.weight has 64x191 instead of 64x192") == 1


@pytest.mark.parametrize(
    ("change", "reason", "is_in_headers"),
    [
        (lambda part: {}, "missing: fc.weight", True),
        (lambda part: {"fc.weight": part[:, 1:].contiguous()}, "fc.weight has 64x191 instead of 64x192", True),
        (lambda part: {"fc.weight": part * torch.nan}, "values of fc.weight are infinite or not numbers", False),
    ],
    ids=["missing", "shape", "NaN"],
)
def test_damaged_tensors_are_found_by_the_list_or_before_use(
    change: Callable[[Tensor], dict[str, Tensor]],
    reason: str,
    target: Path,
    tmp_path: Path,
    *,
    is_in_headers: bool,
) -> None:
    damaged = Path(shutil.copytree(head_folder(tmp_path / "heads"), target.parent / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    part = tensors.pop("fc.weight")
    save_file(tensors | change(part), damaged / "model.safetensors")
    assert (reason in str(one(found_for(target)).reason)) == is_in_headers
    llm = LLM(target, dtype="float32")
    assert llm.drafts == ("suffix",)
    assert llm.draft_note.count(reason) == 1


@pytest.mark.parametrize("is_tuned", [True, False])
def test_a_damaged_head_that_was_trained_or_measured_here_is_left_out(
    target: Path, tmp_path: Path, *, is_tuned: bool
) -> None:
    damaged = Path(shutil.copytree(head_folder(tmp_path / "heads"), tmp_path / "mine"))
    tensors = load_file(damaged / "model.safetensors")
    model = load_model(target, dtype="float32")
    if is_tuned:
        kept = TunedDraft(
            model=model.name, fingerprint=model.model.fingerprint, draft=f"head:{damaged},k=2", plan=None, speedup=1.5,
            spread=(1.2, 1.6), texts=8, prompts="mine.jsonl", temperatures=(0.0,),
            conditions=conditions_of(model), date="2026-11-28",
        )  # fmt: skip
        keep_tuned(kept)
    else:
        keep_trained(model.model.fingerprint, TrainedHead(str(damaged), 2.0))
    assert LLM(model).drafts == (f"head:{damaged},k=2" if is_tuned else f"head:{damaged}+suffix",)
    del tensors["fc.weight"]
    save_file(tensors, damaged / "model.safetensors")
    llm = LLM(model)
    assert llm.drafts == ("suffix",)
    assert llm.draft_note.count("missing: fc.weight") == 1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, ""),
        ({"vocab_size": 100}, "a vocabulary of 100, and this one has 96"),
        ({"target_hidden": 32, "hidden": 32}, "hidden states of 32, and this one has 64"),
        ({"features": (1, 2, 7)}, "hidden states of layer 7, but 'LlamaForCausalLM' has 4 layers"),
    ],
)
def test_a_head_for_a_model_without_a_folder_is_checked(
    values: dict[str, Any], reason: str, target: Path, tmp_path: Path
) -> None:
    model = load_model(AutoModelForCausalLM.from_pretrained(target))
    head = head_folder(tmp_path / "heads", "eagle3", **values)
    keep_trained(model.model.fingerprint, TrainedHead(str(head), 2.0))
    llm = LLM(model)
    assert llm.drafts == ("suffix" if reason else f"head:{head}+suffix",)
    assert reason in llm.draft_note


@pytest.mark.parametrize("kind", ["drafters", "tuned", "heads"])
def test_auto_starts_without_a_damaged_file_of_the_user(
    kind: str, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = own_folder()
    assert own is not None
    place = own.parent / kind / f"{load_model(target, dtype='float32').model.fingerprint}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("{")
    assert LLM(target, dtype="float32").drafts == ("suffix",)
    (record,) = caplog.records
    assert str(place) in record.getMessage()


@pytest.mark.parametrize(
    ("fingerprint", "length", "words"),
    [("other", 2.0, "it was trained for other weights"), ("", 1.05, "it writes 1.05 tokens per round"), ("", 1.5, "")],
)
def test_a_head_trained_by_draftree_says_for_which_weights_and_what_it_gains(
    fingerprint: str, length: float, words: str, target: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(head_folder(tmp_path / "heads"), target.parent / "head"))
    own = load_model(target, dtype="float32").model.fingerprint
    unseen = {"greedy": {"rounds": {"all": {"acceptance_length": length}}}}
    (folder / "recipe.json").write_text(json.dumps({"fingerprint": fingerprint or own, "unseen": unseen}))
    llm = LLM(target, dtype="float32")
    assert llm.drafts == (("suffix",) if words else (f"head:{folder}+suffix",))
    assert words in llm.draft_note


def test_a_comma_in_a_path_is_told(target: Path, tmp_path: Path) -> None:
    shutil.copytree(head_folder(tmp_path / "heads"), target.parent / "a,b")
    llm = LLM(target, dtype="float32")
    assert llm.drafts == ("suffix",)
    assert "has a comma" in llm.draft_note


@pytest.fixture
def hub(places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Downloads that were asked for; the stand-in has one repository."""
    asked: list[tuple[str, str | None]] = []
    head = head_folder(tmp_path / "heads")

    def snapshot_download(repository: str, *, revision: str | None = None, **options: Any) -> str:
        asked.append((repository, revision))
        if repository != "maker/head":
            raise huggingface_hub.errors.LocalEntryNotFoundError("no network")
        return str(snapshot_of(repository, revision) or put_in_hub(places, repository, head, ref=revision or "main"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_published_drafter_is_downloaded_if_that_is_allowed(target: Path, hub: list[tuple[str, str | None]]) -> None:
    drafters = [
        {"kind": "jetspec", "id": "maker/tree", "source": "me"},
        {"kind": "eagle3", "id": "maker/head", "source": "me", "revision": "v2", "bytes": 2_000_000_000},
        {"kind": "dflash", "id": "maker/other", "source": "me"},
    ]
    name_them(drafters=drafters)
    llm = LLM(target, dtype="float32")
    assert llm.drafts == ("suffix",)
    offer = "maker/head (eagle3, 2.0 GB) is published for it: --download-drafter fetches it"
    assert offer in llm.draft_note
    assert hub == []
    llm = LLM(target, dtype="float32", download_drafter=True)
    snapshot = snapshot_of("maker/head", "v2")
    assert llm.drafts == (f"head:{snapshot}+suffix",)
    assert set(hub) == {("maker/head", "v2")}
    assert LLM(target, dtype="float32").drafts == llm.drafts, "it is here now"


def test_a_download_that_fails_is_reported(target: Path, hub: list[tuple[str, str | None]]) -> None:
    name_them(drafters=[{"kind": "dflash", "id": "maker/other", "source": "me"}])
    llm = LLM(target, dtype="float32", download_drafter=True)
    assert llm.drafts == ("suffix",)
    assert "maker/other (dflash) cannot be fetched: the model 'maker/other' is not on this machine" in llm.draft_note


@pytest.mark.parametrize("draft", [None, "none", "ngram", ["ngram", "suffix"]])
def test_a_download_without_auto_is_refused(draft: Any) -> None:
    with pytest.raises(ConfigurationError, match="download_drafter fetches a drafter for 'auto', and draft is"):
        LLM("/no/such/model", draft, download_drafter=True)


def test_a_server_downloads_for_the_models_that_choose_automatically() -> None:
    options = ModelOptions(None, download_drafter=True)
    models = choose_models(["one=/a", "two=/b"], ["two=ngram"])
    settings = ServerSettings(models=models, options=options)
    assert [settings.options_of(choice).download_drafter for choice in models] == [True, False]
    with pytest.raises(ConfigurationError, match="every model has another one"):
        ServerSettings(models=choose_models(["one=/a"], ["ngram"]), options=options)
