"""Failures of the transcripts' disk: they are logged, counted, and reported to clients.

A full disk is noticed by a write that fails. From then on a session is opened only if a probe finds
room before an answer is computed for it; for sessions that have a file each write is tried.
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
PROBE_BYTES = 65536  # as many as the record of a long first turn
RETRY_S = 30.0  # sent to clients; an operator has to make room first

log = get_logger(__name__)


class DiskTrouble:
    """Records failures of the disk, and whether it is full. Methods run on the event loop.

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

    def record_failure(self, what: str, path: Path, error: OSError, kind: str) -> ReportedError:
        """Count a failure, log it, at most a line a second, and return the client's error.

        Args:
            what: the session that cannot be recorded or read, for the client.
            path: the file, for the operator.
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
                remedy="free some space there" if is_full else "check that disk",
                more=left_out,
            )
        if is_full:
            return TranscriptDiskFullError(
                f"the service's disk has no room to record {what}",
                "try again later; whoever runs the service has to make room",
                retry_after_s=RETRY_S,
            )
        return TranscriptUnavailableError(
            f"the transcript of {what} cannot be used ({error.strerror})",
            "try again later; the log of the service says what to do",
            retry_after_s=RETRY_S,
        )

    def record_room(self) -> None:
        """Record that the disk has room again: a session's file was made, or could be.

        An append that succeeds does not prove it: the file's last disk block may have had room.
        """
        if self._is_full:
            self._is_full = False
            log.info("transcript_disk_has_room", path=str(self._directory))

    async def check_room(self) -> None:
        """Check that a session can be opened, before anything is computed for it.

        Costs nothing unless the last write found no room: then a probe file is written and removed.

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
                raise self.record_failure("a new session", path, error, "write") from error
            self.record_room()


def _probe(path: Path) -> None:
    """Write a probe file and remove it.

    Raises:
        OSError: there is no room for it.
    """
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())  # with delayed allocation a full disk may show only here
    finally:
        path.unlink(missing_ok=True)
