"""Many clients at once while kvd is killed: clients that retry as hinted all get answers."""

import asyncio
import uuid

import pytest

from tests.http_api.conftest import MODEL, next_messages
from tests.inference_processes import wait_kvd_state

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TURNS = 3
RETRIES = 50  # each after the delay that the service names


@pytest.mark.parametrize(
    "num_clients", [8, pytest.param(100, marks=pytest.mark.long)], ids=["few", "many"]
)
async def test_every_conversation_is_answered_in_its_session(api, num_clients):
    """More requests than places, and kvd killed midway: none fails, none meets another."""
    arrived = asyncio.Semaphore(0)

    async def converse(client, number):
        name = f"{uuid.uuid4().hex} {number}"
        messages = [{"role": "user", "content": f"I am {name}. " + "Keys are kept. " * 20}]
        sessions = set()
        for turn in range(NUM_TURNS):
            answer = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=4, extra_body={"ignore_eos": True}
            )
            assert answer.usage.completion_tokens == 4
            sessions.add(answer.model_extra["session_id"])
            messages = next_messages(messages, answer.choices[0].message.content, f"{turn}?")
            arrived.release()
        return sessions

    async def disturb():
        for _ in range(num_clients):  # about a third of the turns are over
            await arrived.acquire()
        async with api.service.client() as client:
            await api.kvd.kill()
            await wait_kvd_state(client, "detached")
            await api.kvd.start()
            # otherwise the next test's turns would not be saved
            await wait_kvd_state(client, "attached")

    async with api.client(max_retries=RETRIES) as client:
        talks = [converse(client, number) for number in range(num_clients)]
        sessions, _ = await asyncio.gather(asyncio.gather(*talks), disturb())
    assert all(len(own) == 1 for own in sessions)
    assert len(set.union(*sessions)) == num_clients
    for session_id in set.union(*sessions):
        assert await api.num_turns(session_id) == NUM_TURNS
