"""The services of a kvd over real caches, called without gRPC in between; one engine attached."""

import os
import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvd.caches.caches import Caches
from kvd.config import load_live
from kvd.engines.attached import Engine
from kvd.engines.data_socket import DataConnection, EngineUsers
from kvd.rpc.service import Draining, EngineService
from kvd.runtime.cache import Cache
from shared.access.identity import Identity, act_as
from shared.pb.kvd.v1 import kvd_pb2 as pb
from tests.kvd.caches.cache_bench import LAYOUT, caches_in
from tests.synthetic_engine import encode, key_of

TOKENS = encode(range(16))  # one block
OPERATOR = Identity("ops", "token", ("*",), frozenset({"operator"}))
OF_ACME = Identity("acme-ops", "token", ("acme",), frozenset({"operator"}))


@dataclass
class Served:
    """Caches, one of them with an engine, and that engine's service."""

    caches: Caches
    cache: Cache
    engine: Engine
    service: EngineService
    draining: Draining

    def named(self, session_id="a", tenant="default", **fields):
        """Return the fields of every request of the engine about a session."""
        session = pb.SessionKey(tenant=tenant, session_id=session_id)
        return {"engine_id": self.engine.engine_id, "session": session, **fields}

    async def store(self, session_id="a", token_ids=TOKENS, **fields):
        """Store a session as an engine does; return the last answer."""
        named = self.named(session_id, token_ids=token_ids, **fields)
        answer = await self.service.PrepareStore(pb.PrepareStoreRequest(**named), None)
        completed = pb.CompleteStoreRequest(
            engine_id=self.engine.engine_id, lease_id=answer.lease_id, success=True
        )
        return await self.service.CompleteStore(completed, None)

    async def load(self, session_id="a", token_ids=TOKENS, **fields):
        """Ask for a session; the caller has to complete a granted lease."""
        named = self.named(session_id, token_ids=token_ids, **fields)
        return await self.service.PrepareLoad(pb.PrepareLoadRequest(**named), None)

    def keys(self):
        """Return the ids of all sessions."""
        return {key.session_id for key in self.cache.act(lambda core: core.inspection.keys())}


def settings(directory):
    """Return the settings of a kvd in a directory, with their sources."""
    return load_live(None, {"runtime_dir": directory, "state_dir": directory})


def as_caller(identity):
    """Make the block's calls in this caller's name, as the guard of an address does."""
    act_as(identity)


def session_name(session_id="a", tenant="default"):
    """Return a session's name as operators give it."""
    tenant, model, session_id = key_of(session_id, tenant)
    return pb.SessionKey(tenant=tenant, model=model, session_id=session_id)


@asynccontextmanager
async def serving(directory, tenants=("*",)):
    """Serve an engine of our own user, which may name these tenants."""
    async with caches_in(directory) as caches:
        caches.restore()
        cache, arena = await caches.open(LAYOUT)
        engines, draining = caches._engines, Draining(1.0)
        connection = DataConnection("token", os.getpid(), os.geteuid(), None)
        connection.arena = arena
        engine, _, _ = engines.attach("e", cache, connection, secrets.token_hex(16), ())
        users = EngineUsers((), {os.geteuid(): tenants})
        service = EngineService(caches, engines, None, settings(directory), draining, users)
        yield Served(caches, cache, engine, service, draining)
        connection.gone.set()
        engines.on_connection_gone(connection)
        connection.close()
