"""Import of a session: stores its KV under a temporary name, and gives it its own name at the end.

The session does not exist until the whole file has arrived and is stored; a session that it
replaces stays unchanged until then. A session that has just the first tokens is not replaced but
extended, as by a turn: it keeps its settings (TTL, pin), and exists all the time. If the target
says so, the session *grows*: it gets the tokens that have arrived while the import runs, and keeps
them if later ones fail (kvd/core/operations/growing.py).

To the core, kvd is an engine that stores the session, under a random engine id.
"""

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from kvd.caches.caches import Caches
from kvd.core.engine import CacheEngine
from kvd.core.operations.growing import Growth
from kvd.core.records.errors import UnknownSessionError
from kvd.core.records.records import StoreAnswer
from kvd.errors import (
    BusyTransferError,
    InUseError,
    NoRoomError,
    NotHeldError,
    SessionExistsError,
)
from kvd.runtime.cache import Cache
from kvd.session_files.file_format import Frame, HeldTokens, StatePart, WindowRows, row_bytes
from kvd.session_files.in_thread import run_in_thread
from kvd.session_files.slot_runs import RowBuffer, SlotRuns
from kvd.session_files.target import Target, unfinished_name
from shared.process.log import get_logger
from shared.types.block_key import TOKEN_BYTES
from shared.types.errors import ReportedError
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

BATCH_BYTES = 4 << 20  # bytes of rows stored at once; at least one block
WAIT_S = 60.0  # the longest wait for a slot
# A session grows in at most so many steps to twice its length, as a step costs O(its length).
MOST_STEPS = 32
REPLACED, IMPORTED = "replaced", "imported"  # reasons for dropping a session, as events name them
UNFINISHED_NS = 600 * NS_PER_S  # TTL of a temporary session: kvd may be killed during an import

log = get_logger(__name__)


class Import:
    """One import under way. Its owner owes `finish` or `cancel`."""

    def __init__(
        self, caches: Caches, cache: Cache, key: SessionKey, lineage: Lineage, target: Target
    ) -> None:
        self.key = key
        self._caches = caches
        self._cache = cache
        self._lineage = lineage
        self._target = target
        layout = cache.layout
        self._unfinished = key._replace(session_id=unfinished_name())
        self._engine_id = secrets.randbits(63)
        self._runs = SlotRuns.of_tokens(layout)
        self._window_runs = SlotRuns.of_windows(layout)
        self._buffer = RowBuffer(sum(row_bytes(layout)))
        self._token_ids = bytearray()
        self._is_coupled = layout.position_mode == "coupled"
        self._parts: StoreAnswer | None = None  # the grant of the state or windows being stored
        self._growth: Growth | None = None  # None: the session does not grow
        if target.grow_bytes and not layout.part_slots:
            self._growth = Growth(key, self._unfinished, lineage, target.replaces_up_to)
        self._grown_tokens = 0  # tokens that the session has got so far

    async def hold(self, tokens: HeldTokens) -> None:
        """Begin with stored KV of these tokens, from the session's first one on, of any session.

        Raises:
            NotHeldError: kvd does not have all of them.
        """
        self._token_ids += tokens.token_ids
        num_tokens = len(self._token_ids) // TOKEN_BYTES
        self._cache, _ = await self._caches.open(self._cache.layout, prefault=False)
        if not self._cache.act(self._reuse_stored):
            raise NotHeldError(
                f"the file leaves out the first {num_tokens} tokens of session {self.key}, and "
                "kvd does not have their KV",
                "send the whole session",
            )
        self._buffer.token_offset = self._grown_tokens = num_tokens

    async def add(self, frame: Frame) -> None:
        """Take the next rows; their memory may not change before `keep` is called.

        Raises:
            NoRoomError: there is no room for them.
        """
        self._token_ids += frame.token_ids
        self._buffer.add(frame.rows, frame.num_tokens)
        if self._buffer.num_bytes >= BATCH_BYTES:
            await self._store(self._end_of_blocks())

    async def keep(self) -> None:
        """Copy rows that are not stored yet, as the memory they are in may change.

        If the session grows, and enough has arrived, it gets the stored tokens before that.

        Raises:
            NoRoomError: there is no room for the rows.
            SessionExistsError: the session was stored meanwhile, or is longer.
            SessionChangedError: it has grown, and was changed otherwise meanwhile.
        """
        if self._growth is not None:
            num_tokens = len(self._token_ids) // TOKEN_BYTES - self._grown_tokens
            num_bytes = num_tokens * sum(row_bytes(self._cache.layout))
            is_worth_it = num_tokens * MOST_STEPS >= self._grown_tokens
            if num_bytes >= self._target.grow_bytes and is_worth_it:
                await self._grow()
        await run_in_thread(self._buffer.keep)

    async def keep_begun(self) -> None:
        """Give the session what has arrived, as far as possible: no more will come."""
        if self._growth is not None:
            with suppress(ReportedError):
                await self._grow()

    async def add_part(self, part: StatePart) -> None:
        """Take the next part of the state behind the tokens that have arrived.

        If there is no room for it, or it is stored already, the session is imported without it.

        Raises:
            NoRoomError: there is no room for the tokens.
        """
        if not part.index:
            num_tokens = len(self._token_ids) // TOKEN_BYTES
            await self._store(num_tokens)
            self._parts = await self._lease_slots(num_tokens, [part.position])
        answer, cache = self._parts, self._cache
        if answer is None or not answer.states:
            return
        slot_ids = answer.states[0].slot_ids
        await run_in_thread(self._fill_part, slot_ids[part.index], part.data)
        if part.index == len(slot_ids) - 1:
            cache.act(partial(self._complete, answer.lease_id))

    async def add_rows(self, rows: WindowRows) -> None:
        """Take rows of the next part of a window; the first rows say where windows begin.

        Behind a discard, blocks may begin elsewhere here than on the exporting server. A window is
        stored if all of its rows arrive. If there is no room, the import continues without it.

        Raises:
            NoRoomError: there is no room for the tokens.
        """
        if self._parts is None:
            await self._store(len(self._token_ids) // TOKEN_BYTES)
            self._parts = await self._windows_for(rows)
        answer = self._parts
        if not answer.windows:
            return
        await run_in_thread(self._fill_rows, answer, rows)
        is_last_part = rows.index == len(self._window_runs) - 1
        if is_last_part and rows.token_offset + rows.num_tokens == rows.position:
            self._cache.act(partial(self._complete, answer.lease_id))

    async def _windows_for(self, rows: WindowRows) -> StoreAnswer:
        """Lease slots for the windows of tokens from these rows on, up to their position.

        If the position is inside a block, the windows are for the end of the block before.
        """
        num_tokens = len(self._token_ids) // TOKEN_BYTES
        answer = await self._lease_slots(num_tokens, [rows.position], rows.token_offset)
        last = answer.windows[-1] if answer.windows else None
        if last is not None and last.token_offset + last.num_tokens > rows.position:
            lease_id, engine_id, end = answer.lease_id, self._engine_id, last.token_offset
            self._cache.act(lambda core: core.stores.complete(lease_id, engine_id, success=False))
            answer = await self._lease_slots(num_tokens, [end] if end else [], rows.token_offset)
        await run_in_thread(self._zero_windows, answer)
        return answer

    def _zero_windows(self, answer: StoreAnswer) -> None:
        """Zero the slots of windows, as not all of their rows need to arrive."""
        for slot_id in (slot_id for window in answer.windows for slot_id in window.slot_ids):
            self._fill_part(slot_id, memoryview(b""))

    def _fill_rows(self, answer: StoreAnswer, rows: WindowRows) -> None:
        """Write rows to the windows that contain their tokens."""
        arena = self._cache.arena
        assert arena is not None, "slots are leased where there is an arena"  # noqa: S101
        runs = self._window_runs[rows.index]
        end = rows.token_offset + rows.num_tokens
        for window in answer.windows:
            first = max(rows.token_offset, window.token_offset)
            last = min(end, window.token_offset + window.num_tokens)
            if first < last:
                slot = arena.slots.slot(window.slot_ids[rows.index])
                wanted = range(first - rows.token_offset, last - rows.token_offset)
                runs.write_rows(slot, first - window.token_offset, rows.rows, wanted)

    async def finish(self) -> int:
        """Store the remaining rows, and give the session its name.

        Returns:
            The number of its stored tokens.

        Raises:
            NoRoomError: not all of it is stored.
            InUseError: the session that it replaces is in use.
            SessionExistsError: a session that it may not replace was stored meanwhile.
            SessionChangedError: it has grown, and was changed otherwise meanwhile.
            NotDurableError: the index has not committed it.
        """
        await self._store(len(self._token_ids) // TOKEN_BYTES)
        num_tokens = self._cache.act(self._rename)
        self._end_growth(is_whole=True)
        self._drop_unfinished()
        await self._caches.wait_until_committed()
        log.info("session_imported", session=str(self.key), num_tokens=num_tokens)
        return num_tokens

    def cancel(self) -> None:
        """End the import. Of it only what a growing session has got stays."""
        self._cache.act(lambda core: core.engines.remove(self._engine_id))
        self._end_growth(is_whole=False)
        self._drop_unfinished()

    # ------------------------------------------------------------------------------------ internal

    async def _grow(self) -> None:
        """Store whole blocks, and give them to the session."""
        await self._store(self._end_of_blocks())
        self._cache.act(self._extend_session)
        self._grown_tokens = self._buffer.token_offset

    def _reuse_stored(self, core: CacheEngine) -> bool:
        """Give the temporary session the stored KV of its tokens; return whether all is stored."""
        num_tokens = len(self._token_ids) // TOKEN_BYTES
        if core.layout.part_slots:
            return False
        answer = self._prepare(num_tokens, (), num_tokens, core)
        self._limit_ttl(core)
        stored = core.inspection.info(self._unfinished)
        is_stored = stored is not None and stored.num_tokens == num_tokens
        return is_stored and not (answer.lease_id or answer.refused)

    def _extend_session(self, core: CacheEngine) -> bool:
        """Give the session what is stored; return whether it has it."""
        growth = self._growth
        if growth is None:
            return False
        if not growth.spans:
            self._target.check(core.inspection.info(self.key))
        return core.growing.grow(growth, bytes(self._token_ids))

    def _end_growth(self, *, is_whole: bool) -> None:
        growth = self._growth
        if growth is not None:
            self._cache.act(lambda core: core.growing.end(growth, is_whole=is_whole))

    def _end_of_blocks(self) -> int:
        """Return the end of the last block that has arrived completely."""
        step, lineage = self._cache.layout.block_tokens, self._lineage
        start, end = self._buffer.token_offset, len(self._token_ids) // TOKEN_BYTES
        clean = lineage.clean_tokens
        # Blocks have the full size, except that one ends where the clean tokens end.
        if not lineage.is_whole and not self._is_coupled and start < clean <= end:
            start = clean
        return start + (end - start) // step * step

    async def _store(self, end: int) -> None:
        """Store the buffered rows before the token `end`."""
        while self._buffer.token_offset < end:
            answer = await self._lease_slots(end)
            if answer.lease_id:
                await run_in_thread(self._fill_blocks, answer)
                self._cache.act(partial(self._complete, answer.lease_id))
            self._buffer.drop(answer.end_token - self._buffer.token_offset)

    async def _lease_slots(
        self, end: int, positions: Sequence[int] = (), from_token: int | None = None
    ) -> StoreAnswer:
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while True:
            # In each try: while it is empty, the layout may be replaced by another one.
            self._cache, _ = await self._caches.open(self._cache.layout, prefault=False)
            answer = self._cache.act(partial(self._prepare, end, positions, from_token))
            if not answer.refused:
                return answer
            if answer.refused != "wait":
                raise NoRoomError(
                    f"there is no room for session {self.key} after {answer.end_token} tokens "
                    f"({answer.refused})",
                    "see kvd stats, and raise the tenant's quota or the size of the tiers",
                )
            left_s = until - loop.time()
            if left_s <= 0 or not await self._cache.wait_for_change(left_s):
                raise BusyTransferError(
                    "no slot became free in time", "try again when less is running"
                )

    def _prepare(
        self, end: int, positions: Sequence[int], from_token: int | None, core: CacheEngine
    ) -> StoreAnswer:
        token_ids = bytes(self._token_ids[: end * TOKEN_BYTES])
        start = self._buffer.token_offset if from_token is None else from_token
        key = self._unfinished
        return core.session_files.prepare_import(
            key, token_ids, start, self._engine_id, self._lineage, positions
        )

    def _fill_part(self, slot_id: int, data: memoryview) -> None:
        arena = self._cache.arena
        assert arena is not None, "slots are leased where there is an arena"  # noqa: S101
        slot = arena.slots.slot(slot_id)
        slot[: len(data)] = data
        slot[len(data) :] = bytes(len(slot) - len(data))

    def _fill_blocks(self, answer: StoreAnswer) -> None:
        arena = self._cache.arena
        for block in answer.blocks:
            assert arena is not None, "slots are leased where there is an arena"  # noqa: S101
            slot = arena.slots.slot(block.slot_id)
            self._buffer.write_to(slot, self._runs, block.token_offset, block.num_tokens)

    def _complete(self, lease_id: int, core: CacheEngine) -> None:
        core.stores.complete(lease_id, self._engine_id, success=True)
        self._limit_ttl(core)

    def _limit_ttl(self, core: CacheEngine) -> None:
        if core.inspection.info(self._unfinished) is not None:
            core.sessions.set_ttl(self._unfinished, UNFINISHED_NS)

    def _rename(self, core: CacheEngine) -> int:
        """Give the session what is stored, in place of the session that it replaces."""
        stored, existing = core.inspection.info(self._unfinished), core.inspection.info(self.key)
        num_tokens = len(self._token_ids) // TOKEN_BYTES
        if stored is None or stored.num_tokens != num_tokens:
            raise self._lost_error()
        if self._growth is not None and self._growth.spans and self._extend_session(core):
            return num_tokens
        self._target.check(existing)
        if existing is not None and existing.leases:
            raise InUseError(
                f"session {self.key} is in use",
                "wait until its turn has ended; kvd leases shows who uses it",
            )
        if existing is not None and self._target.replaces:
            core.sessions.flush(self.key, dry_run=False, why=REPLACED)
        elif existing is not None and existing.num_tokens >= num_tokens:
            raise SessionExistsError(
                f"session {self.key} is already stored with as many tokens",
                "nothing needs to be imported",
            )
        token_ids, engine_id = bytes(self._token_ids), self._engine_id
        answer = core.session_files.prepare_import(self.key, token_ids, 0, engine_id, self._lineage)
        info = core.inspection.info(self.key)
        if answer.lease_id or answer.refused or info is None or info.num_tokens != num_tokens:
            core.engines.remove(engine_id)
            raise self._lost_error()
        return num_tokens

    def _lost_error(self) -> NoRoomError:
        return NoRoomError(
            f"parts of session {self.key} were evicted while it was imported",
            "make the tiers larger, or import it when less is stored: see kvd stats",
        )

    def _drop_unfinished(self) -> None:
        """Drop the temporary session; the named one keeps the blocks."""
        try:
            self._cache.act(
                lambda core: core.sessions.flush(self._unfinished, dry_run=False, why=IMPORTED)
            )
        except UnknownSessionError:
            return  # nothing was stored, or it was evicted
