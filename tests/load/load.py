"""Many clients at once against the real pair, good and hostile, while kvd is killed.

A good client is the shipped one, and patient: it retries when the hint says so. If any of its turns
ends otherwise, the turn has failed, and the load with it.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from inference_svc.client import InferenceClient, turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import ReportedError
from tests.inference_processes import InferenceProcess
from tests.load.hostile import EXPECTED, FLOOD, KINDS, MAX_MESSAGE_BYTES, HostileClient
from tests.mixed_pair import EXTENT_BYTES
from tests.oracle import Oracle
from tests.pair import SLOT_BYTES, VOCAB_SIZE, until
from tests.processes import KvdProcess

NUM_TENANTS = 8
HOSTILE_SHARE = 5  # one client in this many is hostile
MAX_SESSION_TOKENS = 800  # then the client opens another session: nothing overflows
MAX_TURNS = 48  # running at once: fewer than there are clients, so that some are refused
TURN_S = 600.0
MIN_KILLS = 2
RELOAD_S = 7.0  # between two reloads of the service's settings
SETTINGS = f"""
[server]
max_message_bytes = {MAX_MESSAGE_BYTES}
socket_tenants = [{", ".join(f'"tenant-{n}"' for n in range(NUM_TENANTS))}, "{FLOOD}"]
[overflow]
policy = "reject"
[scheduler]
max_turns = {MAX_TURNS}
max_running = 16
kv_tokens = 40000
[limits]
max_streams_per_client = 4096
[tenants.{FLOOD}]
max_turns = 2
turns_per_minute = %(flood_turns)d
"""


@dataclass(frozen=True)
class LoadShape:
    """The size of everything.

    Attributes:

    num_clients: all of them together.

    seconds: least duration.

    kill_s: between two kills of kvd.

    num_judged: sessions that are compared with recomputation.
    """

    num_clients: int
    seconds: float
    kill_s: float
    num_judged: int


class GoodClient:
    """Has one conversation after another, patiently.

    Attributes:

    seen: reasons of refusals that it waited out, and answered turns.

    answers: of each of its sessions, in order.

    failed: what its turns ended with, if not with an answer.
    """

    def __init__(self, client: InferenceClient, number: int) -> None:
        self.seen: Counter[str] = Counter()
        self.answers: dict[str, list[list[int]]] = {}
        self.failed: list[str] = []
        self.tenant = f"tenant-{number % NUM_TENANTS}"
        self._client = client
        self._number = number
        self._random = random.Random(number)  # noqa: S311  # test data

    async def converse(self, stop: asyncio.Event) -> None:
        """Converse until stopped; wait for the running turn."""
        num_tokens = 0
        while not stop.is_set():
            if num_tokens == 0:
                session_id = f"good-{self._number}-{len(self.answers)}"
                self.answers[session_id] = []
            num_tokens += await self._turn(session_id)
            if num_tokens > MAX_SESSION_TOKENS:
                num_tokens = 0

    async def _turn(self, session_id: str) -> int:
        """Run one turn to its end; return the answer's tokens."""
        given = [self._random.randrange(4, VOCAB_SIZE) for _ in range(self._random.randint(8, 90))]
        num_answer = self._random.randint(2, 16)
        sampling = pb.Sampling(max_tokens=num_answer, ignore_eos=True)
        request = turn_request(given, session_id, tenant=self.tenant, sampling=sampling)
        try:
            result = await self._client.submit_patiently(
                request, TURN_S, on_refused=lambda error: self.seen.update([error.reason])
            )
        except ReportedError as error:
            self.failed.append(f"{session_id}: {type(error).__name__} {error.reason} {error}")
            return MAX_SESSION_TOKENS + 1
        if len(result.token_ids) != num_answer or result.finished.finish_reason != "length":
            self.failed.append(f"{session_id}: {result.finished}")
        self.seen["answered"] += 1
        self.seen.update(dict(result.usage.tier_tokens))
        self.answers[session_id].append(result.token_ids)
        return len(given) + num_answer


class Load:
    """The pair and its clients.

    Attributes:

    seen: what happened to good clients, all together.

    harm: what happened to hostile ones, by kind.
    """

    def __init__(self, model: Path, directory: Path, shape: LoadShape) -> None:
        self.seen: Counter[str] = Counter()
        self.harm: dict[type[HostileClient], Counter[str]] = {kind: Counter() for kind in KINDS}
        self._shape = shape
        self._settings = directory / "settings.toml"
        self._write_settings(600)
        # Little of everything, so that blocks go to SSD and back.
        tiers = ("--dram", str(96 * SLOT_BYTES), "--ssd", str(1000 * EXTENT_BYTES))
        self.kvd = KvdProcess(directory / "kvd", tiers)
        (directory / "svc").mkdir()
        flags = ("--config", str(self._settings))
        self.service = InferenceProcess(
            model, directory / "svc", self.kvd.runtime_dir, flags, {"INFERENCE_LOG__LEVEL": "info"}
        )
        self._good: list[GoodClient] = []
        self._hostile: list[HostileClient] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run both processes, attached, and the clients' connections."""
        async with AsyncExitStack() as stack:
            await self.kvd.start()
            stack.push_async_callback(self.kvd.stop)
            await stack.enter_async_context(self.service)
            await self._until_kvd_is("attached")
            for number in range(self._shape.num_clients):
                client = await stack.enter_async_context(self.service.client())
                if number % HOSTILE_SHARE:
                    self._good.append(GoodClient(client, number))
                else:
                    kind = KINDS[number // HOSTILE_SHARE % len(KINDS)]
                    self._hostile.append(kind(client, number))
            yield

    async def play(self) -> None:
        """Run everything for the given time, and until every kind of event has happened."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for good in self._good:
                tasks.create_task(good.converse(stop))
            for hostile in self._hostile:
                tasks.create_task(hostile.harass(stop))
            tasks.create_task(self._reload(stop))
            await self._kill_kvd()
            stop.set()
        for good in self._good:
            self.seen += good.seen
        for hostile in self._hostile:
            self.harm[type(hostile)] += hostile.seen

    @property
    def failed(self) -> list[str]:
        """Return turns of good clients that ended with anything but their answer."""
        return [failure for good in self._good for failure in good.failed]

    @property
    def least(self) -> int:
        """Return the smallest number of answered turns of any good client."""
        return min(good.seen["answered"] for good in self._good)

    async def differing(self, oracle: Oracle, count: int) -> list[str]:
        """Return those of this many drawn sessions that differ from recomputation."""
        sessions = [
            (good.tenant, session_id, answers)
            for good in self._good
            for session_id, answers in good.answers.items()
            if answers
        ]
        drawn = random.Random(1).sample(sessions, min(count, len(sessions)))  # noqa: S311
        async with self.service.client() as client:
            return [name for name in drawn if not await _is_identical(client, oracle, *name)]

    async def until_settled(self) -> None:
        """Return when no turn is running."""
        async with self.service.client() as client:

            async def is_settled() -> bool:
                model = await client.get_model()
                busy = (model.running_turns, model.waiting_turns)
                names = ("reserved_token_slots", "saves_under_way")
                return not any(busy) and not any(model.gauges[name] for name in names)

            await until(is_settled)

    async def counters(self) -> dict[str, int]:
        """Return counters of the service."""
        async with self.service.client() as client:
            return dict((await client.get_model()).counters)

    async def _kill_kvd(self) -> None:
        """Kill kvd with SIGKILL again and again, and replace it, until the load is complete."""
        end_s = time.monotonic() + self._shape.seconds
        while time.monotonic() < end_s or not self._is_enough():
            await asyncio.sleep(self._shape.kill_s)
            await self.kvd.kill()
            self.seen["kills"] += 1
            await self.kvd.start()
        await self._until_kvd_is("attached")

    def _is_enough(self) -> bool:
        """Whether everything that a load must cause has happened, on a slow machine too."""
        answered = sum(good.seen["answered"] for good in self._good)
        harmed = {type(one) for one in self._hostile if one.seen[EXPECTED[type(one)]]}
        return (
            self.seen["kills"] >= MIN_KILLS
            and answered > self._shape.num_clients
            and harmed == set(EXPECTED)
        )

    async def _reload(self, stop: asyncio.Event) -> None:
        """Change the limits of the flooding tenant again and again."""
        while not stop.is_set():
            self._write_settings(random.randint(2, 60))  # noqa: S311  # test data
            self.service.send_signal(signal.SIGHUP)
            self.seen["reloads"] += 1
            await asyncio.sleep(RELOAD_S)

    async def _until_kvd_is(self, state: str) -> None:
        async with self.service.client() as client:

            async def is_so() -> bool:
                return (await client.get_model()).kvd_state == state

            await until(is_so)

    def _write_settings(self, flood_turns: int) -> None:
        """Replace the whole file: it may be read at any moment."""
        written = self._settings.with_suffix(".new")
        written.write_text(SETTINGS % {"flood_turns": flood_turns})
        written.rename(self._settings)


async def _is_identical(
    client: InferenceClient,
    oracle: Oracle,
    tenant: str,
    session_id: str,
    answers: Sequence[Sequence[int]],
) -> bool:
    """Whether a session is recorded as it was streamed, and equals recomputation."""
    session = await client.get_session(session_id, with_turns=True, tenant=tenant)
    records = session.turn_records
    if [list(record.output_ids) for record in records] != [list(answer) for answer in answers]:
        return False
    turns = [(record.input_ids, record.output_ids) for record in records]
    return (await asyncio.to_thread(oracle.judge, turns)).is_identical
