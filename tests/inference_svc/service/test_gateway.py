"""The gateway: whose turns are accepted, for which tenant, and what refused ones leave."""

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
from tests.turn_service import make_turn

ANN = Identity("ann", "token", ("acme", "globex"), frozenset({"client"}))
NEW = TurnNames("", "", "r")


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


def build_for(key, _defaults):
    """Return what an API builds for a session's key."""
    return replace(make_turn([5, 6, 7], max_tokens=2, request_id="r"), key=key)


async def test_a_client_follows_its_turn(model, tmp_path):
    """Under its own tenant, in a session that gets a name; then its place is free again."""
    async with gateway_of(model, tmp_path) as gateway:
        stream = await gateway.submit(ANN, NEW, build_for)
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


async def test_other_facts_of_a_session_are_deleted_with_it(model, tmp_path):
    """Before the client is answered; not for a session that stays."""
    forgotten = []

    async def forget(key):
        forgotten.append(key)

    async with gateway_of(model, tmp_path) as gateway:
        gateway.on_deletion.append(forget)
        stream = await gateway.submit(ANN, NEW._replace(session_id="s"), build_for)
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


async def test_the_last_client_that_leaves_cancels(model, tmp_path):
    """Two requests with one id are one turn; the first that leaves does not affect it."""

    def long(key, _defaults):
        return replace(make_turn([5, 6], max_tokens=100, request_id="r"), key=key)

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
async def test_a_refusal_is_counted_once_and_occupies_nothing(model, tmp_path, names, error):
    """Also an API's own error while it builds the submission."""

    def refuse(_key, _defaults):
        raise empty_turn()

    async with gateway_of(model, tmp_path) as gateway:
        with pytest.raises(error):
            await gateway.submit(ANN, names, refuse)
        assert not gateway.streams._held
        assert list(gateway._report.histograms.refused.counts.values()) == [1]


async def test_a_session_belongs_to_the_named_tenant(model, tmp_path):
    """Or the caller's first; an invalid name is refused before its identity is checked."""
    async with gateway_of(model, tmp_path) as gateway:
        assert gateway.key(ANN, "", "s") == SessionKey("acme", "m", "s")
        assert gateway.key(ANN, "globex", "s") == SessionKey("globex", "m", "s")
        with pytest.raises(TenantDeniedError):
            gateway.key(ANN, "umbrella", "s")
        with pytest.raises(InvalidNameError):
            gateway.key(ANN, "umbrella", "")
