"""Imports whose session has what has come: whenever the file ends, what is served is sound."""

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
from tests.kvd.caches.opened import LAYOUT, caches_in
from tests.synthetic_engine import encode, key_of, layout_with_states, layout_with_windows

KEY = key_of("a")
STEP = LAYOUT.block_tokens
NUM_BLOCKS = 6
TOKENS = range(NUM_BLOCKS * STEP)
TARGET = Target("", "", replaces=False, may_add_layout=True, grow_bytes=1)


def stored(cache, tokens, key=KEY, load_ends=()):
    """Have a session stored; what it has depends on its tokens."""
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
    """The pieces of a session's file: its header, each of its frames, its end."""
    exporter = Exporter(caches, key)
    pieces = [exporter.header]
    async for batch in exporter.frames(prefix=False):
        starts = [0, *(end for _, end in batch.ends)]
        pieces += [bytes(batch.data[start:end]) for start, end in itertools.pairwise(starts)]
    whole = b"".join([bytes(p.data) async for p in Exporter(caches, key).pieces(prefix=False)])
    return [*pieces, whole[sum(map(len, pieces)) :]]


async def file_of(directory, layout=LAYOUT, load_ends=()):
    """The pieces of a file with one session."""
    async with caches_in(directory) as caches:
        cache, _ = await caches.open(layout)
        stored(cache, TOKENS, load_ends=load_ends)
        return await pieces_of(caches)


def info_of(cache, key=KEY):
    return cache.act(lambda core: core.inspection.info(key))


def keys_of(cache):
    return set(cache.act(lambda core: core.inspection.keys()))


async def each(pieces, before=lambda number: None):
    for number, piece in enumerate(pieces):
        before(number)
        yield piece


async def test_it_has_what_has_come(tmp_path):
    """After each frame; in the end it is what it would be had it come at once."""
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
async def test_what_was_good_stays(tmp_path, grow_blocks, end):
    """Of a file that ends in its fourth frame, or is damaged there: three blocks, with their rows.

    The last of them, too, which are fewer than it would have been given next.
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


async def test_whoever_sends_it_may_go(tmp_path):
    """In the middle: what the session was given is its own."""
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


async def test_a_part_that_is_here_is_there_all_the_time(tmp_path):
    """It grows once there is more of it, and keeps what was set for it."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        stored(cache, TOKENS[: 2 * STEP + 3])
        cache.act(lambda core: core.sessions.set_ttl(KEY, 10**15))
        seen = []
        target = replace(TARGET, replaces_up_to=2 * STEP + 3)
        look = each(pieces, lambda _: seen.append(info_of(cache).num_tokens))
        await read_file(caches, target, look)
        least = 2 * STEP + 3
        assert seen == [*[least] * 4, *(number * STEP for number in range(3, NUM_BLOCKS + 1))]
        assert (info_of(cache).num_tokens, info_of(cache).ttl_ns) == (len(TOKENS), 10**15)


async def test_a_part_of_other_tokens_gives_way_in_the_end(tmp_path):
    """When all is there; else it stays."""
    pieces = await file_of(tmp_path)
    target = replace(TARGET, replaces_up_to=STEP)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        stored(cache, range(900, 900 + STEP))
        with pytest.raises(SessionFileError):
            await read_file(caches, target, each(pieces[:-1]))
        assert info_of(cache).num_tokens == STEP
        await read_file(caches, target, each(pieces))
        assert (info_of(cache).num_tokens, info_of(cache).lost) == (len(TOKENS), "")


@pytest.mark.parametrize("change", ["longer", "flushed"])
async def test_what_a_turn_makes_of_it_meanwhile_stays(tmp_path, change):
    """The rest is not wanted any more."""
    pieces = await file_of(tmp_path)
    longer = [*TOKENS[: 3 * STEP], *range(500, 500 + STEP)]
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)

        def changes(number):
            if number == 4 and change == "longer":
                stored(cache, longer)
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


async def test_one_that_is_longer_by_now_ends_it_early(tmp_path):
    """Before anything more is fetched for nothing."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        num_read = []

        def stores(number):
            num_read.append(number)
            if number == 1:
                stored(cache, range(900, 900 + STEP))

        with pytest.raises(SessionExistsError):
            await read_file(caches, TARGET, each(pieces, stores))
        assert len(num_read) < len(pieces)
        assert info_of(cache).num_tokens == STEP


@pytest.mark.parametrize("layout", [layout_with_states(), layout_with_windows()])
async def test_what_needs_its_end_comes_whole(tmp_path, layout):
    """Without its state, or windows, nothing of it can be loaded."""
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
    """The pieces of a file without its first blocks, whose tokens it names."""
    held = held_bytes(encode(TOKENS[: num_blocks * STEP]))
    return [pieces[0] + held, *pieces[1 + num_blocks :]]


@pytest.mark.parametrize("grow_bytes", [0, 1])
@pytest.mark.parametrize("num_here", [HELD * STEP, HELD * STEP + 3])
async def test_a_tail_brings_what_is_missing(tmp_path, grow_bytes, num_here):
    """The session is then what it would be had all of it come."""
    pieces = await file_of(tmp_path)
    target = replace(TARGET, grow_bytes=grow_bytes, replaces_up_to=num_here)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        stored(cache, TOKENS[:num_here])
        before = cache.stats().counters["store_tokens"]
        assert await read_file(caches, target, each(tail_of(pieces))) == (KEY, len(TOKENS))
        new = (NUM_BLOCKS - HELD) * STEP
        assert cache.stats().counters["store_tokens"] - before == new
        assert (info_of(cache).num_tokens, info_of(cache).lost) == (len(TOKENS), "")
        assert (await pieces_of(caches))[1:] == pieces[1:]
        assert keys_of(cache) == {KEY}
        cache.act(lambda core: core.check())


async def test_what_another_session_has_is_here_too(tmp_path):
    """Its tokens are the same, computed as these: there is nothing else to be fetched."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        stored(cache, TOKENS, key_of("b"))
        assert await read_file(caches, TARGET, each(tail_of(pieces))) == (KEY, len(TOKENS))
        assert (await pieces_of(caches))[1:] == pieces[1:]


@pytest.mark.parametrize("there", ["nothing", "less", "other tokens", "another tenant's"])
async def test_a_tail_of_what_is_not_here_is_refused(tmp_path, there):
    """And leaves nothing; what is here stays as it is."""
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
            stored(cache, tokens, key)
        before = [info and info.num_tokens for info in (info_of(cache, key),)]
        target = replace(TARGET, replaces_up_to=HELD * STEP)
        with pytest.raises(NotHeldError, match="send the whole session"):
            await read_file(caches, target, each(tail_of(pieces)))
        assert [info and info.num_tokens for info in (info_of(cache, key),)] == before
        assert keys_of(cache) == ({key} if tokens else set())
        assert not cache.act(lambda core: core.inspection.leases())


async def test_a_tail_of_another_lineage_is_refused(tmp_path):
    """The same tokens, but computed after discards: their KV is not what is here."""
    pieces = await file_of(tmp_path)
    header = FileHeader(KEY, LAYOUT, Lineage(b"x" * 16, STEP), "0", 0.0)
    tail = [header_bytes(header), *tail_of(pieces)]
    tail[1] = tail[1].removeprefix(pieces[0])
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        stored(cache, TOKENS)
        with pytest.raises(NotHeldError):
            await read_file(caches, replace(TARGET, replaces_up_to=len(TOKENS)), each(tail))


async def test_a_tail_that_breaks_off_leaves_what_has_come(tmp_path):
    """Behind what was here."""
    pieces = await file_of(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        stored(cache, TOKENS[: HELD * STEP])
        target = replace(TARGET, replaces_up_to=HELD * STEP)
        with pytest.raises(SessionFileError):
            await read_file(caches, target, each(tail_of(pieces)[:2]))
        num_tokens = (HELD + 1) * STEP
        assert (info_of(cache).num_tokens, info_of(cache).lost) == (num_tokens, NOT_FETCHED)
        assert (await pieces_of(caches))[1 : HELD + 2] == pieces[1 : HELD + 2]


AFTER_DISCARDS = Lineage(b"x" * 16, STEP + 4)


def with_lineage(pieces, lineage=AFTER_DISCARDS):
    """The same file of tokens that were computed after discards, behind the first ones."""
    return [header_bytes(FileHeader(KEY, LAYOUT, lineage, "0", 0.0)), *pieces[1:]]


def num_loaded(cache, lineage):
    """How much of the session a load is granted that names a lineage."""
    answer = cache.act(lambda core: core.loads.prepare(KEY, encode(TOKENS), 0, 1, lineage=lineage))
    if answer.lease_id:
        cache.act(lambda core: core.loads.complete(answer.lease_id, 1))
    return answer.end_token if answer.lease_id else 0


async def test_what_comes_of_a_session_with_discards_is_of_its_lineage(tmp_path):
    """Only whoever names it is given what was computed after them; the next time the rest comes."""
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


async def test_a_file_that_finds_no_room_leaves_what_is_sound(tmp_path):
    """More than the tiers have: what is served of it is of its first tokens."""
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
