"""Seconds of a text as a client sees it, from the server's simulated seconds and the network. No torch."""

from __future__ import annotations

import math

__all__ = ["client_seconds", "streamed_seconds"]


def client_seconds(
    server_seconds: float, round_trip: float, *, draft_seconds: float, client_overhead: float = 0.0
) -> float:
    """Return the seconds of a text whose client drafts.

    The simulator counts the network and the client between rounds. Opening the text takes one round trip, the first
    draft its time, and the first round a round trip.

    Args:
        server_seconds: from the arrival of the first tree to the last verdict, as simulated.
        round_trip: seconds on the network and back.
        draft_seconds: of the first draft.
        client_overhead: of the client per round besides its draft.
    """
    return server_seconds + 2 * round_trip + draft_seconds + client_overhead


def streamed_seconds(server_seconds: float, round_trip: float) -> float:
    """Return the seconds of a text that the server writes alone and a client reads.

    The client opens the text, which the server begins after half a round trip, and then reads: every read returns all
    new tokens, and the next one begins when its reply is there. The last read is the first one that arrives after the
    end of the text, or waits for it if it arrives while the last token is computed.

    Args:
        server_seconds: from the arrival of the request to the last token, as simulated.
        round_trip: seconds on the network and back.
    """
    if round_trip <= 0:
        return server_seconds
    return round_trip * (math.ceil(server_seconds / round_trip) + 1)
