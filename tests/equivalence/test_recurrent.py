"""Recurrent models with slots of ours: each token's logits are those of transformers' pass over the text alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.loading.transformers_model import wrap_model
from draftree.models.base import Commit, Edit, Extend, LayerSubset, Pass, Slot
from draftree.models.kv.states import MAX_KEPT, MIN_KEPT_CHAIN
from draftree.models.torch.hf import HFModel
from families import VOCAB_SIZE, prompts, transformers_greedy
from paced import steady
from recurrent_samples import RECURRENT, last_logits, recurrent_model, recurrent_peer, slotted

TOLERANCE = 2e-5  # maximum difference, relative to the range of the logits
NUM_ROUNDS = 12


@dataclass
class Text:
    """A slot, the tokens of its prefix, and of each tentative node the tokens from the first one on."""

    slot: Slot
    tokens: list[int]
    nodes: list[list[int]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    settled: int = 0

    def job(self, chooser: random.Random, *, settled: int, drafted: int) -> Extend:
        """Append a settled chain, if there is no tree, and random nodes after it."""
        first = len(self.nodes)
        self.settled = self.settled if first else settled
        for place in range(settled + drafted):
            node = first + place
            allowed = [-1, *range(node)] if not self.settled else range(self.settled - 1, node)
            parent = node - 1 if place < settled else chooser.choice(list(allowed))
            before = self.tokens if parent < 0 else self.nodes[parent]
            self.nodes.append([*before, chooser.randrange(VOCAB_SIZE)])
            self.parents.append(parent)
        added = [nodes[-1] for nodes in self.nodes[first:]]
        return Extend(self.slot, added, self.parents[first:], settled=settled)

    def commit(self, chooser: random.Random) -> Commit:
        """Accept a random path after the settled tokens, and keep part of what hangs at its end."""
        path = list(range(self.settled))
        while children := [node for node, parent in enumerate(self.parents) if parent == (path[-1] if path else -1)]:
            if len(path) > self.settled and chooser.random() < 0.3:
                break
            path.append(chooser.choice(children))
        end = path[-1] if path else -1
        keep: list[int] = []
        for node, parent in enumerate(self.parents):
            if node > end and (parent == end or parent in keep) and chooser.random() < 0.5:
                keep.append(node)
        if path:
            self.tokens = self.nodes[end]
        numbers = {node: number for number, node in enumerate(keep)}
        self.nodes, self.parents = [self.nodes[n] for n in keep], [numbers.get(self.parents[n], -1) for n in keep]
        self.settled = 0
        return Commit(self.slot, path, keep)

    def drop(self) -> None:
        self.nodes, self.parents, self.settled = [], [], 0


def require_logits(family: str, texts: list[list[int]], rows: torch.Tensor) -> None:
    for tokens, row in zip(texts, rows, strict=True):
        wanted = last_logits(family, tokens)
        error = float((row - wanted).abs().max() / (wanted.amax() - wanted.amin()))
        assert error < TOLERANCE, f"{family}: error {error:.1e} after {len(tokens)} tokens"


@pytest.mark.parametrize("family", RECURRENT)
def test_every_node_of_every_pass_has_the_logits_of_its_own_text(family: str) -> None:
    model, chooser = slotted(family), random.Random(7)
    texts = [Text(model.open(), []) for _ in range(3)]
    for number in range(NUM_ROUNDS):
        jobs, wanted = [], []
        for text in texts[: 1 + number % 3]:
            first = len(text.nodes)
            settled = 0 if first else chooser.choice([0, 1, 1, 2, 7] if number % 5 else [1])
            jobs.append(text.job(chooser, settled=settled, drafted=chooser.choice([1, 3, 6])))
            wanted += text.nodes[first:]
        require_logits(family, wanted, model.run(Pass(jobs)).logits.tensor())
        edits: list[Edit] = [text.commit(chooser) for text in texts if text.nodes and chooser.random() < 0.8]
        model.apply(edits)
        model.check_integrity()
        if number % 4 == 3:  # a fork, in place of another text
            source = chooser.choice(texts)
            length = model.cut_length(source.slot, source.slot.length)
            model.close(texts[0].slot if texts[0] is not source else texts[1].slot)
            place = 0 if texts[0] is not source else 1
            texts[place] = Text(model.fork(source.slot, length), source.tokens[:length])
    for text in texts:
        model.close(text.slot)
    assert model._states is not None
    assert model._states.num_rows_in_use == 0, "closed slots leave no rows"


DEEP = {"qwen3_next": 2, "nemotron_h": 4, "falcon_h1": 2, "mamba": 2}
"""Families of other tests, one for each place of a state, with their numbers of layers."""
CHUNK = MIN_KEPT_CHAIN + 3


def chunk(place: int) -> list[int]:
    chooser = random.Random(place)
    return [chooser.randrange(VOCAB_SIZE) for _ in range(CHUNK)]


def read(family: str, slot: Slot, tokens: list[int]) -> torch.Tensor:
    """Commit settled tokens; returns the logits after the last one."""
    model, count = slotted(family), len(tokens)
    job = Extend(slot, tokens, range(-1, count - 1), logits_at=[count - 1], settled=count)
    logits = model.run(Pass([job])).logits.tensor()
    model.commit(slot, range(count))
    return logits


@pytest.mark.parametrize("family", DEEP)
def test_a_long_text_is_read_in_chunks_and_cut_where_they_end(family: str) -> None:
    model = slotted(family)
    slot = model.open()
    text: list[int] = []
    for place in range(2):
        text += chunk(place)
        require_logits(family, [text], read(family, slot, chunk(place)))
    assert [model.cut_length(slot, n) for n in (CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK)] == [
        0,
        CHUNK,
        CHUNK,
        2 * CHUNK,
    ]
    copy = model.fork(slot, CHUNK)
    model.truncate(slot, CHUNK)
    require_logits(family, [[*chunk(0), 5, 6]], read(family, slot, [5, 6]))
    require_logits(family, [[*chunk(0), 7]], read(family, copy, [7]))
    model.truncate(copy, model.cut_length(copy, CHUNK))
    assert copy.length == CHUNK, "a copy keeps the states of its source"
    require_logits(family, [[*chunk(0), 8]], read(family, copy, [8]))
    model.close(slot)
    model.close(copy)


def test_the_last_few_states_are_kept_and_released() -> None:
    model = slotted("qwen3_next")
    states = model._states
    assert states is not None
    slot = model.open()
    for place in range(MAX_KEPT + 2):
        read("qwen3_next", slot, chunk(place)[:MIN_KEPT_CHAIN])
    assert states.num_rows_in_use == MAX_KEPT
    assert model.cut_length(slot, 3 * MIN_KEPT_CHAIN - 1) == 0
    assert model.cut_length(slot, 3 * MIN_KEPT_CHAIN) == 3 * MIN_KEPT_CHAIN
    copy = model.fork(slot, 4 * MIN_KEPT_CHAIN)
    model.close(slot)
    assert states.num_rows_in_use == 2, "shared states stay"
    model.close(copy)
    assert states.num_rows_in_use == 0


@pytest.mark.parametrize("family", DEEP)
def test_a_pass_that_is_not_committed_takes_the_prefix_with_it(family: str) -> None:
    model = slotted(family)
    slot = model.open()
    read(family, slot, chunk(0))
    read(family, slot, [9])
    model.run(Pass([Extend(slot, [1, 2, 3, 4], [-1, 0, 1, 1], settled=2)]))
    cut = model.cut_length(slot, slot.length)
    assert cut == CHUNK
    model.truncate(slot, cut)
    require_logits(family, [[*chunk(0), 9, 8]], read(family, slot, [9, 8]))
    model.run(Pass([Extend(slot, [1, 2], [-1, -1])]))
    assert model.cut_length(slot, slot.length) == slot.length, "drafted tokens have their own states"
    model.close(slot)


@pytest.mark.parametrize("family", DEEP)
def test_a_whole_pass_continues_partial_nodes(family: str) -> None:
    model = slotted(family)
    model.require_part(LayerSubset(end=1))
    slot, other = model.open(), model.open()
    for text in (slot, other):
        read(family, text, chunk(0))
    part = LayerSubset(end=DEEP[family] // 2)
    model.run(Pass([Extend(slot, [1, 2, 3], [-1, 0, 0])], part))
    model.run(Pass([Extend(slot, [4], [1])], part))
    jobs = [
        Extend(slot, [1, 2, 5, 4, 3, 3], [-1, 0, 1, 1, 0, 0], settled=1),
        Extend(other, [6, 7, 8, 8, 8, 8, 1], range(-1, 6), settled=6),
    ]
    paths = [[1], [1, 2], [1, 2, 5], [1, 2, 4], [1, 3], [1, 3], *([6, 7, 8, 8, 8, 8, 1][:n] for n in range(1, 8))]
    require_logits(family, [[*chunk(0), *tokens] for tokens in paths], model.run(Pass(jobs)).logits.tensor())
    model.apply([Commit(slot, [0, 1, 3]), Commit(other, range(6))])
    require_logits(family, [[*chunk(0), 1, 2, 4, 9]], read(family, slot, [9]))
    require_logits(family, [[*chunk(0), 6, 7, 8, 8, 8, 8, 9]], read(family, other, [9]))
    model.close(slot)
    model.close(other)


@pytest.mark.parametrize("family", RECURRENT)
def test_padded_prompts_that_the_model_reads_itself_continue_in_slots(family: str) -> None:
    model = slotted(family)
    asked = [chunk(0)[:9], chunk(1)[:4], [5]]
    ids = torch.tensor([[0] * (9 - len(prompt)) + prompt for prompt in asked])
    mask = torch.tensor([[0] * (9 - len(prompt)) + [1] * len(prompt) for prompt in asked])
    read_prompts = model.read(ids, mask, {})
    slots = [model.adopt(prompt) for prompt in read_prompts]
    assert [slot.length for slot in slots] == [8, 3, 0]
    jobs = [Extend(s, [prompt[-1], 7, 8], [-1, 0, 0], settled=1) for s, prompt in zip(slots, asked, strict=True)]
    texts = [[*prompt, *more] for prompt in asked for more in ([], [7], [8])]
    require_logits(family, texts, model.run(Pass(jobs)).logits.tensor())
    require_logits(family, asked, torch.stack([prompt.logits for prompt in read_prompts]))
    for slot in slots:
        model.close(slot)


@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_rows_of_padding_change_nothing(num_rows: int) -> None:
    model = HFModel(recurrent_model("qwen3_next"), row_buckets=(4, 16))
    slot = model.open()
    for place in range(2):
        job = Extend(slot, chunk(place)[:num_rows], range(-1, num_rows - 1), settled=num_rows)
        logits = model.run(Pass([job])).logits.tensor()
        model.commit(slot, range(num_rows))
    wanted = [[*chunk(0)[:num_rows], *chunk(1)[:count]] for count in range(1, num_rows + 1)]
    require_logits("qwen3_next", wanted, logits)


@pytest.mark.parametrize("family", DEEP)
def test_hidden_states_are_those_of_the_text_alone(family: str) -> None:
    model, layers = slotted(family), (0, DEEP[family])
    slot, other = model.open(), model.open()
    tree = [Extend(slot, [3, 4, 5, 6], [-1, 0, 0, 2], settled=1), Extend(other, [9], [-1])]
    hidden = model.run(Pass(tree, capture=layers)).hidden_of(0)
    alone = model.open()
    chain = model.run(Pass([Extend(alone, [3, 5, 6], [-1, 0, 1])], capture=layers)).hidden_of(0)
    torch.testing.assert_close(hidden[[0, 2, 3]], chain, atol=1e-4, rtol=1e-4)
    for text in (slot, other, alone):
        model.close(text)


@pytest.mark.essential
@pytest.mark.parametrize(
    "draft", [None, "ngram,min=1,k=4", "lookahead,window=6,n=4", "ngram,min=1+early-exit:1,tree=best-8"]
)
@pytest.mark.parametrize("family", DEEP)
def test_texts_are_those_of_transformers(family: str, draft: str | None) -> None:
    asked = [*prompts(1, 8, 70), [*prompts(70)[0], 4, 5, 6]]
    llm = LLM(wrap_model(recurrent_model(family)).model, draft, plan=steady(draft))
    wanted = [transformers_greedy(recurrent_peer(family), prompt, 12) for prompt in asked]
    for _ in range(2):  # then with cached prefixes
        done = llm.generate(asked, SamplingParams(max_tokens=12, temperature=0.0))
        assert [list(one.token_ids) for one in done] == wanted
