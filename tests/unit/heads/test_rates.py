"""Acceptance that training measured, read from the recipe beside a head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftree.drafters import DRAFTERS
from draftree.heads.calibration import AcceptanceRates, read_rates
from draftree.heads.shipped import head_folder


def facts(rates: list[float], reached: list[int]) -> dict[str, Any]:
    return {"rounds": {"all": {"conditional": rates, "reached": reached}}}


def test_rates_of_greedy_texts_and_the_mean_of_sampled_ones(tmp_path: Path) -> None:
    unseen = {"0": facts([0.7, 0.6], [100, 70]), "0.6": facts([0.6, 0.5], [30, 10]), "1.0": facts([0.4, 0.1], [10, 30])}
    (tmp_path / "recipe.json").write_text(json.dumps({"unseen": unseen}), encoding="utf-8")
    found = read_rates(tmp_path)
    assert found.greedy == (0.7, 0.6)
    assert found.sampled == pytest.approx((0.55, 0.2))


@pytest.mark.parametrize(
    "content",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"unseen": {"0": {}}}',
        '{"unseen": {"0": {"rounds": {"all": {"conditional": [1.5], "reached": [1]}}}}}',
        '{"unseen": {"0": {"rounds": {"all": {"conditional": [0.5, 0.5], "reached": [1]}}}}}',
    ],
)
def test_files_of_another_form_give_no_rates(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "recipe.json").write_text(content, encoding="utf-8")
    assert read_rates(tmp_path) == AcceptanceRates()


def test_the_drafter_of_a_shipped_head_states_its_rates() -> None:
    cls, config = DRAFTERS.configure(DRAFTERS.parse("head:smollm2-135m-instruct")[0])
    traits, rates = cls.describe(config), read_rates(head_folder("smollm2-135m-instruct"))
    assert traits.is_calibrated
    assert (traits.greedy_rates, traits.sampled_rates) == (rates.greedy, rates.sampled)
    assert len(rates.greedy) == len(rates.sampled) == traits.depth
    part = traits.part("head")
    assert (part.greedy_rates, part.sampled_rates, part.is_calibrated) == (rates.greedy, rates.sampled, True)
