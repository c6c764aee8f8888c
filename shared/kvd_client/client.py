"""KvdClient: asynchronous client of kvd for engines: RPCs for control, a mapped arena for KV.

One task runs run(), which attaches, holds the attachment, and attaches again, for ever. Any task of
the same loop may call at any time. Each call ends, with an answer or a ReportedError (unavailable
while detached or past its deadline; KvdProtocolError if it contradicts itself). None retries.

Obligations of the caller, on every path:
    prepare_load HIT       -> read the slots, then complete_load; if that raises, the KV that was
                              read must not be used
    prepare_load PENDING   -> the same, but read no layer before grant.progress.wait_layer returns
    prepare_store, lease   -> write the slots, then complete_store; if that raises, nothing was
                              stored
When complete_… is called no thread may use the grant's slots any more: kvd gives them to others.
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
MOST_ENDED = 4096  # ends of sessions to report once kvd is back; older ones expire by their TTL

log = get_logger(__name__)


class KvdClient(KvdConnection):
    """An engine's calls of kvd; see KvdConnection for run, attached and on_change.

    Attributes:
        queue: reports the engine's queue; call its `follow` before `run`.
        run_while_attached: coroutine functions that run during each attachment, and are cancelled
            at its end.
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
        self.run_while_attached: list[Callable[[Attachment], Coroutine[object, object, None]]] = []
        self._ended: OrderedDict[SessionKey, None] = OrderedDict()  # their end is to be reported
        self._logged_missing: set[str] = set()  # features that this kvd lacks and that are logged

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
            key: the session.
            token_ids: little-endian uint32, all tokens of its context from the first one on.
            from_token: position from which the caller lacks KV.
            deadline_s: most seconds that kvd may read from SSD.
            accept_pending: take an answer before these reads end. If false, everything granted is
                in DRAM when this returns.
            dram_only: be granted only what is in DRAM, up to the first block that is not; nothing
                is read from SSD. `more` says that more is stored, and the miss reason "on_ssd" that
                the first block is not in DRAM. Unverified blocks are in DRAM, and make it PENDING.
            lineage: lineage of the tokens: only KV that was computed after the same discards is
                granted. None: not named; then kvd assumes that of the stored session.
            fetch_wait_s: most seconds that kvd may wait before that for a session that it does not
                have and that comes from a remote store; an older kvd does not wait.
            history_tokens: number of tokens that the session had before this turn. If kvd lacks a
                good share of them it may wait for that share of `fetch_wait_s`, too.
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
            span_columns=True,
        )
        most_s = fetch_wait_s + deadline_s
        response = await self._call_for_grant(
            attachment.stub.PrepareLoad, request, most_s, attachment, self._complete_load
        )
        with self._ending_on_bad_answer(attachment, response.lease_id):
            arena = attachment.mapped.slots
            return load_grant(response, request, arena, self._layout, attachment.progress)

    async def complete_load(self, grant: LoadGrant) -> None:
        """Release the slots of a load; if this raises, they may have changed while being read."""
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
            key: the session.
            token_ids: little-endian uint32, the whole sequence whose KV is computed.
            from_token: position from which the caller has position-free KV.
            deadline_s: most seconds that kvd may wait for free slots.
            lineage: lineage of the tokens; None: that of the stored session.
            load_ends: token counts at which later loads are to be able to end. With states, the
                caller must have the states there; windows may be requested up to tokens that do not
                exist yet. Granted states and windows must be written, too, all bytes of their
                slots.
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
            block_columns=True,
        )
        response = await self._call_for_grant(
            attachment.stub.PrepareStore, request, deadline_s, attachment, self._complete_store
        )
        with self._ending_on_bad_answer(attachment, response.lease_id):
            return store_grant(response, request, attachment.mapped.slots, self._layout)

    async def complete_store(self, grant: StoreGrant, success: bool) -> int:
        """Publish the written blocks, or abandon them.

        Returns:
            Number of the session's tokens that are stored now.
        """
        if not grant.lease_id:
            return grant.end_token
        attachment = self._attachment_of(grant)
        return await self._complete_store(attachment, grant.lease_id, success=success)

    async def discard(
        self,
        key: SessionKey,
        token_ids: bytes,
        ranges: Sequence[tuple[int, int]],
        *,
        lineage: Lineage | None = None,
    ) -> int:
        """Drop tokens of a session; a store under way then publishes nothing.

        With its lineage a discard may be repeated: a session that is after it already, or has
        another lineage, is left as it is.

        Args:
            key: the session.
            token_ids: the whole context before the discard, however little of it is stored.
            ranges: half-open ranges of token positions to drop.
            lineage: lineage of these tokens; None: not named.

        Returns:
            Number of stored tokens of what the discard leaves.
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
        """Append KV of another session's tokens to a session; it may be repeated.

        Args:
            key: the session.
            token_ids: its context, exactly the tokens that are stored; little-endian uint32.
            lineage: lineage of these tokens.
            source: the other session and its tokens that are to follow.

        Returns:
            Number of the source's tokens that are stored behind the session's own now. Always 0
            with an older kvd.
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
        """Whether kvd is attached, and knows grafts."""
        return self.attached and self._ready().offers_grafts

    async def end_session(self, key: SessionKey) -> None:
        """Report to kvd that a session will not return.

        If this raises, the end is reported again with the next attachment.
        """
        self._ended[key] = None
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)
        await self._report_end(self._ready(), key)

    async def retain_session(
        self, key: SessionKey, retain_s: float, prefix_token_ids: bytes = b""
    ) -> float:
        """Ask kvd to retain a session for a while after each use, in place of an earlier wish.

        It is a hint that may be lost, and is not sent to an older kvd.

        Args:
            key: the session.
            retain_s: seconds after each use; 0: no longer than other sessions.
            prefix_token_ids: little-endian uint32, whole blocks that are stored. If given, the
                session is made of them, and expires with its retention.

        Returns:
            The granted seconds.
        """
        attachment = self._ready()
        if not attachment.offers_retention:
            self._log_missing("kvd_cannot_retain")
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
        """Report to kvd what to expect of a session, after the stores of its turn.

        It is a hint that may be lost, and is not sent to an older kvd.

        Args:
            key: the session.
            awaited_tools: names of the tools that its answer calls: it returns once they answer.
            superseded: whether another session continues in its place.

        Returns:
            Whether kvd took the hint, and something of the session is stored.

        Raises:
            InvalidInputError: invalid or too many names, see shared/types/awaited_tools.py.
        """
        attachment = self._ready()
        if not attachment.offers_expectations:
            self._log_missing("kvd_cannot_expect")
            return False
        # Report the queue first: if the finished turn still waits there, kvd ignores the hint.
        await self.queue.reported()
        request = pb.ExpectSessionRequest(
            engine_id=attachment.engine_id,
            session=key_message(key),
            awaited_tools=awaited_tools,
            superseded=superseded,
        )
        response = await self._call(attachment.stub.ExpectSession, request, CALL_S)
        return bool(response.stored)

    async def get_session(self, key: SessionKey) -> pb.SessionInfo:
        """Return kvd's information about a session.

        Raises:
            NotFoundError: the session is not stored.
        """
        ready = self._ready()
        request = pb.GetSessionRequest(session=key_message(key), engine_id=ready.engine_id)
        return await self._call(ready.stub.GetSession, request, CALL_S)

    # --------------------------------------------------------------------------------- private

    async def _while_attached(self, attachment: Attachment, abandoned: Collection[int]) -> None:
        """Complete abandoned leases, report ended sessions, then keep reporting the queue."""
        for lease_id in abandoned:
            with suppress(ReportedError):  # the lease is lost: there is nothing to complete
                await self._complete_store(attachment, lease_id)
        for key in list(self._ended):
            with suppress(ReportedError):  # kvd has gone again: the next attachment reports it
                await self._report_end(attachment, key)
        # No TaskGroup: the cancelled call of the queue would stay referenced by its exception group
        # and keep a connection to kvd open until the garbage collector finds the cycle.
        tasks = [asyncio.create_task(run(attachment)) for run in self.run_while_attached]
        try:
            await self.queue.run(attachment)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _log_missing(self, event: str) -> None:
        """Log once that this kvd lacks a feature."""
        if event not in self._logged_missing:
            self._logged_missing.add(event)
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
        is_ours = grant.lease_id in self._held  # false for leases that were lost
        if attachment is None or attachment.mapped.slots is not grant.arena or not is_ours:
            self._held.discard(grant.lease_id)
            raise self._unavailable()
        return attachment

    @contextmanager
    def _ending_on_bad_answer(self, attachment: Attachment, lease_id: int) -> Iterator[None]:
        """End the attachment if kvd's answer breaks the protocol; kvd then ends the lease."""
        try:
            yield
        except KvdProtocolError:
            self._held.discard(lease_id)
            attachment.events.cancel()
            raise
