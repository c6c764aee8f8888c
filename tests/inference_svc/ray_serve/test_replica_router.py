"""Ray's router with ours inside: Ray's own classes, without a cluster."""

import asyncio
from collections import Counter
from itertools import count

import pytest
import pytest_asyncio

from inference_svc.ray_serve.reports import stats_of
from shared.routing.hash_ring import HashRing, name_hash
from shared.routing.session_router import ServerReport

pytest.importorskip("ray", reason="needs the extra `ray`: make test-ray")

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
    RunningReplicaInfo,
)
from ray.serve.request_router import PendingRequest, RunningReplica

from inference_svc.ray_serve.replica_router import SessionReplicaRouter

DEPLOYMENT = DeploymentID(name="SessionServer", app_name="ca")
SERVERS = ("gpu1:/run/a.sock", "gpu2:/run/a.sock", "gpu3:/run/a.sock")
SESSIONS = [f"session-{number}" for number in range(60)]


class Replica(RunningReplica):
    """A replica that reports what a controller would; there is no actor behind it."""

    def __init__(self, info):
        self._replica_info = info
        self.num_ongoing = 0

    async def get_queue_len(self, *, deadline_s):
        return self.num_ongoing


def request_of(number, session="", method="SubmitTurn", tried=()):
    """Make a call as Ray's routers get it."""
    metadata = RequestMetadata(number, number, call_method=method, session_id=session)
    return PendingRequest([], {"tried": tried} if tried else {}, metadata)


class Replicas:
    """Replicas with Ray's ids, which change, and their servers."""

    def __init__(self):
        self.router = SessionReplicaRouter(
            DEPLOYMENT,
            DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            create_replica_wrapper_func=Replica,
        )
        self.router.initialize_state(num_fallbacks=1)
        self.number = 0
        self._requests = count()

    def run(self, reports, *, most=100):
        """Give the router new replicas, by (server, report)."""
        self.number += 1
        self.router._update_running_replicas(
            [
                RunningReplicaInfo(
                    ReplicaID(f"{self.number}-{index}", DEPLOYMENT),
                    *("node", "127.0.0.1", None, f"actor-{index}"),
                    max_ongoing_requests=most,
                    routing_stats=stats_of(report) if report else {},
                    replica_metadata={"server": server},
                )
                for index, (server, report) in enumerate(reports)
            ]
        )

    async def send(self, session, method="SubmitTurn", tried=()):
        """Route a call; return its server's name, the replica and the request."""
        request = request_of(f"request-{next(self._requests)}", session, method, tried)
        replica = await self.router._choose_replica_for_request(request)
        self.router.on_request_routed(request, replica.replica_id, None)
        return replica.replica_metadata["server"], replica, request

    def end(self, replica, request):
        """End the call."""
        self.router.on_request_completed(replica.replica_id, request.metadata.internal_request_id)


@pytest_asyncio.fixture
async def replicas():
    made = Replicas()
    yield made
    pending = asyncio.all_tasks() - {asyncio.current_task()}
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


async def place(replicas, sessions=SESSIONS):
    return [(await replicas.send(session))[0] for session in sessions]


async def test_servers_are_chosen_by_their_names(replicas):
    """Not by Ray's ids: restarted replicas have their old sessions."""
    ring = HashRing(SERVERS)
    replicas.run([(server, None) for server in SERVERS])
    before = await place(replicas)
    assert before == [next(ring.owners(session)) for session in SESSIONS]
    other = Replicas()
    other.run([(server, None) for server in reversed(SERVERS)])
    assert await place(other) == before


async def test_a_server_that_reports_a_session_gets_its_turns(replicas):
    holder = [*HashRing(SERVERS).owners("ann")][-1]
    replicas.run(
        [
            (server, ServerReport(sessions={name_hash("ann"): 90} if server == holder else {}))
            for server in SERVERS
        ]
    )
    assert (await replicas.send("ann"))[0] == holder


async def test_a_draining_server_gets_no_new_sessions(replicas):
    own = next(HashRing(SERVERS).owners("ann"))
    replicas.run([(server, ServerReport(takes_turns=server != own)) for server in SERVERS])
    assert (await replicas.send("ann"))[0] != own
    assert own not in await place(replicas)


async def test_a_full_replica_is_skipped(replicas):
    """By Ray's count; the next one is the session's next server."""
    own, second, _ = HashRing(SERVERS).owners("ann")
    replicas.run([(server, None) for server in SERVERS], most=1)
    for replica in replicas.router.curr_replicas.values():
        if replica.replica_metadata["server"] == own:
            replica.num_ongoing = 1
            replicas.router.on_new_queue_len_info(replica.replica_id, 1)
    assert (await replicas.send("ann"))[0] == second


async def test_a_server_that_refused_a_request_is_not_asked_again(replicas):
    """The session's next one is, and has the session from then on."""
    own, second, third = HashRing(SERVERS).owners("ann")
    replicas.run([(server, None) for server in SERVERS])
    assert (await replicas.send("ann", "answer", tried=(own,)))[0] == second
    assert (await replicas.send("ann"))[0] == second
    assert (await replicas.send("bob", "answer", tried=(own, second)))[0] == third
    assert (await replicas.send("ann", "answer", tried=SERVERS))[0] == second


async def test_a_dead_replica_is_forgotten(replicas):
    replicas.run([(server, None) for server in SERVERS])
    own, replica, request = await replicas.send("ann")
    replicas.router.on_replica_actor_died(replica.replica_id)
    replicas.end(replica, request)
    assert (await replicas.send("ann"))[0] != own
    assert own not in await place(replicas)


async def test_calls_without_a_session_go_to_the_least_loaded_server(replicas):
    """Ended turns do not count, nor do other calls."""
    replicas.run([(server, None) for server in SERVERS])
    turns = [await replicas.send("") for _ in range(9)]
    assert set(Counter(server for server, _, _ in turns).values()) == {3}
    for _ in range(5):
        await replicas.send("", method="GetModel")
    left = turns[0][0]
    for server, replica, request in turns:
        if server == left:
            replicas.end(replica, request)
    assert [(await replicas.send(""))[0] for _ in range(3)] == [left] * 3


async def test_simultaneous_turns_are_spread(replicas):
    """Each counts from its choice, until its client disconnects before it is sent."""
    replicas.run([(server, None) for server in SERVERS])
    requests = [request_of(f"at-once-{number}") for number in range(6)]
    ranks = [await replicas.router.choose_replicas([], request) for request in requests]
    first = [rank[0].replica_metadata["server"] for rank, *_ in ranks]
    assert set(Counter(first).values()) == {2}
    for request, server in zip(requests, first, strict=True):
        if server == first[0]:
            request.future.cancel()
    await asyncio.sleep(0)
    ranks = [await replicas.router.choose_replicas([], request_of(f"l-{n}")) for n in range(2)]
    assert [rank[0].replica_metadata["server"] for rank, *_ in ranks] == [first[0]] * 2
    assert len(replicas.router._under_way) == 6


async def test_a_turn_counts_at_its_final_server(replicas):
    """The first choice was full; chosen twice it counts once."""
    replicas.run([(server, None) for server in SERVERS])
    request = request_of("full", "ann")
    (own,), (second,) = await replicas.router.choose_replicas([], request)
    await replicas.router.choose_replicas([], request)
    replicas.router.on_request_routed(request, second.replica_id, None)
    assert len(replicas.router._under_way) == 1
    moved = {(await replicas.send(""))[0] for _ in range(2)}
    assert second.replica_metadata["server"] not in moved
    assert own.replica_metadata["server"] in moved
    replicas.end(second, request)
    assert (await replicas.send(""))[0] == second.replica_metadata["server"]
    assert (await replicas.send("ann"))[0] == second.replica_metadata["server"]


async def test_a_report_covers_its_own_server_only(replicas):
    """Calls since another server's last report still count."""
    idle = ServerReport(num_places=1, turn_s=5.0)
    replicas.run([(server, idle) for server in SERVERS])
    busy = {(await replicas.send(""))[0] for _ in range(2)}
    (free,) = set(SERVERS) - busy
    replicas.run(
        [(server, idle if server in busy else ServerReport(num_places=8)) for server in SERVERS]
    )
    assert [(await replicas.send(""))[0] for _ in range(4)] == [free] * 4


async def test_two_replicas_of_a_server_share_its_turns(replicas):
    replicas.run([(SERVERS[0], None), (SERVERS[0], None)])
    chosen = await replicas.router.choose_replicas(
        list(replicas.router.curr_replicas.values()),
        request_of("r", "ann"),
    )
    assert [len(rank) for rank in chosen] == [2]
