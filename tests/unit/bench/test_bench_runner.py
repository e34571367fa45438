"""The order of measurements and their records, with fake writers."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest

from draftree.bench.conversations import Prompt
from draftree.bench.engines import Outcome, RunParams, Writer
from draftree.bench.methods import Method, OurMethod, PeerMethod
from draftree.bench.records import OURS, PEER, Divergence, sha256_of
from draftree.bench.runner import WARM_UP_TOKENS, Runner, grouped, rotated
from draftree.bench.workload import Task

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
        return [Outcome(text, str(text), "length", run_params.seed, {"rounds": 1}) for text in texts]


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


def test_every_method_has_every_place_equally_often():
    places = [[method.name for method in rotated(METHODS, turn)].index("ngram") for turn in range(6)]
    assert sorted(places) == [0, 0, 1, 1, 2, 2]


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
