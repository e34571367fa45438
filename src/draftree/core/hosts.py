"""Names of network addresses."""

from __future__ import annotations

__all__ = ["is_loopback"]


def is_loopback(name: str) -> bool:
    """Return whether a name or an address, without brackets, is one of this machine's own."""
    import ipaddress

    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
