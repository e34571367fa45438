"""Many coroutines, one engine: texts are the same as alone, updates arrive in order, refusals are raised at once."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from async_samples import PROMPTS, Gate, alone, asked, asynchronous, opened, params
from cli_samples import save_tiny_model
from draftree import LLM, AsyncLLM
from draftree.async_llm import Submission
from draftree.core.errors import (
    ConfigurationError,
    EngineClosedError,
    GenerationError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from draftree.core.types import RoundRecord, SequenceRecord
from draftree.engine.sequence import Update
from draftree.models.table import TableLM, hashed
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import Tokenizer
from engine_samples import VOCAB
from families import target
from spelling import tokenizer


@asynchronous
async def test_many_at_once_write_what_each_writes_alone() -> None:
    async with opened(draft="ngram,min=1", max_batch_size=3) as llm:
        done = await asyncio.gather(*(llm.generate(ids, params(seed)) for seed, ids in enumerate(PROMPTS)))
    assert [texts[0].token_ids for texts in done] == alone()


@asynchronous
async def test_streams_give_every_piece_once_and_in_order() -> None:
    llm = AsyncLLM(target("llama"), "ngram,min=1", tokenizer=tokenizer())

    async def read(seed: int, delay: float) -> str:
        text = ""
        async for piece in llm.stream([5, 6, seed + 3], params(seed, 20)):
            text += piece
            await asyncio.sleep(delay)
        return text

    async with llm:
        texts = await asyncio.gather(*(read(seed, 0.01 * (seed % 3)) for seed in range(6)))
        wanted = [(await llm.generate([5, 6, seed + 3], params(seed, 20)))[0].text for seed in range(6)]
    assert texts == wanted
    assert all(texts)


def test_a_long_prompt_delays_the_encoding_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, may_go_on = threading.Event(), threading.Event()
    encode, long = Tokenizer.encode, "abc " * 20_000

    def waiting(self: Tokenizer, text: str, *args: Any, **options: Any) -> list[int]:
        if text == long:
            reached.set()
            assert may_go_on.wait(60)
        return encode(self, text, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode", waiting)

    async def run() -> None:
        async with AsyncLLM(target("llama"), tokenizer=tokenizer()) as llm:
            task = asyncio.create_task(llm.prompts.encode(long))
            await asyncio.to_thread(reached.wait, 60)
            short = encode(tokenizer(), "abc")
            assert await llm.prompts.encode("abc") == short
            async with await llm.submit("abc", params(1)) as submission:
                assert submission.prompt_ids == tuple(short)
            assert not task.done()
            may_go_on.set()
            assert await task == encode(tokenizer(), long)

    asyncio.run(run())


def test_a_prompt_far_beyond_the_context_is_refused_unless_it_is_truncated(tmp_path: Path) -> None:
    message = {"role": "user", "content": "a"}

    async def run() -> None:
        async with AsyncLLM(str(save_tiny_model(tmp_path, chat=True)), "none") as llm:
            for prompt in ("abc " * 100_000, [5] * 2_000, [message] * 2_000):
                with pytest.raises(PromptTooLongError, match=r"the prompt has .* at most \d+ tokens are allowed"):
                    await llm.generate(prompt, params(1))
                cut = SamplingParams(max_tokens=1, truncate_prompt_tokens=4)
                async with await llm.submit(prompt, cut) as submission:
                    assert len(submission.prompt_ids) == 4

    asyncio.run(run())


@asynchronous
async def test_a_slow_reader_delays_no_other_request() -> None:
    async with opened() as llm:
        slow = llm.stream_updates([1, 2], params(1, 50))
        first = asyncio.ensure_future(anext(slow, None))
        done = await asyncio.gather(*(llm.generate(ids, params(seed)) for seed, ids in enumerate(PROMPTS)))
        assert [texts[0].token_ids for texts in done] == alone()
        last = await first
        async for update in slow:
            last = update
        assert last is not None
        assert last.is_last
        assert last.sequence.history.num_output_tokens == 50


@asynchronous
async def test_a_refused_request_affects_no_other() -> None:
    async with opened() as llm:
        requests = [
            llm.generate([], params(1)),
            llm.generate([VOCAB], params(1)),
            llm.generate("text", params(1)),
            llm.generate([1], params(1, 10**6)),
            llm.generate([1], {"max_tokens": 3}),  # type: ignore[arg-type]
            llm.generate(PROMPTS[0], params(0)),
        ]
        done = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(one, InvalidRequestError) for one in done[:5])
        assert done[5][0].token_ids == alone()[0]  # type: ignore[index]
        with pytest.raises(InvalidRequestError, match="n=2"):
            await anext(llm.stream([1], params(1, n=2)))


@asynchronous
async def test_cached_state_can_be_dropped() -> None:
    async with opened() as llm:
        await llm.generate([1 + i % 9 for i in range(40)], params(1))
        assert llm.prefix_stats.kept == 1
        await llm.forget()
        assert llm.prefix_stats.kept == 0


@pytest.mark.parametrize("count", [-1, "many", 1.5])
def test_max_waiting_is_a_whole_number(count: Any) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigurationError, match="max_waiting is"):
        AsyncLLM(TableLM(hashed(VOCAB, seed=5), order=3), "none", max_waiting=count)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "draftree-engine"]


@asynchronous
async def test_a_chat_is_answered_as_by_the_synchronous_front() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = save_tiny_model(Path(place), chat=True)
        talks = [[{"role": "user", "content": text}] for text in ("ab", "a longer question", "b")]
        wanted = LLM(folder, "none").chat(talks, params(3))
        async with AsyncLLM(folder, "ngram") as llm:
            done = await asyncio.gather(*(llm.chat(talk, params(3)) for talk in talks))
            assert [texts[0].token_ids for texts in done] == [text.token_ids for text in wanted]
            assert len(await llm.chat(talks[0], params(3, n=2), priority=-1)) == 2
            with pytest.raises(InvalidRequestError, match="A chat must be a list of messages, but got str"):
                await llm.chat("ab")  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError, match="one conversation per call"):
                await llm.chat(talks)  # type: ignore[arg-type]
    async with opened() as llm:
        with pytest.raises(InvalidRequestError, match="a conversation needs a tokenizer"):
            await llm.chat(talks[0])


@asynchronous
async def test_updates_of_all_texts_add_up_to_the_completions() -> None:
    async with opened(draft="ngram,min=1") as llm:
        submission = await llm.submit([1, 2, 1, 2], params(1, 20, n=3, logprobs=0))
        updates: dict[int, list[Update]] = defaultdict(list)
        async with submission:
            async for update in submission:
                updates[update.sequence.index].append(update)
        done = submission.completions()
        wanted = await llm.generate([1, 2, 1, 2], params(1, 20, n=3, logprobs=0))
    assert submission.prompt_ids == (1, 2, 1, 2)
    assert [c.token_ids for c in done] == [c.token_ids for c in wanted]
    for index, completion in enumerate(done):
        of_text = updates[index]
        assert tuple(token for update in of_text for token in update.token_ids) == completion.token_ids
        assert tuple(flag for update in of_text for flag in update.drafted) == completion.drafted
        assert tuple(entry for update in of_text for entry in update.logprobs) == completion.logprobs
        assert [update.is_last for update in of_text] == [False] * (len(of_text) - 1) + [True]
        assert not any(update.rounds for update in of_text)


@asynchronous
async def test_texts_arrive_interleaved() -> None:
    with Gate(rounds=5) as gate:
        async with opened(on_round=gate) as llm, await llm.submit([1], params(1, 200, n=2)) as submission:
            begun = {update.sequence.index: update async for update in updates_until(submission, 2)}
            assert not any(sequence.is_finished for sequence in submission.sequences)
            gate.open()
            rest = [update async for update in submission]
    assert sorted(begun) == [0, 1]
    assert sorted(update.sequence.index for update in rest if update.is_last) == [0, 1]


async def updates_until(submission: Submission, num_texts: int) -> AsyncIterator[Update]:
    """Updates until so many texts have begun."""
    begun: set[int] = set()
    while len(begun) < num_texts:
        update = await anext(submission)
        begun.add(update.sequence.index)
        yield update


@asynchronous
async def test_a_reader_that_comes_late_gets_one_update_of_each_text() -> None:
    async with opened() as llm:
        submission = await llm.submit([1], params(1, 40, n=2), trace=True)
        while not all(sequence.is_finished for sequence in submission.sequences) or llm.num_running:
            await asyncio.sleep(0.001)
        await llm.forget()  # the engine's thread has sent the last updates before
        updates = [update async for update in submission]
        done = submission.completions()
    assert sorted(update.sequence.index for update in updates) == [0, 1]
    for update in updates:
        assert update.is_last
        assert update.token_ids == done[update.sequence.index].token_ids
        assert len(update.rounds) == len(update.drafted) == 40


@asynchronous
async def test_pieces_and_token_ids_belong_together() -> None:
    async with AsyncLLM(target("llama"), "ngram,min=1", tokenizer=tokenizer()) as llm:
        submission = await llm.submit([5, 6, 7], params(2, 20))
        updates = [update async for update in submission]
        (done,) = submission.completions()
        assert "".join(piece.text for update in updates for piece in update.pieces) == done.text
        assert tuple(token for update in updates for token in update.token_ids) == done.token_ids
        assert await llm.prompts.decode(done.token_ids, skip_special_tokens=True) == done.text
        assert await llm.prompts.encode([5, 6, 7]) == [5, 6, 7]
        with pytest.raises(InvalidRequestError, match="vocabulary") as refused:
            await llm.prompts.decode([10**6])
        assert refused.value.param == "ids"


@asynchronous
async def test_a_request_keeps_the_name_that_it_was_given() -> None:
    async with opened() as llm:
        async with await llm.submit([1], params(1), request_id="req-7") as named:
            assert {update.sequence.request_id async for update in named} == {"req-7"}
        assert named.request_id == "req-7"
        for wrong in ("", 7):
            with pytest.raises(InvalidRequestError, match="request_id") as refused:
                await llm.submit([1], params(1), request_id=wrong)  # type: ignore[arg-type]
            assert refused.value.param == "request_id"


@asynchronous
async def test_submitting_raises_what_refuses_the_request() -> None:
    with Gate() as gate:
        async with opened(max_batch_size=1, max_waiting=1, on_round=gate) as llm:
            running = await llm.submit([1], params(0, 4000))
            await gate.reached()
            invalid = asyncio.ensure_future(llm.submit([], params(1)))
            with pytest.raises(InvalidRequestError):
                await invalid
            endless = asyncio.ensure_future(llm.submit([1], params(1, 10**6)))
            with pytest.raises(InvalidRequestError):
                await endless
            waiting = asyncio.ensure_future(llm.submit([1], params(2)))
            await asked(llm, 1)
            refused = asyncio.ensure_future(llm.submit([1], params(3), wait=False))
            await gate.open_behind(llm, 2)
            with pytest.raises(QueueFullError):
                await refused
            await running.aclose()
            async with await waiting as served:
                assert [update.is_last async for update in served][-1]
        with pytest.raises(EngineClosedError):
            await llm.submit([1], params(1))


@asynchronous
async def test_leaving_a_submission_aborts_its_unfinished_texts() -> None:
    async with opened() as llm:
        async with await llm.submit([1], params(1, 4000, n=2)) as submission:
            assert (await anext(submission)).token_ids
            with pytest.raises(GenerationError, match="not finished"):
                submission.completions()
        while llm.num_running:
            await asyncio.sleep(0.001)
        assert [str(sequence.finish_reason) for sequence in submission.sequences] == ["abort", "abort"]
        assert all(sequence.history.num_output_tokens < 4000 for sequence in submission.sequences)
        assert [update.is_last async for update in submission][-1]
        with pytest.raises(GenerationError, match="was aborted"):
            submission.completions()


@asynchronous
async def test_traced_updates_hold_the_record_of_every_round_of_their_text() -> None:
    everything: list[RoundRecord] = []
    async with opened(draft="ngram,min=1", on_round=everything.append) as llm:
        submission = await llm.submit([1, 2, 1, 2], params(1, 20, n=2), trace=True)
        other = asyncio.ensure_future(llm.generate([3], params(2)))
        rounds: dict[int, list[SequenceRecord]] = defaultdict(list)
        async for update in submission:
            rounds[update.sequence.index].extend(update.rounds)
            assert sum(row.num_written for row in update.rounds) == len(update.token_ids)
        await other
        done = submission.completions()
    for index, completion in enumerate(done):
        assert len(rounds[index]) == completion.stats.rounds
        assert [row.prefix_length for row in rounds[index]] == [
            row.prefix_length
            for record in everything
            for row in record.sequences
            if (row.request_id, row.index) == (submission.request_id, index)
        ]
        written = [[*(row.tree.tokens[node] for node in row.path), row.bonus] for row in rounds[index]]
        assert tuple(token for tokens in written for token in tokens)[:20] == completion.token_ids
        assert sum(row.num_drafted for row in rounds[index]) == completion.stats.draft_tokens > 0


@asynchronous
async def test_records_kept_for_a_reader_hold_no_distributions() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = save_tiny_model(Path(place), chat=False)
        async with AsyncLLM(folder, f"model:{folder}", verify="token") as llm:
            submission = await llm.submit([1], params(1, 8), trace=True)
            rounds = [row async for update in submission for row in update.rounds]
    assert any(row.num_drafted for row in rounds)
    assert all(tree.distributions is None for row in rounds for tree in (row.tree, row.drafted))


@asynchronous
async def test_several_listeners_receive_the_rounds_until_they_are_removed() -> None:
    first: list[RoundRecord] = []
    second: list[RoundRecord] = []
    third: list[RoundRecord] = []
    async with opened(on_round=first.append) as llm:
        llm.on_round(second.append)
        remove = llm.on_round(third.append)
        (done,) = await llm.generate([1], params(1))
        remove()
        await llm.generate([2], params(2))
    assert first == second
    assert 0 < len(third) == done.stats.rounds < len(first)


@asynchronous
async def test_a_list_of_prompts_names_the_method_for_one() -> None:
    talk = [{"role": "user", "content": "a"}]
    async with opened() as llm:
        with pytest.raises(InvalidRequestError, match=r"list of 2 conversations.*chat") as refused:
            await llm.generate([talk, talk])  # type: ignore[arg-type]
        assert refused.value.param == "prompt"
        with pytest.raises(InvalidRequestError, match="list of 2 prompts"):
            await llm.generate(["a", "b"])  # type: ignore[list-item]


@asynchronous
async def test_token_ids_without_text_are_not_streamed_as_text() -> None:
    async with opened() as llm:
        with pytest.raises(InvalidRequestError, match=r"stream_updates.*submit") as refused:
            await anext(llm.stream([1], params(1, detokenize=False)))
        assert refused.value.param == "detokenize"
        with pytest.raises(InvalidRequestError, match="stream_updates"):
            next(llm.llm.stream([1], params(1, detokenize=False)))
        updates = [update async for update in llm.stream_updates([1], params(1, detokenize=False))]
    assert sum(len(update.token_ids) for update in updates) == 12
