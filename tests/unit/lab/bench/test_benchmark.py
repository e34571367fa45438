"""Order of measurements, comparison with plain texts, conversations."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from draftree.core.noise import Noise
from draftree.lab.bench.benchmark import (
    CHUNK_ROWS,
    WARM_UP_TOKENS,
    Runner,
    explain,
    first_difference,
    grouped,
    last_logits,
)
from draftree.lab.bench.methods import Method, OurMethod, PeerMethod
from draftree.lab.bench.records import OURS, PEER, Divergence, sha256_of
from draftree.lab.bench.suite.submission import read_submission
from draftree.lab.bench.workload import MARGIN, Prompt, Task, encode, following, with_room
from draftree.lab.bench.writers import Outcome, RunParams, Writer
from draftree.models.table import TableLM, hashed, listed
from draftree.text.tokenizer import Tokenizer
from suite_files import suite, suite_home
from text_backends import CHAT_TEMPLATE, byte_level

PLAIN = Method("plain", "plain", OurMethod("none", "coupled", None, draft_is_pass=False))
DRAFTED = Method("ngram", "ngram", OurMethod("ngram", "coupled", None, draft_is_pass=False))
OTHER = Method("transformers", "plain", PeerMethod())
METHODS = [PLAIN, DRAFTED, OTHER]


class PretendWriter(Writer):
    """Writes the prompt backwards, or a given text for a method's name."""

    def __init__(self, instead: dict[str, tuple[int, ...]] | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.instead = instead or {}
        self.collected: list[bool] = []

    def write(self, method: Method, prompts: Sequence[Sequence[int]], run_params: RunParams) -> list[Outcome]:
        self.calls.append((method.name, run_params.max_tokens))
        self.collected.append(gc.isenabled())
        texts = [self.instead.get(method.name, tuple(reversed(prompt))) for prompt in prompts]
        return [Outcome(text, str(text), "length", {"rounds": 1}) for text in texts]


def prompts(*categories: str) -> list[Prompt]:
    return [Prompt(Task(str(n), c, prompt="x"), (n, n + 1), "plain") for n, c in enumerate(categories)]


def runner(writer: Writer, *, repeats: int = 1, temperature: float = 0.0) -> Runner:
    return Runner(
        METHODS,
        {OURS: writer, PEER: writer},
        RunParams(100, temperature),
        repeats,
        lambda prompt, plain, other: Divergence(len(plain), 0.25, 0.5),
    )


def test_methods_take_turns_in_an_order_that_rotates():
    writer = PretendWriter()
    batches = list(runner(writer, repeats=2).run([[prompt] for prompt in prompts("a", "a")]))
    assert [name for name, _ in writer.calls] == [
        *("plain", "ngram", "transformers"),
        *("ngram", "transformers", "plain"),
        *("transformers", "plain", "ngram"),
        *("plain", "ngram", "transformers"),
    ]
    assert [(r.task, r.method, r.repeat, r.place) for r in batches[1]][:3] == [
        ("1", "transformers", 0, 0),
        ("1", "plain", 0, 1),
        ("1", "ngram", 0, 2),
    ]


def test_warming_up_is_short_and_not_recorded():
    writer = PretendWriter()
    runner(writer).warm_up(prompts("a"))
    assert writer.calls == [(method.name, WARM_UP_TOKENS) for method in METHODS]


def test_the_garbage_collector_is_off_during_the_run():
    writer = PretendWriter()
    assert gc.isenabled()
    list(runner(writer).run([prompts("a")]))
    assert writer.collected == [False] * 3
    assert gc.isenabled()


def test_texts_are_compared_with_plain():
    writer = PretendWriter({"ngram": (1, 7)})
    records = {r.method: r for r in next(runner(writer).run([prompts("a")]))}
    assert records["plain"].equal_to_plain
    assert records["plain"].divergence is None
    assert records["plain"].equal_to_other_plain
    assert records["ngram"].equal_to_plain is False
    assert records["ngram"].divergence == Divergence(2, 0.25, 0.5)
    assert records["ngram"].equal_to_other_plain is False
    assert records["ngram"].tokens_sha256 == sha256_of((1, 7)) != records["plain"].tokens_sha256
    assert records["transformers"].equal_to_plain


def test_sampled_texts_of_transformers_are_not_compared():
    records = {r.method: r for r in next(runner(PretendWriter({"ngram": (9,)}), temperature=1.0).run([prompts("a")]))}
    assert records["transformers"].equal_to_plain is None
    assert records["plain"].equal_to_other_plain is None
    assert records["ngram"].equal_to_plain is False  # ours are the same text at any temperature


def test_prompts_of_a_group_share_a_call():
    writer = PretendWriter()
    records = next(runner(writer).run([prompts("a", "a")]))
    assert len(writer.calls) == 3
    assert [(r.task, r.method) for r in records] == [(task, m.name) for task in "01" for m in METHODS]
    assert len({r.seconds for r in records if r.method == "plain"}) == 1


def test_groups_are_of_one_category():
    groups = grouped(prompts("a", "b", "a", "a", "b"), 2)
    assert [[prompt.task.id for prompt in group] for group in groups] == [["0", "2"], ["1", "4"], ["3"]]


def test_an_interrupt_leaves_the_collector_as_it_was():
    class Interrupted(PretendWriter):
        def write(self, method: Method, prompts: Sequence[Sequence[int]], run_params: RunParams) -> list[Outcome]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(runner(Interrupted()).run([prompts("a")]))
    assert gc.isenabled()


QUESTION = Task("81", "writing", messages=({"role": "user", "content": "one two"},), turns=("three", "four"))
SOFT = Method("soft", "soft", OurMethod("ngram", "soft", None, draft_is_pass=False))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(chat_template=CHAT_TEMPLATE))


@pytest.fixture
def prompt(tokenizer: Tokenizer) -> Prompt:
    ids, form = encode(QUESTION, tokenizer)
    return Prompt(QUESTION, tuple(ids), form)


def test_a_later_turn_has_the_answers_before_it(tokenizer: Tokenizer, prompt: Prompt) -> None:
    second = following(tokenizer, prompt, "an answer")
    assert second is not None
    roles = [(message["role"], message["content"]) for message in second.task.messages or ()]
    assert roles == [("user", "one two"), ("assistant", "an answer"), ("user", "three")]
    assert (second.task.id, second.task.first_turn, second.task.turns) == ("81/2", "81", ("four",))
    assert list(second.ids) == tokenizer.apply_chat_template(second.task.messages or ())
    third = following(tokenizer, second, "")
    assert third is not None
    assert (third.task.id, third.task.first_turn) == ("81/3", "81")
    assert [message["content"] for message in third.task.messages or ()][-3:] == ["three", "", "four"]
    assert following(tokenizer, third, "the end") is None
    assert QUESTION.ids == ("81", "81/2", "81/3")


def test_turns_that_may_not_fit_are_left_out_with_a_note(tokenizer: Tokenizer, prompt: Prompt) -> None:
    second = following(tokenizer, prompt, ".")
    assert second is not None
    room = len(second.ids) + 8 + MARGIN
    (kept,), notes = with_room([prompt], tokenizer, room=room, answer=8)
    assert (kept.task.turns, kept.ids) == (("three",), prompt.ids)
    assert notes == ("1 later turns left out, longer than the context: 81/3",)
    (none,), notes = with_room([prompt], tokenizer, room=room - 1, answer=8)
    assert none.task.turns == ()
    assert "81/2, 81/3" in notes[0]
    assert with_room([prompt], tokenizer, room=10_000, answer=8) == ([prompt], ())


class Echo(Writer):
    """Answers with the method's name, and keeps the prompts."""

    def __init__(self) -> None:
        self.read: list[tuple[str, tuple[int, ...]]] = []

    def write(self, method: Method, prompts: Sequence[Sequence[int]], run_params: RunParams) -> list[Outcome]:
        self.read += [(method.name, tuple(ids)) for ids in prompts]
        return [Outcome((1,), method.name, "stop", {"rounds": 1}) for _ in prompts]


def test_all_methods_continue_the_plain_answer(tokenizer: Tokenizer, prompt: Prompt) -> None:
    writer = Echo()
    runner = Runner([PLAIN, SOFT], {OURS: writer}, RunParams(8), 1, lambda *texts: None, partial(following, tokenizer))
    single = Prompt(Task("82", "writing", prompt="x"), (5,), "plain")
    (records,) = runner.run([[prompt, single]])
    assert [(one.task, one.first_turn) for one in records[::2]] == [
        ("81", None),
        ("82", None),
        ("81/2", "81"),
        ("81/3", "81"),
    ]
    assert [one.method for one in records] == ["plain", "soft", "plain", "soft", "soft", "plain", "plain", "soft"]
    second, third = (next(ids for _, ids in writer.read[start:]) for start in (4, 6))
    assert "plain" in tokenizer.decode(second, skip_special_tokens=False)
    assert all("soft" not in tokenizer.decode(ids, skip_special_tokens=False) for _, ids in writer.read)
    assert {ids for _, ids in writer.read[4:6]} == {second}
    assert {ids for _, ids in writer.read[6:]} == {third}


def test_a_turn_without_room_is_named_in_the_submission(tmp_path: Path) -> None:
    home = suite_home(tmp_path)
    questions = home / "questions.jsonl"
    questions.write_text(questions.read_text().replace("and again", "and again " * 2000))
    path = tmp_path / "short.json"
    assert suite(home, "--draft", "ngram@fixed", "--category", "spec-bench/writing", "--output", path) == 0
    found = read_submission(path)
    assert [prompt["id"] for prompt in found["prompts"]] == ["spec-bench/81", "spec-bench/82"]
    assert any("spec-bench/81/2" in note for note in found["notes"])


DISTRIBUTIONS = {(1, 2): [0.5, 0.25, 0.125, 0.125], (1, 2, 0): [0.4, 0.3, 0.2, 0.1]}
MODEL = TableLM(listed(DISTRIBUTIONS, [0.25] * 4))


@pytest.mark.parametrize(
    ("plain", "other", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((1,), (), 0), ((), (), None)],
)
def test_first_difference(plain, other, place):
    assert first_difference(plain, other) == place


def test_equal_texts_have_nothing_to_explain():
    assert explain(MODEL, RunParams(4), [1, 2], [0, 1], [0, 1]) is None


def test_the_gap_is_of_the_two_best_and_the_difference_of_the_two_written():
    found = explain(MODEL, RunParams(4), [1, 2], [0, 1, 3], [0, 2, 3])
    assert found is not None
    assert found.index == 1
    assert found.gap == pytest.approx(torch.tensor(0.4 / 0.3).log().item())
    assert found.between == pytest.approx(torch.tensor(0.3 / 0.2).log().item())


def test_a_text_that_ends_where_the_other_goes_on_has_no_gap():
    assert explain(MODEL, RunParams(4), [1, 2], [0, 1], [0]) == Divergence(1, None, None)


def test_with_a_temperature_scores_have_the_requests_noise():
    found = explain(MODEL, RunParams(4, temperature=2.0, seed=5), [1, 2], [0, 3], [1, 3])
    noise = Noise(5).gumbel(2, torch.arange(4)).double()
    scores = torch.tensor(DISTRIBUTIONS[1, 2], dtype=torch.float64).log() / 2 + noise
    assert found is not None
    assert found.between == pytest.approx(float(scores[0] - scores[1]), rel=1e-5)
    best = scores.topk(2).values
    assert found.gap == pytest.approx(float(best[0] - best[1]), rel=1e-5)


def test_long_prefixes_are_read_in_chunks_and_the_slot_is_given_back():
    model = TableLM(hashed(8, 3), order=3)
    tokens = [place % 8 for place in range(2 * CHUNK_ROWS + 5)]
    for count in (1, CHUNK_ROWS, CHUNK_ROWS + 1, len(tokens)):
        assert torch.equal(last_logits(model, tokens[:count]), hashed(8, 3)(tuple(tokens[:count][-3:])))
