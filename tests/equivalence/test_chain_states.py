"""Chains in caches with states: whatever is drafted, kept, cut or forked, logits are those of the model's own pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree import LLM, SamplingParams
from draftree.models.base import Extend, Pass, Slot
from draftree.models.torch import cache_slots
from draftree.models.torch.cache_slots import CroppedSlot
from draftree.models.torch.hf_cache import CachedModel, Continuation
from families import VOCAB_SIZE, prompts, transformers_greedy
from zoo import tiny_model

FAMILIES = [
    "mamba",
    "jamba",
    "qwen3_next",
    "falcon_h1",
    "lfm2",
    "inkling_text",
    "qwen4_exp_text",
    "minimax",
    "rwkv",
    "xlstm",
    "deepseek_v32",
    "minimax_m3_vl_text",
    "deepseek_v4",
]
"""A pure recurrence, hybrids, convolutions, caches of their own, two kinds of index, compressed keys."""
BY_TOKEN = ("mamba", "jamba")
"""A pass over several tokens ignores the state that they follow."""
TEXT = torch.randint(3, VOCAB_SIZE, (140,), generator=torch.Generator().manual_seed(4)).tolist()

pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def own(family: str) -> Any:
    return tiny_model(family)


@functools.cache
def cached(family: str, continuation: Continuation | None = None) -> CachedModel:
    """The family's model; it continues texts as it can if nothing is said."""
    if continuation is None:
        continuation = Continuation.TOKEN if family in BY_TOKEN else Continuation.CHAIN
    return CachedModel(own(family), continuation)


def expected(family: str, tokens: Sequence[int]) -> Tensor:
    """Logits after every token by the model's own forward pass, without a cache."""
    with torch.inference_mode():
        logits: Tensor = own(family)(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def read(model: CachedModel, slot: Slot, tokens: Sequence[int], settled: int = 0) -> Tensor:
    """Logits of tokens after the slot's chain."""
    end = slot.num_tentative
    parents = range(end - 1, end + len(tokens) - 1)
    return model.run(Pass([Extend(slot, tokens, parents, settled=settled)])).logits.tensor()


def filled(model: CachedModel, tokens: Sequence[int]) -> Slot:
    """A slot that has read a text as the engine does."""
    slot = model.open()
    settle(model, slot, tokens)
    return slot


def settle(model: CachedModel, slot: Slot, tokens: Sequence[int]) -> None:
    read(model, slot, tokens, settled=len(tokens))
    model.commit(slot, range(len(tokens)))


def assert_continues(model: CachedModel, slot: Slot, family: str, text: Sequence[int]) -> None:
    """The slot holds this text: what follows is scored as after it, with a draft and without."""
    text = list(text)
    for tokens, settled in (([7, 8, 9], 1), ([5], 1)):
        assert torch.allclose(
            read(model, slot, tokens, settled), expected(family, text + tokens)[-len(tokens) :], atol=2e-4
        )
        model.commit(slot, [0])
        text.append(tokens[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_rounds_with_drafts_score_as_the_model_itself(family: str, seed: int) -> None:
    model, generator = cached(family), torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(0, limit, (), generator=generator))

    text = TEXT[:9]
    slot = filled(model, text)
    for _ in range(14):
        pending = [below(VOCAB_SIZE) for _ in range(1 + below(2))]
        draft = [below(VOCAB_SIZE) for _ in range(below(6))]
        first = read(model, slot, pending + draft, settled=len(pending) if below(4) else 0)
        more = [below(VOCAB_SIZE)] * below(2)
        rows = torch.cat([first, *([read(model, slot, more)] if more else [])])
        chain = pending + draft + more
        assert torch.allclose(rows, expected(family, text + chain)[len(text) :], atol=2e-4)
        accepted = len(pending) + below(1 + len(chain) - len(pending))
        kept = accepted + (below(2) if accepted < len(chain) else 0)
        model.commit(slot, range(accepted), range(accepted, kept))
        text = text + chain[:accepted]
        if kept > accepted:
            tokens = [*chain[accepted:kept], 11]
            assert torch.allclose(read(model, slot, [11]), expected(family, text + tokens)[-1:], atol=2e-4)
            model.commit(slot, ())
        if below(3) == 0:
            other = model.fork(slot)
            model.close(slot)
            slot = other
    assert slot.length == len(text)
    model.close(slot)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_is_cut_at_the_end_of_chunks(family: str) -> None:
    model = cached(family)
    slot = filled(model, TEXT[:40])
    settle(model, slot, TEXT[40:80])
    settle(model, slot, TEXT[80:90])
    lengths = [model.cut_length(slot, length) for length in (90, 89, 79, 39)]
    assert lengths == ([90, 89, 79, 39] if isinstance(slot, CroppedSlot) else [90, 80, 40, 0])
    twin = model.fork(slot, lengths[1])
    assert_continues(model, twin, family, TEXT[: lengths[1]])
    model.truncate(slot, lengths[2])
    assert_continues(model, slot, family, TEXT[: lengths[2]])
    model.close(twin)
    twin = model.fork(slot, 0)
    assert_continues(model, twin, family, [])
    model.close(twin)
    model.close(slot)
    assert model.num_open == 0


@pytest.mark.parametrize("family", ["mamba", "jamba", "minimax", "rwkv"])
def test_a_pass_that_raises_leaves_the_text_readable(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cached(family)
    slot = filled(model, TEXT[:40])
    head = own(family).get_output_embeddings()
    forward = head.forward

    def raises(*args: Any) -> Tensor:
        raise MemoryError

    for tokens, settled in (([5, 6], 2), ([5, 6], 1), ([5, 6], 0)):
        monkeypatch.setattr(head, "forward", raises)
        with pytest.raises(MemoryError):
            read(model, slot, tokens, settled)
        monkeypatch.setattr(head, "forward", forward)
        model.truncate(slot, slot.length)
        assert torch.allclose(read(model, slot, [5, 6], 1), expected(family, [*TEXT[:40], 5, 6])[-2:], atol=2e-4)
        model.truncate(slot, 40)
    model.close(slot)


@pytest.mark.parametrize("family", ["mamba", "jamba", "rwkv"])
def test_other_continuations_write_the_same(family: str) -> None:
    prompt = prompts(24)[0]
    wanted = transformers_greedy(own(family), prompt, 20)
    for continuation in (Continuation.TOKEN, Continuation.REREAD):
        for draft in ("ngram,min=1", None):
            llm = LLM(cached(family, continuation), draft)
            (done,) = llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0.0))
            assert list(done.token_ids) == wanted


@pytest.mark.parametrize("family", ["mamba", "rwkv", "jamba"])
def test_plain_decoding_copies_no_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cached(family)
    slot = filled(model, TEXT[:5])
    monkeypatch.setattr(cache_slots, "copied", lambda cache: pytest.fail("a state is copied"))
    for token in TEXT[5:9]:
        settle(model, slot, [token])
    monkeypatch.undo()
    assert_continues(model, slot, family, TEXT[:9])
    model.close(slot)


@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "falcon_h1"])
def test_hidden_states_are_captured_in_drafted_rounds(family: str) -> None:
    model, text = cached(family), TEXT[:6]
    with torch.inference_mode():
        states = own(family)(torch.tensor([TEXT[:12]]), output_hidden_states=True, use_cache=False).hidden_states
    slot = filled(model, text)
    for size in (3, 3):  # the second pass reads accepted tokens once more
        place = slot.length
        job = Extend(slot, TEXT[place : place + size], range(-1, size - 1), settled=1)
        rows = model.run(Pass([job], capture=(0, 1))).hidden
        assert rows is not None
        wanted = torch.stack([state[0, place : place + size] for state in states[:2]], dim=1)
        assert torch.allclose(rows, wanted, atol=2e-4)
        model.commit(slot, [0, 1])
    model.close(slot)


@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_a_shared_prefix_is_read_once(family: str) -> None:
    llm = LLM(cached(family), "ngram,min=1")
    params = SamplingParams(max_tokens=8, temperature=0.0)
    shared = TEXT[:64]
    for tail in ([3, 4, 5], [3, 4, 5, 6], [9, 9]):
        (done,) = llm.generate([shared + tail], params)
        assert list(done.token_ids) == transformers_greedy(own(family), shared + tail, 8)


def test_the_footprint_counts_the_states() -> None:
    model = cached("mamba")
    assert model.footprint.token == 0
    mixer = own("mamba").backbone.layers[0].mixer
    state = 4 * mixer.intermediate_size * (mixer.ssm_state_size + mixer.conv_kernel_size)
    assert model.footprint.state == 2 * state * (2 + cache_slots.MAX_KEPT)
    assert cached("deepseek_v32").footprint.state == 0
