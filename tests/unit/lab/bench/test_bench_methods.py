"""The notation and names of benchmark methods, and transformers' methods for the same jobs."""

from __future__ import annotations

import pytest

from draftree.core.errors import ConfigurationError
from draftree.lab.bench.methods import OurMethod, PeerMethod, jobs_without_peer, our_methods, peer_methods


def test_plain_is_always_first():
    for drafts in ([], ["none"], ["ngram"], ["ngram", "none"]):
        assert our_methods(drafts)[0].name == "plain"
    assert [method.name for method in our_methods(["none"])] == ["plain"]


@pytest.mark.parametrize(
    ("text", "name", "how"),
    [
        ("ngram", "ngram", OurMethod("ngram", "coupled", None, draft_is_pass=False)),
        ("ngram,k=4", "ngram,k=4", OurMethod("ngram,k=4", "coupled", None, draft_is_pass=False)),
        ("ngram@heuristic", "ngram@heuristic", OurMethod("ngram", "coupled", "heuristic", draft_is_pass=False)),
        (
            "model:small,k=3@token@fixed:2",
            "model:small,k=3@fixed:2@token",
            OurMethod("model:small,k=3", "token", "fixed:2", draft_is_pass=True),
        ),
    ],
)
def test_a_method_may_name_its_planner_and_verifier(text, name, how):
    method = our_methods([text])[1]
    assert (method.name, method.how) == (name, how)


def test_planners_multiply_the_drafts_that_name_none():
    names = [method.name for method in our_methods(["ngram", "ngram@fixed:3"], plans=["heuristic", "additive"])]
    assert names == ["plain", "ngram@heuristic", "ngram@additive", "ngram@fixed:3"]


def test_a_model_folder_is_not_shown(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    method = our_methods([f"model:{folder},k=2"])[1]
    assert (method.name, method.job) == ("model:small,k=2", "model:small")
    assert str(tmp_path) not in str(method.to_json())
    assert all(str(tmp_path) not in peer.name for peer in peer_methods([method], batch=1))


@pytest.mark.parametrize(
    ("drafts", "plans", "said"),
    [
        (["ngrams"], [], "did you mean 'ngram'"),
        (["ngram@heuristc"], [], "neither a planner nor a verifier: did you mean 'heuristic'"),
        (["ngram@fixed:2@heuristic"], [], "two planners or two verifiers"),
        (["ngram", "ngram"], [], "is given 2 times"),
        (["none"], ["heuristic"], "there is no drafter"),
        (["none@heuristic"], [], "takes no @"),
        (["ngram,k=0"], [], "from 1 to 1024"),
    ],
)
def test_wrong_methods_are_refused_before_weights_are_loaded(drafts, plans, said):
    with pytest.raises(ConfigurationError, match=said):
        our_methods(drafts, plans=plans)


def test_transformers_does_the_same_jobs():
    ours = our_methods(["ngram,k=4", "ngram,k=4@heuristic", "model:small,k=3", "early-exit:2,k=3"])
    peers = peer_methods(ours, batch=1)
    assert [(peer.job, peer.how) for peer in peers] == [
        ("plain", PeerMethod()),
        ("ngram", PeerMethod(lookup_tokens=4)),
        ("model:small", PeerMethod(assistant="small")),
        ("model:small", PeerMethod(assistant="small", assistant_tokens=3)),
        ("early-exit:2", PeerMethod(exit_layers=2)),
        ("early-exit:2", PeerMethod(exit_layers=2, assistant_tokens=3)),
    ]
    assert jobs_without_peer(ours, peers) == []


def test_passes_of_the_target_itself_are_no_overhead():
    ours = our_methods(["ngram", "early-exit:2", "layer-skip,mlp=1", "ngram+layer-skip,mlp=1", "model:small"])
    assert [m.how.draft_is_pass for m in ours] == [False, False, True, True, True, True]


def test_transformers_drafts_for_one_prompt_only():
    ours = our_methods(["ngram"])
    peers = peer_methods(ours, batch=2)
    assert [peer.job for peer in peers] == ["plain"]
    assert jobs_without_peer(ours, peers) == ["ngram"]
