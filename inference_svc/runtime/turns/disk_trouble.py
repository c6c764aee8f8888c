"""What happens when the transcripts' disk fails: it is logged, counted, and reported to clients.

A disk without room is found out by writing. From then on a session is opened only if some room is
found before an answer is computed for it; sessions that have a file are tried each time.
"""

import asyncio
import errno
import os
from pathlib import Path

from inference_svc.core.errors import TranscriptDiskFullError, TranscriptUnavailableError
from shared.process.log import LineAllowance, get_logger
from shared.types.errors import ReportedError
from shared.types.histogram import Tally

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
PROBE_FILE = "room"  # written to see whether there is room again
PROBE_BYTES = 65536  # as the record of a long first turn
RETRY_S = 30.0  # when to come back to a disk that somebody has to look after

log = get_logger(__name__)


class DiskTrouble:
    """See the module docstring. Methods are called on the event loop.

    Args:
        directory: the directory of the transcripts.

    Attributes:
        errors: number of reads and writes that failed, by "full", "write" and "read".
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._is_full = False
        self._probing = asyncio.Lock()
        self._lines = LineAllowance(per_s=1)
        self.errors = Tally()

    def failed(self, what: str, path: Path, error: OSError, kind: str) -> ReportedError:
        """Count and log, a line a second at most, and return the client's error.

        Args:
            what: what cannot be recorded or read, for the client.
            path: the file, for whoever runs the service.
            error: the exception that reading or writing it raised.
            kind: "write" or "read".
        """
        is_full = error.errno in NO_ROOM
        self._is_full = self._is_full or is_full
        self.errors.add("full" if is_full else kind)
        left_out = self._lines.take("")
        if left_out is not None:
            log.warning(
                "transcript_disk_full" if is_full else "transcript_unavailable",
                path=str(path),
                error=error.strerror,
                remedy="make room there" if is_full else "see that the disk is in order",
                more=left_out,
            )
        if is_full:
            return TranscriptDiskFullError(
                f"the service has no room to record {what}",
                "come back later; whoever runs the service has to make room",
                retry_after_s=RETRY_S,
            )
        return TranscriptUnavailableError(
            f"the transcript of {what} cannot be used ({error.strerror})",
            "come back later; the log of the service says what to do",
            retry_after_s=RETRY_S,
        )

    def opened(self) -> None:
        """Record that a session was opened, or could be: there is room.

        Appending to another file proves little: its last block may have had room for that.
        """
        if self._is_full:
            self._is_full = False
            log.info("transcript_disk_has_room", path=str(self._directory))

    async def check_room(self) -> None:
        """Check that a session can be opened, before anything is computed for it.

        Costs nothing unless the last write found no room: then it writes a little, and removes it.

        Raises:
            TranscriptDiskFullError: there still is no room.
        """
        if not self._is_full:
            return
        async with self._probing:
            path = self._directory / PROBE_FILE
            try:
                await asyncio.to_thread(_probe, path)
            except OSError as error:
                raise self.failed("a new session", path, error, "write") from error
            self.opened()


def _probe(path: Path) -> None:
    """Write a file and remove it.

    Raises:
        OSError: there is no room for it.
    """
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
