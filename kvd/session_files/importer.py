"""Imports a session: stores its rows under a name of their own, and gives them their name at once.

Until the file has come whole and everything of it is stored, the session does not exist, and one
that it is to replace stays as it is. One that is only a shorter part of it is not replaced but
becomes it, as by a turn: it keeps what was set for it, and there is no moment without it. Where the
target says so the session has what has come meanwhile, and keeps it if the rest does not come
(kvd/core/operations/growing.py). To the core kvd itself is the engine here, under a number of its
own.
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
from kvd.session_files.in_thread import finished_in_thread
from kvd.session_files.slot_runs import RowBuffer, SlotRuns
from kvd.session_files.target import Target, unfinished_name
from shared.process.log import get_logger
from shared.types.block_key import TOKEN_BYTES
from shared.types.errors import ReportedError
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

BATCH_BYTES = 4 << 20  # of rows stored at once; at least one block
WAIT_S = 60.0  # for a slot
MOST_STEPS = 32  # to twice the length, of a session that grows: each costs its whole length
REPLACED, IMPORTED = "replaced", "imported"  # why the name of a session goes
UNFINISHED_NS = 600 * NS_PER_S  # what a killed kvd leaves of an import expires

log = get_logger(__name__)


class Import:
    """One import under way; whoever has begun it owes `finish` or `cancel`."""

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
        self._parts: StoreAnswer | None = None  # the state or windows that are being stored
        self._growth: Growth | None = None  # None: it has all in the end
        if target.grow_bytes and not layout.part_slots:
            self._growth = Growth(key, self._unfinished, lineage, target.replaces_up_to)
        self._grown_tokens = 0  # that it was last to have

    async def hold(self, tokens: HeldTokens) -> None:
        """Begin with what is stored of these tokens, from the first one on, by whichever session.

        Raises:
            NotHeldError: not all of them are.
        """
        self._token_ids += tokens.token_ids
        num_tokens = len(self._token_ids) // TOKEN_BYTES
        self._cache, _ = await self._caches.open(self._cache.layout, prefault=False)
        if not self._cache.act(self._holds):
            raise NotHeldError(
                f"kvd does not have the first {num_tokens} tokens of session {self.key}, computed "
                "as this one's",
                "send all of the session",
            )
        self._buffer.token_offset = self._grown_tokens = num_tokens

    async def add(self, frame: Frame) -> None:
        """Take the next rows, which may not change before `keep` is called.

        Raises:
            NoRoomError: they find none.
        """
        self._token_ids += frame.token_ids
        self._buffer.add(frame.rows, frame.num_tokens)
        if self._buffer.num_bytes >= BATCH_BYTES:
            await self._store(self._end_of_blocks())

    async def keep(self) -> None:
        """Copy rows that are not stored yet: the memory that they came in may change.

        Before that the session grows, if that is to be.

        Raises:
            NoRoomError: they find none.
            SessionExistsError: the session has come meanwhile, or is longer.
            SessionChangedError: it has grown, and changed meanwhile.
        """
        if self._growth is not None:
            num_tokens = len(self._token_ids) // TOKEN_BYTES - self._grown_tokens
            num_bytes = num_tokens * sum(row_bytes(self._cache.layout))
            is_worth_it = num_tokens * MOST_STEPS >= self._grown_tokens
            if num_bytes >= self._target.grow_bytes and is_worth_it:
                await self._grow()
        await finished_in_thread(self._buffer.keep)

    async def keep_begun(self) -> None:
        """Let the session have what has come, as far as that can be: no more comes."""
        if self._growth is not None:
            with suppress(ReportedError):
                await self._grow()

    async def add_part(self, part: StatePart) -> None:
        """Take the next part of the state behind the tokens that have come.

        Where it finds no room, or is stored already, the session does without.

        Raises:
            NoRoomError: the tokens find none.
        """
        if not part.index:
            num_tokens = len(self._token_ids) // TOKEN_BYTES
            await self._store(num_tokens)
            self._parts = await self._granted(num_tokens, [part.position])
        answer, cache = self._parts, self._cache
        if answer is None or not answer.states:
            return
        slot_ids = answer.states[0].slot_ids
        await finished_in_thread(self._fill_part, slot_ids[part.index], part.data)
        if part.index == len(slot_ids) - 1:
            cache.act(partial(self._complete, answer.lease_id))

    async def add_rows(self, rows: WindowRows) -> None:
        """Take rows of the next part of a window; the first ones say where windows begin.

        Blocks here may begin elsewhere than where the session comes from, behind a discard: a
        window is stored if all of its rows come. Where there is no room the session does without.

        Raises:
            NoRoomError: the tokens find none.
        """
        if self._parts is None:
            await self._store(len(self._token_ids) // TOKEN_BYTES)
            self._parts = await self._windows_for(rows)
        answer = self._parts
        if not answer.windows:
            return
        await finished_in_thread(self._fill_rows, answer, rows)
        is_last_part = rows.index == len(self._window_runs) - 1
        if is_last_part and rows.token_offset + rows.num_tokens == rows.position:
            self._cache.act(partial(self._complete, answer.lease_id))

    async def _windows_for(self, rows: WindowRows) -> StoreAnswer:
        """Be granted the windows of tokens from these rows on, up to the end that they are for.

        Where that is in the middle of a block they are for the end of the block before.
        """
        num_tokens = len(self._token_ids) // TOKEN_BYTES
        answer = await self._granted(num_tokens, [rows.position], rows.token_offset)
        last = answer.windows[-1] if answer.windows else None
        if last is not None and last.token_offset + last.num_tokens > rows.position:
            lease_id, engine_id, end = answer.lease_id, self._engine_id, last.token_offset
            self._cache.act(lambda core: core.stores.complete(lease_id, engine_id, success=False))
            answer = await self._granted(num_tokens, [end] if end else [], rows.token_offset)
        await finished_in_thread(self._clear, answer)
        return answer

    def _clear(self, answer: StoreAnswer) -> None:
        """Write zeros to the slots of windows: rows follow."""
        for slot_id in (slot_id for window in answer.windows for slot_id in window.slot_ids):
            self._fill_part(slot_id, memoryview(b""))

    def _fill_rows(self, answer: StoreAnswer, rows: WindowRows) -> None:
        """Write rows to the windows that have their tokens."""
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
        """Store what is left, and give the session its name; returns its stored tokens.

        Raises:
            NoRoomError: not everything of it is stored.
            InUseError: the session that it is to replace is.
            SessionExistsError: a session has come meanwhile that it is not to replace.
            SessionChangedError: it has grown, and changed meanwhile.
            NotDurableError: the index has not taken it.
        """
        await self._store(len(self._token_ids) // TOKEN_BYTES)
        num_tokens = self._cache.act(self._name_it)
        self._end_growth(is_whole=True)
        self._forget()
        await self._caches.wait_until_committed()
        log.info("session_imported", session=str(self.key), num_tokens=num_tokens)
        return num_tokens

    def cancel(self) -> None:
        """End the import, and leave nothing of it but what the session has got."""
        self._cache.act(lambda core: core.engines.gone(self._engine_id))
        self._end_growth(is_whole=False)
        self._forget()

    # -------------------------------------------------------------------------------------- inside

    async def _grow(self) -> None:
        """Store whole blocks, and let the session have them."""
        await self._store(self._end_of_blocks())
        self._cache.act(self._give)
        self._grown_tokens = self._buffer.token_offset

    def _holds(self, core: CacheEngine) -> bool:
        """Let the import have what is stored of its tokens; returns whether that is all of them."""
        num_tokens = len(self._token_ids) // TOKEN_BYTES
        if core.layout.part_slots:
            return False
        answer = self._prepare(num_tokens, (), num_tokens, core)
        self._limit_ttl(core)
        stored = core.inspection.info(self._unfinished)
        is_stored = stored is not None and stored.num_tokens == num_tokens
        return is_stored and not (answer.lease_id or answer.refused)

    def _give(self, core: CacheEngine) -> bool:
        """Let the session have what is stored; returns whether it has it."""
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
        """Return where the last block ends that has come whole."""
        step, lineage = self._cache.layout.block_tokens, self._lineage
        start, end = self._buffer.token_offset, len(self._token_ids) // TOKEN_BYTES
        clean = lineage.clean_tokens
        # Blocks end at multiples of their size, but for the one where the clean tokens end.
        if not lineage.is_whole and not self._is_coupled and start < clean <= end:
            start = clean
        return start + (end - start) // step * step

    async def _store(self, end: int) -> None:
        """Store the rows up to a token."""
        while self._buffer.token_offset < end:
            answer = await self._granted(end)
            if answer.lease_id:
                await finished_in_thread(self._fill, answer)
                self._cache.act(partial(self._complete, answer.lease_id))
            self._buffer.drop(answer.end_token - self._buffer.token_offset)

    async def _granted(
        self, end: int, positions: Sequence[int] = (), from_token: int | None = None
    ) -> StoreAnswer:
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_S
        while True:
            # Anew each time: while nothing was stored, another layout may have replaced this one.
            self._cache, _ = await self._caches.open(self._cache.layout, prefault=False)
            answer = self._cache.act(partial(self._prepare, end, positions, from_token))
            if not answer.refused:
                return answer
            if answer.refused != "wait":
                raise NoRoomError(
                    f"session {self.key} finds no room behind {answer.end_token} tokens "
                    f"({answer.refused})",
                    "see kvd stats, and raise the tenant's quota or the size of the tiers",
                )
            left_s = until - loop.time()
            if left_s <= 0 or not await self._cache.wait_for_change(left_s):
                raise BusyTransferError("no slot comes free", "try again when less is under way")

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

    def _fill(self, answer: StoreAnswer) -> None:
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

    def _name_it(self, core: CacheEngine) -> int:
        """Let the session have what is stored; it replaces an earlier one."""
        stored, there = core.inspection.info(self._unfinished), core.inspection.info(self.key)
        num_tokens = len(self._token_ids) // TOKEN_BYTES
        if stored is None or stored.num_tokens != num_tokens:
            raise self._lost()
        if self._growth is not None and self._growth.spans and self._give(core):
            return num_tokens
        self._target.check(there)
        if there is not None and there.leases:
            raise InUseError(
                f"session {self.key} is in use",
                "wait for the end of its turn, or see kvd leases",
            )
        if there is not None and self._target.replaces:
            core.sessions.flush(self.key, dry_run=False, why=REPLACED)
        elif there is not None and there.num_tokens >= num_tokens:
            raise SessionExistsError(
                f"session {self.key} has as many tokens already", "there is nothing to be imported"
            )
        token_ids, engine_id = bytes(self._token_ids), self._engine_id
        answer = core.session_files.prepare_import(self.key, token_ids, 0, engine_id, self._lineage)
        info = core.inspection.info(self.key)
        if answer.lease_id or answer.refused or info is None or info.num_tokens != num_tokens:
            core.engines.gone(engine_id)
            raise self._lost()
        return num_tokens

    def _lost(self) -> NoRoomError:
        return NoRoomError(
            f"not all of session {self.key} is still stored",
            "make the tiers larger, or import it when less is stored: kvd stats",
        )

    def _forget(self) -> None:
        """Drop the name of the unfinished session; the blocks stay with the finished one."""
        try:
            self._cache.act(
                lambda core: core.sessions.flush(self._unfinished, dry_run=False, why=IMPORTED)
            )
        except UnknownSessionError:
            return  # nothing was stored, or it has given way to others
