"""In each of Ray's routers: which replica gets a call. A thin shell over `shared.routing`.

A server is known by the name that its replica tells, not by Ray's id of the replica: a replica that
is started again has the sessions that it had. Proxies and handles have a router each; the ring
gives all of them the same answer, and what replicas report of their sessions soon does.
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
HTTP_CALLS = ("__call__", "answer")  # of a proxy, and of a replica whose server has refused it


class SessionReplicaRouter(RequestRouter):  # type: ignore[misc]
    """Sends the calls of a session to the server that holds it; see `SessionRouter`."""

    def initialize_state(self, num_fallbacks: int = 2, most_sessions: int = 1_000_000) -> None:
        """Begin knowing nothing; the arguments are those of `request_router_kwargs`."""
        self._sessions = SessionRouter(num_fallbacks=num_fallbacks, most_sessions=most_sessions)
        self._by_server: dict[str, list[RunningReplica]] = {}
        self._reported: dict[str, Any] = {}  # by server: the stats that were taken in last
        self._under_way: dict[str, tuple[str, str | None]] = {}  # by Ray's id of the request

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Know these replicas, and what they report."""
        self._take_in(replicas)
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Know a replica no more."""
        super().on_replica_actor_died(replica_id)
        self._take_in(list(self.curr_replicas.values()))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> Sequence[list[RunningReplica]]:
        """Rank the replicas: the server's that the router chooses, then its next choices'."""
        if pending_request is None or not self._by_server:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        route = self._sessions.choose(_session_of(pending_request))
        tried = pending_request.kwargs.get("tried", ())
        ranked = [name for name in (route.server, *route.fallbacks) if name not in tried]
        if not ranked:  # where to is all the same then
            ranked = [name for name in self._by_server if name not in tried] or [route.server]
        self._count(pending_request, ranked[0])
        return [self._by_server[name] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Count a turn where it is: the replicas that were chosen before may have been full."""
        del result
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            self._count(pending_request, _server_of(replica))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a turn that is over; others are not known here."""
        del replica_id
        server, session = self._under_way.pop(internal_request_id, ("", None))
        if server:
            self._sessions.on_end(server, session)

    def _count(self, request: PendingRequest, server: str) -> None:
        """Count a turn where it goes to, at once: others are chosen before it is there."""
        if request.metadata.call_method not in {GRPC_TURN, *HTTP_CALLS}:
            return
        number, session = request.metadata.internal_request_id, _session_of(request)
        before, _ = self._under_way.get(number, ("", None))
        if before == server:
            return
        if before:
            self._sessions.on_end(before)
        else:
            request.future.add_done_callback(partial(self._given_up, number))
        self._under_way[number] = server, session
        self._sessions.on_begin(server, session)

    def _given_up(self, number: str, chosen: Future[Any]) -> None:
        """Forget a turn whose client went before it was sent: nobody says that it is over."""
        server, _ = self._under_way.get(number, ("", None))
        if server and chosen.cancelled():
            del self._under_way[number]
            self._sessions.on_end(server)

    def _take_in(self, replicas: list[RunningReplica]) -> None:
        self._by_server = {}
        for replica in replicas:
            self._by_server.setdefault(_server_of(replica), []).append(replica)
        self._sessions.set_servers(self._by_server)
        before, self._reported = self._reported, {}
        for server, (replica, *_) in self._by_server.items():
            stats = self._reported[server] = replica.routing_stats
            if stats and stats != before.get(server):  # others' come with news of one
                self._sessions.report(server, report_from(stats))


def _server_of(replica: RunningReplica) -> str:
    return str(replica.replica_metadata.get("server") or replica.replica_id.unique_id)


def _session_of(request: PendingRequest) -> str | None:
    return request.metadata.session_id or None
