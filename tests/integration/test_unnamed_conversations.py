"""Conversations without a client's name continue at any of the servers that share a store."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

from shared.types.session_key import SessionKey
from tests.examples.moving import num_pushed_tokens
from tests.examples.pairs import Pair, check_identical
from tests.http_api.conftest import MODEL
from tests.http_api.test_listening import local_client
from tests.kvd_polling import eventually, sessions_of

LENGTH = 6
# more than a block
SAID = "Keys and values are kept, so that they need not be computed again. " * 4
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
        """Return this server's number of turns of a session; None: it has no such session."""
        found = await self.session(session_id)
        return found and found.turns

    async def until_sessions(self, number):
        """Return when this server itself has so many sessions."""

        async def num_files():
            return len(list(self._sessions.glob("*.jsonl")))

        await eventually(num_files, number)

    async def until_caught_up(self):
        """Return when the store has everything of this server."""

        async def num_behind():
            return len(list(self._sessions.glob("*.behind")))

        await eventually(num_behind, 0)


class Talk:
    """A conversation; its client sends all of it each time, without a name.

    Attributes:
        session_id: the session that answered last.
        num_tokens: tokens of the context that could have KV.
        recomputed: tokens of history that the last turn recomputed.
    """

    def __init__(self, name, messages=(), num_tokens=0):
        self._name = name
        self._messages = [*messages]
        self.num_tokens = num_tokens

    async def ask(self, server):
        """Ask the next question at a server; return the answer's text."""
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
        """Copy the conversation, so that it can continue differently."""
        return Talk(name, self._messages, self.num_tokens)


@asynccontextmanager
async def running(model, directory, *max_sessions, more=""):
    """Run servers with such bounds and settings; yield them with the directory of their store."""
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
                return await num_pushed_tokens(store, key) == info.num_tokens
        return False

    await eventually(is_there, wanted=True)


async def test_a_conversation_continues_anywhere_without_recomputation(
    tiny_model, short_dir, oracle
):
    """It goes back and forth, also past a lost server; each answer equals recomputation."""
    async with running(tiny_model, short_dir, 100, 100) as (first, second, store):
        talk = Talk("a tale")
        # once its kvd has had an answer from its follower turns wait
        for server in (second, first):
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


async def test_two_simultaneous_turns_are_both_answered(tiny_model, short_dir, oracle):
    """Each continues, wherever it runs; if they differ one of them gets its own session."""
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


async def test_a_silent_store_fails_no_turn(tiny_model, short_dir):
    """Local history is used, the rest is recomputed; later everything is as before."""
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


async def test_sessions_that_one_server_evicts_continue_at_another(tiny_model, short_dir):
    """It has room for one conversation; both continue all the same, and are removed at last."""
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
