"""The one way in: whose turns are taken, as which tenant, and what is left of the others."""

from dataclasses import replace

import pytest

from inference_svc.core.errors import EmptyTurnError, SessionBusyError, UnknownSessionError
from inference_svc.core.submission import TurnNames
from inference_svc.core.turn_record import Accepted, Finished
from inference_svc.service.submissions import empty_turn
from shared.access.clients import TooManyStreamsError
from shared.access.identity import Identity, TenantDeniedError
from shared.types.session_key import InvalidNameError, SessionKey
from tests.inference_svc.service.gateways import gateway_of
from tests.memory_engine import loaded_model
from tests.turn_service import asked

ANN = Identity("ann", "token", ("acme", "globex"), frozenset({"client"}))
NEW = TurnNames("", "", "r")


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


def made(key, _defaults):
    """What a front makes of a session's key."""
    return replace(asked([5, 6, 7], max_tokens=2, request_id="r"), key=key)


async def test_a_turn_is_followed_by_its_client(model, tmp_path):
    """As its own tenant, in a session that gets a name; then its place is free again."""
    async with gateway_of(model, tmp_path) as gateway:
        stream = await gateway.submit(ANN, NEW, made)
        events = [event async for event in stream.events]
        await stream.wait_ended()
        stream.leave()
        stream.leave()
        assert isinstance(events[0], Accepted)
        assert isinstance(events[-1], Finished)
        key = gateway.key(ANN, "acme", events[0].session_id)
        transcript, is_busy = await gateway.turns.sessions.get(key)
        assert (len(transcript.turns), is_busy) == (1, False)
        assert not gateway.streams._held


async def test_what_else_is_kept_of_a_session_goes_with_it(model, tmp_path):
    """Whoever keeps it is called before the client is told; not for a session that stays."""
    forgotten = []

    async def forget(key):
        forgotten.append(key)

    async with gateway_of(model, tmp_path) as gateway:
        gateway.on_deletion.append(forget)
        stream = await gateway.submit(ANN, NEW._replace(session_id="s"), made)
        key = gateway.key(ANN, "acme", "s")
        with pytest.raises(SessionBusyError):
            await gateway.delete_session(key)
        assert forgotten == []
        _ = [event async for event in stream.events]
        await stream.wait_ended()
        stream.leave()
        await gateway.delete_session(key)
        with pytest.raises(UnknownSessionError):
            await gateway.turns.sessions.get(key)
        assert forgotten == [key]


async def test_whoever_leaves_last_cancels(model, tmp_path):
    """Two clients' requests with one id are one turn; the first that leaves disturbs nobody."""

    def long(key, _defaults):
        return replace(asked([5, 6], max_tokens=100, request_id="r"), key=key)

    async with gateway_of(model, tmp_path) as gateway:
        names = NEW._replace(session_id="s")
        first, second = [await gateway.submit(ANN, names, long) for _ in range(2)]
        assert gateway.streams._held["ann"] == 2
        with pytest.raises(TooManyStreamsError):
            await gateway.submit(ANN, names, long)
        first.leave()
        events = second.events
        assert isinstance(await anext(events), Accepted)
        second.leave()
        assert [event async for event in events][-1].finish_reason == "cancelled"
        await second.wait_ended()
        assert not gateway.streams._held


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (TurnNames("umbrella", "s", ""), TenantDeniedError),
        (TurnNames("acme", "/etc", ""), InvalidNameError),
        (TurnNames("acme", "s", ""), EmptyTurnError),
    ],
)
async def test_what_is_refused_is_counted_once_and_holds_nothing(model, tmp_path, names, error):
    """Also what a front finds out while it makes the submission."""

    def refuse(_key, _defaults):
        raise empty_turn()

    async with gateway_of(model, tmp_path) as gateway:
        with pytest.raises(error):
            await gateway.submit(ANN, names, refuse)
        assert not gateway.streams._held
        assert list(gateway._report.histograms.refused.counts.values()) == [1]


async def test_a_session_is_the_tenants_that_is_named(model, tmp_path):
    """Or the caller's first; an invalid name is refused before its identity is checked."""
    async with gateway_of(model, tmp_path) as gateway:
        assert gateway.key(ANN, "", "s") == SessionKey("acme", "m", "s")
        assert gateway.key(ANN, "globex", "s") == SessionKey("globex", "m", "s")
        with pytest.raises(TenantDeniedError):
            gateway.key(ANN, "umbrella", "s")
        with pytest.raises(InvalidNameError):
            gateway.key(ANN, "umbrella", "")
