"""Synchronous client of the Operator and Reader services, for the command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvd.errors import NotRunningError
from shared.errors import UnavailableError
from shared.grpc_status import error_from_rpc
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.runtime_dir import OPERATOR_SOCKET, channel_options

TIMEOUT_S = 30.0  # a flush of everything walks over every session


class OperatorClient:
    """Calls on one channel; each raises a ReportedError if kvd refuses or is not there."""

    def __init__(self, runtime_dir: Path, channel: grpc.Channel) -> None:
        self._runtime_dir = runtime_dir
        self._operator = kvd_pb2_grpc.OperatorStub(channel)
        self._reader = kvd_pb2_grpc.ReaderStub(channel)

    def sessions(
        self, tenant: str, model: str, limit: int
    ) -> tuple[list[kvd_pb2.SessionInfo], int]:
        """Return up to `limit` sessions (0: all of them), and how many there are."""
        found: list[kvd_pb2.SessionInfo] = []
        page_token = ""
        while True:
            request = kvd_pb2.ListSessionsRequest(
                tenant=tenant,
                model=model,
                limit=max(0, limit - len(found)),
                page_token=page_token,
            )
            page = self._call(self._reader.ListSessions, request)
            found.extend(page.sessions)
            page_token = page.next_page_token
            if not page_token or (limit and len(found) >= limit):
                return found, page.total

    def describe(self, key: kvd_pb2.SessionKey) -> kvd_pb2.DescribeSessionResponse:
        """Return one session with its blocks."""
        request = kvd_pb2.DescribeSessionRequest(session=key)
        answer: kvd_pb2.DescribeSessionResponse = self._call(self._reader.DescribeSession, request)
        return answer

    def stats(self) -> kvd_pb2.GetStatsResponse:
        """Return fill, counters, engines, process."""
        answer: kvd_pb2.GetStatsResponse = self._call(
            self._reader.GetStats, kvd_pb2.GetStatsRequest()
        )
        return answer

    def flush(self, key: kvd_pb2.SessionKey | None, *, dry_run: bool) -> kvd_pb2.FlushResponse:
        """Drop a session, or (key None) all of them."""
        request = kvd_pb2.FlushRequest(session=key, all=key is None, dry_run=dry_run)
        answer: kvd_pb2.FlushResponse = self._call(self._operator.Flush, request)
        return answer

    def pin(self, key: kvd_pb2.SessionKey, *, soft: bool) -> None:
        """Protect a session; soft: until nothing else is left to evict."""
        self._call(self._operator.Pin, kvd_pb2.PinRequest(session=key, soft=soft))

    def unpin(self, key: kvd_pb2.SessionKey) -> None:
        """Take the protection away."""
        self._call(self._operator.Unpin, kvd_pb2.PinRequest(session=key))

    def set_ttl(self, key: kvd_pb2.SessionKey, ttl_s: float) -> float:
        """Set a TTL (0: default, negative: never); return when it expires, in seconds."""
        request = kvd_pb2.SetTtlRequest(session=key, ttl_s=ttl_s)
        return float(self._call(self._operator.SetTtl, request).expires_in_s)

    def leases(self, model: str) -> list[kvd_pb2.LeaseInfo]:
        """Return all leases, oldest first."""
        request = kvd_pb2.ListLeasesRequest(model=model)
        return list(self._call(self._reader.ListLeases, request).leases)

    def kill_holder(self, pid: int) -> kvd_pb2.KillHolderResponse:
        """End a process that holds leases."""
        request = kvd_pb2.KillHolderRequest(pid=pid)
        answer: kvd_pb2.KillHolderResponse = self._call(self._operator.KillHolder, request)
        return answer

    def recent_turns(self, model: str) -> list[kvd_pb2.RecentTurns]:
        """Return what kvd remembers of its recent turns, one message a layout."""
        of_layout: dict[str, kvd_pb2.RecentTurns] = {}
        with self._reported():
            request = kvd_pb2.ListRecentTurnsRequest(model=model)
            for part in self._reader.ListRecentTurns(request, timeout=TIMEOUT_S):
                if part.layout in of_layout:
                    of_layout[part.layout].turns.extend(part.turns)
                else:
                    of_layout[part.layout] = part
        return list(of_layout.values())

    def verify(self, *, repair: bool, model: str) -> Iterator[kvd_pb2.VerifyProgress]:
        """Check every copy; yields about once a second, the final report last. Takes its time."""
        with self._reported():
            yield from self._operator.Verify(kvd_pb2.VerifyRequest(repair=repair, model=model))

    def _call(self, method: Any, request: Any) -> Any:
        with self._reported():
            return method(request, timeout=TIMEOUT_S)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Raise what kvd says, or that it is not there, as a ReportedError."""
        try:
            yield
        except grpc.RpcError as error:
            reported = error_from_rpc(error)
            if isinstance(reported, UnavailableError):
                raise NotRunningError(
                    f"no kvd answers in {self._runtime_dir}",
                    "start it with: kvd serve (or name its directory with --runtime-dir)",
                ) from error
            raise reported from error


@contextmanager
def connect(runtime_dir: Path) -> Iterator[OperatorClient]:
    """Open a channel to the kvd of `runtime_dir`; it connects at the first call."""
    address = f"unix:{runtime_dir / OPERATOR_SOCKET}"
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        yield OperatorClient(runtime_dir, channel)
