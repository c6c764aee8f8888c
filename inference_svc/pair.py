"""A pair of child processes, kvd and a service that stores its KV there, for `up` and the demo.

Sockets, state and logs are the pair's own, so that nothing else on the machine is disturbed:

    <runtime_dir>/kvd             kvd's sockets
    <runtime_dir>/inference.sock  the service's socket
    <state_dir>/NAME-state        state of each process
    <state_dir>/NAME.log          log of each process
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

from inference_svc.client import InferenceClient
from inference_svc.installation import SOCKET
from shared.children.child_process import ChildFailedError, ChildProcess
from shared.process.runtime_dir import READER_SOCKET

SETTLE_DEADLINE_S = 30.0  # for work that either process does in the background
POLL_S = 0.05
# How long running turns may continue at the end: ChildProcess.stop must not give up before.
DRAIN = {"INFERENCE_SERVER__DRAIN_S": "10s"}


class Pair:
    """A kvd and a service; `start` returns when both serve and the service is attached to kvd.

    Args:
        runtime_dir: directory of the sockets, with a short name; only this user may enter it.
        state_dir: directory of state and logs.
        kvd_flags: options of `kvd serve`.
        service_flags: options of `inference-svc serve`.

    Attributes:
        kvd_dir: runtime directory of kvd, for `kvd … --runtime-dir`.
        address: gRPC address of the service.
        logs: directory of both logs.
        kvd: kvd's process.
        service: the service's process.
    """

    def __init__(
        self,
        runtime_dir: Path,
        state_dir: Path,
        kvd_flags: Sequence[str],
        service_flags: Sequence[str],
    ) -> None:
        self.logs = state_dir
        self.kvd_dir = runtime_dir / "kvd"
        self.address = f"unix:{runtime_dir / SOCKET}"
        self.kvd = ChildProcess(
            "kvd",
            (
                *("kvd", "serve", "--runtime-dir", str(self.kvd_dir)),
                *("--state-dir", str(state_dir / "kvd-state")),
                # Nothing is left in /dev/shm when it has ended; its next start reads from SSD.
                *("--dram-keep", "none", *kvd_flags),
            ),
            f"unix:{self.kvd_dir / READER_SOCKET}",
            state_dir / "kvd.log",
        )
        kvd_runtime_dir = ("--kvd-runtime-dir", str(self.kvd_dir))
        self.service = service_child(
            "inference-svc", self.address, state_dir, (*kvd_runtime_dir, *service_flags)
        )

    async def start(self) -> None:
        """Start both, and wait until the service is attached to kvd.

        Raises:
            ChildFailedError: one of them does not start; the other may run.
        """
        await asyncio.gather(self.kvd.start(), self.service.start())
        await self.wait_until_attached()

    async def wait_until_attached(self) -> None:
        """Wait until the service is attached to kvd, which it does in the background.

        Raises:
            ChildFailedError: it is not attached after SETTLE_DEADLINE_S.
        """
        async with InferenceClient(self.address) as client:

            async def is_attached() -> bool:
                return (await client.get_model()).kvd_state == "attached"

            await wait_until(is_attached, "inference-svc did not attach to kvd", self.logs)

    async def stop(self) -> None:
        """Stop both, the service first: its last KV is then stored, and kvd writes it to SSD."""
        await self.service.stop()
        await self.kvd.stop()


def service_child(name: str, address: str, state_dir: Path, flags: Sequence[str]) -> ChildProcess:
    """Return the process of a service, which listens at a socket; its state and log have its name.

    Args:
        name: the process's name.
        address: the gRPC address to listen at.
        state_dir: directory of its state and log.
        flags: further options of `inference-svc serve`.
    """
    arguments = (
        *("inference_svc.cli.main", "serve", "--listen", address),
        *("--state-dir", str(state_dir / f"{name}-state"), *flags),
    )
    return ChildProcess(name, arguments, address, state_dir / f"{name}.log", DRAIN)


async def wait_for_first_end(children: Iterable[ChildProcess]) -> ChildFailedError:
    """Wait until one of the processes ends by itself, and return the error that reports it."""
    waits = [asyncio.ensure_future(child.wait_for_failure()) for child in children]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return done.pop().result()


async def wait_until(condition: Callable[[], Awaitable[bool]], otherwise: str, logs: Path) -> None:
    """Poll until a condition holds: kvd and the service do some work in the background.

    Args:
        condition: asks the processes.
        otherwise: message of the error if it does not hold in time.
        logs: directory of their logs.

    Raises:
        ChildFailedError: it does not hold after SETTLE_DEADLINE_S.
    """
    try:
        async with asyncio.timeout(SETTLE_DEADLINE_S):
            while not await condition():  # noqa: ASYNC110  # the event is in another process
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise ChildFailedError(otherwise, f"the logs in {logs} may say why") from error
