"""`draftree train head|boost|block|distill` on a tiny model: from data to texts with drafts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench_samples import write_model
from draftree import LLM
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.heads.calibration import read_calibration
from draftree.heads.folders import read_config, read_head
from draftree.loading.auto_draft import trained_for
from draftree.loading.load import load_model
from draftree.options import ModelOptions
from draftree.train.block import train_block
from draftree.train.data.shards import TrainingData
from draftree.train.head import HeadOptions
from draftree.train.loop import read_log
from draftree.train.preparing import TrainingJob
from draftree.train.settings import Limits, TrainSettings
from families import fresh
from train_folders import DEPTH, lengths_of_unseen, write_data

OPTIONS = (
    "--draft-vocab 300 --steps 120 --optimizer adamw --learning-rate 1e-2 --batch-tokens 600 --evaluate-every 40 "
    f"--depth {DEPTH} --unseen-share 0.2 --dtype float32"
).split()
CONTINUED = OPTIONS[2:]
"""Options of trainings that start from a head, which has a draft vocabulary."""


@pytest.fixture(scope="module")
def head(model: Path, data: Path) -> Path:
    output = model.parent / "head"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTREE_CONFIG", str(config_of(output)))  # other tests train heads for the same model
        assert run(["train", "head", str(model), "--data", str(data), "--output", str(output), *OPTIONS]) == 0
    return output


def config_of(head: Path) -> Path:
    return head.with_name("config")


def test_a_trained_head_drafts_accepted_tokens_and_leaves_the_text(model: Path, data: Path, head: Path) -> None:
    facts = json.loads((head / "recipe.json").read_text())
    for temperature in (0.0, 0.8):
        stats = lengths_of_unseen(model, data, f"head:{head}", temperature=temperature)
        assert sum(one.accepted_tokens for one in stats) > 0.3 * sum(one.draft_tokens for one in stats) / DEPTH
        # the offline table and the engine agree in the acceptance at depth 1
        accepted = sum(one.accepted_by_depth[0] for one in stats) / sum(one.drafted_by_depth[0] for one in stats)
        offline = facts["unseen"][f"{temperature:g}"]["rounds"]["all"]["conditional"][0]
        assert accepted == pytest.approx(offline, abs=0.06)


def test_auto_uses_a_trained_head_at_once(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CONFIG", str(config_of(head)))
    facts = json.loads((head / "recipe.json").read_text())
    best = max(mode["rounds"]["all"]["acceptance_length"] for mode in facts["unseen"].values())
    loaded = load_model(model, dtype="float32", kernels="torch")
    llm = LLM(loaded)
    assert llm.drafts == (f"head:{head}+suffix",)
    assert f"trained here for this model: {best:.2f} tokens per round" in llm.draft_note
    (head.parent / "elsewhere").mkdir()
    away = head.rename(head.parent / "elsewhere" / "away")  # beside the model it would be found
    try:
        llm = LLM(loaded)
        assert llm.drafts == ("suffix",)
        assert f"no longer in '{head}'" in llm.draft_note
    finally:
        away.rename(head)


def test_a_head_that_does_not_pay_is_named(
    model: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changed = {"120": "1", "1e-2": "1e-9"}
    options = [changed.get(option, option) for option in OPTIONS]
    output = tmp_path / "head"
    assert run(["train", "head", str(model), "--data", str(data), "--output", str(output), *options]) == 0
    said = capfd.readouterr().out
    assert "this head does not pay: 1." in said
    assert "--minutes, --steps" in said
    known = trained_for(json.loads((output / "recipe.json").read_text())["fingerprint"])
    assert known is None or known.folder != str(output)


def test_the_folder_has_head_recipe_card_and_log(model: Path, head: Path) -> None:
    config = read_config(head)
    assert (config.kind, config.depth, config.draft_vocab_size) == ("eagle3", DEPTH, 300)
    assert read_head(head).vocabulary.vocab_size == config.vocab_size
    facts = json.loads((head / "recipe.json").read_text())
    assert facts["run"]["updates"] == 120
    assert facts["settings"]["loss"] == "coupled"
    assert facts["data"]["prompts"][0]["count"] == 300
    card = (head / "README.md").read_text()
    assert "## Data" in card
    assert "| 0.8 |" in card
    log = read_log(head / "training" / "log.jsonl")
    assert [line["step"] for line in log if line["kind"] == "evaluation"] == [40, 80, 120]
    scores = [line["score"] for line in log if line["kind"] == "evaluation"]
    assert scores[-1] > 1.2
    calibration = read_calibration(head)
    assert calibration is not None
    assert len(calibration.greedy) == len(calibration.sampled) == DEPTH


def test_plots_are_drawn(head: Path) -> None:
    pytest.importorskip("matplotlib")
    names = {path.name for path in (head / "training" / "plots").iterdir()}
    assert names == {"loss.svg", "training-acceptance.svg", "unseen-acceptance.svg", "acceptance-length.svg"}
    assert "coupled" in (head / "training" / "plots" / "loss.svg").read_text()


def test_a_run_is_resumed_and_never_overwritten(
    model: Path, data: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "head", str(model), "--data", str(data), *OPTIONS]
    assert run([*command, "--output", str(head)]) == 1
    assert "already has a run: give --resume" in capsys.readouterr().err
    assert run([*command, "--output", str(tmp_path / "new"), "--resume"]) == 1
    assert "has no run to resume" in capsys.readouterr().err
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "mine").write_text("mine")
    assert run([*command, "--output", str(tmp_path / "file")]) == 1
    assert "files are never overwritten" in capsys.readouterr().err
    longer = [one if one != "120" else "122" for one in command]
    copy = shutil.copytree(head, tmp_path / "copy")
    assert run([*longer, "--output", str(copy), "--resume"]) == 0
    assert "resumed after 120 updates" in capsys.readouterr().err
    assert json.loads((copy / "recipe.json").read_text())["run"]["updates"] == 122


def test_training_continues_from_a_head(model: Path, data: Path, head: Path, tmp_path: Path) -> None:
    output = tmp_path / "second"
    arguments = ["--data", str(data), "--output", str(output), "--from", str(head), *CONTINUED, "--levels-from", "0"]
    arguments[arguments.index("120")] = "5"
    assert run(["train", "head", str(model), *arguments]) == 0
    first = read_log(head / "training" / "log.jsonl")[0]["levels"][0]["loss"]
    assert read_log(output / "training" / "log.jsonl")[0]["levels"][0]["loss"] < first
    before, after = (json.loads((folder / "recipe.json").read_text()) for folder in (head, output))
    assert "earlier" not in before
    assert after["earlier"] == [{name: before[name] for name in ("data", "settings", "run")}]
    assert f"An earlier run: {before['run']['trained_predictions']:,} predictions" in (output / "README.md").read_text()


def test_training_reads_several_folders(model: Path, data: Path, tmp_path: Path) -> None:
    more = write_data(model, tmp_path / "more", count=40, temperatures=("0.5",))
    output = tmp_path / "second"
    arguments = ["--data", str(data), "--data", str(more), "--output", str(output), *OPTIONS]
    arguments[arguments.index("120")] = "5"
    assert run(["train", "head", str(model), *arguments]) == 0
    recipe = json.loads((output / "recipe.json").read_text())
    assert recipe["data"]["tokens"] == TrainingData(data, more).num_tokens


def test_data_of_another_target_is_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_model(tmp_path / "other", seed=5)
    assert run(["train", "head", str(other), "--data", str(data), "--output", str(tmp_path / "out"), *OPTIONS]) == 1
    assert "was made with other weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--features", "7"], "the data has no hidden states of layer 7: it has 0, 1, 2"),
        (["--patience", "-1"], "patience is -1"),
        (["--loss", "kll"], "did you mean 'kl'"),
        (["--draft-vocab", "0"], "draft_vocab is 0"),
        (["--unseen-share", "0"], "0 unseen ones"),
    ],
)
def test_bad_options_are_refused(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    command = ["train", "head", str(model), "--data", str(data), "--output", str(tmp_path / "out"), "--steps", "1"]
    assert run([*command, *options, "--dtype", "float32"]) == 1
    assert message in capsys.readouterr().err


def test_a_block_head_is_trained_at_all_levels_of_its_block(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "block"
    options = [*OPTIONS, "--layers", "1", "--markov-rank", "8", "--patience", "0"]
    command = ["train", "block", str(model), "--data", str(data), "--output", str(output)]
    assert run([*command, *options]) == 0
    updates = [line for line in read_log(output / "training" / "log.jsonl") if line["kind"] == "update"]
    assert {len(line["levels"]) for line in updates} == {DEPTH}
    facts = json.loads((output / "recipe.json").read_text())
    assert facts["settings"]["levels"] == facts["head"]["config"]["block_size"] == DEPTH
    stats = lengths_of_unseen(model, data, f"head:{output}", temperature=0.0)
    accepted = sum(one.accepted_by_depth[0] for one in stats) / sum(one.drafted_by_depth[0] for one in stats)
    assert accepted > 0.2
    assert accepted == pytest.approx(facts["unseen"]["0"]["rounds"]["all"]["conditional"][0], abs=0.06)
    capsys.readouterr()
    assert run([*command, "--levels", "2"]) == 2
    assert "no such option: --levels" in capsys.readouterr().err


def test_a_block_head_starts_from_a_head_and_is_continued(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = [*CONTINUED]
    short[short.index("--steps") + 1] = "2"
    head, first, second = (tmp_path / name for name in ("head", "first", "second"))
    assert run(["train", "head", str(model), "--data", str(data), "--output", str(head), *OPTIONS[:2], *short]) == 0
    command = ["train", "block", str(model), "--data", str(data), "--layers", "1", "--markov-rank", "8", *short]
    assert run([*command, "--output", str(first), "--from", str(head)]) == 0
    assert f"the first layer begins with the weights of '{head}'" in capsys.readouterr().err
    sizes = command.index("--layers")
    same = [*command[:sizes], *command[sizes + 2 :]]
    assert run([*same, "--output", str(second), "--from", str(first)]) == 0
    earlier = json.loads((second / "recipe.json").read_text())["earlier"]
    assert [one["run"]["updates"] for one in earlier] == [2, 2]
    capsys.readouterr()
    assert run([*command, "--output", str(tmp_path / "no"), "--from", str(head), "--features", "1"]) == 1
    assert "leave out features" in capsys.readouterr().err
    again = ["train", "head", str(model), "--data", str(data), "--output", str(tmp_path / "no"), "--from", str(head)]
    again += short
    assert run([*again, "--draft-vocab", "30", "--layers", "2"]) == 1
    assert "leave out layers, draft_vocab" in capsys.readouterr().err
    assert run([*same, "--layers", "3", "--output", str(tmp_path / "no"), "--from", str(first)]) == 1
    assert "leave out --layers" in capsys.readouterr().err
    command[command.index("--markov-rank") + 1] = "4"
    assert run([*command, "--output", str(tmp_path / "no"), "--from", str(first)]) == 1
    assert "has a bias of rank 8: leave out markov_rank, which is 4" in capsys.readouterr().err
    command[command.index("--depth") + 1] = str(DEPTH + 1)
    assert run([*command, "--output", str(tmp_path / "no"), "--from", str(first)]) == 1
    assert f"drafts {DEPTH} tokens in a pass" in capsys.readouterr().err


def test_a_block_is_not_trained_at_fewer_levels(model: Path, data: Path, tmp_path: Path) -> None:
    job = TrainingJob(options=ModelOptions(str(model)), data=(data,), output=tmp_path / "block")
    with pytest.raises(ConfigurationError, match="levels is 2 and depth is 3: a block has all its levels"):
        train_block(job, TrainSettings(Limits(steps=1), levels=2, depth=3), HeadOptions())


def test_a_boosted_head_is_compared_with_the_best_two_tokens_of_the_first(
    model: Path, data: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "second"
    command = ["train", "boost", str(model), "--data", str(data), "--output", str(output), "--earlier", str(head)]
    assert run([*command, *OPTIONS]) == 0
    text = capsys.readouterr().out
    facts = json.loads((output / "recipe.json").read_text())
    assert facts["boosting"]["earlier"] == [str(head)]
    for temperature in ("0", "0.8"):
        union = facts["union"][temperature]
        (line,) = [one for one in text.splitlines() if one.startswith(f"temperature {temperature}, tokens per round")]
        values = {
            name.rsplit(" ", 1)[0].strip(): float(name.rsplit(" ", 1)[1])
            for name in line.partition(": ")[2].replace("head, best", "head best").split(",")
        }
        assert values["best of 2 heads"] >= max(values["first head"], values["last head"])
        assert values["first head best 2"] >= values["first head"]
        lengths = {name.replace("head, best", "head best"): row["acceptance_length"] for name, row in union.items()}
        assert lengths == pytest.approx(values, abs=6e-4)


def test_a_distilled_model_drafts_accepted_tokens(model: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "student"
    arguments = ["--hidden", "32", "--layers", "1", "--heads", "2", "--steps", "150", "--learning-rate", "1e-2"]
    more = ["--batch-tokens", "600", "--depth", str(DEPTH), "--unseen-share", "0.2", "--dtype", "float32"]
    command = ["train", "distill", str(model), "--data", str(data), "--output", str(output)]
    assert run([*command, *arguments, *more]) == 0
    facts = json.loads((output / "recipe.json").read_text())
    longest = max(len(text.tokens) for text in TrainingData(data))
    assert json.loads((output / "config.json").read_text())["max_position_embeddings"] == longest
    stats = lengths_of_unseen(model, data, f"model:{output}", temperature=0.0)
    accepted = sum(one.accepted_by_depth[0] for one in stats) / sum(one.drafted_by_depth[0] for one in stats)
    assert accepted > 0.2
    assert accepted == pytest.approx(facts["unseen"]["0"]["rounds"]["all"]["conditional"][0], abs=0.06)


def test_distillation_starts_from_given_weights(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target itself: its drafts are accepted before any update counts."""
    output = tmp_path / "same"
    arguments = ["--from", str(model), "--steps", "1", "--learning-rate", "1e-9", "--depth", str(DEPTH)]
    command = ["train", "distill", str(model), "--data", str(data), "--output", str(output), *arguments]
    assert run([*command, "--unseen-share", "0.2", "--dtype", "float32"]) == 0
    facts = json.loads((output / "recipe.json").read_text())
    for mode in facts["unseen"].values():
        assert mode["rounds"]["all"]["acceptance_length"] > DEPTH + 0.9
    assert "tokens per round" in capsys.readouterr().out


def test_a_start_with_a_table_of_positions_is_not_extended(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    fresh("gpt2", vocab_size=vocab, max_position_embeddings=16).save_pretrained(tmp_path / "start")
    command = ["train", "distill", str(model), "--data", str(data), "--output", str(tmp_path / "out"), "--steps", "1"]
    assert run([*command, "--from", str(tmp_path / "start"), "--unseen-share", "0.2", "--dtype", "float32"]) == 1
    assert "--max-length 16" in capsys.readouterr().err
