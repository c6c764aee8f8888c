"""A scripted agent: forty steps with tools, a fork, an edit and a compaction."""

import pytest

from tests.http_api.conftest import MODEL
from tests.http_api.test_tools import ADD, return_results
from tests.oracle import Oracle

STEPS = 40
ANSWER = 4  # tokens of an answer without a call
TOOLS = [{"type": "function", "function": ADD}]
FORKED, EDITED, COMPACTED = 10, 20, 30  # steps


class Agent:
    """A scripted agent: its conversation, and what it has cost."""

    def __init__(self, client, name):
        self._client = client
        self.messages = [
            {"role": "system", "content": f"This is {name}. " + "You count. " * 30},
            {"role": "user", "content": "Count."},
        ]
        self.sessions = {}  # id -> indexes of its turns that were not calls
        self.prompt_tokens = self.cached_tokens = 0
        self.misses = []

    async def step(self, number):
        """Send one request; every third answer must be a call, whose result is appended."""
        calls = number % 3 == 2
        options = {"max_tokens": 40, "tool_choice": "required"}
        if not calls:
            options = {
                "max_tokens": ANSWER,
                "tool_choice": "none",
                "extra_body": {"ignore_eos": True},
            }
        answer = await self._client.chat.completions.create(
            model=MODEL, messages=self.messages, tools=TOOLS, **options
        )
        usage, message = answer.usage, answer.choices[0].message
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.prompt_tokens_details.cached_tokens
        self.misses += filter(None, [usage.model_extra.get("cache_miss_reason")])
        turns = self.sessions.setdefault(answer.model_extra["session_id"], [])
        turns.append(not calls)
        if calls:
            self.messages = return_results(self.messages, message, "It is 7.")
        else:
            said = {"role": "assistant", "content": message.content}
            self.messages = [*self.messages, said, {"role": "user", "content": f"On, {number}."}]


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return Oracle(tiny_model)


async def test_an_agents_history_is_read_from_the_cache(api, oracle, opening):
    """More than 95 % of the sent tokens are cached, and answers equal recomputation."""
    async with api.client() as client:
        agent = Agent(client, opening[0]["content"][8:40])
        for number in range(STEPS):
            # the conversation returns from a sub-agent, and another question is asked
            if number == FORKED:
                main, agent.messages = agent.messages, agent.messages[: len(agent.messages) // 2]
                while agent.messages[-1]["role"] != "user":
                    agent.messages.pop()
                await agent.step(number)
                agent.messages = main
            if number == EDITED:  # an old result is cleared
                place = max(i for i, one in enumerate(agent.messages) if one["role"] == "tool")
                agent.messages[place] = {**agent.messages[place], "content": "(cleared)"}
            if number == COMPACTED:  # a summary replaces the first half
                kept = len(agent.messages) - 12
                while agent.messages[kept]["role"] != "user":
                    kept += 1
                summary = {"role": "user", "content": "Until now you have counted."}
                agent.messages = [agent.messages[0], summary, *agent.messages[kept + 1 :]]
            await agent.step(number)
    assert agent.cached_tokens > 0.95 * agent.prompt_tokens
    assert agent.misses == ["message_edited", "message_edited"]
    async with api.service.client() as service:
        for session_id, is_plain in agent.sessions.items():
            found = await service.get_session(session_id, with_turns=True, tenant="acme")
            records = found.turn_records
            # a fork begins with more tokens
            judged = [False] * (len(records) - len(is_plain)) + is_plain
            turns = [
                (one.input_ids, one.output_ids)
                if plain
                else ((*one.input_ids, *one.output_ids), ())
                for one, plain in zip(records, judged, strict=True)
            ]
            assert oracle.judge(turns).is_identical
