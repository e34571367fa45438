"""What `draftree verify-server` tells devices."""

from __future__ import annotations

import pytest

from draftree.cli.verify_server import device_address
from draftree.remote.address import RemoteAddress


@pytest.mark.parametrize(
    ("url", "split", "told"),
    [
        ("http://127.0.0.1:8000", 0, "remote:http://127.0.0.1:8000"),
        ("https://0.0.0.0:8443", 0, "remote:https://HOST:8443"),
        ("http://[::]:8000", 0, "remote:http://HOST:8000"),
        ("http://[::1]:8000", 4, "remote:http://[::1]:8000?split=4&weights=MODEL"),
    ],
)
def test_devices_are_told_an_address_that_they_can_use(url: str, split: int, told: str) -> None:
    assert device_address(url, split) == told
    assert RemoteAddress.parse(told).split == split
