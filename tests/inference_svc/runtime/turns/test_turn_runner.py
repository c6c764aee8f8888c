"""Whole turns over a real engine: their events, their records, and their ends."""

import asyncio
import errno
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random

import pytest

from inference_svc.core.answers import SamplingParams
from inference_svc.core.errors import RequestIdReusedError, SessionEndedError, TurnMismatchError
from inference_svc.core.turn_record import Accepted, ConversationDigests, Finished, Started, Tokens
from inference_svc.runtime.turns.disk_trouble import PROBE_FILE
from inference_svc.runtime.turns.store_calls import StoreCalls
from shared.process.backoff import Backoff
from shared.types.errors import ReportedError
from tests.faulty_store import FaultyStore, View
from tests.memory_engine import alone, loaded_model
from tests.turn_service import (
    KEY,
    block_thread,
    failure_of,
    first_token,
    make_turn,
    serving,
    token_ids_of,
    until,
)


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


# -------------------------------------------------------------------------------- what is answered


async def test_a_turn_is_accepted_started_answered_and_recorded(model, tmp_path):
    """In this order; its history is exactly that of the earlier turns."""
    async with serving(model, tmp_path) as service:
        accepted, started, *tokens, finished = await service.run(range(20, 40), request_id="a")
        assert accepted == Accepted("s", 0, "a", 0, is_replayed=False)
        assert (started.history_tokens, started.reused_tokens) == (0, 0)
        answer = await alone(model, range(20, 40))
        assert token_ids_of(tokens) == answer
        text = "".join(token.text for e in tokens for token in e.tokens)
        assert (finished.finish_reason, finished.text, finished.turns) == ("length", text, 1)
        record = (await service.transcript()).turns[0]
        assert (record.input_ids, list(record.output_ids)) == (tuple(range(20, 40)), answer)
        assert (record.turn, record.request_id, record.usage) == (0, "a", finished.usage)
        assert (record.text, record.uncomputed_tokens) == (text, 1)

        events = await service.run([50, 51, 52])
        assert events[0].turn == 1
        usage = events[-1].usage
        assert (usage.history_tokens, usage.reused_tokens, usage.new_tokens) == (27, 27, 4)
        assert events[-1].turns == 2
        assert token_ids_of(events) == await alone(model, [*range(20, 40), *answer, 50, 51, 52])
        names = ("turns_finished", "history_tokens", "reused_tokens", "new_tokens")
        assert await service.counts(*names) == (2, 27, 27, 24)
        names = ("output_tokens", "recomputed_tokens", "overflows", "turns_failed")
        assert await service.counts(*names) == (16, 0, 0, 0)
        assert service.histograms.ended.counts == {("length",): 2}
        assert service.histograms.tenant_turns.counts == {("default", "finished"): 2}


async def test_lost_history_is_counted_as_recomputed(model, tmp_path):
    """The store has dropped it."""
    async with serving(model, tmp_path, keeps_residents=False) as service:
        await service.run(range(20, 40))
        await service.engine.loop.idle.wait()
        service.engine.store.rows.clear()
        usage = (await service.run([50]))[-1].usage
        assert (usage.history_tokens, usage.reused_tokens) == (27, 0)
        assert (usage.recomputed_tokens, usage.recompute_reason) == (27, "miss")
        assert await service.counts("recomputed_tokens", "reused_tokens") == (27, 0)


@pytest.mark.parametrize("logprobs", [0, 2])
async def test_a_repeat_is_answered_from_the_record(model, tmp_path, logprobs):
    """With the same answer, whatever details were requested per token; it is counted separately."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=logprobs)
    async with serving(model, tmp_path) as service:
        first = await service.run(range(20, 40), request_id="a", sampling=sampling)
        usage = first[-1].usage
        again = await service.run(range(20, 40), request_id="a", sampling=sampling)
        shown = tuple(token for e in first if isinstance(e, Tokens) for token in e.tokens)
        assert all((token.logprob is not None) == bool(logprobs) for token in shown)
        assert again == [
            Accepted("s", 0, "a", 0, is_replayed=True),
            Started(usage.history_tokens, usage.reused_tokens, usage.queue_s, usage.new_tokens),
            Tokens(shown),
            first[-1],
        ]
        with pytest.raises(RequestIdReusedError):
            await service.turns.submit(make_turn([99], request_id="a"))
        assert len((await service.transcript()).turns) == 1
        assert await service.counts("turns_replayed", "turns_finished") == (1, 1)
        assert service.histograms.ended.counts == {("length",): 1, ("replayed",): 1}


async def test_a_turn_that_expects_another_session_is_refused(model, tmp_path):
    """It is neither computed nor recorded."""
    async with serving(model, tmp_path) as service:
        await service.run(range(20, 40))
        turn = await service.turns.submit(make_turn([50], expected_turn=0))
        error = await failure_of(turn)
        assert isinstance(error, TurnMismatchError)
        await service.run([50], expected_turn=1)
        assert service.histograms.ended.counts == {("length",): 2, (error.reason,): 1}
        assert len((await service.transcript()).turns) == 2
        assert await service.counts("turns_failed", "output_tokens") == (1, 16)


async def test_after_its_final_turn_a_session_has_ended(model, tmp_path):
    """The store is notified, nothing stays in memory, no turn is accepted."""
    async with serving(model, tmp_path) as service:
        await service.run(range(20, 40), is_final=True)
        await service.engine.loop.idle.wait()
        assert service.engine.store.ended == [KEY]
        assert not len(service.engine.scheduler.residents)
        turn = await service.turns.submit(make_turn([50]))
        assert isinstance(await failure_of(turn), SessionEndedError)


async def test_a_session_that_ends_between_turns_frees_its_memory(model, tmp_path):
    """The store gets the end after the save of its last turn."""
    async with serving(model, tmp_path) as service:
        service.engine.store.may_end.clear()
        await service.run(range(20, 40))
        ending = asyncio.create_task(service.turns.sessions.end(KEY))
        await until(lambda: KEY not in service.engine.scheduler.residents)  # its end is on disk
        await service.run([20], key=KEY._replace(session_id="other"))
        assert service.engine.store.ended == []
        service.engine.store.may_end.set()
        await ending
        order = service.engine.store.order
        assert order.index("save") < order.index("end")


async def test_a_session_is_not_opened_if_it_could_not_be_recorded(model, tmp_path):
    """A full disk is tried before the answer; existing sessions continue."""
    async with serving(model, tmp_path) as service:
        await service.run(range(20, 40))
        service.store.trouble.record_failure("s", tmp_path, OSError(errno.ENOSPC, ""), "write")
        (tmp_path / PROBE_FILE).mkdir()  # writing there fails
        other = KEY._replace(session_id="other")
        turn = await service.turns.submit(make_turn([50], key=other))
        assert (await failure_of(turn)).reason == "transcript_unavailable"
        assert await service.counts("output_tokens") == (8,)
        await service.run([50])
        (tmp_path / PROBE_FILE).rmdir()
        assert (await service.run([51], key=other))[-1].turns == 1


# --------------------------------------------------------------------------- who stops, and waits


async def test_a_cancelled_turn_ends_with_its_tokens_so_far(model, tmp_path):
    """Its transcript does not change; its followers learn why it ended."""
    async with serving(model, tmp_path) as service:
        await service.run(range(20, 40))
        turn = await service.turns.submit(make_turn([50], 100))
        events = await first_token(turn)
        assert turn.cancel()
        last = [event async for event in events][-1]
        assert isinstance(last, Finished)
        assert (last.finish_reason, last.turns) == ("cancelled", 1)
        assert last.usage.history_tokens == 27
        assert not turn.cancel(), "it is over"
        assert len((await service.transcript()).turns) == 1
        assert await service.counts("turns_cancelled", "turns_finished") == (1, 1)
        assert service.histograms.ended.counts == {("length",): 1, ("cancelled",): 1}
        assert service.histograms.tenant_turns.counts == {
            ("default", "finished"): 1,
            ("default", "cancelled"): 1,
        }


async def test_a_cancelled_turn_counts_for_what_it_used(model, tmp_path):
    """One that still waited for nothing; all that counts tokens agrees."""
    other, third = KEY._replace(session_id="other"), KEY._replace(session_id="third")
    names = ("history", "reused", "recomputed", "new")
    async with serving(model, tmp_path, max_running=1, max_loading=1) as service:
        await service.run(range(20, 40))
        running = await service.turns.submit(make_turn([60, 61], 190, key=other))
        loaded = await service.turns.submit(make_turn([70], key=third))
        await first_token(running)
        scheduler = service.engine.scheduler
        await until(lambda: scheduler.traffic(None, 0).num_loading)
        compute_thread = service.engine.loop._stepper._compute_thread
        async with block_thread(compute_thread):  # else the running turn might end first
            waiting = await service.turns.submit(make_turn([50]))
            await until(lambda: len(scheduler.queue))
            assert waiting.cancel()
            usage = [event async for event in waiting.follow()][-1].usage
            assert loaded.cancel()
            assert [event async for event in loaded.follow()][-1].finish_reason == "cancelled"
        assert not any(getattr(usage, f"{name}_tokens") for name in names)
        assert not usage.recompute_reason
        assert running.cancel()
        left = [event async for event in running.follow()][-1].usage
        assert left.new_tokens == 2
        assert left.output_tokens > 0
        history, reused, recomputed, new, output = await service.counts(
            *(f"{name}_tokens" for name in (*names, "output"))
        )
        assert (history, new, output) == (0, 20 + 2, 8 + left.output_tokens)
        assert service.histograms.tenant_tokens.counts == {
            ("default", "computed"): recomputed + new,
            ("default", "reused"): reused,
            ("default", "output"): output,
        }
        assert not service.histograms.recomputed_tokens.counts


async def test_a_turn_that_is_being_recorded_is_not_cancelled(model, tmp_path):
    """Its client would not know the result."""
    async with serving(model, tmp_path) as service:
        write, is_writing, may_write = service.store._write, asyncio.Event(), asyncio.Event()

        async def slow_write(*args, **how):
            is_writing.set()
            await may_write.wait()
            await write(*args, **how)

        service.store._write = slow_write
        turn = await service.turns.submit(make_turn(range(20, 40)))
        await is_writing.wait()
        assert not turn.cancel()
        may_write.set()
        assert [event async for event in turn.follow()][-1].finish_reason == "length"


async def test_a_turn_that_cannot_be_recorded_fails_and_frees_its_memory(model, tmp_path):
    """The next one begins where it did."""
    async with serving(model, tmp_path) as service:
        service.store.local.files.directory = tmp_path / "gone"
        turn = await service.turns.submit(make_turn(range(20, 40)))
        assert (await failure_of(turn)).reason == "transcript_unavailable"
        await service.engine.all_released()
        service.store.local.files.directory = tmp_path
        assert (await service.run(range(20, 40)))[-1].turns == 1


async def test_a_turn_that_is_handed_back_ends_with_only_the_error(model, tmp_path):
    """As if nothing had been computed for it."""
    async with serving(model, tmp_path) as service:
        turn = await service.turns.submit(make_turn(range(20, 40), 150))
        events = await first_token(turn)
        service.turns.hand_back_all()
        with pytest.raises(ReportedError) as caught:
            assert not [event async for event in events if isinstance(event, Finished)]
        assert caught.value.reason == "draining"
        assert await service.counts("turns_handed_back", "turns_cancelled") == (1, 0)
        assert not turn.hand_back(caught.value), "it is over"


async def test_a_turn_ends_with_its_last_follower(model, tmp_path):
    """Not with one of two."""
    async with serving(model, tmp_path) as service:
        turn = await service.turns.submit(make_turn(range(20, 40), 150))
        turn.join()
        turn.join()
        events = await first_token(turn)
        turn.leave()
        assert not turn.is_cancelled
        turn.leave()
        assert turn.is_cancelled
        assert [event async for event in events][-1].finish_reason == "cancelled"


async def test_a_turn_has_the_latest_deadline_of_its_followers(model, tmp_path):
    """Also while it is being computed."""
    async with serving(model, tmp_path) as service:
        never, late = 1 << 62, 1 << 61
        turn = await service.turns.submit(make_turn(range(20, 40), 150, "a", deadline_ns=late))
        await first_token(turn)
        again = make_turn(range(20, 40), 150, "a", deadline_ns=never)
        assert await service.turns.submit(again) is turn
        with pytest.raises(RequestIdReusedError):
            await service.turns.submit(make_turn([99], 150, "a"))
        assert turn.request.deadline_ns == turn.deadline_ns == never
        await service.turns.submit(replace(again, deadline_ns=late))
        assert turn.request.deadline_ns == never
        turn.cancel()


# ----------------------------------------------------------------------------- beside other servers


async def test_a_turn_that_another_server_has_overtaken(model, tmp_path):
    """It is stored in a new session, with all earlier turns, where its KV is found."""
    blobs = FaultyStore(Random(1))  # noqa: S311
    mine = KEY._replace(session_id="mine")
    async with AsyncExitStack() as stack:
        here, there = [
            await stack.enter_async_context(sharing(model, tmp_path / name, blobs))
            for name in ("here", "there")
        ]
        begun = await here.run(range(20, 40), fork_id="unused", make_digests=digests_of)
        assert begun[-1].moved_to == ""
        await there.run(range(50, 60))
        accepted, *_, last = await here.run(range(60, 70), fork_id="mine", make_digests=digests_of)
        assert (accepted.turn, last.turns, last.moved_to) == (1, 2, "mine")
        assert await here.counts("turns_forked", "turns_failed") == (1, 0)

        await there.store.refresh(mine)
        fork = await there.store.get(mine)
        assert fork.header.forked_from == KEY.session_id
        assert fork.turns[0].input_ids == tuple(range(20, 40))
        assert (fork.turns[1].said, fork.history) == (f"mine: {last.text}", f"all, {last.text}")
        usage = (await here.run([7, 8], key=mine, fork_id="unused"))[-1].usage
        assert usage.reused_tokens == usage.history_tokens > 30
        await here.store.refresh(KEY)
        last_turn = (await here.transcript()).turns[1]
        assert last_turn.input_ids[-10:] == tuple(range(50, 60))


def digests_of(text, session_id):
    return ConversationDigests(f"{session_id}: {text}", f"all, {text}")


@asynccontextmanager
async def sharing(model, directory, blobs):
    """Run a service that shares a store with others."""
    directory.mkdir()
    calls = StoreCalls(View(blobs), 60.0, Backoff(Random(1)))  # noqa: S311
    async with serving(model, directory, calls=calls) as service:
        yield service
    calls.close()
