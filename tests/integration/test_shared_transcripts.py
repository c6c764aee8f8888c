"""Two services share a store of transcripts: a session continues at either, even if one is lost."""

import asyncio
import signal

import pytest

from inference_svc.client import turn_request
from shared.encryption.key_file import new_key, write_key
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import (
    ConflictError,
    NotFoundError,
    ReportedError,
    StateError,
    UnavailableError,
)
from tests.inference_processes import InferenceProcess

SAMPLING = pb.Sampling(max_tokens=6, ignore_eos=True)


@pytest.fixture
def services(tiny_model, tmp_path):
    """Return a factory for numbered services, and the directory that all share."""
    store = tmp_path / "store"

    def make(number, url="", **remote):
        directory = tmp_path / str(number)
        directory.mkdir(exist_ok=True)
        environ = {"INFERENCE_REMOTE__URL": url or f"file://{store}"}
        environ |= {
            f"INFERENCE_REMOTE__{name.upper()}": str(value) for name, value in remote.items()
        }
        return InferenceProcess(tiny_model, directory, environ=environ)

    return make, store


async def say(service, turn, session="tale", text="Keys and values are kept."):
    """Submit a turn of a session; the client expects so many turns before it."""
    async with service.client() as client:
        request = turn_request(text, session, sampling=SAMPLING, expected_turn=turn)
        return await client.submit(request)


async def read(service, session="tale"):
    async with service.client() as client:
        return await client.get_session(session, with_turns=True)


async def test_a_session_continues_at_any_service(services, oracle):
    """Its first server may be lost or not; each answer equals recomputation."""
    make, _ = services
    async with make(1) as first, make(2) as second:
        await say(first, 0)
        await say(first, 1)
        await say(second, 2)
        await first.kill()
        await say(second, 3)
        with pytest.raises(StateError) as refused:
            await say(second, 3)
        assert refused.value.reason == "turn_mismatch"
        await first.start()
        await say(first, 4)
        async with second.client() as client:
            await client.fork_session("tale", 3, "other")
        await say(first, 3, "other")
        for session, num_turns in (("tale", 5), ("other", 4)):
            there = await read(second, session)
            assert there.turns == num_turns
            turns = [(turn.input_ids, turn.output_ids) for turn in there.turn_records]
            assert oracle.judge(turns).is_identical
        async with first.client() as client:
            await client.delete_session("tale")
        with pytest.raises(NotFoundError):
            await read(second)


async def test_of_two_simultaneous_turns_one_is_kept(services):
    """One of two turns on two servers is recorded, the client of the other gets an error."""
    make, _ = services
    async with make(1) as first, make(2) as second:
        await say(first, 0)
        results = await asyncio.gather(
            *(say(service, 1) for service in (first, second)), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, ReportedError)]
        assert len(failed) <= 1
        assert all(
            isinstance(error, ConflictError | StateError)
            and error.reason in {"session_moved", "turn_mismatch"}
            for error in failed
        )
        assert (await read(first)).turns == 3 - len(failed) == (await read(second)).turns


async def test_a_store_that_is_unreachable(services):
    """Local sessions continue; possibly remote ones are not started over; new ones begin."""
    make, store = services
    async with make(1) as first:
        await say(first, 0)
        aside = store.with_name("aside")
        store.rename(aside)
        store.touch()
        await say(first, 1)
        await say(first, 0, "new")
        async with first.client() as client:
            unnamed = await client.submit(turn_request("Whose?", sampling=SAMPLING))
            assert unnamed.accepted.turn == 0
        with pytest.raises(UnavailableError) as refused:
            await say(first, None, "elsewhere")
        assert refused.value.reason == "transcript_unavailable"
        await first.kill()
        store.unlink()
        aside.rename(store)
        async with make(2) as second:
            assert (await read(second)).turns == 1, "the second turn has not come there"
        await first.start()
        first.send_signal(signal.SIGTERM)  # the missing turns are pushed before the end
        assert await first.exit_code() == 0
        async with make(2) as second:
            assert (await read(second)).turns == 2
            await say(second, 2)
            await say(second, 1, "new")


async def test_sealed_transcripts_need_the_key(services, tmp_path, oracle):
    """They continue where the key is, and nowhere else; a server without it names what it lacks."""
    make, _ = services
    key_file, other = tmp_path / "key", tmp_path / "other"
    write_key(key_file, new_key())
    write_key(other, new_key())
    async with make(1, key_file=key_file) as first:
        await say(first, 0)
        await say(first, 1)
    for remote in ({}, {"key_file": other}):
        async with make(2, **remote) as second:
            with pytest.raises(StateError, match=r"remote\.old_key_files") as refused:
                await say(second, 2)
            assert refused.value.reason == "transcript_sealed"
    async with make(2, key_file=other, old_key_files=key_file) as second:
        await say(second, 2)
        turns = [(turn.input_ids, turn.output_ids) for turn in (await read(second)).turn_records]
        assert oracle.judge(turns).is_identical
    async with make(3, key_file=other) as third:
        assert (await read(third)).turns == 3, "sealed with the newest key by its last turn"


async def test_a_key_that_cannot_be_read_is_refused_at_the_start(services, tmp_path):
    make, _ = services
    service = make(1, key_file=tmp_path / "nowhere")
    with pytest.raises(Exception, match="ended with exit code 78"):
        await service.start()
    log = service.log_path.read_text()
    assert "kvd key new" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("url", ["ftp://nowhere", "s3://", "file:///"])
async def test_a_url_that_names_no_store_is_refused_at_the_start(services, url):
    """The error names the remedy, without a traceback."""
    make, _ = services
    service = make(1, url)
    with pytest.raises(Exception, match="ended with exit code"):
        await service.start()
    log = service.log_path.read_text()
    assert "remote.url" in log or "the URL of the store" in log
    assert "Traceback" not in log
