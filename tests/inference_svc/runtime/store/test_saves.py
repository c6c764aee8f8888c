"""Save streams: groups of full blocks during computation, the rest at the end, in order."""

import asyncio

import torch

from inference_svc.core.counters import Counters
from inference_svc.runtime.engine.engine_request import as_token_bytes
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import LayerShape
from inference_svc.runtime.kv.states import SequenceStates
from inference_svc.runtime.store.saves import Saves
from shared.types.lineage import WHOLE
from shared.types.session_key import SessionKey

KEY = SessionKey("default", "m", "s")
BLOCK_TOKENS = 4
GROUP_TOKENS = 8


class Store:
    """Records its saves, which tests end with an answer."""

    def __init__(self, answer=""):
        self.saves = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.began = asyncio.Event()
        self.answer = answer
        self.num_under_way = 0

    async def save(self, key, token_ids, from_token, buffer, clock=None, lineage=WHOLE):
        assert self.num_under_way == 0, "two saves of one session at a time"
        self.num_under_way += 1
        self.began.set()
        await self.may_end.wait()
        self.saves.append((from_token, len(token_ids) // 4))
        self.num_under_way -= 1
        self.lineage = lineage
        return self.answer

    async def discard(self, key, token_ids, ranges, lineage=WHOLE):
        assert self.num_under_way == 0, "a save is under way"
        self.saves.append("discard")


def tokens(num_tokens):
    return as_token_bytes(range(num_tokens))


class Scene:
    """Saves over one pool."""

    def __init__(self, answer=""):
        self.store = Store(answer)
        self.counters = Counters()
        self.saves = Saves(
            self.store, self.counters, block_tokens=BLOCK_TOKENS, group_tokens=GROUP_TOKENS
        )
        shapes = [LayerShape((1, 8), (1, 8))]
        self.pool = KVPool(shapes, 200, device=torch.device("cpu"), dtype=torch.float32)

    def open_on(self, buffer, key=KEY, shared_from=None):
        """Make a stream over a buffer."""
        stream = self.saves.open(key, buffer, shared_from=shared_from)
        return stream, asyncio.create_task(self.saves.run(key, stream))

    def open(self, first_token):
        """Make a running stream."""
        return self.open_on(self.buffer(first_token))

    def buffer(self, first_token):
        """Make a buffer whose tokens are all computed."""
        buffer = self.pool.new_write_buffer(first_token, 50)
        buffer.end_token = buffer.room_end
        return buffer


async def follow(stream, end_token):
    if stream.should_follow(end_token):
        stream.follow(tokens(end_token), None)
        await stream.idle.wait()


async def test_full_blocks_are_saved_in_groups_and_the_end_saves_the_rest():
    """Fewer tokens than a group wait; a partial block is stored only at the end."""
    scene = Scene()
    stream, life = scene.open(0)
    for end_token in range(1, 22):
        await follow(stream, end_token)
    stream.finish(tokens(22))
    await life
    assert scene.store.saves == [(0, 8), (8, 16), (16, 22)]
    assert scene.counters.snapshot()["saves"] == 1


async def test_blocks_are_counted_from_the_buffers_first_token():
    """A history may end anywhere after a discard: the start of its last block counts."""
    scene = Scene()
    stream, life = scene.open(3)
    await follow(stream, 10)
    await follow(stream, 11)
    stream.finish(tokens(12))
    await life
    assert scene.store.saves == [(3, 11), (11, 12)]


async def test_a_kept_part_shorter_than_the_stored_one_needs_no_save():
    """An answer that a stop string cuts may be stored beyond its end."""
    scene = Scene()
    stream, life = scene.open(0)
    await follow(stream, 16)
    stream.finish(tokens(13))
    await life
    assert scene.store.saves == [(0, 16)]
    assert scene.counters.snapshot()["saves"] == 1


async def test_a_refused_piece_is_saved_with_the_next():
    """Only tokens that the store confirms are stored."""
    scene = Scene(answer="no_space")
    stream, life = scene.open(0)
    await follow(stream, 8)
    scene.store.answer = ""
    stream.finish(tokens(9))
    await life
    assert scene.store.saves == [(0, 8), (0, 9)]


async def test_stored_tokens_leave_the_buffer():
    """Full blocks at once, a partial one stays: it will grow."""
    scene = Scene()
    given = []
    buffer = scene.buffer(3)
    buffer.give = given.extend
    stream, life = scene.open_on(buffer)
    stream.follow(tokens(13), None)
    await stream.idle.wait()
    assert (buffer.first_token, given) == (11, list(range(8)))
    scene.store.answer = None
    stream.follow(tokens(19), None)
    await stream.idle.wait()
    assert buffer.first_token == 11, "what could not be stored stays, to be tried again"
    stream.abandon()
    await life


async def test_a_state_noted_during_a_save_is_stored_with_the_next_piece():
    """Its tokens are being stored, and it did not exist when that began."""
    scene = Scene()
    scene.store.may_end.clear()
    buffer = scene.buffer(0)
    stream, task = scene.open_on(buffer)
    stream.follow(tokens(8), None)
    await scene.store.began.wait()
    buffer.states[8] = SequenceStates((), torch.device("cpu"))
    scene.store.may_end.set()
    await stream.idle.wait()
    assert list(buffer.states) == [8]
    stream.finish(tokens(8))
    await task
    assert scene.store.saves == [(0, 8), (8, 8)]
    assert buffer.states == {}


async def test_unrequested_tokens_are_counted():
    """From the end of the last full block whose save was requested."""
    scene = Scene()
    stream, life = scene.open(3)
    assert stream.num_unsaved == 50
    stream.follow(tokens(13), None)
    assert stream.num_unsaved == 42
    stream.abandon()
    await life


async def test_waiting_callers_are_woken_once_tokens_are_stored():
    """At once if they are; at the end of the stream in any case."""
    scene = Scene()
    stream, life = scene.open(0)
    awaited = {num_tokens: stream.stored_event(num_tokens) for num_tokens in (8, 9)}
    stream.follow(tokens(9), None)
    await stream.idle.wait()
    assert [event.is_set() for event in awaited.values()] == [True, False]
    assert [stream.stored_event(num_tokens).is_set() for num_tokens in (8, 9)] == [True, False]
    stream.abandon()
    await life
    assert awaited[9].is_set()


async def test_a_short_block_is_not_stored_again():
    """The next one begins behind it."""
    scene = Scene()
    stream, life = scene.open(0)
    stream.cut_short(tokens(6))
    await stream.idle.wait()
    assert not stream.should_follow(9, is_tight=True)
    assert stream.should_follow(10, is_tight=True)
    assert not stream.should_follow(10)
    stream.follow(tokens(11), None)
    stream.finish(tokens(13))
    await life
    assert scene.store.saves[0] == (0, 6)
    assert scene.store.saves[-1][1] == 13
    assert {first for first, _ in scene.store.saves[1:]} <= {6, 10}


async def test_saves_are_idle_without_active_requests():
    """Then waiting makes no room."""
    scene = Scene()
    scene.store.may_end.clear()
    stream, life = scene.open(0)
    assert scene.saves.is_idle
    stream.follow(tokens(8), None)
    assert not scene.saves.is_idle
    scene.store.may_end.set()
    await stream.idle.wait()
    assert scene.saves.is_idle
    stream.abandon()
    await life


async def test_a_later_turn_is_saved_after_the_previous_one():
    """Even if its stream is complete first; and `settled` waits for both."""
    scene = Scene()
    scene.store.may_end.clear()
    first, life_first = scene.open(0)
    first.finish(tokens(5))
    await scene.store.began.wait()
    second, life_second = scene.open(4)
    second.finish(tokens(9))
    settled = asyncio.create_task(scene.saves.wait_for_end(KEY))
    await asyncio.sleep(0)
    assert not settled.done()
    scene.store.may_end.set()
    await asyncio.gather(life_first, life_second, settled)
    assert scene.store.saves == [(0, 5), (4, 9)]


async def test_an_abandoned_stream_ends_without_an_error():
    """Its active copy ends, the rest is dropped."""
    scene = Scene()
    scene.store.may_end.clear()
    stream, life = scene.open(0)
    stream.follow(tokens(8), None)
    await scene.store.began.wait()
    stream.follow(tokens(16), None)
    stream.abandon()
    scene.store.may_end.set()
    await life
    assert stream.over.is_set()
    assert scene.store.saves == [(0, 8)]
    counts = scene.counters.snapshot()
    assert not counts["saves"] + counts["saves_refused"] + counts["save_dropped"]


async def test_a_cancelled_stream_blocks_no_caller():
    """As when the service stops during a save: callers that wait for it continue."""
    scene = Scene()
    scene.store.may_end.clear()
    stream, life = scene.open(0)
    prefix = stream.stored_event(8)
    stream.follow(tokens(8), None)
    await scene.store.began.wait()
    assert not stream.idle.is_set()
    life.cancel()
    await asyncio.wait([life])
    assert stream.idle.is_set()
    assert stream.over.is_set()
    assert prefix.is_set()
    assert scene.saves.is_idle


async def test_a_failed_save_is_counted_and_the_next_turn_continues():
    """It costs only a recomputation later."""
    scene = Scene(answer=None)
    first, life = scene.open(0)
    first.finish(tokens(5))
    await life
    assert scene.counters.snapshot()["save_dropped"] == 1
    await scene.saves.wait_for_end(KEY)


async def test_a_prefix_is_stored_after_its_first_session_has_stored_it():
    """B has it from A, and C has it from B: C, too, waits for A's save."""
    scene = Scene()
    scene.store.may_end.clear()
    key_b, key_c = (SessionKey("default", "m", name) for name in "bc")
    first, life_a = scene.open(0)
    _, life_b = scene.open_on(scene.buffer(8), key_b, shared_from=KEY)
    third, life_c = scene.open_on(scene.buffer(8), key_c, shared_from=key_b)
    third.finish(tokens(12))
    first.finish(tokens(10))
    await scene.store.began.wait()
    scene.store.may_end.set()
    await asyncio.gather(life_a, life_c)
    assert scene.store.saves == [(0, 10), (8, 12)]
    life_b.cancel()
    await asyncio.wait([life_b])


async def test_synchronous_saving_waits_for_all_requested_pieces():
    """`wait_until_idle` ends with the last piece that was asked for."""
    scene = Scene()
    scene.store.may_end.clear()
    stream, life = scene.open(0)
    stream.follow(tokens(8), None)
    waiting = asyncio.create_task(scene.saves.wait_until_idle())
    await scene.store.began.wait()
    assert not waiting.done()
    scene.store.may_end.set()
    await waiting
    assert scene.store.saves == [(0, 8)]
    stream.abandon()
    await life


async def test_a_discard_comes_between_the_saves_around_it():
    """Its tokens are stored by then; blocks behind the rest are not."""
    scene = Scene()
    scene.store.may_end.clear()
    first, first_life = scene.open(0)
    first.finish(tokens(12))
    link = scene.saves.open_discard(KEY)
    discarding = asyncio.create_task(
        scene.saves.run_discard(KEY, link, tokens(12), ((0, 4),), WHOLE)
    )
    second, second_life = scene.open(8)
    second.finish(tokens(10))
    loads = asyncio.create_task(scene.saves.wait_for_end(KEY))
    await scene.store.began.wait()
    assert not link.over.is_set()
    scene.store.may_end.set()
    await asyncio.gather(first_life, discarding, second_life, loads)
    assert scene.store.saves == [(0, 12), "discard", (8, 10)]


async def test_a_load_waits_for_the_last_discard():
    """Otherwise it would be granted tokens that are about to be dropped."""
    scene = Scene()
    stream, life = scene.open(0)
    link = scene.saves.open_discard(KEY)
    discarding = asyncio.create_task(
        scene.saves.run_discard(KEY, link, tokens(12), ((0, 4),), WHOLE)
    )
    loads = asyncio.create_task(scene.saves.wait_for_end(KEY))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not loads.done()
    stream.abandon()
    await asyncio.gather(life, discarding, loads)
    assert scene.store.saves == ["discard"]
    await scene.saves.wait_for_end(KEY)
    await scene.saves.wait_until_idle()


async def test_each_piece_has_the_streams_lineage():
    """It is handed on with each piece."""
    scene = Scene()
    lineage = WHOLE.after(tokens(12), [(0, 4)])
    stream = scene.saves.open(KEY, scene.buffer(8), lineage)
    stream.finish(tokens(20))
    await scene.saves.run(KEY, stream)
    assert scene.store.lineage == lineage
