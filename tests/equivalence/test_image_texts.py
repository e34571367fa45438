"""Prompts with images through `LLM`: as written by transformers, in batches, from cached prefixes, after a cancel."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.engine.memory import SlotAllocator
from draftree.loading.images import load_processor
from draftree.models.images import ImagePrompt
from draftree.models.torch import chunks
from draftree.models.torch.images import OwnPassReader
from draftree.outputs import Completion
from draftree.text.chat import images
from families import COMMON, drafter_folder
from native_samples import in_c
from vision_folders import picture, vision_folder
from vision_samples import IMAGE, vision_model

NAMES = ("gemma3", "idefics3", "llava", "qwen2_5_vl", "qwen3_vl")
"""Families whose processors need no torchvision."""
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3, ignore_eos=True)
LONG = " ".join(f"w{number}" for number in range(20, 44))
"""More tokens than a prefix needs to be shared."""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def load(name: str, where: Path, *, native: bool = False, draft: str = "ngram,min=1", **options: Any) -> LLM:
    folder = vision_folder(name, where, is_wide=native)
    plan = None if draft == "none" else "fixed"
    return LLM(folder, draft, dtype="float32", kernels="native" if native else "torch", plan=plan, **options)


def asked(question: str, *pictures: Any, system: str = "") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": each} for each in pictures]
    content = [*parts, {"type": "text", "text": question}] if parts else question
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": content}]


def wanted(name: str, where: Path, messages: list[dict[str, Any]], *, native: bool = False) -> list[int]:
    """What transformers writes."""
    processor = load_processor(vision_folder(name, where, is_wide=native))
    if name == "idefics3":  # its template writes lists of parts only
        messages = [
            {**each, "content": [{"type": "text", "text": each["content"]}]}
            if isinstance(each["content"], str)
            else each
            for each in messages
        ]
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="pt"
    )
    model = vision_model(name, is_wide=native)
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False, repetition_penalty=1.3)
    written: list[int] = ids[0, inputs["input_ids"].shape[1] :].tolist()
    return written


def ids_of(done: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in done]


@pytest.mark.parametrize("draft", ["none", "ngram,min=1", "early-exit,layers=1"])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=in_c)], ids=["torch", "native"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_transformers(name: str, native: bool, draft: str, where: Path) -> None:
    chats = [
        asked("w5 w6 w7 w5 w6", picture(1)),
        asked("w8 w9 w8 w9"),
        asked("w5 w6 w7", picture(2), picture(3, (8, 16))),
        asked("w10", picture(1), system="w3 w4"),
    ]
    done = load(name, where, native=native, draft=draft).chat(chats, GREEDY)
    assert ids_of(done) == [wanted(name, where, chat, native=native) for chat in chats]
    assert draft == "none" or sum(completion.stats.draft_tokens for completion in done) > 0


@pytest.mark.parametrize("draft", ["none", "ngram,min=1"])
@pytest.mark.parametrize("native", [False, pytest.param(True, marks=in_c)], ids=["torch", "native"])
def test_recurrent_states_after_an_image_are_taken_over(native: bool, draft: str, where: Path) -> None:
    """The target is the text decoder; the whole model reads the images."""
    llm = load("qwen3_5", where, native=native, draft=draft)
    chats = [
        asked("w5 w6 w5 w6", picture(1)),
        asked("w8 w9 w8 w9"),
        asked("w5 w6", picture(2), picture(3, (8, 16))),
        asked("w7", picture(1), system="w3 w4"),
    ]
    expected = [wanted("qwen3_5", where, chat, native=native) for chat in chats]
    assert ids_of(llm.chat(chats, GREEDY)) == expected
    again = [llm.chat(chat, GREEDY)[0] for chat in chats]
    assert ids_of(again) == expected
    prompt = llm.prompts.encode_chat(chats[0])
    assert isinstance(prompt, ImagePrompt)
    assert again[0].stats.cached_tokens >= prompt.num_first - 1
    llm.engine.check_integrity()


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=in_c)], ids=["torch", "native"])
@pytest.mark.parametrize("name", [*NAMES, "qwen3_5"])
def test_long_prompts_are_read_in_chunks_that_end_outside_of_images(
    name: str, native: bool, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "ROWS", 5)
    llm, rows = load(name, where, native=native), list[int]()
    chat = asked("w5 w6 w7", picture(2), picture(3, (8, 16)), system="w3 w4 w9 w11")
    reader = llm.requests.images
    assert isinstance(reader, OwnPassReader)
    prompt = llm.prompts.encode_chat(chat)
    assert isinstance(prompt, ImagePrompt)
    prompt = reader.prepared(prompt)
    assert reader._source is not None
    first = reader._source.model.get_decoder().layers[0]
    hook = first.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    assert reader.begin(prompt).result().length == prompt.num_first == sum(rows)
    hook.remove()
    ends = list(accumulate(rows))
    if name == "gemma3":  # tokens of an image see each other
        assert all((prompt[end - 1], prompt[end]) != (IMAGE, IMAGE) for end in ends[:-1])
        assert any(count > 5 for count in rows)
    else:
        assert max(rows) == 5
    assert ids_of(llm.chat(chat, GREEDY)) == [wanted(name, where, chat, native=native)]


def test_layers_that_share_keys_and_values(where: Path) -> None:
    """An image of Gemma 4 takes 64 tokens here, so that the next question shares them."""
    llm = load("gemma4", where)
    chats = [asked(question, picture(1, (8, 8))) for question in ("w5 w6", "w7 w8 w9")]
    answers = [llm.chat(chat, GREEDY)[0] for chat in chats]
    assert ids_of(answers) == [wanted("gemma4", where, chat) for chat in chats]
    assert answers[1].stats.cached_tokens > 64


@in_c
def test_keys_and_values_of_8_bits_are_not_those_of_an_image(where: Path) -> None:
    llm = load("llava", where, native=True, kv_dtype="int8")
    assert llm.chat(asked("w5"), GREEDY)[0].token_ids
    with pytest.raises(InvalidRequestError, match="without kv_dtype"):
        llm.chat(asked("w5", picture(1)), GREEDY)


@pytest.mark.parametrize("name", NAMES)
def test_the_image_counts(name: str, where: Path) -> None:
    llm = load(name, where, draft="none")
    prompts = [llm.prompts.encode_chat(asked("w5 w6", picture(number))) for number in (1, 2)]
    assert list(prompts[0]) == list(prompts[1])
    answers = llm.chat([asked("w5 w6", picture(number)) for number in (1, 2)], replace(GREEDY, logprobs=1))
    first, second = (completion.logprobs[0] for completion in answers if completion.logprobs)
    assert abs(first.logprob - second.logprob) > 1e-4 or first.token_id != second.token_id


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=in_c)], ids=["torch", "native"])
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_the_same_image_is_read_once_and_another_one_never_shared(name: str, native: bool, where: Path) -> None:
    llm = load(name, where, native=native)
    chats = [
        asked("w5 w6", picture(1), system=LONG),
        asked("w7 w8", picture(1), system=LONG),
        asked("w5 w6", picture(2), system=LONG),
        asked("w5 w6", system=LONG),
    ]
    answers = [llm.chat(chat, GREEDY)[0] for chat in chats]
    assert ids_of(answers) == [wanted(name, where, chat, native=native) for chat in chats]
    first, same, other, _ = (completion.stats.cached_tokens for completion in answers)
    prompt = llm.prompts.encode_chat(chats[1])
    assert isinstance(prompt, ImagePrompt)
    assert (first, other) == (0, 0)
    assert same >= prompt.num_first - 1 > 24


def test_a_conversation_goes_on_from_its_own_prefix(where: Path) -> None:
    llm = load("qwen3_vl", where)
    chat = asked("w5 w6", picture(1), system=LONG)
    first = llm.chat(chat, GREEDY)[0]
    longer = [*chat, {"role": "assistant", "content": first.text}, {"role": "user", "content": "w9"}]
    second = llm.chat(longer, GREEDY)[0]
    assert list(second.token_ids) == wanted("qwen3_vl", where, longer)
    assert second.stats.cached_tokens > len(llm.prompts.encode_chat(chat)) - 4


def counted(llm: LLM) -> list[ImagePrompt]:
    """A list that grows with every prompt that is read."""
    reads: list[ImagePrompt] = []
    reader = llm.requests.images
    assert reader is not None
    begins = reader.begin
    reader.begin = lambda prompt: reads.append(prompt) or begins(prompt)  # type: ignore[method-assign, func-returns-value]
    return reads


def test_several_texts_read_an_image_once(where: Path) -> None:
    llm = load("llava", where)
    reads = counted(llm)
    chat = asked("w5 w6", picture(1), system=LONG)
    assert len(llm.chat(chat, replace(GREEDY, temperature=0.9, n=3))) == 3
    assert len(reads) == 1


@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_samples_do_not_depend_on_the_drafter(name: str, where: Path) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.9, seed=3, n=2)
    texts = [
        ids_of(load(name, where, draft=draft).chat(asked("w5", picture(4)), params)) for draft in ("none", "ngram")
    ]
    assert texts[0] == texts[1]


def test_a_text_that_is_cancelled_leaves_nothing_behind(where: Path) -> None:
    llm = load("qwen2_5_vl", where)
    chat = asked("w5 w6 w7", picture(1), system=LONG)
    stream = llm.stream(chat, GREEDY)
    next(stream)
    stream.close()
    llm.engine.check_integrity()
    assert ids_of(llm.chat(chat, GREEDY)) == [wanted("qwen2_5_vl", where, chat)]
    llm.engine.check_integrity()


@in_c
def test_other_texts_go_on_while_an_image_is_read(where: Path) -> None:
    """Their passes run between the beginning and the end of the pass that reads the image."""
    llm = load("llava", where, native=True)
    reader = llm.requests.images
    assert reader is not None
    begins, may_end, began = reader.begin, threading.Event(), threading.Event()

    def begin(prompt: ImagePrompt) -> Future[Any]:
        began.set()
        read = begins(prompt)
        held = Future[Any]()
        threading.Thread(target=lambda: (may_end.wait(60), held.set_result(read.result()))).start()
        return held

    reader.begin = begin  # type: ignore[method-assign]
    chats = [asked("w5 w6", picture(1)), asked("w8 w9 w8 w9")]
    (seeing,), (other,) = (llm.requests.sequences(llm.prompts.encode_chat(chat), GREEDY) for chat in chats)
    llm.engine.add(seeing, other)
    while not other.is_finished:
        llm.engine.step()
    assert began.is_set()
    assert not seeing.history.output.tolist()
    may_end.set()
    while not seeing.is_finished:
        llm.engine.step()
    for sequence, chat in ((seeing, chats[0]), (other, chats[1])):
        assert sequence.history.output.tolist() == wanted("llava", where, chat, native=True)


def test_a_preempted_text_reads_its_image_again(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [asked(f"w{number} w6", picture(number), system=LONG) for number in range(1, 4)]
    llm = load("llava", where, prefix_cache_size=0)
    reads, fits = counted(llm), iter([True, True, True, False])
    monkeypatch.setattr(SlotAllocator, "fits", lambda *args, **options: "ahead" not in options or next(fits, True))
    assert ids_of(llm.chat(chats, GREEDY)) == [wanted("llava", where, chat) for chat in chats]
    assert len(reads) == 4
    llm.engine.check_integrity()


def test_a_prompt_is_read_whole_where_its_first_tokens_cannot_be_read_alone(where: Path) -> None:
    llm = load("llava", where)
    chat = asked("w5 w6 w7", picture(1))
    prompt = llm.prompts.encode_chat(chat)
    assert isinstance(prompt, ImagePrompt)
    cut = replace(prompt, num_first=prompt.num_first - 3)  # within the image
    (sequence,) = llm.requests.sequences(cut, GREEDY)
    assert sequence.images is not None
    assert sequence.images.num_first == len(prompt)
    for _ in llm.engine.stream(sequence):
        pass
    assert sequence.history.output.tolist() == wanted("llava", where, chat)


def test_generate_takes_a_text_with_placeholders(where: Path) -> None:
    llm = load("gemma3", where)
    prompt = {"text": "<bos> w5 <start_of_image> w6 w7", "images": [picture(1)]}
    processor = load_processor(vision_folder("gemma3", where))
    inputs = processor(text=[prompt["text"]], images=[[picture(1)]], add_special_tokens=False, return_tensors="pt")
    ids = vision_model("gemma3").generate(**inputs, max_new_tokens=12, do_sample=False, repetition_penalty=1.3)
    expected = ids[0, inputs["input_ids"].shape[1] :].tolist()
    assert ids_of(llm.generate(prompt, GREEDY)) == [expected]
    assert ids_of(llm.generate([prompt, "w5 w6"], GREEDY))[0] == expected
    assert list(llm.prompts.encode(prompt)) == inputs["input_ids"][0].tolist()


def test_requests_of_coroutines_with_and_without_images(where: Path) -> None:
    chats = [asked("w5 w6", picture(1)), asked("w9 w8"), asked("w5 w6", picture(2))]

    async def run() -> list[Completion]:
        folder = vision_folder("qwen3_vl", where)
        llm = AsyncLLM(folder, "ngram,min=1", dtype="float32", kernels="torch", plan="fixed")
        try:
            return [each[0] for each in await asyncio.gather(*(llm.chat(chat, GREEDY) for chat in chats))]
        finally:
            await llm.close()

    assert ids_of(asyncio.run(run())) == [wanted("qwen3_vl", where, chat) for chat in chats]


def test_a_loaded_model_with_its_processor(where: Path) -> None:
    processor = load_processor(vision_folder("llava", where))
    llm = LLM(vision_model("llava"), "ngram,min=1", tokenizer=processor)
    chat = asked("w5 w6 w7", picture(1))
    assert ids_of(llm.chat(chat, GREEDY)) == [wanted("llava", where, chat)]


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def test_an_image_may_be_a_file_its_bytes_or_a_data_url(where: Path, tmp_path: Path) -> None:
    llm = load("llava", where, draft="none")
    content = encoded(picture(1))
    (tmp_path / "a b.png").write_bytes(content)
    url = "data:image/png;base64," + base64.b64encode(content).decode()
    sources = [content, tmp_path / "a b.png", str(tmp_path / "a b.png"), (tmp_path / "a b.png").as_uri(), url]
    parts = [{"type": "image", "image": source} for source in sources]
    parts += [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, {"type": "image", "url": url}]
    digests = set()
    for part in [{"type": "image", "image": picture(1)}, *parts]:
        prompt = llm.prompts.encode_chat([{"role": "user", "content": [part, {"type": "text", "text": "w5"}]}])
        assert isinstance(prompt, ImagePrompt)
        digests.add(prompt.digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.org/cat.png", "is a remote URL, and these are not fetched"),
        ("/nowhere/cat.png", "cannot be read: No such file"),
        (b"no image", "the image cannot be read"),
        (encoded(picture(1))[:200], "the image cannot be read"),
        ("data:image/png;base64,%%%", "is not valid base64"),
        ("data:image/png,abc", "has another form"),
        (5, "is of type int"),
    ],
)
def test_an_image_that_cannot_be_read_is_refused(source: Any, message: str, where: Path) -> None:
    llm = load("llava", where, draft="none")
    with pytest.raises(InvalidRequestError, match=message) as error:
        llm.chat(asked("w5", source), GREEDY)
    assert error.value.param == "messages[0].content[0].image"


def test_limits_of_images(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load("llava", where, draft="none")
    content = encoded(picture(1))
    for name, limit, message in (("MAX_PIXELS", 95, "12 x 8 pixels"), ("MAX_BYTES", 50, "and 50 are allowed")):
        with monkeypatch.context() as patch:
            patch.setattr(images, name, limit)
            with pytest.raises(InvalidRequestError, match=message):
                llm.chat(asked("w5", content), GREEDY)
    with pytest.raises(InvalidRequestError, match="has 65 images, and 64 are allowed"):
        llm.chat(asked("w5", *[picture(1)] * 65), GREEDY)


def test_a_typed_placeholder_stands_for_no_image(where: Path) -> None:
    llm = load("qwen2_5_vl", where, draft="none")
    with pytest.raises(InvalidRequestError, match="control token"):
        llm.chat(asked("w5 <|image_pad|>", picture(1)), GREEDY)


def test_what_has_no_images_is_refused(where: Path, tmp_path: Path) -> None:
    llm = load("llava", where, draft="none")
    prompt = {"text": "w5 <image> w6", "images": [picture(1)]}
    with pytest.raises(InvalidRequestError, match="a beam search reads no images"):
        llm.beam_search(asked("w5", picture(1)))
    with pytest.raises(InvalidRequestError, match="prompt_logprobs is for prompts without images"):
        llm.generate(prompt, replace(GREEDY, prompt_logprobs=1))
    with pytest.raises(InvalidRequestError, match="cannot process the prompt with its 2 image"):
        llm.generate(prompt | {"images": [picture(1)] * 2}, GREEDY)
    with pytest.raises(InvalidRequestError, match="ends with an image: add text"):
        llm.generate(prompt | {"text": "w5 <image>"}, GREEDY)
    with pytest.raises(InvalidRequestError, match="give a text, token ids, or a text with images"):
        llm.generate({"text": "w5", "images": "cat.png"}, GREEDY)
    text = LLM(drafter_folder("llama", tmp_path), "none", tokenizer=load_processor(vision_folder("llava", where)))
    with pytest.raises(InvalidRequestError, match="this model reads no images"):
        text.chat(asked("w5", picture(1)), GREEDY)


@pytest.mark.parametrize(
    ("name", "package"), [("mistral3", "run pip install torchvision"), ("smolvlm", "num2words|torchvision")]
)
def test_a_missing_package_is_named(name: str, package: str, where: Path) -> None:
    pytest.importorskip("draftree")
    llm = load(name, where, draft="none")
    assert llm.chat(asked("w5 w6"), GREEDY)[0].token_ids
    with pytest.raises(InvalidRequestError, match=package):
        llm.chat(asked("w5", picture(1)), GREEDY)


def test_a_template_that_writes_lists_of_parts_only_gets_them(where: Path) -> None:
    llm = load("idefics3", where, draft="none")
    ids = llm.prompts.encode_chat(asked("w5 w6 w7"))
    assert list(ids) == [1, 81, 5, 6, 7, 80, 82]


def test_layers_that_attend_to_images_themselves_are_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    tiles = {"max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]], "vision_output_dim": 32}
    eyes = sizes | tiles | {"num_global_layers": 1, "attention_heads": 2, "intermediate_layers_indices": [0]}
    words = COMMON | {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_scaling": None}
    config = AutoConfig.for_model("mllama", vision_config=eyes, text_config=words, image_token_index=95)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "mllama")
    llm = LLM(tmp_path / "mllama", "none", dtype="float32")
    assert llm.generate([[1, 5, 6]], GREEDY)[0].token_ids
    prompt = ImagePrompt((1, 95, 5, 6), {"pixel_values": torch.zeros(1, 1, 1, 3, 8, 8)}, 3)
    with pytest.raises(InvalidRequestError, match="attend to the images themselves"):
        llm.requests.sequences(prompt, GREEDY)
