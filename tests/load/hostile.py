"""Hostile clients: each does one kind of harm again and again until it is stopped.

Each gets exactly the expected refusals; anything else is an AssertionError, and ends the load.
"""

import asyncio
import random
from collections import Counter
from contextlib import aclosing, suppress
from typing import ClassVar

from inference_svc.client import InferenceClient, turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import (
    ConflictError,
    DeniedError,
    ExhaustedError,
    InvalidInputError,
    NotFoundError,
    ReportedError,
)
from tests.pair import VOCAB_SIZE

MAX_MESSAGE_BYTES = 65536  # of the service under load: the smallest possible
FLOOD = "flood"  # the tenant that exceeds its limits
PAUSE_S = 0.01  # between two tries of one client: the load is many clients, not a busy loop
HOLD_S = 1.0  # how long one that holds something holds it
SHORT = pb.Sampling(max_tokens=8, ignore_eos=True)
LONG = pb.Sampling(max_tokens=200, ignore_eos=True)


class HostileClient:
    """Base: a client with a seed, and a record of its results.

    Attributes:

    seen: reasons of refusals, and other events.
    """

    def __init__(self, client: InferenceClient, number: int) -> None:
        self.seen: Counter[str] = Counter()
        self._client = client
        self._name = f"hostile-{number}"
        self._random = random.Random(number)  # noqa: S311  # test data

    async def harass(self, stop: asyncio.Event) -> None:
        """Repeat the harm until stopped."""
        while not stop.is_set():
            await self.harm()
            await asyncio.sleep(PAUSE_S)

    async def harm(self) -> None:
        """Do the harm once."""
        raise NotImplementedError

    async def _submit(self, request: pb.SubmitTurnRequest) -> None:
        """Run a turn, and count the reason of its refusal."""
        try:
            await self._client.submit(request)
            self.seen["answered"] += 1
        except ReportedError as error:
            self.seen[error.reason if error.remedy else "no_remedy"] += 1
            raise

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(4, VOCAB_SIZE) for _ in range(count)]


class Malformed(HostileClient):
    """Sends malformed requests."""

    async def harm(self) -> None:
        """Send one of many kinds."""
        bad = [
            turn_request([5_000_000], self._name, sampling=SHORT),
            turn_request("", self._name),
            turn_request("Hi", "no name!"),
            turn_request("Hi", self._name, sampling=pb.Sampling(temperature=-1.0)),
            turn_request("Hi", self._name, priority=1000),
            turn_request("Hi", self._name, deadline_s=float("nan")),
            turn_request("Hi", self._name, overflow=pb.Overflow(policy="none of these")),
        ]
        with suppress(InvalidInputError, ExhaustedError):  # some are checked when their turn comes
            await self._submit(self._random.choice(bad))
            raise AssertionError("it was taken")


class Stranger(HostileClient):
    """Names a tenant that is not its own, and sessions of others."""

    async def harm(self) -> None:
        """Send any call."""
        name = f"s-{self._random.randrange(1000)}"
        call = self._random.choice(
            (
                lambda: self._submit(turn_request("Hi", name, tenant="secret")),
                lambda: self._call(self._client.get_session(name, tenant="secret")),
                lambda: self._call(self._client.delete_session(name, tenant="secret")),
                lambda: self._call(self._client.cancel(name, tenant="secret")),
            )
        )
        with suppress(DeniedError):
            await call()
            raise AssertionError("it was let in")

    async def _call(self, call) -> None:
        try:
            await call
        except ReportedError as error:
            self.seen[error.reason] += 1
            raise


class Oversized(HostileClient):
    """Sends messages over the size limit."""

    async def harm(self) -> None:
        """Send one; half of them are just above the limit."""
        num_bytes = MAX_MESSAGE_BYTES * self._random.choice((1, 1, 8, 64))
        with suppress(InvalidInputError):
            await self._submit(turn_request("x" * num_bytes, self._name))
            raise AssertionError("it was taken")


class Fickle(HostileClient):
    """Begins long turns and drops them, or has them cancelled."""

    async def harm(self) -> None:
        """Begin one turn, and leave it at some point."""
        request = turn_request(self._tokens(60), self._name, sampling=LONG)
        num_left = self._random.choice((1, 2, 3, 8))
        with suppress(ExhaustedError, ConflictError):  # the previous one is still being stopped
            async with aclosing(self._client.stream_turn(request)) as events:
                async for event in events:
                    num_left -= 1
                    if not num_left and self._random.random() < 0.5:
                        self.seen["left"] += 1
                        return
                    if not num_left:
                        with suppress(NotFoundError):  # it has ended
                            self.seen["cancelled"] += await self._client.cancel(self._name)
                    assert event.WhichOneof("event")


class SlowReader(HostileClient):
    """Reads an event now and then, and thereby holds its turn's messages."""

    async def harm(self) -> None:
        """Read one turn slowly, and leave it unread."""
        name = f"{self._name}-{self.seen['read']}"
        request = turn_request(self._tokens(20), name, sampling=LONG)
        with suppress(ExhaustedError):
            async with aclosing(self._client.stream_turn(request)) as events:
                async for _ in events:
                    self.seen["read"] += 1
                    await asyncio.sleep(HOLD_S)
                    if self.seen["read"] % 3 == 0:
                        return


class Flooder(HostileClient):
    """Exceeds its tenant's limits, and ignores all hints to wait."""

    async def harm(self) -> None:
        """Send several turns at once."""
        requests = [
            turn_request(
                self._tokens(20), f"{self._name}-{number}", tenant=FLOOD, sampling=SHORT, wait=True
            )
            for number in range(8)
        ]
        found = await asyncio.gather(*map(self._submit, requests), return_exceptions=True)
        for error in found:
            if error is not None and not isinstance(error, ExhaustedError):
                raise error


class HalfOpen(HostileClient):
    """Connects to the socket, sends part of a request, and stays."""

    BEGINNINGS: ClassVar = (
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + b"\xff" * 40,
        b"\x00" * 4096,
    )

    async def harm(self) -> None:
        """Hold one connection; the service may close it."""
        path = self._client.address.removeprefix("unix:")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(self._random.choice(self.BEGINNINGS))
        with suppress(OSError):
            await writer.drain()
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(HOLD_S):
                await reader.read()
        self.seen["connected"] += 1
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


KINDS = (Malformed, Stranger, Oversized, Fickle, SlowReader, Flooder, HalfOpen)
EXPECTED = {  # each kind must happen at least once, for the load to count
    Malformed: "invalid_input",
    Stranger: "tenant_denied",
    Oversized: "message_too_large",
    Fickle: "left",
    SlowReader: "read",
    Flooder: "too_many_turns",
    HalfOpen: "connected",
}
