"""A head that always drafts changes no text, whatever its kind, weights, kernels, shape, rule, prompts and controls."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cli_samples import save_tiny_model
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, DraftreeError
from draftree.drafters import head as head_drafter
from draftree.heads import native_passes
from draftree.heads.block_passes import BlockPasses
from draftree.heads.folders import write_head
from draftree.heads.native_passes import NativeBlockPasses, NativePasses
from draftree.heads.passes import HeadPasses, TorchPasses
from families import prompts, target
from head_samples import head_config, random_head
from mtp_families import FAMILIES, published_target
from mtp_targets import TARGETS, target_with_mtp
from native_samples import in_c
from target_heads import BLOCKS, head_folder

RAGGED = prompts(3, 17, 9)
TEMPERATURES = (0.0, 1.0)
IN_C: dict[str, Any] = {"head_dim": 16, "intermediate": 96}
"""Sizes of a head that the native kernels run."""
BLOCKS_IN_C: dict[str, dict[str, Any]] = {
    "dflash": IN_C,
    "dspark": IN_C | {"markov_rank": 16},
    "xpress": IN_C | {"markov_rank": 16, "refiner_width": 16},
    "peagle": IN_C,
    "medusa": {},
}
"""Kinds that draft in one pass, and such sizes of each."""
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[HeadPasses | BlockPasses]:
    """Passes of heads that were made, in order."""
    found: list[HeadPasses | BlockPasses] = []

    def noting(make: Any) -> Any:
        def noted(*args: Any) -> HeadPasses | BlockPasses:
            found.append(make(*args))
            return found[-1]

        return noted

    for name in ("passes_of", "block_passes_of"):
        monkeypatch.setattr(head_drafter, name, noting(getattr(native_passes, name)))
    return found


def params(temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 24, "temperature": temperature, "seed": 11} | more))


def ids(llm: LLM, temperature: float, **more: Any) -> list[tuple[int, ...]]:
    return [done.token_ids for done in llm.generate(RAGGED, params(temperature, **more))]


@functools.cache
def plain(llama: Path, temperature: float, **options: Any) -> list[tuple[int, ...]]:
    return ids(LLM(llama, "none", **({"dtype": "float32"} | options)), temperature)


@pytest.mark.essential
@pytest.mark.parametrize("tree", ["", ",tree=best-9", ",tree=1-2-2,k=2"])
@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3.1", "eagle3-full", *BLOCKS])
def test_every_kind_through_torch(llama: Path, models: Path, variant: str, tree: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "kernels": "torch"}
    fast = LLM(llama, f"head:{head_folder(models, variant)}{tree}", plan="fixed", **options)
    for temperature in TEMPERATURES:
        done = fast.generate(RAGGED, params(temperature))
        assert [one.token_ids for one in done] == plain(llama, temperature, **options)
        assert sum(one.stats.draft_tokens for one in done) > 20
    fast.engine.check_integrity()


@pytest.mark.essential
@in_c
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", ["{}", "{},tree=best-9", "ngram,min=1+{},k=2"])
@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3-full", *BLOCKS_IN_C])
def test_native_kernels_write_the_same_text_by_their_bits(
    llama: Path, models: Path, made: list[HeadPasses | BlockPasses], kind: str, variant: str, draft: str
) -> None:
    options = KINDS[kind] | {"exact": True}
    spec = draft.format(f"head:{head_folder(models, variant, **BLOCKS_IN_C.get(variant, IN_C))}")
    fast = LLM(llama, spec, plan="fixed", **options)
    assert isinstance(made[-1], NativeBlockPasses if variant in BLOCKS_IN_C else NativePasses)
    for temperature in TEMPERATURES:
        wanted = plain(llama, temperature, **options)
        done = fast.generate(RAGGED, params(temperature))
        assert [one.token_ids for one in done] == wanted
        assert sum(one.stats.draft_tokens for one in done) > 60
        assert [fast.generate(prompt, params(temperature))[0].token_ids for prompt in RAGGED] == wanted
    fast.engine.check_integrity()


@in_c
@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("tree", ["", ",tree=best-9"])
def test_causal_blocks_draft_the_same_text(
    llama: Path, models: Path, made: list[HeadPasses | BlockPasses], kernels: str, tree: str
) -> None:
    """Heads of JetSpec."""
    options = KINDS["float32"] | {"kernels": kernels}
    fast = LLM(llama, f"head:{head_folder(models, 'dflash', causal=True, **IN_C)}{tree}", plan="fixed", **options)
    assert isinstance(made[-1], NativeBlockPasses) == (kernels == "native")
    for temperature in TEMPERATURES:
        done = fast.generate(RAGGED, params(temperature))
        assert [one.token_ids for one in done] == plain(llama, temperature, **options)
        assert sum(one.stats.draft_tokens for one in done) > 60
    fast.engine.check_integrity()


@in_c
@pytest.mark.parametrize(("kind", "quantization"), [("float32", None), ("bfloat16", "int8"), ("int8", "int8")])
def test_weights_have_8_bits_unless_the_target_is_float32(
    llama: Path, models: Path, made: list[HeadPasses | BlockPasses], kind: str, quantization: str | None
) -> None:
    LLM(llama, f"head:{head_folder(models, **IN_C)}", plan="fixed", **KINDS[kind])
    (passes,) = made
    assert isinstance(passes, NativePasses)
    assert passes.quantization == quantization


@in_c
def test_drafts_of_native_kernels_are_those_of_torch(
    llama: Path, models: Path, made: list[HeadPasses | BlockPasses]
) -> None:
    """With float32 both make the same drafts, so that rounds and accepted tokens agree."""
    spec, counts = f"head:{head_folder(models, **IN_C)},tree=best-9", []
    for kernels, kind in (("native", NativePasses), ("torch", TorchPasses)):
        llm = LLM(llama, spec, plan="fixed", dtype="float32", kernels=kernels)
        assert isinstance(made[-1], kind)
        done = llm.generate(RAGGED, params(1.0, max_tokens=40))
        counts.append([(one.stats.rounds, one.stats.draft_tokens, one.stats.accepted_tokens) for one in done])
    assert counts[0] == counts[1]
    assert sum(accepted for _, _, accepted in counts[0]) > 0, "accepted paths are rebuilt"


@in_c
def test_a_head_that_c_does_not_support_runs_in_torch(
    llama: Path, models: Path, made: list[HeadPasses | BlockPasses], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(llama, f"head:{head_folder(models, **IN_C, activation='relu')}", plan="fixed", dtype="float32")
    assert isinstance(made[-1], TorchPasses)
    assert "head of kind 'eagle3': kernels: torch (its activation is relu" in caplog.text
    assert ids(llm, 1.0) == plain(llama, 1.0)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen3_moe"])
def test_other_families(family: str, models: Path) -> None:
    folder = head_folder(models, target_hidden=32, hidden=32, features=(0, 1, -1))
    assert ids(LLM(target(family), f"head:{folder}", plan="fixed"), 1.0) == ids(LLM(target(family), "none"), 1.0)


@pytest.mark.parametrize(
    ("verify", "tree"),
    [*((verify, "") for verify in ("match", "token", "block", "traversal")),
     *(("traversal", f",tree={tree}") for tree in ("iid-2-2", "wor-2-2"))],
)  # fmt: skip
def test_rules_take_their_chains_and_draws(llama: Path, models: Path, verify: str, tree: str) -> None:
    fast = LLM(llama, f"head:{head_folder(models)}{tree}", verify=verify, dtype="float32")
    assert ids(fast, 0.0) == plain(llama, 0.0)
    assert len(ids(fast, 1.0)) == len(RAGGED)


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 5},
        {"top_p": 0.7, "min_p": 0.02},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logit_bias": {7: 4.0, 8: -9.0}},
    ],
    ids=str,
)
def test_controls_reach_the_drafts(llama: Path, models: Path, more: dict[str, Any]) -> None:
    fast = LLM(llama, f"head:{head_folder(models)},tree=best-9", plan="fixed", dtype="float32")
    assert ids(fast, 0.8, **more) == ids(LLM(llama, "none", dtype="float32"), 0.8, **more)


@pytest.mark.parametrize("plan", ["adaptive", "threshold:0.3"])
def test_planners(llama: Path, models: Path, plan: str) -> None:
    fast = LLM(llama, f"head:{head_folder(models)}", plan=plan, dtype="float32")
    assert ids(fast, 1.0) == plain(llama, 1.0)


@pytest.mark.parametrize(("variant", "values"), [("eagle3", {"max_length": 24}), ("dspark", {"markov_type": "rnn"})])
def test_chunks_cached_prefixes_and_windows(llama: Path, models: Path, variant: str, values: dict[str, Any]) -> None:
    """A long text in chunks, then others that begin alike; the window of the first head is much shorter."""
    long = prompts(70)[0]
    spec = f"head:{head_folder(models, variant, **values)},tree=best-9"
    plain = LLM(llama, "none", dtype="float32", prefix_cache_size=0)
    fast = LLM(llama, spec, plan="fixed", dtype="float32", prefill_chunk_size=16, prefix_cache_size=4)
    for text in (long, long[:50], [*long[:60], 5, 6, 7], long, [*long, 9]):
        for given in (params(0.0), params(1.0, n=2)):
            texts = [[done.token_ids for done in llm.generate(text, given)] for llm in (fast, plain)]
            assert texts[0] == texts[1]
            fast.engine.check_integrity()
    assert fast.prefix_stats.hits > 0


def test_drafts_after_a_cached_prefix_are_those_of_the_text(llama: Path, models: Path) -> None:
    long = prompts(40)[0]
    spec = f"head:{head_folder(models)}"
    counts = []
    for size in (0, 4):
        llm = LLM(llama, spec, plan="fixed", dtype="float32", prefill_chunk_size=8, prefix_cache_size=size)
        llm.generate(long, params(1.0))
        (done,) = llm.generate([*long[:30], 4, 5], params(1.0, max_tokens=40))
        counts.append((done.stats.rounds, done.stats.draft_tokens, done.stats.accepted_tokens))
    assert counts[0] == counts[1]


def test_many_requests_leave_no_row_behind(llama: Path, models: Path) -> None:
    """Requests that share beginnings come and go in a small batch with a small cache, two of them cancelled."""
    begin = prompts(33)[0]
    texts = [[*begin[: 5 + 4 * (i % 8)], *(1 + (i * j) % 90 for j in range(1, 4 + i % 5))] for i in range(20)]
    asked = [params(float(i % 2), max_tokens=4 + i % 9, seed=i) for i in range(20)]
    plain = LLM(llama, "none", dtype="float32", prefix_cache_size=0)
    limits: dict[str, Any] = {"max_batch_size": 4, "prefill_chunk_size": 8, "prefix_cache_size": 3}
    fast = LLM(llama, f"head:{head_folder(models)},tree=best-9", plan="fixed", dtype="float32", **limits)
    wanted = [done.token_ids for done in plain.generate(texts, asked)]
    for _ in range(2):
        assert [done.token_ids for done in fast.generate(texts, asked)] == wanted
        fast.engine.check_integrity()
    for text in texts[:2]:
        stream = fast.stream_updates(text, params(1.0))
        next(stream)
        stream.close()
        fast.engine.check_integrity()
    assert [done.token_ids for done in fast.generate(texts, asked)] == wanted


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"target_hidden": 32, "hidden": 32}, "hidden states of 32, and this one has 64"),
        ({"vocab_size": 90, "draft_vocab_size": 60}, "a vocabulary of 90, and this one has 96"),
        ({"features": (1, 2, 9)}, "9"),
    ],
)
def test_heads_of_other_targets_are_refused(llama: Path, models: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        LLM(llama, f"head:{head_folder(models, **values)}", dtype="float32")


def test_targets_without_hidden_states_are_refused(models: Path) -> None:
    folder = head_folder(models, target_hidden=32, hidden=32, features=(0, 1, -1))
    with pytest.raises(ConfigurationError, match="hidden states"):
        LLM(target("bart"), f"head:{folder}")


def test_folders_without_a_head_are_refused_before_weights_are_read(llama: Path, tmp_path: Path) -> None:
    for path, words in ((llama, "drafter 'model'"), (tmp_path / "none", "no folder"), (tmp_path, r"no 'config\.json'")):
        with pytest.raises(DraftreeError, match=words):
            LLM("no-such-target-anywhere", f"head:{path}")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = save_tiny_model(tmp_path / "base", chat=False)
    vocab = json.loads((base / "config.json").read_text())["vocab_size"]
    config = head_config(
        target_hidden=32, hidden=32, vocab_size=vocab, draft_vocab_size=vocab // 2, features=(0, 1, -1), depth=3
    )
    write_head(random_head(config), tmp_path / "head")
    texts = []
    for more in ([], ["--draft", f"head:{tmp_path / 'head'}", "--plan", "fixed"]):
        arguments = ["generate", str(base), "Once upon", "--no-chat", "--max-tokens", "20", "--temperature", "0"]
        assert run([*arguments, "--json", *more]) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0]["text"] == texts[1]["text"]
    assert texts[1]["stats"]["draft_tokens"] > 0


WIDE: dict[str, Any] = {
    "head_dim": 16, "moe_intermediate_size": 32, "intermediate_size": 64, "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
"""Sizes of a target that the native kernels run."""


@in_c
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TARGETS)
def test_the_mtp_layer_of_a_native_target_runs_natively(
    name: str, kind: str, made: list[HeadPasses | BlockPasses], tmp_path: Path
) -> None:
    values = TARGETS[name] | {key: size for key, size in WIDE.items() if key in TARGETS[name]}
    folder = target_with_mtp(values, tmp_path / "target")
    options = KINDS[kind] | {"exact": True}
    plain = LLM(folder, "none", **options)
    for tree in (",k=3", ",tree=best-9,k=3"):
        fast = LLM(folder, f"head:{folder}{tree}", plan="fixed", **options)
        assert isinstance(made[-1], NativePasses)
        for temperature in TEMPERATURES:
            assert ids(fast, temperature) == ids(plain, temperature)
        assert fast.generate(RAGGED[0], params(0.0))[0].stats.draft_tokens > 10
        fast.engine.check_integrity()


@pytest.mark.parametrize("tree", ["", ",k=3", ",tree=best-9,k=3"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_mtp_layer_of_a_target_drafts_for_it(name: str, tree: str, tmp_path: Path) -> None:
    folder = target_with_mtp(TARGETS[name], tmp_path / "target")
    plain, fast = (
        LLM(folder, "none", dtype="float32"),
        LLM(folder, f"head:{folder}{tree}", plan="fixed", dtype="float32"),
    )
    for temperature in TEMPERATURES:
        assert ids(fast, temperature) == ids(plain, temperature)
    assert fast.generate(RAGGED[0], params(0.0))[0].stats.draft_tokens > 10
    fast.engine.check_integrity()


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"mimo"}))  # whose target transformers does not have
def test_the_mtp_layer_of_a_family_drafts_for_it(name: str, tmp_path: Path) -> None:
    folder = published_target(name, tmp_path / "target")
    plain = LLM(folder, "none", dtype="float32")
    fast = LLM(folder, f"head:{folder},k=3", plan="fixed", dtype="float32")
    for temperature in TEMPERATURES:
        assert ids(fast, temperature) == ids(plain, temperature)
    assert fast.generate(RAGGED[0], params(0.0))[0].stats.draft_tokens > 10
    fast.engine.check_integrity()
