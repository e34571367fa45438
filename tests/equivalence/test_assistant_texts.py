"""Assistants that read a Gemma 4 target's keys and values: drafts are transformers' own, and no text changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.assistant_stepper import AssistantStepper
from draftree.heads.base import TargetParts
from draftree.heads.folders import read_head
from draftree.heads.gemma4 import AssistantHead
from draftree.models.base import Commit, Extend, Pass
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from families import peer as transformers_model
from families import prompts, target
from gemma4_assistants import assistant, their_levels

FAMILY = "gemma4_text"
RAGGED = prompts(3, 17, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An assistant for the target of the family, with ordered embeddings."""
    place = tmp_path_factory.mktemp("assistant")
    assistant(place, is_ordered=True, target=transformers_model(FAMILY))
    return place


def test_drafts_are_those_of_transformers(tmp_path: Path) -> None:
    """After a pass over a prompt with keys, values, hidden state and position of the target."""
    peer, model = transformers_model(FAMILY), target(FAMILY)
    theirs = assistant(tmp_path, target=peer)
    head = read_head(tmp_path)
    assert isinstance(head, AssistantHead)
    head.bind(TargetParts.of(model))
    stepper = AssistantStepper(head, model)
    controls = build_controls(SamplingParams(), vocab_size=model.vocab_size, seed=0)
    chains = [[5, 7, 11], [40, 3, 2]]
    states = []
    for prompt in RAGGED[:2]:
        view = SequenceView(History([*prompt, chains[len(states)][0]]), controls, model.open())
        states.append(stepper.open(view))
        assert not stepper.is_ready(states[-1])
        model.reserve(3, 64)
        result = model.run(Pass([Extend(view.slot, prompt, range(-1, len(prompt) - 1))], capture=(model.num_layers,)))
        model.apply([Commit(view.slot, range(len(prompt)))])
        stepper.learn([states[-1]], [result.hidden])
        assert stepper.is_ready(states[-1])
    with torch.inference_mode():
        ours = [stepper.catch_up(states, [3, 3]).tensor()]
        for level in (1, 2):
            parents = [[level - 2]] * 2
            ours.append(stepper.feed(states, [[chain[level]] for chain in chains], parents).tensor())
    for place, prompt in enumerate(RAGGED[:2]):
        done = peer.model(
            torch.tensor([prompt]), use_cache=False, return_shared_kv_states=True, output_hidden_states=True
        )
        embedding = peer.get_input_embeddings()
        wanted = their_levels(
            theirs, embedding, chains[place], done.last_hidden_state[0, -1], done.shared_kv_states, len(prompt)
        )
        for level, rows in enumerate(ours):
            torch.testing.assert_close(rows[place], wanted[level], rtol=1e-3, atol=1e-3)
    for state in states:
        model.close(state.view.slot)


@pytest.mark.essential
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["", ",tree=best-9", ",tree=1-2-2"])
def test_no_text_changes(folder: Path, tree: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=11)
    plain = LLM(target(FAMILY), "none").generate(RAGGED, params)
    fast = LLM(target(FAMILY), f"head:{folder}{tree}", plan="fixed")
    done = fast.generate(RAGGED, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert sum(one.stats.draft_tokens for one in done) > 20
    fast.engine.check_integrity()


def test_other_targets_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no layer with a sliding window"):
        LLM(target("llama"), f"head:{folder}")
    assistant(tmp_path, target=transformers_model(FAMILY), head_dim=4)
    with pytest.raises(ConfigurationError, match="choose the target that it was made for"):
        LLM(target(FAMILY), f"head:{tmp_path}")
