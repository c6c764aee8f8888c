"""The replica router, in each of Ray's routers: chooses the replica of a call.

It is a thin shell over `shared.routing`. A server is known by the name that its replica reports,
not by Ray's id of the replica: a restarted replica has the same sessions as before. Each proxy and
each handle has a router of its own. The hash ring gives all of them the same answer, and the
replicas' reports of their sessions soon do so, too.
"""

from asyncio import Future
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from inference_svc.ray_serve.reports import report_from
from shared.routing.session_router import SessionRouter

GRPC_TURN = "SubmitTurn"
HTTP_CALLS = ("__call__", "answer")  # called by a proxy, and by a replica whose server refuses


class SessionReplicaRouter(RequestRouter):  # type: ignore[misc]
    """Sends the calls of a session to the server that holds it; see `SessionRouter`."""

    def initialize_state(self, num_fallbacks: int = 2, most_sessions: int = 1_000_000) -> None:
        """Initialize an empty router; the arguments are the config's `request_router_kwargs`."""
        self._sessions = SessionRouter(num_fallbacks=num_fallbacks, most_sessions=most_sessions)
        self._by_server: dict[str, list[RunningReplica]] = {}
        self._reported: dict[str, Any] = {}  # each server's last stats
        # Server and session of each running turn, by Ray's id of the request.
        self._under_way: dict[str, tuple[str, str | None]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replace the known replicas, and read their reports."""
        self._set_servers_and_reports(replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica."""
        super().on_replica_actor_died(replica_id)
        self._set_servers_and_reports(list(self.curr_replicas.values()))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[list[RunningReplica]]:
        """Rank the replicas: those of the chosen server, then those of its alternatives.

        Servers that have refused the request are left out.
        """
        if pending_request is None or not self._by_server:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        route = self._sessions.choose(_session_of(pending_request))
        tried = pending_request.kwargs.get("tried", ())
        ranked = [name for name in (route.server, *route.fallbacks) if name not in tried]
        if not ranked:  # any other server will do; if all have refused it, the chosen one
            ranked = [name for name in self._by_server if name not in tried] or [route.server]
        self._count(pending_request, ranked[0])
        return [self._by_server[name] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Count a turn at its replica, which may not be the first choice if that was full."""
        del result
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            self._count(pending_request, _server_of(replica))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a turn; other requests are not counted."""
        del replica_id
        server, session = self._under_way.pop(internal_request_id, ("", None))
        if server:
            self._sessions.on_end(server, session)

    def _count(self, request: PendingRequest, server: str) -> None:
        """Count a turn at the server it is sent to, before it arrives: others are chosen then."""
        if request.metadata.call_method not in {GRPC_TURN, *HTTP_CALLS}:
            return
        number, session = request.metadata.internal_request_id, _session_of(request)
        before, _ = self._under_way.get(number, ("", None))
        if before == server:
            return
        if before:
            self._sessions.on_end(before)
        else:
            request.future.add_done_callback(partial(self._forget_if_cancelled, number))
        self._under_way[number] = server, session
        self._sessions.on_begin(server, session)

    def _forget_if_cancelled(self, number: str, chosen: Future[Any]) -> None:
        """Forget a turn whose client left before it was sent: Ray does not report its end."""
        server, _ = self._under_way.get(number, ("", None))
        if server and chosen.cancelled():
            del self._under_way[number]
            self._sessions.on_end(server)

    def _set_servers_and_reports(self, replicas: list[RunningReplica]) -> None:
        self._by_server = {}
        for replica in replicas:
            self._by_server.setdefault(_server_of(replica), []).append(replica)
        self._sessions.set_servers(self._by_server)
        before, self._reported = self._reported, {}
        for server, (replica, *_) in self._by_server.items():
            stats = self._reported[server] = replica.routing_stats
            if stats and stats != before.get(server):  # Ray delivers all stats if one changes
                self._sessions.report(server, report_from(stats))


def _server_of(replica: RunningReplica) -> str:
    return str(replica.replica_metadata.get("server") or replica.replica_id.unique_id)


def _session_of(request: PendingRequest) -> str | None:
    return request.metadata.session_id or None
