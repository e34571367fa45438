"""Two vocabularies, token by token."""

from __future__ import annotations

import pytest

from draftree.text.retokenize import TokenDifference, compare_vocabularies

BASE = ["<unk>", "<s>", "</s>", "▁the", "▁a", "日"]


def test_equal_vocabularies_are_the_same() -> None:
    comparison = compare_vocabularies(BASE, tuple(BASE))
    assert comparison.same
    assert comparison.first_differences == ()
    assert (comparison.target_size, comparison.draft_size, comparison.common_size) == (6, 6, 6)


@pytest.mark.parametrize(
    "padding",
    [
        "",
        "<pad>",
        "[PAD]",
        "[PAD151936]",
        "<unused0>",
        "[unused99]",
        "<|pad|>",
        "<|padding|>",
        "<|PAD_TOKEN|>",
        "<|reserved_special_token_12|>",
        "<extra_id_3>",
        "<dummy7>",
        "<|placeholder1|>",
    ],
)
def test_padding_beyond_the_smaller_size_is_no_difference(padding: str) -> None:
    for target, draft in ((BASE, [*BASE, padding]), ([*BASE, padding], BASE)):
        comparison = compare_vocabularies(target, draft)
        assert comparison.same
        assert comparison.common_size == 6


@pytest.mark.parametrize(
    "token", ["the", "▁unused", "<|im_start|>", "pad", "<paddle>", "<extra>x", "[PAD", "<tool_call>"]
)
def test_a_real_token_beyond_the_smaller_size_is_a_difference(token: str) -> None:
    assert compare_vocabularies(BASE, [*BASE, "", token]).first_differences == (TokenDifference(7, None, token),)
    assert compare_vocabularies([*BASE, token], BASE).first_differences == (TokenDifference(6, token, None),)


def test_the_first_five_differences_are_named() -> None:
    draft = [f"x{i}" for i in range(6)]
    comparison = compare_vocabularies(BASE, draft)
    assert not comparison.same
    assert [difference.token_id for difference in comparison.first_differences] == [0, 1, 2, 3, 4]
    assert comparison.first_differences[3] == TokenDifference(3, "▁the", "x3")


def test_a_hole_in_one_of_them_is_a_difference() -> None:
    draft = [*BASE[:3], "", *BASE[4:]]
    assert compare_vocabularies(BASE, draft).first_differences == (TokenDifference(3, "▁the", None),)


def test_one_changed_token_in_a_large_vocabulary_is_found() -> None:
    target = [f"token{i}" for i in range(50_000)]
    draft = target.copy()
    draft[49_000] = "other"
    assert compare_vocabularies(target, draft).first_differences == (TokenDifference(49_000, "token49000", "other"),)
