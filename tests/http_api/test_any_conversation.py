"""Property: a conversation has exactly the items that were added and not deleted."""

import contextlib
from random import Random

import openai
import pytest

from tests.http_api.conftest import MODEL

pytestmark = pytest.mark.asyncio(loop_scope="session")

LENGTH = 3
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "4"}
REFUSED = (openai.BadRequestError, openai.NotFoundError)


class Client:
    """One conversation, and the items that it must have."""

    def __init__(self, client, conversation_id, random):
        self._client = client
        self._id = conversation_id
        self._random = random
        self.ids = []
        self.num_answers = 0

    def items(self):
        said = [
            {"role": role, "content": f"{role} {self._random.random()}"}
            for role in ("user", "assistant", "system", "developer")
        ]
        return self._random.choices([*said, CALL, RESULT], k=self._random.randint(1, 3))

    async def add(self):
        added = await self._client.conversations.items.create(self._id, items=self.items())
        self.ids += [item.id for item in added.data]

    async def delete(self):
        item_id = self._random.choice([*self.ids, "msg_none"])
        await self._client.conversations.items.delete(item_id, conversation_id=self._id)
        self.ids.remove(item_id)

    async def ask(self):
        """Ask; if a template refuses the order of what is left, nothing is added."""
        answer = await self._client.responses.create(
            model=MODEL,
            input=self._random.choice(["Hi", [], self.items()]),
            conversation=self._id,
            max_output_tokens=LENGTH,
            tools=self._random.choice([[], [], [LOOK]]),
            instructions=self._random.choice([None, None, "Be brief.", "Be long."]),
        )
        brought = await self._client.responses.input_items.list(answer.id, order="asc")
        self.ids += [item.id for item in (*brought.data, *answer.output)]
        self.num_answers += 1

    async def step(self):
        step = self._random.choice([self.add, self.delete, self.ask, self.ask])
        with contextlib.suppress(*REFUSED):
            await step()

    async def check(self):
        limit = self._random.randint(1, 30)
        found = self._client.conversations.items.list(self._id, limit=limit, order="asc")
        assert [item.id async for item in found] == self.ids


@pytest.mark.parametrize(
    ("seed", "num_steps"),
    [(0, 30), *(pytest.param(seed, 60, marks=pytest.mark.long) for seed in range(3))],
)
async def test_items_are_those_added_and_not_deleted(api, seed, num_steps):
    """No request ends in an internal error, and a refused request changes nothing."""
    random = Random(seed)  # noqa: S311  # the same each time
    async with api.client() as client:
        made = await client.conversations.create()
        one = Client(client, made.id, random)
        for _ in range(num_steps):
            await one.step()
            await one.check()
        assert one.num_answers > num_steps / 6
        await client.conversations.delete(made.id)
