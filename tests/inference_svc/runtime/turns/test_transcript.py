"""Transcripts on disk: durable, serialised, bounded in memory, with one owner."""

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


async def test_appended_turns_are_durable(tmp_path):
    """Another store on the same directory finds every acknowledged turn."""
    await append(TranscriptStore(tmp_path), KEY, 0, 1)
    found = await TranscriptStore(tmp_path).get(KEY)
    assert [turn.request_id for turn in found.turns] == ["r0", "r1"]


async def test_a_torn_last_line_is_cut_before_the_next_append(tmp_path):
    """After a crash during a write, appending continues behind the last complete turn."""
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


async def test_a_new_session_leaves_no_open_descriptor(tmp_path):
    """The directory's is needed for a moment, to make the name durable."""
    store = TranscriptStore(tmp_path)
    before = psutil.Process().num_fds()
    await append(store, KEY, 0)
    await store.delete(KEY)
    assert psutil.Process().num_fds() == before


async def test_a_file_torn_in_its_header_is_a_new_session(tmp_path):
    """No turn was acknowledged yet, so nothing is lost."""
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
    """A fork is independent from then on."""
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
    """It survives a restart; an unknown session cannot end."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    await store.end(KEY)
    size = TranscriptFiles(tmp_path).path(KEY).stat().st_size
    await store.end(KEY)
    assert TranscriptFiles(tmp_path).path(KEY).stat().st_size == size
    assert (await TranscriptStore(tmp_path).get(KEY)).has_ended
    with pytest.raises(UnknownSessionError):
        await store.end(KEY._replace(session_id="nobody"))


async def test_a_deleted_session_is_removed_completely(tmp_path):
    """From memory and disk; its id can be used again."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    await store.delete(KEY)
    with pytest.raises(UnknownSessionError):
        await store.get(KEY)
    with pytest.raises(UnknownSessionError):
        await store.delete(KEY)
    await append(store, KEY, 0)


async def test_a_session_whose_file_was_removed_can_be_deleted(tmp_path):
    """Then nothing is left of it."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    TranscriptFiles(tmp_path).path(KEY).unlink()
    await store.delete(KEY)
    assert await store.find(KEY) is None


async def test_a_session_that_cannot_be_removed_stays(tmp_path):
    """The caller gets the error; the session still counts."""
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


async def test_a_complete_file_is_read_once_and_not_changed(tmp_path):
    """Nothing is cut or logged."""
    await append(TranscriptStore(tmp_path), KEY, 0)
    store = TranscriptStore(tmp_path)
    with capture_logs() as lines:
        found = await store.get(KEY)
    assert not lines
    assert await store.get(KEY) is found


@pytest.mark.parametrize(("most_tokens", "num_sessions"), [(1, 1), (9, 1), (10, 2), (14, 2)])
async def test_the_cache_is_bounded(tmp_path, most_tokens, num_sessions):
    """Sessions beyond the limit of five tokens leave memory and are read again; one may stay."""
    store = TranscriptStore(tmp_path, max_cached_tokens=most_tokens)
    keys = [KEY._replace(session_id=f"s{number}") for number in range(5)]
    for key in keys:
        await append(store, key, 0)
    assert store.local.cache.keys() == keys[-num_sessions:]
    assert [len((await store.get(key)).turns) for key in keys] == [1] * 5


async def test_the_most_recently_used_session_stays_in_memory(tmp_path):
    """A read or a write is a use: the other one leaves when a third one comes."""
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


async def test_a_failed_write_does_not_change_the_session(tmp_path):
    """The directory is gone: nothing is recorded, and the caller gets an error."""
    store = TranscriptStore(tmp_path / "gone")
    with pytest.raises(TranscriptUnavailableError):
        await append(store, KEY, 0)
    assert await store.find(KEY) is None


@contextmanager
def no_file_above(num_bytes):
    """Make writing beyond a size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


LIMIT_BYTES = 200_000  # captured output of the tests is smaller
LONG_TOKENS = 100_000  # with a larger record


async def test_a_write_without_room_leaves_nothing(tmp_path):
    """Neither an empty file nor a session.

    The client gets a time to retry at, the log the place.
    """
    store = TranscriptStore(tmp_path)
    store.trouble._lines = LineAllowance(per_s=1, clock_s=lambda: 0.0)
    with no_file_above(LIMIT_BYTES), capture_logs() as lines:
        for name in ("s1", "s2"):
            with pytest.raises(TranscriptDiskFullError) as refused:
                await store.append(KEY._replace(session_id=name), LONG, is_final=False)
        assert refused.value.retry_after_s == RETRY_S
        assert refused.value.retryable
        with pytest.raises(TranscriptDiskFullError):
            await store.fork(await open_long_session(store), "s3", 2)
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


async def open_long_session(store):
    """Make a session whose only turn is nearly as long as the limit: a second one is too much."""
    await store.append(OPENED, record(0, 30_000), is_final=False)
    longer = store.local.cache.get(OPENED).with_turn(record(1, LONG_TOKENS), is_final=False)
    store.local.cache.keep(OPENED, longer)
    return OPENED


async def test_existing_sessions_continue_while_their_records_fit(tmp_path):
    """A refused one does not change, and shorter turns of it are recorded."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    with no_file_above(LIMIT_BYTES):
        with pytest.raises(TranscriptDiskFullError):
            await store.append(KEY, record(1, LONG_TOKENS), is_final=False)
        await append(store, KEY, 1)
    found = await TranscriptStore(tmp_path).get(KEY)
    assert [turn.request_id for turn in found.turns] == ["r0", "r1"]


async def test_no_session_is_opened_without_room(tmp_path):
    """Each time it is tried again, before anything is computed, and leaves nothing."""
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
        await store.trouble.check_room()  # there was room a moment ago: no write is tried
    assert not list(tmp_path.iterdir())


async def test_a_new_session_shows_that_there_is_room(tmp_path):
    """No test write follows; an old session shows little, as its file may have had room."""
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


async def test_room_is_tested_on_the_disk_itself(tmp_path, monkeypatch):
    """Delayed allocation may fail later: the test write is synced."""
    store = TranscriptStore(tmp_path)
    with no_file_above(LIMIT_BYTES), pytest.raises(TranscriptDiskFullError):
        await store.append(KEY, LONG, is_final=False)
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    await store.trouble.check_room()
    assert synced == [PROBE_BYTES]


async def test_the_error_of_a_failed_creation_is_reported(tmp_path):
    """Not that of removing a file that does not exist."""
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


async def test_empty_files_of_a_crash_are_removed_at_the_start(tmp_path):
    """They are no sessions."""
    await append(TranscriptStore(tmp_path), KEY, 0)
    (tmp_path / "empty.jsonl").touch()
    store = TranscriptStore(tmp_path)
    store.count_sessions()
    assert [path.name for path in tmp_path.iterdir()] == [TranscriptFiles(tmp_path).path(KEY).name]
    assert store.local.num_sessions("default") == 1


async def test_one_directory_has_one_owner(tmp_path):
    """A second service on the same directory is refused, until the first one closes."""
    directory = tmp_path / "state" / "sessions"  # which are created
    first, second = TranscriptStore(directory), TranscriptStore(directory)
    first.open()
    with pytest.raises(TranscriptError, match="another service uses the transcript directory"):
        second.open()
    first.close()
    second.open()
    second.close()
    second.close()  # by code that cleans up after a failed start


@pytest.mark.parametrize("open_to_all", [".", "sessions"])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, open_to_all):
    """They could replace the transcripts."""
    directory = tmp_path / "sessions"
    directory.mkdir(mode=0o700)
    (tmp_path / open_to_all).chmod(0o777)
    store = TranscriptStore(directory)
    with pytest.raises(TranscriptError, match=r"other users may write to .*: run chmod 700 "):
        store.open()
    (tmp_path / open_to_all).chmod(0o700)
    store.open()
    store.close()


async def test_created_files_are_private(tmp_path):
    """The directory and its lock, whatever this process's umask is."""
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


async def test_a_directory_that_cannot_be_created_is_refused(tmp_path):
    """A file is in its place: the error names it."""
    (tmp_path / "file").touch()
    with pytest.raises(TranscriptError, match="file"):
        TranscriptStore(tmp_path / "file" / "sessions").open()


async def test_tenants_and_models_are_separate(tmp_path):
    """The same session id of another tenant or model is another session."""
    store = TranscriptStore(tmp_path)
    await append(store, KEY, 0)
    assert await store.find(KEY._replace(tenant="other")) is None
    assert await store.find(KEY._replace(model="other")) is None
    assert len(list(tmp_path.iterdir())) == 1


def test_the_name_of_a_sessions_file_never_changes(tmp_path):
    """Otherwise existing sessions would not be found."""
    key = SessionKey("acme", "0" * 32, "s")
    assert TranscriptFiles(tmp_path).path(key).name == "653f6cf6fa528fd98fad80860864cb5d.jsonl"


async def test_a_discard_is_durable(tmp_path):
    """Between turns, in its place; an unknown session has none."""
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


async def test_names_are_durable(tmp_path, monkeypatch):
    """A new session's file and its name are synced, later only the file; a deleted one's name."""
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


async def test_an_abandoned_write_leaves_no_stale_copy(tmp_path, monkeypatch):
    """The file is read again: it may have the line, or not."""
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
