"""Imports whose session has the parts that arrived: whenever the file ends, these are sound."""

import asyncio
import itertools
from dataclasses import replace

import pytest

from kvd.core.operations.growing import NOT_FETCHED
from kvd.core.records.errors import SessionChangedError
from kvd.errors import NotHeldError, SessionExistsError
from kvd.session_files.exporter import Exporter
from kvd.session_files.file_format import FileHeader, SessionFileError, header_bytes
from kvd.session_files.frame_writer import frame_bytes, held_bytes
from kvd.session_files.target import Target
from kvd.session_files.transfers import read_file
from shared.types.errors import ReportedError
from shared.types.lineage import Lineage
from tests.kvd.caches.cache_bench import LAYOUT, caches_in
from tests.synthetic_engine import encode, key_of, layout_with_states, layout_with_windows

KEY = key_of("a")
STEP = LAYOUT.block_tokens
NUM_BLOCKS = 6
TOKENS = range(NUM_BLOCKS * STEP)
TARGET = Target("", "", replaces=False, may_add_layout=True, grow_bytes=1)


def store_session(cache, tokens, key=KEY, load_ends=()):
    """Store a session whose rows depend on its tokens."""
    answer = cache.act(
        lambda core: core.stores.prepare(key, encode(tokens), 0, 1, load_ends=load_ends)
    )
    for block in answer.blocks:
        slot = cache.arena.slots.slot(block.slot_id)
        first = tokens[block.token_offset] % 100
        slot[:] = bytes((first + number) % 251 for number in range(len(slot)))
    if answer.lease_id:
        cache.act(lambda core: core.stores.complete(answer.lease_id, 1, success=True))


async def pieces_of(caches, key=KEY):
    """Return the pieces of a session's file: its header, each of its frames, its end."""
    exporter = Exporter(caches, key)
    pieces = [exporter.header]
    async for batch in exporter.frames(prefix=False):
        starts = [0, *(end for _, end in batch.ends)]
        pieces += [bytes(batch.data[start:end]) for start, end in itertools.pairwise(starts)]
    whole = b"".join([bytes(p.data) async for p in Exporter(caches, key).pieces(prefix=False)])
    return [*pieces, whole[sum(map(len, pieces)) :]]


async def file_of(directory, layout=LAYOUT, load_ends=()):
    """Return the pieces of a file with one session."""
    async with caches_in(directory) as caches:
        cache, _ = await caches.open(layout)
        store_session(cache, TOKENS, load_ends=load_ends)
        return await pieces_of(caches)


def info_of(cache, key=KEY):
    return cache.act(lambda core: core.inspection.info(key))


def keys_of(cache):
    return set(cache.act(lambda core: core.inspection.keys()))


async def each(pieces, before=lambda number: None):
    for number, piece in enumerate(pieces):
        before(number)
        yield piece


async def test_a_session_has_the_frames_that_have_arrived(tmp_path):
    """After each frame; in the end it equals one imported at once."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        seen = []

        def look(number):
            info = info_of(cache)
            seen.append(info and (info.num_tokens, info.lost))

        assert await read_file(caches, TARGET, each(pieces, look)) == (KEY, len(TOKENS))
        steps = [(number * STEP, NOT_FETCHED) for number in range(1, NUM_BLOCKS + 1)]
        assert seen == [None, None, *steps]
        assert (info_of(cache).num_tokens, info_of(cache).lost) == (len(TOKENS), "")
        assert keys_of(cache) == {KEY}, "nothing under another name is left"
        assert (await pieces_of(caches))[1:] == pieces[1:]
        cache.act(lambda core: core.check())


@pytest.mark.parametrize("grow_blocks", [1, 2])
@pytest.mark.parametrize("end", ["cut short", "damaged"])
async def test_sound_frames_stay(tmp_path, grow_blocks, end):
    """The file ends in its fourth frame, or is damaged there: three blocks stay, with their rows.

    The last one as well, though it alone would be too little for a growing step.
    """
    pieces = await file_of(tmp_path)
    fourth = bytearray(pieces[4])
    fourth[len(fourth) // 2] ^= 1
    coming = [*pieces[:4], pieces[4][:-1]] if end == "cut short" else [*pieces[:4], bytes(fourth)]
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        grow_bytes = (grow_blocks - 1) * LAYOUT.block_bytes + 1
        with pytest.raises(SessionFileError):
            await read_file(caches, replace(TARGET, grow_bytes=grow_bytes), each(coming))
        assert (info_of(cache).num_tokens, info_of(cache).lost) == (3 * STEP, NOT_FETCHED)
        assert keys_of(cache) == {KEY}
        assert (await pieces_of(caches))[1:4] == pieces[1:4]
        assert not cache.act(lambda core: core.inspection.leases())
        cache.act(lambda core: core.check())
        up_to = replace(TARGET, replaces_up_to=3 * STEP)
        assert await read_file(caches, up_to, each(pieces)) == (KEY, len(TOKENS))
        assert info_of(cache).lost == ""
        assert (await pieces_of(caches))[1:] == pieces[1:]


async def test_an_interrupted_import_leaves_its_part(tmp_path):
    """The sender disconnects in the middle: the session keeps the arrived part."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        reached = asyncio.Event()

        async def stalls():
            for piece in pieces[:4]:
                yield piece
            reached.set()
            await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(read_file(caches, TARGET, stalls()))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (info_of(cache).num_tokens, keys_of(cache)) == (3 * STEP, {KEY})
        assert not cache.act(lambda core: core.growing.is_growing(KEY))


async def test_a_stored_part_is_available_all_the_time(tmp_path):
    """It grows once more has arrived, and keeps its settings."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        store_session(cache, TOKENS[: 2 * STEP + 3])
        cache.act(lambda core: core.sessions.set_ttl(KEY, 10**15))
        seen = []
        target = replace(TARGET, replaces_up_to=2 * STEP + 3)
        look = each(pieces, lambda _: seen.append(info_of(cache).num_tokens))
        await read_file(caches, target, look)
        least = 2 * STEP + 3
        assert seen == [*[least] * 4, *(number * STEP for number in range(3, NUM_BLOCKS + 1))]
        assert (info_of(cache).num_tokens, info_of(cache).ttl_ns) == (len(TOKENS), 10**15)


async def test_a_part_with_other_tokens_is_replaced_at_the_end(tmp_path):
    """When everything has arrived; else it stays."""
    pieces = await file_of(tmp_path)
    target = replace(TARGET, replaces_up_to=STEP)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        store_session(cache, range(900, 900 + STEP))
        with pytest.raises(SessionFileError):
            await read_file(caches, target, each(pieces[:-1]))
        assert info_of(cache).num_tokens == STEP
        await read_file(caches, target, each(pieces))
        assert (info_of(cache).num_tokens, info_of(cache).lost) == (len(TOKENS), "")


@pytest.mark.parametrize("change", ["longer", "flushed"])
async def test_a_session_changed_by_a_turn_stays(tmp_path, change):
    """The rest of the import is not needed any more."""
    pieces = await file_of(tmp_path)
    longer = [*TOKENS[: 3 * STEP], *range(500, 500 + STEP)]
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)

        def changes(number):
            if number == 4 and change == "longer":
                store_session(cache, longer)
            elif number == 4:
                cache.act(lambda core: core.sessions.flush(KEY, dry_run=False))

        with pytest.raises(SessionChangedError):
            await read_file(caches, TARGET, each(pieces, changes))
        info = info_of(cache)
        assert (info and (info.num_tokens, info.lost)) == (
            (4 * STEP, "") if change == "longer" else None
        )
        assert keys_of(cache) == ({KEY} if info else set())
        cache.act(lambda core: core.check())


async def test_a_session_that_is_longer_ends_the_import_early(tmp_path):
    """Before more is fetched in vain."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        num_read = []

        def stores(number):
            num_read.append(number)
            if number == 1:
                store_session(cache, range(900, 900 + STEP))

        with pytest.raises(SessionExistsError):
            await read_file(caches, TARGET, each(pieces, stores))
        assert len(num_read) < len(pieces)
        assert info_of(cache).num_tokens == STEP


@pytest.mark.parametrize("layout", [layout_with_states(), layout_with_windows()])
async def test_a_session_that_needs_its_end_arrives_as_a_whole(tmp_path, layout):
    """Without its state, or windows, none of it can be loaded."""
    pieces = await file_of(tmp_path, layout, load_ends=(len(TOKENS),))
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(layout)
        with pytest.raises(SessionFileError):
            await read_file(caches, TARGET, each(pieces[:-1]))
        assert keys_of(cache) == set()
        seen = []
        await read_file(caches, TARGET, each(pieces, lambda _: seen.append(info_of(cache))))
        assert seen == [None] * len(pieces)
        assert info_of(cache).num_tokens == len(TOKENS)


HELD = 4  # blocks


def tail_of(pieces, num_blocks=HELD):
    """Return the pieces of a file without its first blocks, whose tokens it names."""
    held = held_bytes(encode(TOKENS[: num_blocks * STEP]))
    return [pieces[0] + held, *pieces[1 + num_blocks :]]


@pytest.mark.parametrize("grow_bytes", [0, 1])
@pytest.mark.parametrize("num_here", [HELD * STEP, HELD * STEP + 3])
async def test_a_tail_adds_the_missing_blocks(tmp_path, grow_bytes, num_here):
    """The session then equals one imported as a whole."""
    pieces = await file_of(tmp_path)
    target = replace(TARGET, grow_bytes=grow_bytes, replaces_up_to=num_here)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        store_session(cache, TOKENS[:num_here])
        before = cache.stats().counters["store_tokens"]
        assert await read_file(caches, target, each(tail_of(pieces))) == (KEY, len(TOKENS))
        new = (NUM_BLOCKS - HELD) * STEP
        assert cache.stats().counters["store_tokens"] - before == new
        assert (info_of(cache).num_tokens, info_of(cache).lost) == (len(TOKENS), "")
        assert (await pieces_of(caches))[1:] == pieces[1:]
        assert keys_of(cache) == {KEY}
        cache.act(lambda core: core.check())


async def test_blocks_of_another_session_count_as_present(tmp_path):
    """Its tokens are the same, with the same computation: nothing else has to be fetched."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        store_session(cache, TOKENS, key_of("b"))
        assert await read_file(caches, TARGET, each(tail_of(pieces))) == (KEY, len(TOKENS))
        assert (await pieces_of(caches))[1:] == pieces[1:]


@pytest.mark.parametrize("there", ["nothing", "less", "other tokens", "another tenant's"])
async def test_a_tail_without_its_first_part_is_refused(tmp_path, there):
    """It leaves nothing, and the stored session does not change."""
    pieces = await file_of(tmp_path)
    tokens = {
        "less": TOKENS[: (HELD - 1) * STEP],
        "other tokens": [*TOKENS[:STEP], 900, *TOKENS[STEP + 1 : HELD * STEP]],
        "another tenant's": TOKENS,
    }.get(there)
    key = key_of("a", "acme") if there == "another tenant's" else KEY
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        if tokens:
            store_session(cache, tokens, key)
        before = [info and info.num_tokens for info in (info_of(cache, key),)]
        target = replace(TARGET, replaces_up_to=HELD * STEP)
        with pytest.raises(NotHeldError, match="send the whole session"):
            await read_file(caches, target, each(tail_of(pieces)))
        assert [info and info.num_tokens for info in (info_of(cache, key),)] == before
        assert keys_of(cache) == ({key} if tokens else set())
        assert not cache.act(lambda core: core.inspection.leases())


async def test_a_tail_of_another_lineage_is_refused(tmp_path):
    """Its tokens are the same, but computed after discards: their KV differs."""
    pieces = await file_of(tmp_path)
    header = FileHeader(KEY, LAYOUT, Lineage(b"x" * 16, STEP), "0", 0.0)
    tail = [header_bytes(header), *tail_of(pieces)]
    tail[1] = tail[1].removeprefix(pieces[0])
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        store_session(cache, TOKENS)
        with pytest.raises(NotHeldError):
            await read_file(caches, replace(TARGET, replaces_up_to=len(TOKENS)), each(tail))


async def test_an_interrupted_tail_leaves_its_part(tmp_path):
    """Behind the stored blocks."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        store_session(cache, TOKENS[: HELD * STEP])
        target = replace(TARGET, replaces_up_to=HELD * STEP)
        with pytest.raises(SessionFileError):
            await read_file(caches, target, each(tail_of(pieces)[:2]))
        num_tokens = (HELD + 1) * STEP
        assert (info_of(cache).num_tokens, info_of(cache).lost) == (num_tokens, NOT_FETCHED)
        assert (await pieces_of(caches))[1 : HELD + 2] == pieces[1 : HELD + 2]


AFTER_DISCARDS = Lineage(b"x" * 16, STEP + 4)


def with_lineage(pieces, lineage=AFTER_DISCARDS):
    """Return the same file, with tokens computed after discards behind the first ones."""
    return [header_bytes(FileHeader(KEY, LAYOUT, lineage, "0", 0.0)), *pieces[1:]]


def num_loaded(cache, lineage):
    """Return how many tokens a load is granted that names a lineage."""
    answer = cache.act(lambda core: core.loads.prepare(KEY, encode(TOKENS), 0, 1, lineage=lineage))
    if answer.lease_id:
        cache.act(lambda core: core.loads.complete(answer.lease_id, 1))
    return answer.end_token if answer.lease_id else 0


async def test_an_arrived_part_with_discards_is_found_by_its_lineage(tmp_path):
    """Only a load that names it gets the tokens behind them; the next import adds the rest."""
    pieces = with_lineage(await file_of(tmp_path))
    clean = AFTER_DISCARDS.clean_tokens
    here = clean + 2 * STEP  # blocks that are whole behind the clean tokens
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        with pytest.raises(SessionFileError):
            await read_file(caches, TARGET, each(pieces[: 1 + 4]))
        assert (info_of(cache).num_tokens, info_of(cache).lost) == (here, NOT_FETCHED)
        assert num_loaded(cache, AFTER_DISCARDS) == here
        assert num_loaded(cache, Lineage(b"y" * 16, clean)) < here
        target = replace(TARGET, replaces_up_to=here)
        await read_file(caches, target, each(pieces))
        assert num_loaded(cache, AFTER_DISCARDS) == len(TOKENS)
        cache.act(lambda core: core.check())


async def test_a_file_without_room_leaves_its_sound_part(tmp_path):
    """It is larger than the tiers: what is served are its first tokens."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        num_blocks = 2 * (20 + (1 << 20) // LAYOUT.block_bytes)
        tokens = range(num_blocks * STEP)
        size = len(pieces[1]) - 16 - 4 * STEP

        def frames():
            for start in range(0, len(tokens), STEP):
                yield frame_bytes(start, encode(tokens[start : start + STEP]), [bytes(size)])

        with pytest.raises(ReportedError):
            await read_file(caches, TARGET, each([pieces[0], *frames()]))
        cache.act(lambda core: core.check())
        info = info_of(cache)
        assert info is None or info.lost
        assert keys_of(cache) <= {KEY}
        assert not cache.act(lambda core: core.inspection.leases())
