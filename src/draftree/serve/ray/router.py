"""Ray Serve's request router with our choice of a replica: prefix match, load, and replicas that failed a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from draftree.serve.ray.prefixes import PrefixRouting, RoutingPolicy
from draftree.serve.ray.wire import HttpRequest

NO_REQUEST = HttpRequest({}, b"")


class PrefixRouter(RequestRouter):
    """Routes `HttpRequest` arguments; other calls go to the less busy of two random replicas."""

    def initialize_state(self, **policy: Any) -> None:
        """Take the constants of the choice, as keyword arguments of `RoutingPolicy`."""
        self._routing = PrefixRouting(RoutingPolicy(**policy))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas in order of preference."""
        request = _request_of(pending_request)
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in found.items()}
        if pending_request is not None:
            # the groups are all replicas worth trying: pause before they are tried again
            pending_request.routing_context.should_backoff = True
        return [
            [found[name] for name in group] for group in self._routing.rank(request.blocks, loads, avoid=request.avoid)
        ]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Note the prompt that the replica serves now."""
        blocks = _request_of(pending_request).blocks
        if blocks:
            self._routing.index.record(replica_id.unique_id, blocks)


def _request_of(pending: PendingRequest | None) -> HttpRequest:
    arguments: Iterable[Any] = pending.args if pending is not None else ()
    return next((argument for argument in arguments if isinstance(argument, HttpRequest)), NO_REQUEST)
