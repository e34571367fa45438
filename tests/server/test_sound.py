"""Sound files as samples: every width of WAV, resampling against sampled tones, and forms."""

from __future__ import annotations

import numpy as np
import pytest

from draftree.core.errors import InvalidRequestError
from draftree.serve.audio.forms import parse_form
from draftree.serve.audio.sound import read_sound, resampled
from draftree.serve.errors import ApiError
from whispers import samples, wav


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
    assert np.abs(resampled(high, 48000, 16000)[200:-200]).max() < 2e-3


def test_strange_rates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="samples per second"):
        read_sound(wav(samples(0.1), rate=500), 16000)


def test_fields_of_a_form_keep_their_bytes() -> None:
    data = bytes(range(256)) + b"\r\n--not-b\r\n\r\n"
    body = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a \xc3\xa9.wav"\r\nContent-Type: audio/wav'
        b"\r\n\r\n" + data + b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n\r\n--b--\r\n'
    )
    file, model = parse_form('multipart/form-data; boundary="b"', body)
    assert (file.name, file.data) == ("file", data)
    assert (model.name, model.filename, model.data) == ("model", None, b"")


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=b"])
def test_other_bodies_are_refused(kind: str) -> None:
    with pytest.raises(ApiError):
        parse_form(kind, b"--b--\r\n")
