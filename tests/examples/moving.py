"""A scenario behind any balancer: one server is drained and returns, another one is lost.

Half of the conversations use HTTP, and half of these have no name and reach any server: sent whole,
or turn by turn, each after the last response. All others over HTTP are sent whole, and those over
gRPC turn by turn. Where servers share nothing, all are sent whole, by their names, since the others
would have lost their history.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import openai

from inference_svc.client import InferenceClient, turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.session_key import SessionKey
from tests.examples.pairs import Pair
from tests.examples.talks import MODEL
from tests.following_process import manifest_of
from tests.kvd_polling import eventually, sessions_of

LENGTH = 6
AT_ONCE = 8
BUSY_SHARE = 0.2  # turns wait for as long as it may pay: on a busy machine some compute
SAID = "Keys and values are kept, so that they need not be computed again. " * 2


class Front(Protocol):
    """A balancer and what is behind it."""

    pairs: Mapping[str, Pair]

    def openai(self) -> openai.AsyncOpenAI: ...
    def grpc_client(self) -> InferenceClient: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def take_out(self, name: str) -> None: ...
    async def bring_back(self, name: str) -> None: ...


@dataclass
class Tale:
    """A conversation.

    Attributes:

    name: the client's name of it.

    is_http: whether its client uses HTTP.

    is_named: whether its client sends the name.

    is_followed: whether it sends only new messages, after the last response; else it sends the
    whole conversation each time, if it uses HTTP.

    session: id of the session of its last turn.

    num_turns: its client's turns.

    num_tokens: of context that could have KV after them.

    recomputed: tokens of history that its last turn has computed again.

    total_recomputed: likewise of all turns.
    """

    name: str
    is_http: bool
    is_named: bool = True
    is_followed: bool = False
    session: str = ""
    num_turns: int = 0
    num_tokens: int = 0
    recomputed: int = 0
    total_recomputed: int = 0
    _messages: list[dict[str, str]] = field(default_factory=list)
    _last_response: str | None = None

    async def go_on(self, http: openai.AsyncOpenAI, grpc_client: InferenceClient) -> None:
        """Send the next turn; the client retries what may be retried."""
        said = f"{self.name}, {self.num_turns}: {SAID}"
        if self.is_followed:
            reused, num_tokens = await self._follow(http, said)
        elif self.is_http:
            reused, num_tokens = await self._ask(http, said)
        else:
            reused, num_tokens = await self._submit(grpc_client, said)
        self.recomputed = max(0, self.num_tokens - reused)
        self.total_recomputed += self.recomputed
        self.num_tokens = num_tokens
        self.num_turns += 1

    async def _ask(self, http: openai.AsyncOpenAI, said: str) -> tuple[int, int]:
        self._messages.append({"role": "user", "content": said})
        body, headers = {"session_id": self.name}, {"X-Session-Id": self.name}
        answer = await http.chat.completions.create(
            model=MODEL,
            messages=self._messages,
            max_tokens=LENGTH,
            extra_body={"ignore_eos": True, **(body if self.is_named else {})},
            extra_headers=headers if self.is_named else {},
        )
        self.session = answer.model_extra["session_id"]
        self._messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        usage = answer.usage
        return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens + LENGTH - 1

    async def _follow(self, http: openai.AsyncOpenAI, said: str) -> tuple[int, int]:
        response = await http.responses.create(
            model=MODEL,
            input=said,
            previous_response_id=self._last_response,
            max_output_tokens=LENGTH,
            extra_body={"ignore_eos": True},
        )
        self.session = response.model_extra["session_id"]
        self._last_response = response.id
        usage = response.usage
        return usage.input_tokens_details.cached_tokens, usage.input_tokens + LENGTH - 1

    async def _submit(self, client: InferenceClient, said: str) -> tuple[int, int]:
        sampling = pb.Sampling(max_tokens=LENGTH, ignore_eos=True)
        request = turn_request(said, self.name, sampling=sampling, expected_turn=self.num_turns)
        result = await client.submit_patiently(request)
        self.session = self.name
        assert result.accepted.turn == self.num_turns
        usage = result.usage
        num_tokens = usage.history_tokens + usage.new_tokens + LENGTH - 1
        return usage.reused_tokens, num_tokens


@dataclass(frozen=True)
class Scene:
    """The measurements over all conversations.

    Attributes:

    tales: all of them.

    moved: tokens that existing conversations computed again when the first server was drained.

    lost: likewise when the second one was lost.

    unpushed: tokens that only that one had.

    back: likewise when the first one had returned.

    at_stake: tokens that all these conversations had when they changed servers.
    """

    tales: Sequence[Tale]
    moved: int
    lost: int
    unpushed: int
    back: int
    at_stake: int

    @property
    def excess(self) -> int:
        """Return the tokens that were computed again though the store had them."""
        return self.moved + self.back + max(0, self.lost - self.unpushed)

    @property
    def recomputed(self) -> int:
        """Return the tokens of history that were computed again, in all turns."""
        return sum(tale.total_recomputed for tale in self.tales)

    def __str__(self) -> str:
        """Return the measurements as text."""
        unnamed = sum(tale.total_recomputed for tale in self.tales if not tale.is_named)
        return (
            f"{len(self.tales)} conversations of 6 turns: {self.recomputed} tokens of history "
            f"computed anew, {unnamed} of them of those without a name; {self.moved} behind the "
            f"drain, {self.lost} behind the loss (only the lost server had {self.unpushed}), "
            f"{self.back} when the drained one was back"
        )


async def run_checked(front: Front, oracle, num_tales: int, store: Path | None) -> Scene:
    """Run the scenario; check that each answer equals recomputation, on every server."""
    try:
        await front.start()
        scene = await play(front, num_tales, store)
        for tale in scene.tales:
            turns = [(turn.input_ids, turn.output_ids) for turn in await read(front, tale)]
            verdict = await asyncio.to_thread(oracle.judge, turns)
            assert verdict.num_tokens
            assert verdict.is_identical
    finally:
        await front.stop()
    return scene


async def read(front: Front, tale: Tale) -> Sequence[pb.TurnRecord]:
    """Return all turns of a conversation, from the pair with most of them."""
    running = [pair for pair in front.pairs.values() if pair.is_running]
    found = [await pair.session(tale.session) for pair in running]
    longest = max((session for session in found if session), key=lambda one: one.turns)
    return longest.turn_records


async def play(front: Front, num_tales: int, store: Path | None) -> Scene:
    """Run six turns of each conversation.

    Args:

    front: the balancer, and three pairs.

    num_tales: how many conversations.

    store: directory that the pairs share; None: they share nothing.
    """
    tales = [
        Tale(
            f"tale-{number}",
            is_http=not store or number % 2 == 0,
            is_named=not store or number % 4 != 0,
            is_followed=bool(store) and number % 8 == 0,
        )
        for number in range(num_tales)
    ]
    out, lost, _ = front.pairs.values()
    async with front.openai() as http, front.grpc_client() as client:

        async def go_on(which: Iterable[Tale]) -> None:
            gate = asyncio.Semaphore(AT_ONCE)

            async def goes_on(tale: Tale) -> None:
                async with gate:
                    await tale.go_on(http, client)

            await asyncio.gather(*(goes_on(tale) for tale in which))

        await go_on(tales)
        await go_on(tales)
        on_out = await tales_at(front, out, tales)
        at_stake = sum(tale.num_tokens for tale, _ in on_out)
        await front.take_out(out.name)
        if store is not None:
            await until_pushed(store, on_out)
        await go_on(tales)
        moved = sum(tale.recomputed for tale, _ in on_out)

        on_lost = await tales_at(front, lost, tales)
        running = asyncio.create_task(go_on(tale for tale in tales if not tale.is_http))
        if store is not None:
            await lost.until_computing()
        before = {tale.name: tale.num_tokens for tale, _ in on_lost}
        at_stake += sum(before.values())
        await lost.lose()
        unpushed = 0
        for tale, key in on_lost:
            pushed = await num_pushed_tokens(store, key) if store else 0
            unpushed += max(0, before[tale.name] - pushed)
        await running
        await go_on(tale for tale in tales if tale.is_http)
        recomputed = sum(tale.recomputed for tale, _ in on_lost)

        if store is not None:
            await until_pushed(store, await tales_at(front, None, tales))
        await front.bring_back(out.name)
        await go_on(tales)
        come_back = await tales_at(front, out, tales)
        back = sum(tale.recomputed for tale, _ in come_back)
        at_stake += sum(tale.num_tokens for tale, _ in come_back)
        await go_on(tales)
    assert {tale.num_turns for tale in tales} == {6}
    return Scene(tales, moved, recomputed, unpushed, back, at_stake)


async def tales_at(
    front: Front, pair: Pair | None, tales: Sequence[Tale]
) -> list[tuple[Tale, SessionKey]]:
    """Return the conversations whose last turn was at a pair, by the kvds; None: any."""
    most: dict[str, tuple[int, str, SessionKey]] = {}
    for other in front.pairs.values():
        for info in await sessions_of(other.kvd) if other.is_running else ():
            named = info.session
            key = SessionKey(named.tenant, named.model, named.session_id)
            found = (info.num_tokens, other.name, key)
            most[named.session_id] = max(found, most.get(named.session_id, found))
    found = ((tale, most[tale.session]) for tale in tales if tale.session in most)
    return [(tale, key) for tale, (_, name, key) in found if pair is None or name == pair.name]


async def num_pushed_tokens(store: Path, key: SessionKey) -> int:
    """Return how much of a session is in the store."""
    manifest = await asyncio.to_thread(manifest_of, store, key)
    return manifest.num_tokens if manifest else 0


async def until_pushed(store: Path, tales: Iterable[tuple[Tale, SessionKey]]) -> None:
    """Return when the store has all of these conversations."""
    for tale, key in tales:

        async def is_there(tale: Tale = tale, key: SessionKey = key) -> bool:
            return await num_pushed_tokens(store, key) >= tale.num_tokens

        await eventually(is_there, wanted=True)
