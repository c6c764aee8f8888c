"""Conversations that no client names go on at any of the servers that share a store."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from shared.types.session_key import SessionKey
from tests.examples.moving import pushed_tokens
from tests.examples.pairs import Pair, check_identical
from tests.http_api.conftest import MODEL
from tests.http_api.test_listening import local_client
from tests.kvd_polling import eventually, sessions_of

LENGTH = 6
SAID = "Keys and values are kept, so that they need not be computed again. " * 4  # over a block
SETTINGS = """
[openai]
listen = "unix:{socket}"
temperature = 0
max_sessions = {max_sessions}
"""


class Server(Pair):
    """A pair that shares a store with others; `directory` is short, and `more` are settings."""

    def __init__(self, number, model, directory, store, max_sessions=100, more=""):
        directory.mkdir()
        self.socket = directory / "openai.sock"
        self._sessions = directory / "state" / "sessions"
        settings = directory / "inference-svc.toml"
        settings.write_text(SETTINGS.format(socket=self.socket, max_sessions=max_sessions) + more)
        super().__init__(f"server-{number}", model, directory, ["--config", str(settings)], store)

    async def num_turns(self, session_id):
        """Turns of a session as this server has it; None: it has none."""
        found = await self.session(session_id)
        return found and found.turns

    async def until_sessions(self, number):
        """Return when this server has so many sessions itself."""

        async def num_files():
            return len(list(self._sessions.glob("*.jsonl")))

        await eventually(num_files, number)

    async def until_caught_up(self):
        """Return when the store has all that this server has."""

        async def num_behind():
            return len(list(self._sessions.glob("*.behind")))

        await eventually(num_behind, 0)


class Talk:
    """A conversation; its client sends all of it, and has no name for it.

    Attributes:
        session_id: of the session that has answered last.
        num_tokens: of the context that could have KV.
        recomputed: tokens of history that the last turn has computed anew.
    """

    def __init__(self, name, messages=(), num_tokens=0):
        self._name = name
        self._messages = [*messages]
        self.num_tokens = num_tokens

    async def ask(self, server):
        """Ask on, at a server; returns the answer's text."""
        text = f"{self._name}, {len(self._messages)}: {SAID}"
        said = [*self._messages, {"role": "user", "content": text}]
        async with local_client(server.socket).with_options(max_retries=0) as client:
            answer = await client.chat.completions.create(
                model=MODEL, messages=said, max_tokens=LENGTH, extra_body={"ignore_eos": True}
            )
        usage, text = answer.usage, answer.choices[0].message.content
        self._messages = [*said, {"role": "assistant", "content": text}]
        self.recomputed = max(0, self.num_tokens - usage.prompt_tokens_details.cached_tokens)
        self.num_tokens = usage.prompt_tokens + LENGTH - 1
        self.session_id = answer.model_extra["session_id"]
        return text

    def copy(self, name):
        """The same conversation, which goes on otherwise."""
        return Talk(name, self._messages, self.num_tokens)


@asynccontextmanager
async def running(model, directory, *max_sessions, more=""):
    """Servers with such bounds and more settings, and the directory of their store."""
    store = directory / "store"
    async with AsyncExitStack() as stack:
        servers = []
        for number, most in enumerate(max_sessions):
            server = Server(number, model, directory / str(number), store, most, more)
            stack.push_async_callback(server.stop)
            await server.start()
            await server.following.until_said("kvd_followed")
            servers.append(server)
        yield *servers, store


async def until_pushed(store, talk, server):
    """Return when the store has the KV of all that a server has answered in a conversation."""
    tale = talk.session_id, talk.num_tokens

    async def is_there():
        for info in await sessions_of(server.kvd):
            named = info.session
            if (named.session_id, info.num_tokens) == tale:
                key = SessionKey(named.tenant, named.model, named.session_id)
                return await pushed_tokens(store, key) == info.num_tokens
        return False

    await eventually(is_there, wanted=True)


async def test_nothing_is_computed_anew_wherever_a_conversation_goes_on(
    tiny_model, short_dir, oracle
):
    """Back and forth, also past a server that is lost; each answer is that of recomputation."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, store):
        talk = Talk("a tale")
        for server in (second, first):  # once its kvd has had an answer of its follower turns wait
            await talk.copy(server.name).ask(server)
        await talk.ask(first)
        names = {talk.session_id}
        for before, server in ((first, second), (second, second), (second, first)):
            await until_pushed(store, talk, before)
            await talk.ask(server)
            assert talk.recomputed == 0
            names.add(talk.session_id)
        await until_pushed(store, talk, first)
        await first.lose()
        await talk.ask(second)
        assert talk.recomputed == 0
        assert names == {talk.session_id}, "it is one session"
        assert await second.num_turns(talk.session_id) == 5
        await check_identical({second.name: second}, oracle, names)


async def test_two_at_once_are_both_answered(tiny_model, short_dir, oracle):
    """Each goes on, wherever it comes; of two that part one is in a session of its own."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, _):
        talk = Talk("a tale")
        await talk.ask(first)
        other = talk.copy("another tale")
        for _ in range(2):
            await asyncio.gather(talk.ask(first), other.ask(second))
            await asyncio.gather(talk.ask(second), other.ask(first))
        assert talk.session_id != other.session_id
        for one in (talk, other):
            assert await first.num_turns(one.session_id) == 5
            await check_identical({first.name: first}, oracle, [one.session_id])


async def test_a_store_that_is_silent_costs_no_turn(tiny_model, short_dir):
    """What is here goes on, the rest is computed; then all is as it was."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, store):
        talk, other = Talk("a tale"), Talk("another tale")
        for one in (talk, other):
            await one.ask(first)
        session_id = talk.session_id
        aside = store.with_name("aside")
        store.rename(aside)
        store.touch()
        await talk.ask(first)
        elsewhere = other.copy("another tale")
        await other.ask(first)
        await elsewhere.ask(second)
        assert elsewhere.session_id != other.session_id
        store.unlink()
        aside.rename(store)
        for server in (first, second):
            await server.until_caught_up()
        await talk.ask(second)
        assert talk.session_id == session_id
        assert await second.num_turns(session_id) == 3


async def test_what_one_server_lets_go_goes_on_at_another(tiny_model, short_dir):
    """It has room for one conversation; each of two goes on all the same, and is gone at last."""
    async with running(tiny_model, short_dir, 100, 1) as (first, second, _):
        talk = Talk("a tale")
        for server in (first, second, first):
            await talk.ask(server)
        other = Talk("another tale")
        await other.ask(second)
        await second.until_sessions(1)
        await talk.ask(second)
        assert await second.num_turns(talk.session_id) == 4
        await second.until_sessions(1)
        await talk.ask(first)
        assert await first.num_turns(talk.session_id) == 5
        before = other.session_id
        await other.ask(first)
        assert other.session_id != before, "it was deleted for all, and is computed"
