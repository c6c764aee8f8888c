"""CopierLink: keeps a channel to kvd's copier open while attached, and replaces a lost one."""

import asyncio
from contextlib import suppress

from inference_svc.core.counters import Counters
from inference_svc.runtime.cuda.copier_channel import PLACE_BYTES, PLACES, CopierChannel
from inference_svc.runtime.cuda.driver import Driver
from shared.cuda.driver_calls import DriverError
from shared.kvd_client.attachment import Attachment
from shared.process.log import get_logger
from shared.process.packets import close_fds
from shared.types.errors import ReportedError

RETRY_S = 0.5  # doubled after each failure
MAX_RETRY_S = 60.0

log = get_logger(__name__)


class CopierLink:
    """The link to the copier of one GPU.

    Runs on the event loop; `channel` may be read by any thread.

    Attributes:
        channel: the channel to a running copier; None: there is none, use other copies.
    """

    def __init__(
        self, driver: Driver, device: str, counters: Counters, place_bytes: int = PLACE_BYTES
    ) -> None:
        """Store the parts.

        Args:
            driver: the GPU's driver.
            device: the GPU's UUID.
            counters: the service's counters.
            place_bytes: bytes of a place of the ring.
        """
        self.channel: CopierChannel | None = None
        self._driver = driver
        self._device = device
        self._counters = counters
        self._ring_bytes = PLACES * place_bytes
        self._last_problem = ""

    async def run(self, attachment: Attachment) -> None:
        """Keep a channel open as long as an attachment lasts; the caller cancels it at its end."""
        delay_s = RETRY_S
        while True:
            try:
                await self._use_channel(attachment)
            except (ReportedError, DriverError) as error:
                if str(error) != self._last_problem:  # logged once, not at every attempt
                    log.warning("no_copier", reason=str(error), copies_by="shm")
                self._last_problem = str(error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, MAX_RETRY_S)
            else:
                log.warning("copier_gone", copies_by="shm")
                self._counters.add("copiers_lost")
                delay_s = RETRY_S
                await asyncio.sleep(delay_s)

    async def _use_channel(self, attachment: Attachment) -> None:
        """Open a channel; return when it is lost.

        Raises:
            ReportedError: kvd has no copier for this GPU.
            DriverError: the GPU has no room for the ring, or cannot share it.
        """
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        # A new ring each time: an earlier copier that is still dying must not write to it.
        ring, ring_fd = self._driver.share(self._ring_bytes)
        try:
            sock, pidfd = await attachment.open_copier(self._device, ring_fd, self._ring_bytes)
        finally:
            close_fds([ring_fd])

        def on_gone() -> None:
            with suppress(RuntimeError):  # the loop is closed, so that nothing waits for the event
                loop.call_soon_threadsafe(gone.set)

        channel = CopierChannel(sock, pidfd, ring, attachment.mapped.slots, on_gone)
        self.channel = channel
        log.info("copier_open", device=self._device)
        self._last_problem = ""
        try:
            await gone.wait()
        finally:
            self.channel = None
            channel.close()
