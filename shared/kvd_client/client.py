"""Async client of kvd for engines: the control plane, and the mapped arena for the bytes.

One task runs run(), which attaches, holds the attachment and attaches again, for ever. The verbs
may be called from any task of the same loop at any time. Each one ends: with an answer, or with a
ReportedError (KvdUnavailableError while detached or past its deadline; KvdProtocolError for an
answer that makes no sense). None of them retries: the caller recomputes.

What the caller owes, on every path:
    prepare_load HIT       -> read the slots, then complete_load; if that raises, what was read
                              may not be trusted
    prepare_load PENDING   -> the same, but no layer before grant.progress.wait_layer has returned
    prepare_store, lease   -> write the slots, then complete_store; if that raises, nothing was
                              stored
When complete_… is called, no thread may touch the grant's slots any more: they are given to others.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.kvd_client.attachment import Attachment
from shared.kvd_client.connection import RECONNECT_DELAY_S, KvdConnection
from shared.kvd_client.grants import (
    KvdProtocolError,
    LoadGrant,
    StoreGrant,
    load_grant,
    store_grant,
)
from shared.kvd_client.messages import key_message, lineage_message
from shared.kvd_client.queue_sender import QueueSender
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.log import get_logger
from shared.types.errors import ReportedError
from shared.types.graft_source import GraftSource
from shared.types.kv_layout import KVLayout
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

CALL_S = 5.0  # deadline of a call that only touches kvd's memory
GRACE_S = 2.0  # beyond the deadline we hand to kvd, for the way there and back
MOST_ENDED = 4096  # sessions whose end is kept while kvd is away; older ones expire there

log = get_logger(__name__)


class KvdClient(KvdConnection):
    """What an engine asks of kvd; see KvdConnection for run, attached and on_change.

    Attributes:
        queue: reports to kvd what waits and what runs; it is to be followed before `run`.
        beside: what runs beside each attachment, and is cancelled at its end.
    """

    def __init__(
        self,
        runtime_dir: Path,
        layout: KVLayout,
        engine_name: str,
        *,
        reconnect_delay_s: float = RECONNECT_DELAY_S,
    ) -> None:
        super().__init__(runtime_dir, layout, engine_name, reconnect_delay_s=reconnect_delay_s)
        self.queue = QueueSender()
        self.beside: list[Callable[[Attachment], Coroutine[object, object, None]]] = []
        # Sessions whose end kvd does not know.
        self._ended: OrderedDict[SessionKey, None] = OrderedDict()
        self._told_missing: set[str] = set()  # what an older kvd has not, and that is logged

    async def prepare_load(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        deadline_s: float,
        *,
        accept_pending: bool = False,
        dram_only: bool = False,
        lineage: Lineage | None = None,
        fetch_wait_s: float = 0.0,
        history_tokens: int = 0,
    ) -> LoadGrant:
        """Lease the stored KV of token_ids[from_token:].

        Args:
            key: whose.
            token_ids: little-endian uint32, the session from its first token on.
            from_token: KV before it is already with the caller.
            deadline_s: how long kvd may read from SSD.
            accept_pending: be answered before that reading ends. Without, everything granted is in
                DRAM when this returns.
            dram_only: be granted only what is in DRAM, up to the first block that is not; nothing
                is read from SSD. `more` says that more is stored, a miss for "on_ssd" that the
                first block is not in DRAM. What kvd has yet to verify is in DRAM, and is PENDING.
            lineage: of the tokens: only what was computed after these very discards is granted.
                None: it is not named; then what kvd stores of the session is taken at its tokens.
            fetch_wait_s: how long kvd may wait, before that, for a session of which it has nothing
                and that is being fetched from elsewhere; an older one does not.
            history_tokens: how many of the tokens the session had before: where kvd has a good part
                of them not it may wait for this part of that time, too.
        """
        attachment = self._ready()
        fetch_wait_s = fetch_wait_s if attachment.offers_fetch_waits else 0.0
        request = pb.PrepareLoadRequest(
            engine_id=attachment.engine_id,
            session=key_message(key),
            token_ids=token_ids,
            from_token=from_token,
            deadline_s=deadline_s,
            accept_pending=accept_pending,
            dram_only=dram_only,
            lineage=lineage_message(lineage),
            fetch_wait_s=fetch_wait_s,
            history_tokens=history_tokens,
        )
        most_s = fetch_wait_s + deadline_s + GRACE_S
        call = self._call(attachment.stub.PrepareLoad, request, most_s, attachment)
        response = await self._granted(call, self._complete_load, attachment)
        with self._ending_on_nonsense(attachment, response.lease_id):
            arena = attachment.mapped.slots
            return load_grant(response, request, arena, self._layout, attachment.progress)

    async def complete_load(self, grant: LoadGrant) -> None:
        """Return the slots. If this raises, they may have changed while they were read."""
        if grant.lease_id:
            await self._complete_load(self._attachment_of(grant), grant.lease_id)

    async def prepare_store(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        deadline_s: float,
        *,
        lineage: Lineage | None = None,
        load_ends: Sequence[int] = (),
    ) -> StoreGrant:
        """Lease slots for the KV of token_ids[from_token:] that is not stored yet.

        Args:
            key: whose.
            token_ids: little-endian uint32, the whole sequence whose KV is computed.
            from_token: the caller has position-free KV from here on.
            deadline_s: how long kvd may wait for free slots.
            lineage: of the tokens; None: that of what kvd stores of the session.
            load_ends: behind how many tokens loads are to be able to end. Where there are
                states the caller has them there, of these tokens; windows may be asked for up to
                tokens that are yet to come. What is granted of either is to be written, too, all
                bytes of its slots.
        """
        attachment = self._ready()
        request = pb.PrepareStoreRequest(
            engine_id=attachment.engine_id,
            session=key_message(key),
            token_ids=token_ids,
            from_token=from_token,
            deadline_s=deadline_s,
            lineage=lineage_message(lineage),
            load_ends=load_ends,
        )
        call = self._call(attachment.stub.PrepareStore, request, deadline_s + GRACE_S, attachment)
        response = await self._granted(call, self._complete_store, attachment)
        with self._ending_on_nonsense(attachment, response.lease_id):
            return store_grant(response, request, attachment.mapped.slots, self._layout)

    async def complete_store(self, grant: StoreGrant, success: bool) -> int:
        """Publish the written blocks, or abandon them.

        Returns:
            Number of the session's tokens that are stored now.
        """
        if not grant.lease_id:
            return grant.end_token
        return await self._complete_store(
            self._attachment_of(grant), grant.lease_id, success=success
        )

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[tuple[int, int]],
        *,
        lineage: Lineage | None = None,
    ) -> int:
        """Drop tokens of a session. A store under way publishes nothing any more.

        With its lineage a discard may be repeated: a session that is after it already, or of
        another lineage, is left alone.

        Args:
            key: whose.
            token_ids: the whole context before the discard, however little of it is stored.
            ranges: half-open ranges of its tokens.
            lineage: of these tokens; None: it is not named.

        Returns:
            Number of tokens stored of what the discard leaves.
        """
        attachment = self._ready()
        request = pb.DiscardRequest(
            engine_id=attachment.engine_id,
            session=key_message(key),
            token_ids=token_ids,
            ranges=[pb.TokenRange(start=start, end=end) for start, end in ranges],
            lineage=lineage_message(lineage),
        )
        response = await self._call(attachment.stub.Discard, request, CALL_S)
        return int(response.kept_tokens)

    async def graft(
        self, key: SessionKey, token_ids: bytes, lineage: Lineage, source: GraftSource
    ) -> int:
        """Give a session KV of another one's tokens behind its own; it may be repeated.

        Args:
            key: whose.
            token_ids: its context, exactly so much of which is stored; little-endian uint32.
            lineage: of these tokens.
            source: what is to follow.

        Returns:
            Number of the tokens that are stored behind its own now; 0: an older kvd, too, or one
            that stores keys with their positions.
        """
        attachment = self._ready()
        if not attachment.offers_grafts:
            return 0
        request = pb.GraftRequest(
            engine_id=attachment.engine_id,
            session=key_message(key),
            token_ids=token_ids,
            lineage=lineage_message(lineage),
            source_session_id=source.key.session_id,
            source_token_ids=source.token_ids,
            source_lineage=lineage_message(source.lineage),
            source_range=pb.TokenRange(start=source.start, end=source.end),
        )
        response = await self._call(attachment.stub.Graft, request, CALL_S)
        return int(response.grafted_tokens)

    @property
    def offers_grafts(self) -> bool:
        """Whether kvd is there, and `graft` may do something."""
        return self.attached and self._ready().offers_grafts

    async def end_session(self, key: SessionKey) -> None:
        """Notify kvd that the session will not come back.

        If this raises, kvd is notified when it is attached again.
        """
        self._ended[key] = None
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)
        await self._report_end(self._ready(), key)

    async def retain_session(
        self, key: SessionKey, retain_s: float, prefix_token_ids: bytes = b""
    ) -> float:
        """Have kvd keep a session for a while after each use, in place of an earlier wish.

        A hint that may be lost: an older kvd is not told.

        Args:
            key: names the session.
            retain_s: seconds; 0: no longer than others.
            prefix_token_ids: little-endian uint32, whole blocks that are stored. Named, the session
                is made of them, and goes with its retention.

        Returns:
            How many seconds of it kvd grants.
        """
        attachment = self._ready()
        if not attachment.offers_retention:
            self._tell_missing("kvd_cannot_retain")
            return 0.0
        request = pb.RetainSessionRequest(
            engine_id=attachment.engine_id,
            session=key_message(key),
            retain_s=retain_s,
            prefix_token_ids=prefix_token_ids,
        )
        response = await self._call(attachment.stub.RetainSession, request, CALL_S)
        return float(response.retained_s)

    async def expect_session(
        self, key: SessionKey, awaited_tools: Sequence[str] = (), *, superseded: bool = False
    ) -> bool:
        """Have kvd know what is likely to become of a session, after its turn's stores.

        A hint that may be lost: an older kvd is not told.

        Args:
            key: names the session.
            awaited_tools: names of tools that its answer calls: it is back when they have answered.
            superseded: whether another session goes on in its place.

        Returns:
            Whether kvd was told, and something of the session is stored.

        Raises:
            InvalidInputError: names that cannot be, or too many: shared/types/awaited_tools.py.
        """
        attachment = self._ready()
        if not attachment.offers_expectations:
            self._tell_missing("kvd_cannot_expect")
            return False
        await self.queue.reported()  # else the turn that is over may wait there: then it is back
        request = pb.ExpectSessionRequest(
            engine_id=attachment.engine_id,
            session=key_message(key),
            awaited_tools=awaited_tools,
            superseded=superseded,
        )
        response = await self._call(attachment.stub.ExpectSession, request, CALL_S)
        return bool(response.stored)

    async def get_session(self, key: SessionKey) -> pb.SessionInfo:
        """Return what kvd knows of a session.

        Raises:
            NotFoundError: nothing is stored.
        """
        ready = self._ready()
        request = pb.GetSessionRequest(session=key_message(key), engine_id=ready.engine_id)
        return await self._call(ready.stub.GetSession, request, CALL_S)

    # ---------------------------------------------------------------------------------- inside

    async def _while_attached(self, attachment: Attachment, abandoned: Collection[int]) -> None:
        """Report what kvd does not know yet; then keep reporting the queue."""
        for lease_id in abandoned:
            with suppress(ReportedError):  # it is lost: then there is nothing to return
                await self._complete_store(attachment, lease_id)
        for key in list(self._ended):
            with suppress(ReportedError):  # kvd has gone again: the next attachment repeats it
                await self._report_end(attachment, key)
        # No task group: the cancelled call of the queue would stay in its errors, and with it a
        # connection to kvd, until the interpreter looks for circles.
        beside = [asyncio.create_task(runs(attachment)) for runs in self.beside]
        try:
            await self.queue.run(attachment)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    def _tell_missing(self, event: str) -> None:
        """Log once what this kvd cannot be asked for."""
        if event not in self._told_missing:
            self._told_missing.add(event)
            log.warning(event, remedy="update kvd: it is older than this engine")

    async def _report_end(self, attachment: Attachment, key: SessionKey) -> None:
        request = pb.EndSessionRequest(engine_id=attachment.engine_id, session=key_message(key))
        try:
            await self._call(attachment.stub.EndSession, request, CALL_S)
        except ReportedError as error:
            if not error.retryable:
                self._ended.pop(key, None)
            raise
        self._ended.pop(key, None)

    async def _complete_load(self, attachment: Attachment, lease_id: int) -> None:
        self._held.discard(lease_id)
        request = pb.CompleteLoadRequest(engine_id=attachment.engine_id, lease_id=lease_id)
        await self._call(attachment.stub.CompleteLoad, request, CALL_S, attachment)

    async def _complete_store(
        self, attachment: Attachment, lease_id: int, *, success: bool = False
    ) -> int:
        self._held.discard(lease_id)
        request = pb.CompleteStoreRequest(
            engine_id=attachment.engine_id, lease_id=lease_id, success=success
        )
        response = await self._call(attachment.stub.CompleteStore, request, CALL_S, attachment)
        return int(response.stored_tokens)

    def _attachment_of(self, grant: LoadGrant | StoreGrant) -> Attachment:
        """Return the attachment of a grant: its own, or a later one that confirmed its lease."""
        attachment = self._attachment
        is_ours = grant.lease_id in self._held  # not among those lost
        if attachment is None or attachment.mapped.slots is not grant.arena or not is_ours:
            self._held.discard(grant.lease_id)
            raise self._unavailable()
        return attachment

    @contextmanager
    def _ending_on_nonsense(self, attachment: Attachment, lease_id: int) -> Iterator[None]:
        """End the attachment to a kvd that answers nonsense; kvd then ends the lease."""
        try:
            yield
        except KvdProtocolError:
            self._held.discard(lease_id)
            attachment.events.cancel()
            raise
