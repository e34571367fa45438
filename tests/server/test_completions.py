"""Plain completions: several prompts, echo, offsets and streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from draftree import SamplingParams
from draftree.serve.logprobs import OffsetLogprobs, TokenStarts, TokenTexts
from draftree.serve.streams import ChunkEncoder, event
from draftree.text.detokenize import Detokenizer
from draftree.text.streams import byte_alphabet
from draftree.text.tokenizer import Tokenizer
from serving import NAME, events, plain_llm
from text_backends import byte_fallback, byte_level

PROMPTS = ["The quick brown fox", "def add(first"]
URL = "/v1/completions"


def ask(client: openai.OpenAI, **given: Any) -> Any:
    return client.completions.create(**{"model": NAME, "prompt": PROMPTS[0], "max_tokens": 12, "seed": 3, **given})


def expected(prompts: Any = PROMPTS[0], **given: Any) -> list[Any]:
    return plain_llm().generate(prompts, SamplingParams(**{"max_tokens": 12, "seed": 3, **given}))


def ids_of(text: str) -> list[int]:
    tokenizer = plain_llm().tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text)


def test_prompts_of_every_kind(client: openai.OpenAI) -> None:
    one, two = (done.text for done in expected(PROMPTS))
    rows = [ids_of(text) for text in PROMPTS]
    for prompt, wanted in [(PROMPTS[0], [one]), (PROMPTS, [one, two]), (rows[0], [one]), (rows, [one, two])]:
        answer = ask(client, prompt=prompt)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
    assert answer.usage.prompt_tokens == sum(map(len, rows))
    assert answer.usage.completion_tokens == 24


def test_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPTS[0])
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"


def test_choices_are_numbered_by_prompt(client: openai.OpenAI) -> None:
    wanted = [done.text for done in expected(PROMPTS, n=2)]
    answer = ask(client, prompt=PROMPTS, n=2, best_of=2)
    assert [choice.text for choice in answer.choices] == wanted
    found = [""] * 4
    for chunk in ask(client, prompt=PROMPTS, n=2, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert found == wanted


def test_echo(client: openai.OpenAI) -> None:
    (done,) = expected()
    assert ask(client, echo=True).choices[0].text == PROMPTS[0] + done.text
    streamed = "".join(chunk.choices[0].text for chunk in ask(client, echo=True, stream=True))
    assert streamed == PROMPTS[0] + done.text
    assert ask(client, prompt=ids_of(PROMPTS[0]), echo=True).choices[0].text == PROMPTS[0] + done.text


def test_special_tokens_of_an_echoed_prompt(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>The quick</s> fox"
    for given in (prompt, ids_of(prompt)):
        choice = ask(client, prompt=given, echo=True, logprobs=0).choices[0]
        assert choice.text.startswith(prompt)
        found = dict(zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True))
        assert (found[0], found[12], found[prompt.index("</s>")]) == ("<|im_start|>", "The", "</s>")


def test_offsets_of_characters_in_several_byte_tokens() -> None:
    tokenizer = Tokenizer(byte_fallback())
    ids = tokenizer.encode("문장입니다", add_special_tokens=False)
    offsets = OffsetLogprobs(TokenTexts(tokenizer), skip_special_tokens=True, prompt_ids=())
    found = offsets.push([None] * len(ids), tuple(ids), is_last=True)["text_offset"]
    assert found[-15:] == [place for place in range(5) for _ in range(3)]


WHOLE, STARTS = "é👍b".encode(), [0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("written", "byte_level_starts", "fallback_starts"),
    [
        (WHOLE, STARTS, STARTS),
        (WHOLE[:4], STARTS[:4], [0, 1, 2, 3]),
        (WHOLE[:1] + b"b", [0, 1], [0, 1]),
        (WHOLE[:4] + b"b", [0, 0, 1, 1, 2], [0, 1, 2, 3, 4]),
        (b"\x80\x80b", [0, 1, 2], [0, 1, 2]),
        (WHOLE[:3] + WHOLE, [0, 0, 1, *(2 + start for start in STARTS)], [*range(9), 9]),
    ],
)
@pytest.mark.parametrize("kind", ["byte-level", "fallback"])
def test_offsets_of_incomplete_characters(
    written: bytes, byte_level_starts: list[int], fallback_starts: list[int], kind: str
) -> None:
    tokenizer = Tokenizer(byte_level() if kind == "byte-level" else byte_fallback())
    names = {name: token for token, name in enumerate(tokenizer.vocabulary())}
    letters = {code: letter for letter, code in byte_alphabet().items()}
    ids = [
        names[letters[code]] if kind == "byte-level" else names["b"] if code == ord("b") else names[f"<0x{code:02X}>"]
        for code in written
    ]
    starts = TokenStarts(Detokenizer(tokenizer, skip_special_tokens=True))
    found = starts.push([*ids, tokenizer.eos_token_id], is_last=True)
    assert starts.text == tokenizer.decode(ids, True)
    assert found[:-1] == (byte_level_starts if kind == "byte-level" else fallback_starts)
    assert found[-1] == len(starts.text)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_an_echoed_prompt(client: openai.OpenAI, stream: bool) -> None:
    answer = ask(client, echo=True, logprobs=2, stream=stream)
    chunks = list(answer) if stream else [answer]
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    tokens, offsets, found, top = (
        [row for part in parts for row in getattr(part, name)]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    )
    ids = ids_of(PROMPTS[0])
    (done,) = expected(logprobs=2, prompt_logprobs=2)
    assert len(tokens) == len(offsets) == len(found) == len(top) == len(ids) + 12
    assert (found[0], top[0]) == (None, None)
    entries = [entry for entry in (*done.prompt_logprobs, *done.logprobs) if entry is not None]
    assert found[1:] == pytest.approx([entry.logprob for entry in entries], abs=1e-3)
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert offsets == sorted(offsets)
    for token, start in zip(tokens[: len(ids)], offsets, strict=False):
        assert text[start:].startswith(token)
    assert offsets[len(ids)] == len(PROMPTS[0])


def test_offsets_without_echo(client: openai.OpenAI) -> None:
    found = ask(client, logprobs=0).choices[0].logprobs
    assert found.text_offset[0] == 0
    assert len(found.tokens) == 12
    assert all(len(row) == 1 for row in found.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_alone(http: httpx.Client, stream: bool) -> None:
    body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    answers = list(events(http, URL, body)) if stream else [http.post(URL, json=body).json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert "".join(choice["text"] for choice in choices) == PROMPTS[0]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert "".join(tokens) == PROMPTS[0]
    assert choices[-1]["finish_reason"] == "length"
    assert answers[-1]["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_and_token_ids(http: httpx.Client) -> None:
    body = {"model": NAME, "prompt": PROMPTS, "max_tokens": 4, "prompt_logprobs": 0, "return_token_ids": True}
    for text, choice in zip(PROMPTS, http.post(URL, json=body).json()["choices"], strict=True):
        assert choice["prompt_token_ids"] == ids_of(text)
        assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
        assert len(choice["token_ids"]) == 4


def test_truncated_prompt(http: httpx.Client) -> None:
    body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 4, "truncate_prompt_tokens": 3, "echo": True, "seed": 3}
    answer = http.post(URL, json=body).json()
    assert answer["usage"]["prompt_tokens"] == 3
    (done,) = expected(truncate_prompt_tokens=3, max_tokens=4)
    (choice,) = answer["choices"]
    assert choice["text"].endswith(done.text)
    assert len(choice["text"]) < len(PROMPTS[0]) + len(done.text)


FIELDS = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": 'a "name"'}


@pytest.mark.parametrize("own", [{"choices": []}, {"choices": [{"text": "é\n\u2028}"}], "usage": None}])
def test_a_chunk_is_the_event_of_all_its_fields(own: dict[str, object]) -> None:
    found = ChunkEncoder(FIELDS).event(own)
    assert found == event({**FIELDS, **own})
    assert json.loads(found.removeprefix(b"data: ")) == {**FIELDS, **own}


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        ChunkEncoder(FIELDS).event({"choices": [float("nan")]})
