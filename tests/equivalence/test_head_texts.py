"""A head that always drafts changes no text, whatever its weights, target, shape, rule, prompts and controls."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cli_samples import save_tiny_model
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, DraftreeError
from draftree.heads.folders import write_head
from families import VOCAB_SIZE, drafter_folder, prompts, target
from head_samples import head_config, random_head

RAGGED = prompts(3, 17, 9)
WIDTH = 64
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 4}
TREES = ["", ",tree=best-9", ",tree=1-2-2,k=2"]
TABLE_FAMILIES = ["gemma2", "gpt2", "qwen3_moe"]

in_c = pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler")


def head_folder(where: Path, variant: str = "eagle3", *, width: int = WIDTH, **values: Any) -> Path:
    name = "-".join([variant, str(width), *map(str, values.values())])
    folder = where / name.replace(", ", "_")  # a comma begins an option of a spec
    sizes: dict[str, Any] = {"target_hidden": width, "hidden": width, "vocab_size": VOCAB_SIZE, "max_length": 128}
    full = variant in ("eagle", "eagle-own", "eagle3-full")
    sizes["draft_vocab_size"] = VOCAB_SIZE if full else 60
    write_head(random_head(head_config(variant, **{**sizes, **values}), scale=0.2), folder)
    return folder


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_folder("llama", tmp_path_factory.mktemp("models"), distance=0.0, **SIZES)


def params(temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 24, "temperature": temperature, "seed": 11} | more))


def ids(llm: LLM, temperature: float, **more: Any) -> list[tuple[int, ...]]:
    return [done.token_ids for done in llm.generate(RAGGED, params(temperature, **more))]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("variant", ["eagle", "eagle3", "eagle3.1", "eagle3-full"])
def test_passes_through_torch(model: Path, where: Path, variant: str, tree: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "kernels": "torch"}
    plain = LLM(model, **options)
    fast = LLM(model, f"head:{head_folder(where, variant)}{tree}", plan="fixed", **options)
    for temperature in (0.0, 1.0):
        assert ids(fast, temperature) == ids(plain, temperature)
    fast.engine.check_integrity()


@in_c
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["{}", "{},tree=best-9", "ngram,min=1+{}", "{},k=2+suffix,min=1"])
def test_passes_in_c_write_the_same_text_by_their_bits(model: Path, where: Path, draft: str, dtype: str) -> None:
    spec = draft.format(f"head:{head_folder(where)}")
    plain, fast = LLM(model, dtype=dtype, exact=True), LLM(model, spec, dtype=dtype, exact=True, plan="fixed")
    for temperature in (0.0, 1.0):
        done = fast.generate(RAGGED, params(temperature))
        assert [one.token_ids for one in done] == ids(plain, temperature)
        assert sum(one.stats.draft_tokens for one in done) > 100
        assert [fast.generate(prompt, params(temperature))[0].token_ids for prompt in RAGGED] == ids(plain, temperature)
    fast.engine.check_integrity()


def test_random_drafts_are_accepted_now_and_then(model: Path, where: Path) -> None:
    """At temperature 1 a random head agrees with the target sometimes, so accepted paths are rebuilt."""
    fast = LLM(model, f"head:{head_folder(where)},tree=best-16", plan="fixed", dtype="float32")
    done = fast.generate(RAGGED, params(1.0, max_tokens=48))
    assert sum(one.stats.accepted_tokens for one in done) > 0


@pytest.mark.parametrize("family", TABLE_FAMILIES)
def test_other_families(family: str, where: Path) -> None:
    folder = head_folder(where, width=32, features=(0, 1, -1))
    assert ids(LLM(target(family), f"head:{folder}", plan="fixed"), 1.0) == ids(LLM(target(family)), 1.0)


@pytest.mark.parametrize("verify", ["match", "token", "block", "traversal"])
def test_rules_take_their_chains(model: Path, where: Path, verify: str) -> None:
    fast = LLM(model, f"head:{head_folder(where)}", verify=verify, dtype="float32")
    assert ids(fast, 0.0) == ids(LLM(model, dtype="float32"), 0.0)


@pytest.mark.parametrize("tree", ["iid-2-2", "wor-2-2"])
def test_rules_take_their_draws(model: Path, where: Path, tree: str) -> None:
    fast = LLM(model, f"head:{head_folder(where)},tree={tree}", verify="traversal", dtype="float32")
    assert ids(fast, 0.0) == ids(LLM(model, dtype="float32"), 0.0)
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
def test_controls_reach_the_drafts(model: Path, where: Path, more: dict[str, Any]) -> None:
    fast = LLM(model, f"head:{head_folder(where)},tree=best-9", plan="fixed", dtype="float32")
    assert ids(fast, 0.8, **more) == ids(LLM(model, dtype="float32"), 0.8, **more)


@pytest.mark.parametrize("plan", ["auto", "threshold:0.3"])
def test_planners(model: Path, where: Path, plan: str) -> None:
    fast = LLM(model, f"head:{head_folder(where)}", plan=plan, dtype="float32")
    assert ids(fast, 1.0) == ids(LLM(model, dtype="float32"), 1.0)


def test_chunks_cached_prefixes_and_windows(model: Path, where: Path) -> None:
    """A long text in chunks, then others that begin alike; the window of the head is much shorter."""
    long = prompts(70)[0]
    spec = f"head:{head_folder(where, max_length=24)},tree=best-9"
    plain = LLM(model, dtype="float32", prefix_cache_size=0)
    fast = LLM(model, spec, plan="fixed", dtype="float32", prefill_chunk_size=16, prefix_cache_size=4)
    for text in (long, long[:50], [*long[:60], 5, 6, 7], long, [*long, 9]):
        for temperature in (0.0, 1.0):
            assert (
                fast.generate(text, params(temperature))[0].token_ids
                == plain.generate(text, params(temperature))[0].token_ids
            )
            fast.engine.check_integrity()
    assert fast.prefix_stats.hits > 0


def test_drafts_after_a_cached_prefix_are_those_of_the_text(model: Path, where: Path) -> None:
    long = prompts(40)[0]
    spec = f"head:{head_folder(where)}"
    counts = []
    for size in (0, 4):
        llm = LLM(model, spec, plan="fixed", dtype="float32", prefill_chunk_size=8, prefix_cache_size=size)
        llm.generate(long, params(1.0))
        (done,) = llm.generate([*long[:30], 4, 5], params(1.0, max_tokens=40))
        counts.append((done.stats.rounds, done.stats.draft_tokens, done.stats.accepted_tokens))
    assert counts[0] == counts[1]


def test_many_requests_leave_no_row_behind(model: Path, where: Path) -> None:
    """Requests that share beginnings come and go in a small batch with a small cache, two of them cancelled."""
    begin = prompts(33)[0]
    texts = [[*begin[: 5 + 4 * (i % 8)], *(1 + (i * j) % 90 for j in range(1, 4 + i % 5))] for i in range(20)]
    asked = [params(float(i % 2), max_tokens=4 + i % 9, seed=i) for i in range(20)]
    plain = LLM(model, dtype="float32", prefix_cache_size=0)
    fast = LLM(
        model,
        f"head:{head_folder(where)},tree=best-9",
        plan="fixed",
        dtype="float32",
        max_batch_size=4,
        prefill_chunk_size=8,
        prefix_cache_size=3,
    )
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


def test_several_texts_of_one_prompt(model: Path, where: Path) -> None:
    fast = LLM(model, f"head:{head_folder(where)}", plan="fixed", dtype="float32")
    plain = LLM(model, dtype="float32")
    wanted, found = ([d.token_ids for d in llm.generate(RAGGED[1], params(1.0, n=3))] for llm in (plain, fast))
    assert found == wanted
    fast.engine.check_integrity()


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"width": 32}, ConfigurationError, "hidden states of 32, and this one has 64"),
        ({"vocab_size": 90, "draft_vocab_size": 60}, ConfigurationError, "a vocabulary of 90, and this one has 96"),
        ({"features": (1, 2, 9)}, ConfigurationError, "9"),
    ],
)
def test_heads_of_other_targets_are_refused(
    model: Path, where: Path, values: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        LLM(model, f"head:{head_folder(where, **values)}", dtype="float32")


def test_targets_without_hidden_states_are_refused(where: Path) -> None:
    folder = head_folder(where, width=32, features=(0, 1, -1))
    with pytest.raises(ConfigurationError, match="hidden states"):
        LLM(target("bart"), f"head:{folder}")


def test_folders_without_a_head_are_refused_before_weights_are_read(model: Path, tmp_path: Path) -> None:
    for path, words in ((model, "drafter 'model'"), (tmp_path / "none", "no folder"), (tmp_path, r"no 'config\.json'")):
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
