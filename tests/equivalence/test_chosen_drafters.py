"""Several drafters in one engine: each request chooses its own, and its text is that of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from async_samples import asynchronous
from draftree import LLM, AsyncLLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.core.types import RoundRecord
from draftree.engine.sequence import WritingSequence
from draftree.loading.loaded import LoadedModel
from draftree.models.table import TableLM, hashed
from draftree.outputs import completions_of
from draftree.text.tokenizer import Tokenizer
from draftree.verifiers.base import Guarantee
from engine_samples import run, text
from families import target
from real_weights import loaded_float32
from text_backends import byte_level

SCHEMA = {"type": "object", "properties": {"ab": {"enum": [1, 2, 30]}}, "required": ["ab"]}
TOKENIZER = Tokenizer(byte_level())
VOCAB = len(TOKENIZER.vocabulary())
DRAFTS = (
    "ngram,min=1",
    "model:small,k=3",
    "lookahead",
    "model:small,tree=1-2-2",
    "ngram,min=1+suffix",
    "prediction+model:small,k=2",
)
CHOICES = (None, "none", *DRAFTS)
PROMPTS = [[20, 30, 40, 20, 30], [7, 8, 9], [50] * 12, [20, 30, 40] * 12]


def model() -> TableLM:
    """A text that repeats itself, so that there is something to copy."""
    return TableLM(hashed(VOCAB, seed=1, scale=2.0), order=1)


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make every draft model a table; return the names of those that are loaded, in a list that grows."""
    names: list[str] = []

    def load(name: str, **_: Any) -> LoadedModel:
        names.append(name)
        return LoadedModel(TableLM(hashed(VOCAB, seed=1, scale=1.8), order=1), None, (), name)

    monkeypatch.setattr("draftree.drafters.model.load_model", load)
    return names


def opened(drafts: Any = DRAFTS, plan: str | None = "fixed", **options: Any) -> LLM:
    return LLM(model(), drafts, plan=plan, tokenizer=TOKENIZER, **options)


def given(choice: str | None, seed: int, **more: Any) -> SamplingParams:
    params: dict[str, Any] = {"max_tokens": 30, "seed": seed, "temperature": (0.0, 0.8, 1.3)[seed % 3]} | more
    if choice is not None and "prediction" in choice:
        params["prediction"] = [20, 30, 40, 20]
    return SamplingParams(**params)


def plain(ids: list[int], params: SamplingParams) -> list[tuple[int, ...]]:
    llm = LLM(model(), "none", tokenizer=TOKENIZER)
    values = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    without = SamplingParams(**{**values, "prediction": None})
    return [done.token_ids for done in llm.generate([ids], without)]


def add(llm: LLM, ids: list[int], params: SamplingParams, choice: str | None) -> list[WritingSequence]:
    sequences = llm.requests.sequences(ids, params, draft=choice)
    llm.engine.add(*sequences)
    return sequences


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_writes_the_text_of_plain_decoding(choice: str | None) -> None:
    llm, num_drafted = opened(), 0
    for seed, ids in enumerate(PROMPTS):
        params = given(choice, seed)
        (done,) = llm.generate([ids], params, draft=choice)
        num_drafted += done.stats.draft_tokens
        assert [done.token_ids] == plain(ids, params)
        assert "".join(llm.stream(ids, params, draft=choice)) == done.text
    assert (num_drafted > 0) is (choice != "none")


@pytest.mark.parametrize("plan", ["fixed", None])
def test_a_batch_of_all_choices_is_scored_in_common_passes(plan: str | None) -> None:
    records: list[RoundRecord] = []
    llm = opened(plan=plan, on_round=records.append)
    added = [
        (ids, params, add(llm, ids, params, choice))
        for seed, ids in enumerate(PROMPTS)
        for choice in CHOICES
        for params in [given(choice, seed)]
    ]
    run(llm.engine)
    for ids, params, sequences in added:
        assert [tuple(text(sequence)) for sequence in sequences] == plain(ids, params)
    assert max(len(record.sequences) for record in records) == len(added)
    if plan == "fixed":
        assert max(sum(bool(row.num_drafted) for row in record.sequences) for record in records) >= 3 * len(PROMPTS)


@pytest.mark.parametrize("constraint", [{"json_schema": SCHEMA}, {"regex": "(ab|cd)+;"}])
def test_grammars_hold_for_every_choice_of_one_batch(constraint: dict[str, Any]) -> None:
    llm = opened(("model:small,k=3", "ngram,min=1", "suffix+grammar"))
    choices = (None, "none", "ngram,min=1", "suffix+grammar")
    wanted = [given(None, seed, **constraint) for seed in range(4)]
    added = [(params, add(llm, PROMPTS[0], params, choice), choice) for params in wanted for choice in choices]
    added += [(given(None, 1), add(llm, PROMPTS[0], given(None, 1), "none"), "none")]
    run(llm.engine)
    for params, sequences, choice in added:
        assert [tuple(text(sequence)) for sequence in sequences] == plain(PROMPTS[0], params)
        if choice == "none":
            assert not sequences[0].counts.draft_tokens
        elif "json_schema" in constraint and params is not added[-1][0]:
            assert sequences[0].counts.accepted_by_source["grammar"] > 0


def test_several_texts_of_a_request_share_its_choice_and_its_prompt() -> None:
    llm = opened()
    prompt = PROMPTS[3]
    added = [(choice, add(llm, prompt, given(choice, 1, n=3), choice)) for choice in CHOICES]
    run(llm.engine)
    for choice, sequences in added:
        assert [tuple(text(sequence)) for sequence in sequences] == plain(prompt, given(choice, 1, n=3))
    assert llm.prefix_stats.hits >= len(added) * 2


def test_a_cached_prefix_of_another_drafter_is_used_without_its_state() -> None:
    llm = opened(prefix_cache_size=2)
    ids = list(PROMPTS[3])
    for place, choice in enumerate([*CHOICES, *reversed(CHOICES), *CHOICES[::2], *CHOICES[1::2]]):
        params = given(choice, place, max_tokens=12)
        (sequence,) = add(llm, ids, params, choice)
        run(llm.engine)
        assert [tuple(text(sequence))] == plain(ids, params)
        assert bool(sequence.counts.cached_tokens) is (place > 0)
        ids += [*text(sequence), 3, 4]
        ids = ids if len(ids) < 150 else ids[:60]
    llm.forget()
    assert llm.model.num_open == 0


def test_log_probabilities_are_those_of_plain_decoding_with_every_choice_of_one_batch() -> None:
    llm, ids = opened(), PROMPTS[3]
    given_params = {choice: given(choice, 1, logprobs=2, prompt_logprobs=1) for choice in CHOICES}
    (wanted,) = LLM(model(), "none", tokenizer=TOKENIZER).generate([ids], given_params[None])
    added = [add(llm, ids, params, choice) for choice, params in given_params.items()]
    run(llm.engine)
    for done in completions_of(added):
        assert done.logprobs == wanted.logprobs
        assert done.prompt_logprobs == wanted.prompt_logprobs


def test_one_rule_holds_for_choices_with_different_draws() -> None:
    llm = opened(("ngram,min=1", "model:small,k=3"), verify="token")
    added = [add(llm, PROMPTS[0], given(None, 3 * seed), choice) for seed in range(3) for choice in llm.drafts]
    run(llm.engine)
    greedy = plain(PROMPTS[0], given(None, 0))
    assert all([tuple(text(sequence))] == greedy for (sequence,) in added)


@asynchronous
async def test_concurrent_requests_choose_their_drafters() -> None:
    async with AsyncLLM(model(), DRAFTS[:3], tokenizer=TOKENIZER, plan="fixed") as llm:
        assert llm.llm.drafts == DRAFTS[:3]
        for choice in (None, "none", *DRAFTS[:3]):
            submission = await llm.submit(PROMPTS[0], given(None, 1), draft=choice)
            written = [token async for update in submission for token in update.token_ids]
            assert [tuple(written)] == plain(PROMPTS[0], given(None, 1))
            (done,) = await llm.generate(PROMPTS[0], given(None, 1), draft=choice)
            assert done.stats.draft_tokens == submission.completions()[0].stats.draft_tokens
            assert (done.stats.draft_tokens > 0) is (choice != "none")
        with pytest.raises(InvalidRequestError, match="not loaded"):
            await llm.submit([1], draft="suffix")


def test_parts_of_the_target_draft_beside_other_drafters_on_the_targets_own_slots() -> None:
    drafts = ("early-exit:1,k=3", "layer-skip,mlp=1,k=3", "ngram,min=1", "early-exit:1,tree=best-6,k=3", "suffix")
    llm, slow = LLM(target("llama"), drafts, plan="fixed"), LLM(target("llama"), "none")
    choices = [*drafts, "none", None]
    wanted = [SamplingParams(max_tokens=24, seed=seed, temperature=0.7 * (seed % 2)) for seed in range(4)]
    prompts = [[5, 6, 7 + seed, 5, 6] * 5 for seed in range(4)]
    added = [
        (ids, params, add(llm, ids, params, choice))
        for ids, params in zip(prompts, wanted, strict=True)
        for choice in choices
    ]
    run(llm.engine)
    for ids, params, (sequence,) in added:
        assert tuple(text(sequence)) == slow.generate([ids], params)[0].token_ids


def test_a_draft_model_of_several_choices_is_loaded_once(loads: list[str]) -> None:
    opened()
    assert loads == ["small"]


def test_statistics_are_those_of_the_chosen_drafter() -> None:
    llm = opened()
    for choice in CHOICES:
        (done,) = llm.generate([PROMPTS[0]], given(choice, 0), draft=choice)
        sources = {"ngram,min=1+suffix": {"ngram,min=1", "suffix"}, DRAFTS[5]: {"prediction", "model:small,k=2"}}
        assert set(done.stats.drafted_by_source) <= sources.get(choice or "", set(done.stats.drafted_by_source))
        assert bool(done.stats.drafted_by_source) >= (choice in sources)
        assert done.stats.draft_tokens == sum(done.stats.drafted_by_depth)
        assert (done.stats.rounds < len(done.token_ids)) is (choice != "none")


def test_reasons_are_those_of_the_chosen_drafters_planner() -> None:
    llm = LLM(model(), ("ngram,min=1", "model:small,k=3"), tokenizer=TOKENIZER)
    first, second, none = (
        llm.generate([PROMPTS[0]], given(None, 1), draft=choice)[0].stats.explain
        for choice in (None, "model:small,k=3", "none")
    )
    assert first
    assert second
    assert first != second
    assert none == ""


@pytest.mark.parametrize(
    ("drafts", "choice", "message"),
    [
        (DRAFTS[:2], "sufix", "'ngram,min=1' or 'model:small,k=3' or 'none'"),
        (DRAFTS[:2], 3, "draft is 3"),
        (None, "ngram", "give 'none'"),
        ("ngram", "suffix", "give 'ngram' or 'none'"),
    ],
)
def test_an_unknown_choice_is_refused_with_the_loaded_ones(drafts: Any, choice: Any, message: str) -> None:
    llm = opened(drafts, plan=None)
    with pytest.raises(InvalidRequestError, match=message) as refused:
        llm.generate([[1]], draft=choice)
    assert refused.value.param == "draft"


def test_plain_decoding_can_be_chosen_beside_one_drafter_and_is_the_default_where_it_comes_first() -> None:
    for llm, choice in ((opened("ngram,min=1"), "none"), (opened(("none", "ngram,min=1")), None)):
        (done,) = llm.generate([PROMPTS[0]], given(None, 1), draft=choice)
        assert not done.stats.draft_tokens
        (drafted,) = llm.generate([PROMPTS[0]], given(None, 1), draft="ngram,min=1")
        assert drafted.stats.draft_tokens
        assert done.token_ids == drafted.token_ids
    assert llm.drafts == ("none", "ngram,min=1")
    assert opened(DRAFTS[:2]).drafts == DRAFTS[:2]
    assert opened(None, plan=None).drafts == opened("none", plan=None).drafts == ()
    assert opened(None, plan=None).generate([[1]], draft="none")


def test_a_prediction_needs_a_choice_that_reads_it() -> None:
    llm = opened(("ngram,min=1", "prediction"))
    params = SamplingParams(prediction=[1, 2], max_tokens=4)
    assert llm.generate([[1]], params, draft="prediction")
    for choice in (None, "none"):
        with pytest.raises(InvalidRequestError, match="a prediction was given") as refused:
            llm.generate([[1]], params, draft=choice)
        assert refused.value.param == "prediction"


@pytest.mark.parametrize(
    ("drafts", "options", "message"),
    [
        ((), {}, "at least one name"),
        (("ngram", 3), {}, "at least one name"),
        (("ngram", "ngram"), {}, "'ngram' twice"),
        (("ngram", "model:small,tree=1-2-2"), {"verify": "token"}, "free draws"),
        (("ngram", "nonesuch"), {}, "unknown drafter"),
    ],
)
def test_drafters_that_cannot_be_loaded_side_by_side_are_refused_first(
    drafts: Any, options: dict[str, Any], message: str, loads: list[str]
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        opened(drafts, **options)
    assert not loads


def test_a_lossy_rule_is_lossy_for_choices_that_draft() -> None:
    llm = opened(("ngram,min=1", "model:small,k=3"), verify="typical")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=4)
    promises = [llm.generate([[1]], params, draft=choice)[0].stats.promise for choice in (None, "none")]
    assert promises == [Guarantee.LOSSY, Guarantee.SAME_TEXT]


@pytest.mark.weights
def test_a_real_model_writes_the_same_text_with_every_choice_of_one_batch() -> None:
    drafts = ("ngram", "suffix", "early-exit:3,k=3", "lookahead")
    prompts = ["The cat ran. The cat sat. The cat ran. The", "Tom and Lily went to the park. Tom and"]
    loaded = loaded_float32("stories15m")
    llm, slow = LLM(loaded, drafts, plan="fixed"), LLM(loaded, "none")
    if not slow.is_exact:
        pytest.skip("passes of several rows may round otherwise")
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    wanted = [done.token_ids for done in slow.generate(prompts, params)]
    added = [
        (index, choice, add(llm, llm.prompts.encode(prompt), params, choice))
        for index, prompt in enumerate(prompts)
        for choice in (None, "none", *drafts)
    ]
    run(llm.engine)
    for index, choice, (sequence,) in added:
        assert tuple(text(sequence)) == wanted[index]
        assert (sequence.counts.draft_tokens > 0) >= (choice in drafts[2:])
        assert choice != "none" or not sequence.counts.draft_tokens
