"""Transcripts on disk: durable, serialised, bounded in memory, one owner."""

import asyncio
import fcntl
import os
import resource
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from inference_svc.core.errors import (
    TranscriptDiskFullError,
    TranscriptError,
    TranscriptUnavailableError,
    UnknownSessionError,
)
from inference_svc.core.turn_record import CLIENT, Discard, TurnRecord, Usage
from inference_svc.runtime.turns.disk_trouble import PROBE_BYTES, RETRY_S
from inference_svc.runtime.turns.transcript import TranscriptStore
from inference_svc.runtime.turns.transcript_files import TranscriptFiles
from shared.process.log import LineAllowance
from shared.types.session_key import SessionKey

KEY = SessionKey("default", "model", "s1")


def record(turn, num_tokens=4):
    return TurnRecord(
        turn=turn,
        request_id=f"r{turn}",
        request_digest="d",
        input_ids=tuple(range(num_tokens)),
        output_ids=(9,),
        pieces=("x",),
        logprobs=(),
        top_logprobs=(),
        uncomputed_tokens=1,
        finish_reason="stop",
        usage=Usage(),
        created_unix_s=1.0,
    )


async def append(store, key, *turns):
    for turn in turns:
        await store.append(key, record(turn), is_final=False)


async def test_what_is_appended_is_there_for_the_next_process(tmp_path):
    """Another store on the same directory finds every acknowledged turn."""
    await append(TranscriptStore(tmp_path), KEY, 0, 1)
    found = await TranscriptStore(tmp_path).get(KEY)
    assert [turn.request_id for turn in found.turns] == ["r0", "r1"]


async def test_a_torn_last_line_is_cut_before_the_next_append(tmp_path):
    """After a crash in the middle of a write, appending goes on behind the last good turn."""
    await append(TranscriptStore(tmp_path), KEY, 0)
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes() + b'0badc0de {"turn": {"tur')
    await append(TranscriptStore(tmp_path), KEY, 1)
    assert len((await TranscriptStore(tmp_path).get(KEY)).turns) == 2


async def test_a_torn_file_that_cannot_be_cut_is_not_used(tmp_path):
    """The next turn's line would be joined to the torn one, and lost with it."""
    await append(TranscriptStore(tmp_path), KEY, 0)
    (path,) = tmp_path.iterdir()
    torn = os.memfd_create("torn", os.MFD_ALLOW_SEALING)
    os.write(torn, path.read_bytes() + b'{"turn": 1')
    fcntl.fcntl(torn, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    path.unlink()
    path.symlink_to(f"/proc/{os.getpid()}/fd/{torn}")
    store = TranscriptStore(tmp_path)
    with pytest.raises(TranscriptUnavailableError):
        await store.get(KEY)
    assert store.trouble.errors.counts == {("write",): 1}
    os.close(torn)


async def test_a_new_session_leaves_no_descriptor_behind(tmp_path):
    """That its name is durable takes the directory's, for a moment."""
    store = TranscriptStore(tmp_path)
    before = psutil.Process().num_fds()
    await append(store, KEY, 0)
    await store.delete(KEY)
    assert psutil.Process().num_fds() == before


async def test_a_file_torn_in_its_header_is_a_new_session(tmp_path):
    """Nothing was acknowledged yet, so nothing is lost."""
    await append(TranscriptStore(tmp_path), KEY, 0)
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes()[:10])
    store = TranscriptStore(tmp_path)
    assert await store.find(KEY) is None
    await append(store, KEY, 0)
    assert len((await TranscriptStore(tmp_path).get(KEY)).turns) == 1


async def test_an_ended_session_stays_ended(tmp_path):
    """The end is recorded with the final turn."""
    await TranscriptStore(tmp_path).append(KEY, record(0), is_final=True)
    assert (await TranscriptStore(tmp_path).get(KEY)).has_ended


async def test_fork_copies_the_first_turns_and_refuses_an_existing_id(tmp_path):
    """A fork is a session of its own from then on."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0, 1)
    forked = await store.fork(KEY, "s2", 1)
    assert forked is not None
    await append(store, KEY._replace(session_id="s2"), 1)
    assert await store.fork(KEY, "s2", 1) is None
    assert len((await store.get(KEY)).turns) == 2
    assert (await TranscriptStore(tmp_path).get(KEY._replace(session_id="s2"))).token_ids == (
        *(0, 1, 2, 3, 9),
        *(0, 1, 2, 3, 9),
    )


async def test_an_end_is_recorded_once(tmp_path):
    """It survives a restart; a session that nobody knows cannot end."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    await store.end(KEY)
    size = TranscriptFiles(tmp_path).path(KEY).stat().st_size
    await store.end(KEY)
    assert TranscriptFiles(tmp_path).path(KEY).stat().st_size == size
    assert (await TranscriptStore(tmp_path).get(KEY)).has_ended
    with pytest.raises(UnknownSessionError):
        await store.end(KEY._replace(session_id="nobody"))


async def test_delete_removes_the_session_for_good(tmp_path):
    """Neither memory nor disk knows it afterwards; its id can be used again."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    await store.delete(KEY)
    with pytest.raises(UnknownSessionError):
        await store.get(KEY)
    with pytest.raises(UnknownSessionError):
        await store.delete(KEY)
    await append(store, KEY, 0)


async def test_a_session_whose_file_somebody_has_removed_can_be_deleted(tmp_path):
    """Then nothing is left of it."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    TranscriptFiles(tmp_path).path(KEY).unlink()
    await store.delete(KEY)
    assert await store.find(KEY) is None


async def test_a_session_that_cannot_be_removed_stays_one(tmp_path):
    """Whoever wants it gone hears of it; it counts as it did."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    TranscriptFiles(tmp_path).path(KEY).unlink()
    TranscriptFiles(tmp_path).path(KEY).mkdir()
    with pytest.raises(TranscriptUnavailableError):
        await store.delete(KEY)
    assert store.local.num_sessions(KEY.tenant) == 1
    assert store.trouble.errors.counts == {("write",): 1}
    with pytest.raises(TranscriptUnavailableError):
        await store.get(KEY)
    assert store.trouble.errors.counts == {("write",): 1, ("read",): 1}


async def test_what_is_whole_is_read_once_and_left_alone(tmp_path):
    """Nothing is cut off it, and nothing is said of that."""
    await append(TranscriptStore(tmp_path), KEY, 0)
    store = TranscriptStore(tmp_path)
    with capture_logs() as lines:
        found = await store.get(KEY)
    assert not lines
    assert await store.get(KEY) is found


@pytest.mark.parametrize(("most_tokens", "num_sessions"), [(1, 1), (9, 1), (10, 2), (14, 2)])
async def test_the_cache_is_bounded(tmp_path, most_tokens, num_sessions):
    """Sessions of five tokens beyond the bound leave memory and are read again; one may stay."""
    store = TranscriptStore(tmp_path, max_cached_tokens=most_tokens)
    keys = [KEY._replace(session_id=f"s{number}") for number in range(5)]
    for key in keys:
        await append(store, key, 0)
    assert store.local.cache.keys() == keys[-num_sessions:]
    assert [len((await store.get(key)).turns) for key in keys] == [1] * 5


async def test_the_session_that_was_used_last_stays_in_memory(tmp_path):
    """Read or written: the other one leaves when a third one comes."""
    store = TranscriptStore(tmp_path, max_cached_tokens=12)
    first, second, third = (KEY._replace(session_id=name) for name in ("1", "2", "3"))
    await append(store, first, 0)
    await append(store, second, 0)
    await store.get(first)
    await append(store, third, 0)
    assert store.local.cache.keys() == [first, third]


async def test_reads_and_appends_of_one_session_are_serialised(tmp_path):
    """A read that began before an append never brings back the older transcript."""
    await append(TranscriptStore(tmp_path), KEY, 0)
    store = TranscriptStore(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(store.find(KEY))
        tasks.create_task(store.append(KEY, record(1), is_final=False))
        for _ in range(8):
            tasks.create_task(store.find(KEY))
    assert len((await store.get(KEY)).turns) == 2


async def test_a_failed_write_leaves_the_session_as_it_was(tmp_path):
    """When the directory is gone nothing is recorded, and the caller gets an error."""
    store = TranscriptStore(tmp_path / "gone")
    with pytest.raises(TranscriptUnavailableError):
        await append(store, KEY, 0)
    assert await store.find(KEY) is None


@contextmanager
def no_file_above(num_bytes):
    """Writing beyond a size fails, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LIMIT_BYTES = 200_000  # what is captured of the tests themselves is less
LONG_TOKENS = 100_000  # whose record is more


async def test_without_room_nothing_is_left_behind(tmp_path):
    """Neither an empty file nor a session; the client learns when to come back, the log where."""
    store = TranscriptStore(tmp_path)
    store.trouble._lines = LineAllowance(per_s=1, clock_s=lambda: 0.0)
    with no_file_above(LIMIT_BYTES), capture_logs() as lines:
        for name in ("s1", "s2"):
            with pytest.raises(TranscriptDiskFullError) as refused:
                await store.append(KEY._replace(session_id=name), LONG, is_final=False)
        assert refused.value.retry_after_s == RETRY_S
        assert refused.value.retryable
        with pytest.raises(TranscriptDiskFullError):
            await store.fork(await opened(store), "s3", 2)
    assert [path.name for path in tmp_path.iterdir()] == [
        TranscriptFiles(tmp_path).path(OPENED).name
    ]
    assert store.local.num_sessions("default") == 1
    assert store.trouble.errors.counts == {("full",): 3}
    warned = [line for line in lines if line["event"] == "transcript_disk_full"]
    assert len(warned) == 1
    assert warned[0]["log_level"] == "warning"
    assert warned[0]["path"].startswith(str(tmp_path))
    assert warned[0]["remedy"]


OPENED = KEY._replace(session_id="opened")
LONG = record(0, LONG_TOKENS)


async def opened(store):
    """A session whose only turn is nearly as long as the limit: a second one is too much."""
    await store.append(OPENED, record(0, 30_000), is_final=False)
    longer = store.local.cache.get(OPENED).with_turn(record(1, LONG_TOKENS), is_final=False)
    store.local.cache.keep(OPENED, longer)
    return OPENED


async def test_sessions_that_are_there_go_on_as_far_as_they_can(tmp_path):
    """One that is refused is as it was, and shorter turns of it are recorded."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    with no_file_above(LIMIT_BYTES):
        with pytest.raises(TranscriptDiskFullError):
            await store.append(KEY, record(1, LONG_TOKENS), is_final=False)
        await append(store, KEY, 1)
    found = await TranscriptStore(tmp_path).get(KEY)
    assert [turn.request_id for turn in found.turns] == ["r0", "r1"]


async def test_no_session_is_opened_until_there_is_room(tmp_path):
    """It is tried anew each time, before anything is computed, and leaves nothing behind."""
    store = TranscriptStore(tmp_path)
    await store.trouble.check_room()
    with no_file_above(LIMIT_BYTES), pytest.raises(TranscriptDiskFullError):
        await store.append(KEY, LONG, is_final=False)
    with no_file_above(PROBE_BYTES - 1):
        for _ in range(2):
            with pytest.raises(TranscriptDiskFullError):
                await store.trouble.check_room()
    await store.trouble.check_room()
    with no_file_above(PROBE_BYTES - 1):
        await store.trouble.check_room()  # there was room a moment ago: nothing is tried
    assert not list(tmp_path.iterdir())


async def test_a_session_that_was_opened_shows_that_there_is_room(tmp_path):
    """Nothing else is tried then; one that goes on shows little, its file may have had some."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    with no_file_above(LIMIT_BYTES), pytest.raises(TranscriptDiskFullError):
        await store.append(KEY._replace(session_id="long"), LONG, is_final=False)
    await append(store, KEY, 1)
    with no_file_above(PROBE_BYTES - 1):
        with pytest.raises(TranscriptDiskFullError):
            await store.trouble.check_room()
        await append(store, KEY._replace(session_id="short"), 0)
        await store.trouble.check_room()


async def test_room_is_found_on_the_disk_itself(tmp_path, monkeypatch):
    """What is only promised may be refused later: all of what is tried is synced."""
    store = TranscriptStore(tmp_path)
    with no_file_above(LIMIT_BYTES), pytest.raises(TranscriptDiskFullError):
        await store.append(KEY, LONG, is_final=False)
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    await store.trouble.check_room()
    assert synced == [PROBE_BYTES]


async def test_why_nothing_can_be_made_is_said(tmp_path):
    """It is not that there is nothing to remove of it."""
    store = TranscriptStore(tmp_path)
    with no_file_above(LIMIT_BYTES), pytest.raises(TranscriptDiskFullError):
        await store.append(KEY, LONG, is_final=False)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(TranscriptUnavailableError, match="Too many open files"):
            await store.trouble.check_room()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_files_that_a_crash_left_empty_go_at_the_start(tmp_path):
    """They are no sessions."""
    await append(TranscriptStore(tmp_path), KEY, 0)
    (tmp_path / "empty.jsonl").touch()
    store = TranscriptStore(tmp_path)
    store.count_sessions()
    assert [path.name for path in tmp_path.iterdir()] == [TranscriptFiles(tmp_path).path(KEY).name]
    assert store.local.num_sessions("default") == 1


async def test_one_directory_has_one_owner(tmp_path):
    """A second service on the same directory is refused, until the first one closes."""
    directory = tmp_path / "state" / "sessions"  # which are made
    first, second = TranscriptStore(directory), TranscriptStore(directory)
    first.open()
    with pytest.raises(TranscriptError, match="another service uses the transcript directory"):
        second.open()
    first.close()
    second.open()
    second.close()
    second.close()  # by whoever cleans up after a start that failed


@pytest.mark.parametrize("open_to_all", [".", "sessions"])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, open_to_all):
    """They could put other transcripts in the place of these."""
    directory = tmp_path / "sessions"
    directory.mkdir(mode=0o700)
    (tmp_path / open_to_all).chmod(0o777)
    store = TranscriptStore(directory)
    with pytest.raises(TranscriptError, match=r"other users may write to .*: run chmod 700 "):
        store.open()
    (tmp_path / open_to_all).chmod(0o700)
    store.open()
    store.close()


async def test_what_is_made_is_for_no_other_user(tmp_path):
    """Neither the directory nor its lock, whatever this process would give away."""
    before = os.umask(0)
    try:
        store = TranscriptStore(tmp_path / "made")
        store.open()
    finally:
        os.umask(before)
    store.close()
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    (lock,) = (tmp_path / "made").iterdir()
    assert lock.stat().st_mode & 0o777 == 0o600


async def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    """A file where the directory should be: the error names it."""
    (tmp_path / "file").touch()
    with pytest.raises(TranscriptError, match="file"):
        TranscriptStore(tmp_path / "file" / "sessions").open()


async def test_tenants_and_models_do_not_meet(tmp_path):
    """The same session id of another tenant or model is another session."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    assert await store.find(KEY._replace(tenant="other")) is None
    assert await store.find(KEY._replace(model="other")) is None
    assert len(list(tmp_path.iterdir())) == 1


def test_a_sessions_file_has_the_same_name_in_every_release(tmp_path):
    """Or none that is there would be found any more."""
    key = SessionKey("acme", "0" * 32, "s")
    assert TranscriptFiles(tmp_path).path(key).name == "653f6cf6fa528fd98fad80860864cb5d.jsonl"


async def test_a_discard_is_there_for_the_next_process(tmp_path):
    """Between turns, in its place; a session that does not exist has none."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    after = await store.discard(KEY, Discard(((0, 2),), 0, CLIENT))
    await append(store, KEY, 1)
    assert after.context.token_ids == (2, 3, 9)
    found = await TranscriptStore(tmp_path).get(KEY)
    assert found.context.token_ids == (2, 3, 9, 0, 1, 2, 3, 9)
    assert [turn for turn, _ in found.all_discards] == [1]
    with pytest.raises(UnknownSessionError):
        await store.discard(KEY._replace(session_id="nobody"), Discard(((0, 2),), 0, CLIENT))


async def test_names_are_durable_too(tmp_path, monkeypatch):
    """A new session's file and its name are synced, then the file alone; a deleted one's name."""
    synced, fsync, num_bytes = [], os.fsync, [0]

    def watched(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        if synced[-1] == file:
            num_bytes.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", watched)
    store = TranscriptStore(tmp_path)
    file, directory = str(TranscriptFiles(tmp_path).path(KEY)), str(tmp_path)
    await append(store, KEY, 0)
    assert synced == [file, directory]
    await append(store, KEY, 1)
    assert synced == [file, directory, file]
    assert num_bytes[0] < num_bytes[1] < num_bytes[2], "what was written was in the file by then"
    await store.delete(KEY)
    assert synced == [file, directory, file, directory]


async def test_a_write_that_is_given_up_leaves_nothing_stale(tmp_path, monkeypatch):
    """What the file has then is read from it: the line may be there, or not."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    syncing, may_sync = threading.Event(), threading.Event()

    def slow_fsync(_descriptor):
        syncing.set()
        may_sync.wait()

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", slow_fsync)
        writing = asyncio.create_task(store.discard(KEY, Discard(((0, 2),), 0, CLIENT)))
        await asyncio.to_thread(syncing.wait)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        may_sync.set()
    assert (await store.get(KEY)).context.token_ids == (2, 3, 9)
    assert (await TranscriptStore(tmp_path).get(KEY)).context.token_ids == (2, 3, 9)
