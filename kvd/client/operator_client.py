"""A synchronous client of kvd's Operator and Reader services, for commands and the follower."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from kvd.client.byte_stream import ByteStream, open_stream
from kvd.errors import BrokenTransferError, NotRunningError, SocketDeniedError
from kvd.session_files.pieces import Chunk
from shared.access.addresses import UNIX, is_unix
from shared.access.channels import ClientCredentials, channel_of
from shared.access.denials import denial_of
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import OPERATOR_SOCKET, READER_SOCKET, channel_options
from shared.serving.grpc_status import error_from_rpc
from shared.types.errors import ReportedError, UnavailableError

MAX_WHY = 300  # characters of gRPC's message about a failed connection
MESSAGE_BYTES = 1 << 20  # of a session file in one message: well below gRPC's limit
TIMEOUT_S = 30.0  # enough to flush all sessions


class Listed(NamedTuple):
    """A listing of sessions.

    Attributes:
        sessions: the sessions, at most as many as the limit.
        total: all sessions that match the filter.
        num_unavailable: layouts that could not be opened; their sessions are not listed.
    """

    sessions: list[kvd_pb2.SessionInfo]
    total: int
    num_unavailable: int


class OperatorClient:
    """Calls kvd over one channel; a call raises a ReportedError if kvd refuses or is not there."""

    def __init__(self, address: str, channel: grpc.Channel) -> None:
        self._address = address
        self._operator = kvd_pb2_grpc.OperatorStub(channel)
        self._reader = kvd_pb2_grpc.ReaderStub(channel)

    def sessions(
        self,
        filter_: kvd_pb2.SessionFilter,
        limit: int = 0,
        order: kvd_pb2.SessionOrder = kvd_pb2.SESSION_ORDER_IDLE,
        *,
        reverse: bool = False,
    ) -> Listed:
        """Return up to `limit` (0: all) of the sessions that match a filter."""
        found: list[kvd_pb2.SessionInfo] = []
        total = 0
        page_token = ""
        while True:
            request = kvd_pb2.ListSessionsRequest(
                filter=filter_,
                order=order,
                reverse=reverse,
                limit=max(0, limit - len(found)),
                page_token=page_token,
            )
            page = self._call(self._reader.ListSessions, request)
            total = total or page.total
            found.extend(page.sessions)
            page_token = page.next_page_token
            if not page_token or (limit and len(found) >= limit):
                return Listed(found, total, page.unavailable_layouts)

    def session_ids(
        self, filter_: kvd_pb2.SessionFilter, limit: int, timeout_s: float
    ) -> list[str]:
        """Return ids of sessions, last used first; for shell completion, which cannot wait."""
        request = kvd_pb2.ListSessionsRequest(filter=filter_, limit=limit, reverse=True)
        with self._translated_errors():
            page = self._reader.ListSessions(request, timeout=timeout_s)
        return [info.session.session_id for info in page.sessions]

    def describe(
        self, key: kvd_pb2.SessionKey, *, may_be_gone: bool = False
    ) -> kvd_pb2.DescribeSessionResponse:
        """Return one session with its blocks.

        Args:
            key: the session.
            may_be_gone: if kvd has it no longer, return the history that it remembers.
        """
        request = kvd_pb2.DescribeSessionRequest(session=key, may_be_gone=may_be_gone)
        answer: kvd_pb2.DescribeSessionResponse = self._call(self._reader.DescribeSession, request)
        return answer

    def stats(self, timeout_s: float = TIMEOUT_S) -> kvd_pb2.GetStatsResponse:
        """Return the fill of the tiers, counters, engines, and the process."""
        with self._translated_errors():
            answer: kvd_pb2.GetStatsResponse = self._reader.GetStats(
                kvd_pb2.GetStatsRequest(), timeout=timeout_s
            )
        return answer

    def flush(self, request: kvd_pb2.FlushRequest) -> kvd_pb2.FlushResponse:
        """Drop the sessions that the request names.

        A secure flush zeroes memory and waits for running turns: it has no deadline.
        """
        timeout_s = None if request.secure else TIMEOUT_S
        with self._translated_errors():
            answer: kvd_pb2.FlushResponse = self._operator.Flush(request, timeout=timeout_s)
        return answer

    def events(
        self,
        request: kvd_pb2.WatchEventsRequest,
        watching: Callable[[], None] | None = None,
    ) -> Iterator[kvd_pb2.Event]:
        """Yield events as they happen, or past ones, without a deadline.

        Args:
            request: the events to yield.
            watching: called before the first event, once kvd misses none any more.
        """
        with self._translated_errors():
            call = self._reader.WatchEvents(request)
            if watching is not None:
                call.initial_metadata()  # blocks until kvd has subscribed this call
                watching()
            yield from call

    def pin(self, key: kvd_pb2.SessionKey, *, soft: bool) -> None:
        """Protect a session; soft: until nothing else is left to evict."""
        self._call(self._operator.Pin, kvd_pb2.PinRequest(session=key, soft=soft))

    def unpin(self, key: kvd_pb2.SessionKey) -> None:
        """Remove a session's protection."""
        self._call(self._operator.Unpin, kvd_pb2.PinRequest(session=key))

    def set_ttl(self, key: kvd_pb2.SessionKey, ttl_s: float) -> float:
        """Set a TTL (0: the default, negative: none); return when it expires; all in seconds."""
        request = kvd_pb2.SetTtlRequest(session=key, ttl_s=ttl_s)
        return float(self._call(self._operator.SetTtl, request).expires_in_s)

    def leases(self, model: str) -> list[kvd_pb2.LeaseInfo]:
        """Return all leases, oldest first."""
        request = kvd_pb2.ListLeasesRequest(model=model)
        return list(self._call(self._reader.ListLeases, request).leases)

    def kill_holder(self, pid: int) -> kvd_pb2.KillHolderResponse:
        """Kill a process that holds leases."""
        request = kvd_pb2.KillHolderRequest(pid=pid)
        answer: kvd_pb2.KillHolderResponse = self._call(self._operator.KillHolder, request)
        return answer

    def reopen(self, request: kvd_pb2.ReopenLayoutRequest) -> str:
        """Open an unavailable layout, or abandon it; return its name from now on."""
        return str(self._call(self._operator.ReopenLayout, request).name)

    def recent_turns(self, model: str) -> list[kvd_pb2.RecentTurns]:
        """Return the recent turns that kvd remembers, one message per layout."""
        of_layout: dict[str, kvd_pb2.RecentTurns] = {}
        with self._translated_errors():
            request = kvd_pb2.ListRecentTurnsRequest(model=model)
            for part in self._reader.ListRecentTurns(request, timeout=TIMEOUT_S):
                if part.layout in of_layout:
                    of_layout[part.layout].turns.extend(part.turns)
                else:
                    of_layout[part.layout] = part
        return list(of_layout.values())

    def settings(self) -> kvd_pb2.GetSettingsResponse:
        """Return the settings in force."""
        answer: kvd_pb2.GetSettingsResponse = self._call(
            self._reader.GetSettings, kvd_pb2.GetSettingsRequest()
        )
        return answer

    def reload_settings(self) -> kvd_pb2.ReloadSettingsResponse:
        """Make kvd read its settings again; return what has changed."""
        answer: kvd_pb2.ReloadSettingsResponse = self._call(
            self._operator.ReloadSettings, kvd_pb2.ReloadSettingsRequest()
        )
        return answer

    def export_session(self, request: kvd_pb2.ExportSessionRequest) -> Iterator[bytes | bytearray]:
        """Yield a session's file, piece by piece. Without a deadline."""
        for data, _ in self._export_parts(request):
            yield data

    def export_chunks(self, request: kvd_pb2.ExportSessionRequest) -> Iterator[Chunk]:
        """Yield a session in chunks of about the request's `chunk_bytes`. Without a deadline."""
        pieces: list[bytes | bytearray] = []
        for data, part in self._export_parts(request):
            if data:
                pieces.append(data)
            if part.HasField("chunk_end"):
                whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                pieces.clear()
                yield Chunk(whole, part.chunk_end.num_tokens)
            if part.HasField("seal"):
                yield Chunk(b"", 0, part.seal)

    def _export_parts(
        self, request: kvd_pb2.ExportSessionRequest
    ) -> Iterator[tuple[bytes | bytearray, kvd_pb2.SessionFilePart]]:
        """Yield the parts of a session with their data, received over a stream if possible."""
        with self._translated_errors(), open_stream(self._address) as stream:
            streamed_request = kvd_pb2.ExportSessionRequest()
            streamed_request.CopyFrom(request)
            streamed_request.stream = b"" if stream is None else stream.token
            parts = self._operator.ExportSession(streamed_request)
            for part in parts:
                if stream is None or not part.stream_bytes:
                    yield part.data, part
                    continue
                try:
                    data = stream.receive(part.stream_bytes)
                except OSError as error:
                    deque(parts, 0)  # the RPC's own error says more: it is raised here
                    raise BrokenTransferError(
                        "kvd closed the stream of a session file before its end",
                        "transfer it again",
                    ) from error
                yield data, part

    def import_session(
        self, target: kvd_pb2.ImportTarget, pieces: Iterator[bytes | memoryview]
    ) -> kvd_pb2.ImportSessionResponse:
        """Send a session's file. Without a deadline."""
        with self._translated_errors(), open_stream(self._address) as stream:
            to = kvd_pb2.ImportTarget()
            to.CopyFrom(target)
            to.stream = b"" if stream is None else stream.token
            sent = _messages(pieces) if stream is None else _stream_messages(pieces, stream)
            requests = chain([kvd_pb2.ImportSessionRequest(target=to)], sent)
            answer: kvd_pb2.ImportSessionResponse = self._operator.ImportSession(requests)
        return answer

    def answer_wanted(self, key: kvd_pb2.SessionKey, *, coming: bool) -> None:
        """Report whether a wanted session comes; an older kvd ignores it."""
        request = kvd_pb2.AnswerWantedRequest(session=key, coming=coming)
        try:
            self._operator.AnswerWanted(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            code: Any = error
            if code.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise self._error_of(error) from error

    def verify(self, *, repair: bool, model: str) -> Iterator[kvd_pb2.VerifyProgress]:
        """Check every copy; yield progress each second, the final report last. No deadline."""
        with self._translated_errors():
            yield from self._operator.Verify(kvd_pb2.VerifyRequest(repair=repair, model=model))

    def _call(self, method: Any, request: Any) -> Any:
        with self._translated_errors():
            return method(request, timeout=TIMEOUT_S)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Turn gRPC errors into ReportedErrors."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._error_of(error) from error

    def _error_of(self, error: grpc.RpcError) -> ReportedError:
        reported = error_from_rpc(error)
        if isinstance(reported, UnavailableError) and not reported.remedy:  # gRPC's, not kvd's
            return self._no_answer(reported)
        code: Any = error
        if code.code() is grpc.StatusCode.UNIMPLEMENTED and self._address.endswith(READER_SOCKET):
            operators = Path(self._address.removeprefix(UNIX)).with_name(OPERATOR_SOCKET)
            denial = denial_of(operators)
            return SocketDeniedError(
                f"the socket {self._address} only lets callers read",
                denial.remedy if denial else f"use {operators}, or sudo",
            )
        return reported

    def _no_answer(self, reported: ReportedError) -> ReportedError:
        if is_unix(self._address):
            path = Path(self._address.removeprefix(UNIX))
            denial = denial_of(path)
            if denial is not None:  # --address may name a socket, too
                return SocketDeniedError(*denial)
            directory = path.parent
            return NotRunningError(
                f"kvd is not running in {directory}",
                "start it with: kvd serve; or give its directory with --runtime-dir",
            )
        return NotRunningError(
            f"kvd does not answer at {self._address} ({reported.message[:MAX_WHY]})",
            "check access.tcp in its settings, and --tls-ca, --tls-cert and --token-file",
        )


def _messages(pieces: Iterator[bytes | memoryview]) -> Iterator[kvd_pb2.ImportSessionRequest]:
    """Yield a file as messages."""
    for piece in pieces:
        for start in range(0, len(piece), MESSAGE_BYTES):
            yield kvd_pb2.ImportSessionRequest(data=bytes(piece[start : start + MESSAGE_BYTES]))


def _stream_messages(
    pieces: Iterator[bytes | memoryview], stream: ByteStream
) -> Iterator[kvd_pb2.ImportSessionRequest]:
    """Send a file over a stream; yield the message that announces each piece before it."""
    for piece in pieces:
        yield kvd_pb2.ImportSessionRequest(stream_bytes=len(piece))
        try:
            stream.send(piece)
        except OSError:
            return  # the RPC's own error says why


@contextmanager
def connect(runtime_dir: Path) -> Iterator[OperatorClient]:
    """Open a client of the kvd in `runtime_dir`; it connects at the first call."""
    with connect_to(f"{UNIX}{runtime_dir / OPERATOR_SOCKET}") as client:
        yield client


@contextmanager
def connect_to(
    address: str, credentials: ClientCredentials | None = None
) -> Iterator[OperatorClient]:
    """Open a client of a kvd's Unix socket or TCP port; it connects at the first call.

    Raises:
        InvalidInputError: this is no address.
    """
    with channel_of(address, credentials, channel_options()) as channel:
        yield OperatorClient(address, channel)
