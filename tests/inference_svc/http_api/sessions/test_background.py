"""Responses in the background: clients that wait for one are notified of its end."""

import asyncio

import pytest

from inference_svc.http_api.sessions.background import BackgroundResponses, RunningResponse
from inference_svc.http_api.sessions.http_turn import Caller
from inference_svc.http_api.sessions.lookup import CANCELLED, QUEUED, ResponseInfo
from inference_svc.http_api.sessions.store import ApiStore
from shared.access.identity import ANY, Identity
from shared.serving.grpc_status import InternalError
from tests.inference_svc.http_api.sessions.test_routing import turn

CALLER = Caller(Identity("test", "local", (ANY,), frozenset()), "acme")
INFO = ResponseInfo(1.0, "m", is_background=True)


async def open_nothing(*_args):
    """Starts no turn: nobody comes so far."""
    raise AssertionError("a response was begun that is over")


@pytest.mark.parametrize("is_closing", [False, True])
@pytest.mark.parametrize("num_rounds", [1, 2])
async def test_a_response_that_ends_before_it_begins_blocks_no_client(
    tmp_path, num_rounds, is_closing
):
    """Its client is notified: it was not started yet, or is being stored."""
    store = ApiStore(tmp_path, 100)
    released = []
    responses = BackgroundResponses(open_nothing, store, 1, lambda error: error)
    running = RunningResponse(CALLER, turn(response_id="resp_1"), INFO, lambda _session_id: None)
    starting = asyncio.create_task(responses.start(running, lambda: released.append(1)))
    for _ in range(num_rounds):
        await asyncio.sleep(0)
    assert responses.find("acme", "resp_1") is running
    await (responses.close() if is_closing else responses.cancel(running))
    with pytest.raises(InternalError, match="stopped before the response was complete"):
        await starting
    assert responses.find("acme", "resp_1") is None
    assert released == [1]
    if num_rounds == 2:
        unanswered = await store.find_unanswered("acme", "resp_1")
        assert unanswered.state == (QUEUED if is_closing else CANCELLED)
    store.close()
