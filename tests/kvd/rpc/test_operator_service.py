"""Operators may change sessions of their tenants, and none by mistake."""

from contextlib import asynccontextmanager

import pytest

from kvd.caches.erasing import NotErasableError, TenantEraser
from kvd.caches.scrubber import Scrubber
from kvd.core.records.errors import InvalidRequestError, UnknownSessionError
from kvd.errors import UnknownModelError
from kvd.rpc.operator_service import OperatorService
from kvd.session_files.byte_streams import ByteStreams
from kvd.session_files.transfers import Transfers
from kvd.wire.events import EventHub
from shared.pb.kvd.v1 import kvd_pb2 as pb
from tests.kvd.rpc.service_bench import (
    OF_ACME,
    OPERATOR,
    as_caller,
    serving,
    session_name,
    settings,
)
from tests.kvd_polling import eventually
from tests.synthetic_engine import encode, key_of


@asynccontextmanager
async def operating(directory):
    """Serve an operator beside an engine."""
    async with serving(directory) as served:
        caches = served.caches
        operator = OperatorService(
            caches,
            caches._engines,
            Scrubber(1 << 30),
            settings(directory).reload,
            TenantEraser(caches, EventHub(1)),
            Transfers(caches, ByteStreams(1)),
        )
        as_caller(OPERATOR)
        yield served, operator


async def store_three(served):
    """Store one session of each tenant, and one more of the first."""
    for number, (name, tenant) in enumerate((("a", "acme"), ("b", "acme"), ("c", "globex"))):
        start = 100 * number
        await served.store(name, encode(range(start, start + 16)), tenant=tenant)


def info_of(served, session_id="a", tenant="default"):
    return served.cache.act(lambda core: core.inspection.info(key_of(session_id, tenant)))


async def test_one_session_is_flushed(tmp_path):
    """By name; the others stay, and it is unknown afterwards."""
    async with operating(tmp_path) as (served, operator):
        await store_three(served)
        request = pb.FlushRequest(session=session_name("a", "acme"))
        done = await operator.Flush(request, None)
        assert (done.sessions, done.bytes > 0) == (1, True)
        assert served.keys() == {"b", "c"}
        with pytest.raises(UnknownSessionError):
            await operator.Flush(request, None)


async def test_sessions_that_match_a_filter_are_flushed(tmp_path):
    """A dry run counts them, and drops none."""
    async with operating(tmp_path) as (served, operator):
        await store_three(served)
        request = pb.FlushRequest(filter=pb.SessionFilter(tenant="acme"), dry_run=True)
        would = await operator.Flush(request, None)
        assert (would.sessions, served.keys()) == (2, {"a", "b", "c"})
        request.dry_run = False
        done = await operator.Flush(request, None)
        assert (done.sessions, done.bytes) == (2, would.bytes)
        assert served.keys() == {"c"}


async def test_a_session_in_use_is_skipped_and_named(tmp_path):
    """An engine is reading it."""
    async with operating(tmp_path) as (served, operator):
        await store_three(served)
        await served.load("a", encode(range(16)), tenant="acme")
        done = await operator.Flush(pb.FlushRequest(all=True), None)
        assert [key.session_id for key in done.skipped_leased] == ["a"]
        assert (done.sessions, served.keys()) == (2, {"a"})


async def test_an_operator_of_one_tenant_reaches_no_other(tmp_path):
    """Neither by name, nor by a filter for everything; the existence of others stays hidden."""
    async with operating(tmp_path) as (served, operator):
        await store_three(served)
        as_caller(OF_ACME)
        theirs = session_name("c", "globex")
        with pytest.raises(UnknownSessionError):
            await operator.Flush(pb.FlushRequest(session=theirs), None)
        with pytest.raises(UnknownSessionError):
            await operator.Pin(pb.PinRequest(session=theirs), None)
        with pytest.raises(UnknownSessionError):
            await operator.SetTtl(pb.SetTtlRequest(session=theirs, ttl_s=1), None)
        await operator.Flush(pb.FlushRequest(filter=pb.SessionFilter(idle_s=1e-9)), None)
        assert served.keys() == {"c"}


async def test_pins_and_deadlines_are_set_and_removed(tmp_path):
    """0 is the default of the settings, less than 0 is never."""
    async with operating(tmp_path) as (served, operator):
        await served.store()
        await operator.Pin(pb.PinRequest(session=session_name(), soft=True), None)
        assert info_of(served).pin.name == "SOFT"
        await operator.Pin(pb.PinRequest(session=session_name()), None)
        assert info_of(served).pin.name == "HARD"
        await operator.Unpin(pb.PinRequest(session=session_name()), None)
        assert info_of(served).pin.name == "NONE"
        answer = await operator.SetTtl(pb.SetTtlRequest(session=session_name(), ttl_s=60), None)
        assert 0 < answer.expires_in_s <= 60
        answer = await operator.SetTtl(pb.SetTtlRequest(session=session_name(), ttl_s=-1), None)
        assert answer.expires_in_s == -1
        answer = await operator.SetTtl(pb.SetTtlRequest(session=session_name(), ttl_s=0), None)
        assert answer.expires_in_s > 60


async def test_what_contradicts_itself_is_refused(tmp_path):
    """Before anything is done: a process that is none, a model that nobody has, both decisions."""
    async with operating(tmp_path) as (_, operator):
        with pytest.raises(InvalidRequestError, match="no process"):
            await operator.KillHolder(pb.KillHolderRequest(pid=0), None)
        both = pb.ReopenLayoutRequest(layout="ab", accept_loss=True, set_aside=True)
        with pytest.raises(InvalidRequestError, match="both decisions"):
            await operator.ReopenLayout(both, None)
        with pytest.raises(UnknownModelError):
            _ = [one async for one in operator.Verify(pb.VerifyRequest(model="ff"), None)]


async def test_without_encryption_nothing_is_erased(tmp_path):
    """The sessions stay: a flush that only seems secure would be worse."""
    async with operating(tmp_path) as (served, operator):
        await store_three(served)
        secure = pb.FlushRequest(secure=True, filter=pb.SessionFilter(tenant="acme"))
        with pytest.raises(NotErasableError):
            await operator.Flush(secure, None)
        assert served.keys() == {"a", "b", "c"}


async def test_every_copy_is_verified(tmp_path):
    """The last message has the totals; a block in DRAM can be verified once it has its checksum."""
    async with operating(tmp_path) as (served, operator):
        await store_three(served)
        await served.caches.wait_until_committed()

        async def verified():
            found = [one async for one in operator.Verify(pb.VerifyRequest(), None)]
            assert found[-1].done
            assert found[-1].num_lost == 0
            return found[-1].dram.num_blocks

        await eventually(verified, wanted=3)


async def test_a_reload_reports_the_changes(tmp_path):
    """None, if the settings are the same."""
    async with operating(tmp_path) as (_, operator):
        answer = await operator.ReloadSettings(pb.ReloadSettingsRequest(), None)
        assert (list(answer.applied), list(answer.needs_restart)) == ([], [])
