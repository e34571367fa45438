from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftree.core.noise import Noise, gumbel
from draftree.sampling.controls import build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import SubsetLogits, TensorLogits, TokenSubset
from draftree.sampling.params import SamplingParams

VOCAB = 13
INF = math.inf
EVERYTHING: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5,
    "frequency_penalty": 0.25, "logit_bias": {3: 1.0, 4: -INF}, "no_repeat_ngram_size": 3, "bad_words": ["ab", "c"],
    "min_tokens": 4,
}  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.6},
    EVERYTHING,
    EVERYTHING | {"temperature": 0},
    EVERYTHING | {"temperature": 1.0},
    {"top_k": 3},
    {"temperature": 0, "repetition_penalty": 1.3},
]


def entry(values: dict[str, Any], history: History, paths: Sequence[Sequence[int]], seed: int = 1) -> DistributionRows:
    controls = build_controls(
        SamplingParams(**values),
        vocab_size=VOCAB,
        eos_ids=[2],
        encode=lambda text: [ord(letter) % VOCAB for letter in text],
        seed=seed,
    )
    return DistributionRows(history, controls, paths)


def written(*tokens: int, output: Sequence[int] = ()) -> History:
    history = History(tokens)
    history.append(output)
    return history


def random_logits(rows: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2


def test_temperature_0_is_all_on_the_largest_logit_and_takes_no_noise() -> None:
    raw = random_logits(3)
    raw[1, 4] = raw[1, 7] = 9.0  # the first of equals
    distributions = Distributions(TensorLogits(raw), [entry({"temperature": 0}, written(1, 2), [[], [3], [3, 4]])])
    node = distributions.of(0)
    assert node.picks() == raw.argmax(-1).tolist()
    assert node.picks()[1] == 4
    assert torch.equal(node.probs(), torch.nn.functional.one_hot(raw.argmax(-1), VOCAB).float())
    assert distributions.logits is raw


def test_a_pick_is_the_largest_of_logit_over_temperature_plus_noise() -> None:
    raw = random_logits(3)
    rows = entry({"temperature": 0.5}, written(1, 2, 5), [[], [3], [3, 4]], seed=9)
    assert rows.positions == [3, 4, 5]
    scores = raw / 0.5 + gumbel([Noise(9).keys(position) for position in (3, 4, 5)], torch.arange(VOCAB))
    distributions = Distributions(TensorLogits(raw), [rows])
    assert torch.equal(distributions.perturbed([Noise(9)]), scores)
    assert distributions.of(0).picks() == scores.argmax(-1).tolist()
    assert torch.allclose(distributions.of(0).probs([0, 2]), torch.softmax(raw[[0, 2]] / 0.5, -1))


def test_the_models_logits_are_left_as_they_are() -> None:
    raw = random_logits(2)
    before = raw.clone()
    distributions = Distributions(TensorLogits(raw), [entry(EVERYTHING, written(1, 2), [[], [3]])])
    assert torch.equal(raw, before)
    assert torch.equal(distributions.of(0).raw, before)
    assert not torch.equal(distributions.logits, before)


BANS: dict[str, Any] = {"no_repeat_ngram_size": 2, "bad_words": ["ab", "c"], "min_tokens": 9}


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("size", [1, 2])
def test_bans_are_in_the_models_logits_during_a_search_only(temperature: float, size: int) -> None:
    values = BANS | {"temperature": temperature, "no_repeat_ngram_size": size}
    paths, history = [[], [5], [5, 6], [9, 9]], written(1, 2, 9, output=[5, 6, 5])
    num_changed = 0
    for seed in range(30):
        raw = random_logits(8, seed=seed)
        before, rows = raw.clone(), [entry(values, history, paths, seed), entry({}, history, paths, seed + 1)]
        processed = Distributions(TensorLogits(raw.clone()), rows)
        assert not torch.equal(processed.logits, raw)  # from here on the processed copy is searched
        searched = Distributions(TensorLogits(raw), rows)
        assert searched.picks() == processed.picks()
        assert searched.finite() == [True, True]
        tokens, scores = searched.ranked([Noise(3)] * 2, 3, in_place=True)
        wanted, wanted_scores = processed.ranked([Noise(3)] * 2, 3)
        assert tokens == wanted
        assert torch.allclose(torch.tensor(scores), torch.tensor(wanted_scores), atol=1e-5)
        assert torch.equal(raw, before)
        free = [entry({"temperature": temperature}, history, paths, seed), rows[1]]
        num_changed += searched.picks() != Distributions(TensorLogits(raw), free).picks()
    assert num_changed > 10


@pytest.mark.parametrize("inference", [False, True])
def test_bans_do_not_copy_the_logits(inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode(inference):
        raw = random_logits(4)
    rows = entry(BANS | {"temperature": 0}, written(1, 2, 9, output=[5, 6, 5]), [[], [5], [5, 6], [9, 9]])
    wanted = Distributions(TensorLogits(raw), [rows]).logits.argmax(-1).tolist()
    monkeypatch.setattr(Tensor, "clone", None)
    assert Distributions(TensorLogits(raw), [rows]).picks() == wanted


def test_bans_on_logits_of_a_part_of_the_vocabulary() -> None:
    ids = torch.tensor([1, 4, 5, 6, 9])
    logits = SubsetLogits(torch.zeros(1, 5), TokenSubset(ids, VOCAB))
    rows = entry({"temperature": 0, "no_repeat_ngram_size": 1}, written(1, 2, 4), [[5]])
    assert Distributions(logits, [rows]).picks() == [6]
    assert Distributions(logits, [rows]).ranked([Noise(0)], 2)[0] == [[6, 9]]


def test_probs_are_distributions_and_give_forbidden_tokens_nothing() -> None:
    rows = entry(EVERYTHING, written(1, 2), [[], [3], [3, 1], [3, 1, 2]])
    distributions = Distributions(TensorLogits(random_logits(4)), [rows])
    probs = distributions.of(0).probs()
    assert torch.allclose(probs.sum(-1), torch.ones(4))
    assert bool((probs[distributions.logits.isneginf()] == 0).all())
    assert bool((probs[:, 4] == 0).all())


def batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[DistributionRows]]:
    entries = [
        entry(
            values,
            written(1, 2, index, output=[5, 6, 5, 6][: index % 5]),
            [[], [5], [5, 6], [6]][: 1 + index % 4],
            index,
        )
        for index, values in enumerate(SETTINGS)
    ]
    return random_logits(sum(len(item.paths) for item in entries), seed=seed, dtype=dtype), entries


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_gives_each_sequence_what_it_gets_alone(dtype: torch.dtype) -> None:
    for seed in range(20):
        raw, entries = batch(seed, dtype)
        together = Distributions(TensorLogits(raw), entries)
        assert len(together) == len(entries)
        assert together.logits.dtype == dtype
        picks: list[int] = []
        for index, rows in enumerate(entries):
            alone = Distributions(TensorLogits(raw[together.span(index)]), [rows])
            node = together.of(index)
            assert torch.equal(node.logits, alone.of(0).logits)
            assert torch.equal(node.probs(), alone.of(0).probs())
            assert node.picks() == alone.picks()
            assert node.positions == alone.of(0).positions
            picks += alone.picks()
        assert together.picks() == picks
        assert together.finite() == [True] * len(entries)


@given(
    st.sampled_from(SETTINGS),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_a_node_has_the_distribution_of_plain_decoding_once_its_path_is_written(
    values: dict[str, Any], output: list[int], paths: list[list[int]], seed: int
) -> None:
    raw = random_logits(len(paths), seed=seed)
    tree = Distributions(TensorLogits(raw), [entry(values, written(1, 2, output=output), paths)])
    for row, path in enumerate(paths):
        rows = entry(values, written(1, 2, output=[*output, *path]), [[]])
        plain = Distributions(TensorLogits(raw[row : row + 1]), [rows])
        assert torch.equal(tree.logits[row], plain.logits[0])
        assert tree.picks()[row] == plain.picks()[0]
        assert tree.finite()[0] or not all(tree.logits.amax(-1).isfinite())


def test_a_row_may_have_a_noise_of_its_own() -> None:
    raw = random_logits(5)
    entries = [
        entry({"temperature": 0.5}, written(1, 2), [[], [3], [4]]),
        entry({"temperature": 0}, written(1), [[], [5]]),
    ]
    distributions = Distributions(TensorLogits(raw), entries)
    shared = distributions.perturbed([Noise(7), Noise(8)])
    assert torch.equal(distributions.perturbed_rows([Noise(7)] * 3 + [Noise(8)] * 2), shared)
    own = distributions.perturbed_rows([Noise(7), Noise(7), Noise(9), Noise(8), Noise(8)])
    assert torch.equal(own[[0, 1, 3, 4]], shared[[0, 1, 3, 4]])
    assert torch.equal(own[2], distributions.perturbed([Noise(9), Noise(8)])[2])
    assert not torch.equal(own[2], shared[2])


def test_finite_names_the_sequences_that_can_go_on() -> None:
    raw = random_logits(6)
    raw[1, 3] = math.nan
    raw[3] = -INF
    raw[4, 0] = INF
    entries = [entry({}, written(1), [[], [2]]) for _ in range(3)]
    assert Distributions(TensorLogits(raw), entries).finite() == [False, False, False]
    assert Distributions(TensorLogits(raw[[0, 2, 5, 1]]), entries[:2]).finite() == [True, False]
    assert Distributions(TensorLogits(raw[:0]), []).finite() == []
    forbids_all = entry({"logit_bias": dict.fromkeys(range(VOCAB), -INF)}, written(1), [[]])
    assert Distributions(TensorLogits(raw[:1]), [forbids_all]).finite() == [False]


def test_nan_is_detected_after_every_control() -> None:
    for values in SETTINGS:
        raw = random_logits(2)
        raw[1, 9] = math.nan
        assert Distributions(TensorLogits(raw), [entry(values, written(1, output=[9]), [[], [9]])]).finite() == [False]


@pytest.mark.parametrize("paths", [[[], [3], [4], [3, 4]], [[3], [4], [5]], [[3]]])
@pytest.mark.parametrize("values", [{"temperature": 0.6}, {}, {"temperature": 0}])
def test_distributions_may_be_lost_on_the_way_to_the_picks(paths: list[list[int]], values: dict[str, Any]) -> None:
    raw = random_logits(len(paths))
    rows = entry(values, written(1, 2), paths, seed=4)
    kept = Distributions(TensorLogits(raw), [rows]).perturbed([Noise(4)])
    lost = Distributions(TensorLogits(raw.clone()), [rows], overwrites=True).perturbed([Noise(4)])
    assert torch.equal(kept, lost)
    # siblings are at one position and share its noise
    one_by_one = [
        Distributions(TensorLogits(raw[i : i + 1]), [entry(values, written(1, 2), [path], seed=4)])
        for i, path in enumerate(paths)
    ]
    assert torch.equal(kept, torch.cat([distributions.perturbed([Noise(4)]) for distributions in one_by_one]))
