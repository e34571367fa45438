"""Sound: transcriptions and translations equal to the library, formats, forms, and what is refused."""

from __future__ import annotations

import io
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.serve import audio
from draftree.serve.api.audio import parse_form
from draftree.serve.audio import Resampler, read_sound
from draftree.serve.errors import ApiError
from draftree.serve.pool import ServedModel
from serving import HTTP, NAME, Running, running_server, settings
from whispers import samples, saved, token, wav


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("width", "error"), [(1, 2e-2), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
def test_wav_files_of_every_width(width: int, error: float, channels: int) -> None:
    values = samples(0.1)
    found = read_sound(wav(values, width=width, channels=channels), 16000)
    assert found.dtype == np.float32
    assert np.abs(found - values).max() < error


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
def test_tones_are_the_same_at_another_rate(rate: int) -> None:
    found = read_sound(wav(samples(0.5, rate=rate), rate=rate, width=4), 16000)
    wanted = samples(0.5)
    assert abs(len(found) - len(wanted)) <= 1
    inner = slice(200, len(wanted) - 200)
    assert np.abs(found[inner] - wanted[inner]).max() < 2e-3


def test_tones_above_half_of_the_new_rate_are_removed() -> None:
    times = np.arange(48000) / 48000
    high = np.sin(2 * np.pi * 11000 * times).astype(np.float32)
    assert np.abs(read_sound(wav(high, rate=48000), 16000)[200:-200]).max() < 2e-3


@pytest.mark.parametrize("rate", [1000, 8000, 16001, 44100, 767_999])
def test_blocks_of_any_size_give_the_same_samples(rate: int) -> None:
    values = np.random.default_rng(0).standard_normal(20_001).astype(np.float32)

    def resampled(*cuts: int) -> np.ndarray:
        resampler = Resampler(rate, 16000)
        parts = [resampler.push(part) for part in np.split(values, cuts)]
        return np.concatenate([*parts, resampler.finish()])

    whole = resampled()
    assert len(whole) == -(-len(values) * 16000 // rate)
    np.testing.assert_allclose(resampled(0, 1, 2, 700, 701, 15_000), whole, rtol=0, atol=1e-5)


def test_memory_of_a_low_rate_is_bounded() -> None:
    data = wav(np.zeros(2**20, np.float32), rate=1000, width=1)
    tracemalloc.start()
    try:
        found = read_sound(data, 16000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 16 * 2**20
    assert peak < 3 * found.nbytes


def riff(form: bytes, samples: bytes, *, riff_size: int | None = None, data_size: int | None = None) -> bytes:
    """A WAV file with these headers; sizes that are None are right."""
    data = len(samples) if data_size is None else data_size
    body = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"LIST\4\0\0\0info"
    body += b"data" + struct.pack("<I", data) + samples
    return b"RIFF" + struct.pack("<I", len(body) if riff_size is None else riff_size) + body


def form_of(tag: int, width: int, *, channels: int = 1, is_extensible: bool = False) -> bytes:
    """The format of samples with this many bytes."""
    numbers = (channels, 16000, 16000 * width * channels, width * channels, 8 * width)
    if not is_extensible:
        return struct.pack("<HHIIHH", tag, *numbers)
    identifier = struct.pack("<H", tag) + bytes.fromhex("000000001000800000aa00389b71")
    return struct.pack("<HHIIHHHHI", 0xFFFE, *numbers, 22, 8 * width, 4) + identifier


def raw(values: np.ndarray, tag: int, width: int) -> bytes:
    """Samples as their bytes."""
    if tag == 3:
        return values.astype(f"<f{width}").tobytes()
    whole = np.round(values.astype(np.float64) * (2 ** (8 * width - 1) - 1)).astype("<i4")
    return whole.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


@pytest.mark.parametrize("is_extensible", [False, True])
@pytest.mark.parametrize(("tag", "width"), [(1, 2), (1, 3), (1, 4), (3, 4), (3, 8)])
@pytest.mark.parametrize("size", [None, 0, 0xFFFFFFFF])
def test_wav_files_of_every_format_and_of_unknown_size(
    tag: int, width: int, is_extensible: bool, size: int | None
) -> None:
    values = samples(0.1)
    data = riff(
        form_of(tag, width, is_extensible=is_extensible), raw(values, tag, width), riff_size=size, data_size=size
    )
    assert np.abs(read_sound(data, 16000) - values).max() < 1e-4


def test_samples_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not finite"):
        read_sound(riff(form_of(3, 4), np.array([0, np.nan], "<f4").tobytes()), 16000)


def test_every_changed_byte_of_a_header_gives_samples_or_one_sentence() -> None:
    data = bytearray(wav(samples(0.01)))
    for place in range(44):
        for value in (0, 1, 127, 128, 255, data[place] ^ 1):
            changed = bytes(data[:place] + bytes([value]) + data[place + 1 :])
            with suppress(InvalidRequestError):
                assert len(read_sound(changed, 16000))


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG"])
def test_more_seconds_than_allowed_are_refused(form: str) -> None:
    data = wav(np.zeros(9000, np.float32), rate=1000)
    if form != "WAV":
        soundfile = pytest.importorskip("soundfile")
        with io.BytesIO() as file:
            soundfile.write(file, np.zeros(90_000), 8000 if form == "OGG" else 10_000, format=form)
            data = file.getvalue()
    assert len(read_sound(data, 16000, max_seconds=12)) in (144_000, 180_000)
    with pytest.raises(InvalidRequestError, match="more than 8 seconds"):
        read_sound(data, 16000, max_seconds=8)


def test_strange_rates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="samples per second"):
        read_sound(wav(samples(0.1), rate=500), 16000)


def test_fields_of_a_form_keep_their_bytes() -> None:
    data = bytes(range(256)) + b"\r\n--not-b\r\n\r\n"
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a \xc3\xa9.wav"\r\nContent-Type: audio/wav'
        b"\r\n\r\n" + data + b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n\r\n--b--\r\n'
    )
    assert parse_form('multipart/form-data; boundary="b"', body) == [("file", data), ("model", b"")]


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"])
def test_other_bodies_are_refused(kind: str) -> None:
    with pytest.raises(ApiError):
        parse_form(kind, b"--b--\r\n")


GREEDY = SamplingParams(temperature=0, max_tokens=None)
SECONDS = 0.8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    served = ServedModel(NAME, AsyncLLM(folder, "suffix", dtype="float32"))
    with running_server([served], settings_given=settings(max_prompt_tokens=100)) as found:
        yield found


@pytest.fixture(scope="module")
def library(folder: Path) -> LLM:
    return LLM(folder, "none", dtype="float32")


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def sent() -> tuple[str, bytes]:
    return ("speech.wav", wav(samples(SECONDS)))


def transcribed(library: LLM, **given: Any) -> Any:
    (done,) = library.transcribe(read_sound(sent()[1], 16000), GREEDY, **given)
    return done


@pytest.mark.parametrize("language", ["de", "German", None])
def test_the_text_equals_the_library(client: openai.OpenAI, library: LLM, language: str | None) -> None:
    given = {} if language is None else {"language": language}
    found = client.audio.transcriptions.create(model=NAME, file=sent(), **given)  # type: ignore[call-overload]
    done = transcribed(library, language=language)
    assert found.text == library.transcriber.text(done.token_ids) != ""
    assert found.usage.seconds == SECONDS


def test_translations_and_prompts_equal_the_library(client: openai.OpenAI, library: LLM) -> None:
    with pytest.warns(DeprecationWarning, match="deprecated"):  # of the client
        found = client.audio.translations.create(model=NAME, file=sent(), prompt="a fox", temperature=0)
    done = transcribed(library, task="translate", prompt="a fox")
    assert found.text == library.transcriber.text(done.token_ids)
    assert found.text != library.transcriber.text(transcribed(library, task="translate").token_ids)


def test_text_is_plain(client: openai.OpenAI, library: LLM) -> None:
    found = client.audio.transcriptions.create(model=NAME, file=sent(), language="de", response_format="text")
    assert str(found) == library.transcriber.text(transcribed(library, language="de").token_ids) + "\n"


def test_verbose_json_has_the_segments(client: openai.OpenAI, library: LLM) -> None:
    found = client.audio.transcriptions.create(
        model=NAME, file=sent(), language="de", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    done = transcribed(library, language="de", timestamps=True)
    wanted = library.segments(done, seconds=SECONDS)
    assert found.language == "german"
    assert found.duration == SECONDS
    assert found.segments is not None
    assert len(wanted) > 0
    assert [(one.start, one.end, one.text) for one in found.segments] == [
        (round(one.start, 3), round(one.end, 3), one.text) for one in wanted
    ]
    assert [one.tokens for one in found.segments] == [list(done.token_ids[one.first : one.last]) for one in wanted]
    assert all(one.avg_logprob < 0 and 0 <= one.no_speech_prob <= 1 for one in found.segments)
    assert token("notimestamps") + 1 <= done.token_ids[0]


def test_subtitles_have_the_times_of_the_segments(client: openai.OpenAI, library: LLM) -> None:
    wanted = library.segments(transcribed(library, language="de", timestamps=True), seconds=SECONDS)
    for kind, point in (("srt", ","), ("vtt", ".")):
        found = str(client.audio.transcriptions.create(model=NAME, file=sent(), language="de", response_format=kind))  # type: ignore[call-overload]
        lines = [line for line in found.splitlines() if "-->" in line]
        assert lines == [
            f"00:00:{f'{one.start:06.3f}'.replace('.', point)} --> 00:00:{f'{one.end:06.3f}'.replace('.', point)}"
            for one in wanted
        ]
        assert found.startswith("1\n" if kind == "srt" else "WEBVTT\n\n")


def spoken(seconds: float) -> tuple[str, bytes]:
    """A sound whose tones change, so that its windows differ."""
    whole = samples(seconds) * np.linspace(0.1, 4.0, int(seconds * 16000), dtype=np.float32)
    return ("long.wav", wav(whole))


@pytest.mark.parametrize("language", ["de", None])
def test_long_sounds_equal_the_library(client: openai.OpenAI, library: LLM, language: str | None) -> None:
    file, given = spoken(3.3), {} if language is None else {"language": language}
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=0)
    (wanted,) = library.transcribe_long(read_sound(file[1], 16000), params, language=language, prompt="a fox")
    assert len(wanted.windows) > 3
    common: Any = {"model": NAME, "file": file, "prompt": "a fox", "extra_body": {"max_tokens": 20}, **given}
    found = client.audio.transcriptions.create(**common, response_format="verbose_json")
    assert found.text == wanted.text != ""
    assert (found.duration, found.usage.seconds) == (3.3, 3.3)
    assert [(one.start, one.end, one.text, one.tokens) for one in found.segments] == [
        (round(one.start, 3), round(one.end, 3), one.text, list(wanted.token_ids[one.first : one.last]))
        for one in wanted.segments
    ]
    assert found.segments[-1].start > 1.0
    assert all(one.avg_logprob < 0 for one in found.segments)
    assert client.audio.transcriptions.create(**common).text == wanted.text
    times = [line for line in str(client.audio.transcriptions.create(**common, response_format="vtt")).splitlines()
             if "-->" in line]  # fmt: skip
    assert len(times) == len(wanted.segments)


def test_sampled_texts_repeat_with_a_seed(running: Running) -> None:
    def text(seed: int) -> str:
        data = {"temperature": "1", "seed": str(seed), "language": "en"}
        answer = HTTP.post(f"{running.url}/v1/audio/transcriptions", data=data, files={"file": sent()})
        return str(answer.raise_for_status().json()["text"])

    assert text(3) == text(3)
    assert len({text(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"language": "xx"}, "language"),
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "1.5"}, "temperature"),
        ({"stream": "true"}, "stream"),
        ({"include[]": "logprobs"}, "include[]"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities[]"),
        ({"timestamp_granularities[]": "word", "response_format": "verbose_json"}, "timestamp_granularities[]"),
        ({"langauge": "de"}, "langauge"),
        ({"model": "nothing"}, "model"),
        ({"draft": "nothing"}, "draft"),
    ],
)
def test_values_that_cannot_be_honoured_are_refused(running: Running, data: dict[str, str], param: str) -> None:
    answer = HTTP.post(f"{running.url}/v1/audio/transcriptions", data=data, files={"file": sent()})
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is empty"),
        (b"fLaC and more", "soundfile"),
        (b"RIFF\0\0\0\0WAVE", "damaged WAV"),
        (wav(samples(0.5))[:60] + b"", "seconds|samples"),
        (wav(samples(0.0)), "no samples"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    running: Running, data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audio, "_soundfile", lambda: None)
    answer = HTTP.post(f"{running.url}/v1/audio/transcriptions", files={"file": ("a.flac", data)})
    if reason == "seconds|samples":  # a cut file has the samples before the cut
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "file"


def test_other_formats_are_read_by_soundfile(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class SoundFile:
        samplerate, channels = 16000, 1

        def __init__(self, file: io.BytesIO) -> None:
            assert file.read() == b"OggS"
            self.rest = samples(SECONDS)[:, None]

        def read(self, count: int, *, dtype: str, always_2d: bool) -> np.ndarray:
            assert (dtype, always_2d) == ("float32", True)
            block, self.rest = self.rest[:count], self.rest[count:]
            return block

        def __enter__(self) -> SoundFile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(audio, "_soundfile", lambda: SimpleNamespace(SoundFile=SoundFile))
    found = HTTP.post(f"{running.url}/v1/audio/transcriptions", files={"file": ("a.ogg", b"OggS")})
    assert found.status_code == 200, found.text


def test_bodies_that_are_no_forms_are_refused(running: Running) -> None:
    url, kind = f"{running.url}/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=b"}
    for given in (
        {"json": {"file": "a"}},
        {"content": b"--b\r\nContent-Disposition: form-data; name=file\r\n\r\nab", "headers": kind},
        {"content": b"--b\r\nnothing\r\n\r\nab\r\n--b--\r\n", "headers": kind},
        {"data": {"model": NAME}, "files": {"other": b"a"}},
        {"data": {"model": NAME, "language": "de"}},
    ):
        answer = HTTP.post(url, **given)  # type: ignore[arg-type]
        assert answer.status_code == 400, answer.text


def test_models_of_text_are_refused() -> None:
    with running_server() as other:
        answer = HTTP.post(f"{other.url}/v1/audio/transcriptions", files={"file": sent()})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "model"
