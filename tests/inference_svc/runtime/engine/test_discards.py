"""Dropping tokens in a running engine: later answers equal a simple formula's.

The formula: the stock model with its own cache; after each discard the kept keys are rotated back
from their old positions and to their new ones with the model's cosines and sines.
"""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from inference_svc.core.errors import InvalidDiscardError, QueueFullError
from inference_svc.core.ranges import kept_runs, without
from inference_svc.core.scheduling.request import RequestState
from inference_svc.runtime.compute.attention_scores import ScoreKeeper
from inference_svc.runtime.engine.engine_request import ContextCut, as_token_bytes
from shared.types.lineage import WHOLE, Lineage
from tests.memory_engine import loaded_model, running_engine
from tests.sampled import sampled_cases

WINDOW = 64
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def model(tiny_model):
    return loaded_model(tiny_model)


@pytest.fixture(scope="module")
def stock(tiny_model):
    """Load the stock model of Transformers."""
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


class PlainSession:
    """A context and its cache; keys lie at positions 0, 1, 2, …."""

    def __init__(self, stock):
        self.stock, self.past = stock, DynamicCache()
        self.context, self.num_fed = [], 0

    def answer(self, prompt, max_tokens, choose=None):
        """Return the most likely tokens.

        Whenever the window is full, drop what `choose` returns.
        """
        self.context += prompt
        answer = []
        while len(answer) < max_tokens:
            if self.num_fed == WINDOW:
                self.discard(choose(self.context))
            new = self.context[self.num_fed :]
            positions = torch.arange(self.num_fed, len(self.context))[None]
            with torch.no_grad():
                logits = self.stock(
                    input_ids=torch.tensor([new]),
                    position_ids=positions,
                    past_key_values=self.past,
                ).logits[0, -1]
            self.num_fed = len(self.context)
            answer.append(int(logits.argmax()))
            self.context.append(answer[-1])
        return answer

    def discard(self, ranges):
        kept = [i for run in kept_runs(ranges, self.num_fed) for i in range(*run)]
        old, self.past = self.past, DynamicCache()
        for index, layer in enumerate(old.layers):
            keys, values = layer.keys[:, :, kept], layer.values[:, :, kept]
            free = self.turned(keys, torch.tensor(kept), -1)
            self.past.update(self.turned(free, torch.arange(len(kept)), 1), values, index)
        self.context, self.num_fed = without(self.context, ranges), len(kept)

    def turned(self, keys, positions, direction):
        with torch.no_grad():
            cosines, sines = self.stock.model.rotary_emb(keys, positions[None])
        first, second = keys.chunk(2, dim=-1)
        halves = torch.cat((-second, first), dim=-1)
        return keys * cosines[None] + direction * halves * sines[None]


def oldest_half(context):
    return ((0, (len(context) - 1) // 2),)


def behind_the_first_four(context):
    return ((4, 4 + len(context) // 2),)


def every_third(context):
    return tuple((first, first + 1) for first in range(3, len(context) - 2, 3))


def all_but_two(context):
    return ((0, len(context) - 2),)


def the_oldest(context):
    del context
    return ((0, 1),)


async def finish(engine, request):
    await engine.loop.generate(request)
    engine.loop.keep(request, request.token_ids[: request.computed_tokens])
    return request


def resident_ids(engine, request):
    resident = engine.scheduler.residents.get(request.key)
    return [] if resident is None else list(resident.token_ids)


@asynccontextmanager
async def block_thread(thread):
    """Block a thread until the event is set, or the block is left."""
    may_resume = threading.Event()
    busy = asyncio.create_task(thread.run(may_resume.wait))
    try:
        yield may_resume
    finally:
        may_resume.set()
        await busy


CHOICES = [oldest_half, behind_the_first_four, every_third, all_but_two, the_oldest]


@pytest.mark.parametrize(
    ("choose", "write_slots"), sampled_cases(CHOICES, [4000, 0], count=5, seed=1)
)
async def test_an_answer_continues_when_its_window_is_full(model, stock, choose, write_slots):
    """Repeatedly, with the remaining rows."""
    async with running_engine(model, write_slots=write_slots) as engine:
        engine.store.saves = bool(write_slots)
        request = engine.request(PROMPT, 90, window_tokens=WINDOW, truncate=choose)
        request.input_tokens = 30
        await finish(engine, request)
        assert request.sink.token_ids == PlainSession(stock).answer(PROMPT, 90, choose)
        assert request.num_sampled == 90
        assert (
            request.num_overflows == len(request.discards) == engine.counters.snapshot()["shifts"]
        )
        assert request.discards[0].after_tokens == 30 + WINDOW - len(PROMPT) + 1
        assert request.discards[0].ranges == choose([0] * (WINDOW + 1))
        assert len(request.token_ids) <= WINDOW + 1
        assert request.outcome.tier_tokens == {}
        assert request.num_preemptions < 5
        await engine.all_released()


@pytest.mark.parametrize(
    ("choose", "keeps_residents"), sampled_cases(CHOICES, [True, False], count=5, seed=2)
)
async def test_the_next_turn_continues_with_the_rest(model, stock, keeps_residents, choose):
    """From memory, or from the store, which gets the discard between the saves around it."""
    async with running_engine(model, keeps_residents=keeps_residents) as engine:
        session = PlainSession(stock)
        request = engine.request(PROMPT, 60, window_tokens=WINDOW, truncate=choose)
        await finish(engine, request)
        assert request.sink.token_ids == session.answer(PROMPT, 60, choose)
        dropped = ((0, request.computed_tokens // 2),)
        computed_ids = request.token_ids[: request.computed_tokens]
        await engine.loop.discard(request.key, ContextCut(computed_ids, dropped))
        session.discard(dropped)
        following = [*without(request.token_ids, dropped), 77, 78]
        turn = await finish(
            engine, engine.request(following, 30, window_tokens=WINDOW, truncate=choose)
        )
        assert turn.outcome.tokens == len(following) - 3
        assert turn.sink.token_ids == session.answer([77, 78], 30, choose)
        await engine.all_released()


RANGES = [((0, 20),), ((4, 9), (30, 47)), ((40, 47),), ((0, 47),)]


@pytest.mark.parametrize(
    ("ranges", "where"), sampled_cases(RANGES, ["memory", "store", "nowhere"], count=5, seed=1)
)
async def test_tokens_are_dropped_between_turns(model, stock, ranges, where):
    """The other rows are moved together in memory.

    Those in the store are loaded to new positions.
    """
    async with running_engine(model, keeps_residents=where == "memory") as engine:
        engine.store.is_away = where == "nowhere"
        session = PlainSession(stock)
        first = await engine.run(PROMPT)
        assert first.sink.token_ids == session.answer(PROMPT, 8)
        context = first.token_ids
        await engine.loop.discard(first.key, ContextCut(context[:47], ranges))
        if where == "nowhere":  # all of the rest is recomputed
            session = PlainSession(stock)
            session.context = without(context, ranges)
        else:
            session.discard(ranges)
        kept = without(context, ranges)
        turn = await engine.run([*kept, 70, 71, 72])
        num_kept = len(kept) - 1
        if where != "nowhere":
            tier = "hbm" if where == "memory" else "dram"
            assert turn.outcome.tier_tokens == ({tier: num_kept} if num_kept else {})
        assert turn.sink.token_ids == session.answer([70, 71, 72], 8)
        following = [*turn.token_ids, 73]
        again = await engine.run(following)
        assert again.sink.token_ids == session.answer([73], 8)
        await engine.all_released()


async def test_an_invalid_discard_is_refused(model):
    """Ranges outside the context are the caller's error; no range is nothing to do."""
    async with running_engine(model) as engine:
        first = await engine.run(PROMPT)
        with pytest.raises(InvalidDiscardError):
            await engine.loop.discard(first.key, ContextCut(first.token_ids[:47], [(40, 48)]))
        await engine.loop.discard(first.key, ContextCut(first.token_ids[:47], []))
        assert "discard" not in engine.store.order
        assert resident_ids(engine, first) == first.token_ids[:47]
        await engine.all_released()


async def test_an_engine_that_discards_is_not_idle(model):
    """Until the store has been told, and KV in memory is compacted."""
    async with running_engine(model) as engine:
        first = await engine.run(PROMPT)
        await engine.loop.idle.wait()
        cut = ContextCut(first.token_ids[:47], [(0, 10)], first.lineage)
        discarding = asyncio.create_task(engine.loop.discard(first.key, cut))
        await asyncio.sleep(0)
        assert not engine.loop.idle.is_set()
        await engine.loop.idle.wait()
        assert "discard" in engine.store.order
        assert resident_ids(engine, first) == first.token_ids[10:47]
        await discarding
        await engine.all_released()


async def test_discards_of_a_session_are_sequential(model):
    """The second one applies to the result of the first."""
    async with running_engine(model) as engine:
        first = await engine.run(PROMPT)
        whole = first.token_ids[:47]
        async with block_thread(engine.threads[1]) as may_resume:
            discards = [
                asyncio.create_task(engine.loop.discard(first.key, ContextCut(context, ranges)))
                for context, ranges in ((whole, [(0, 10)]), (whole[10:], [(0, 5)]))
            ]
            for _ in range(9):
                await asyncio.sleep(0)
            assert not any(discard.done() for discard in discards)
            may_resume.set()
        async with asyncio.timeout(60):  # otherwise they would make no progress
            await asyncio.gather(*discards)
        assert resident_ids(engine, first) == whole[15:]
        await engine.all_released()


async def test_a_resident_of_another_context_is_dropped(model):
    """Its rows are not those of the remaining tokens."""
    async with running_engine(model) as engine:
        first = await engine.run(PROMPT)
        other = [99, *first.token_ids[1:47]]
        await engine.loop.discard(first.key, ContextCut(other, [(0, 10)]))
        assert not len(engine.scheduler.residents)
        await engine.all_released()


@pytest.mark.parametrize("truncate", [None, lambda context: ()])
async def test_an_answer_ends_when_nothing_may_be_dropped(model, stock, truncate):
    """With as many tokens as the window has rows for."""
    async with running_engine(model) as engine:
        request = engine.request(PROMPT, 90, window_tokens=WINDOW, truncate=truncate)
        await finish(engine, request)
        assert request.sink.is_cut_off
        assert request.sink.token_ids == PlainSession(stock).answer(
            PROMPT, WINDOW - len(PROMPT) + 1
        )
        assert request.computed_tokens == WINDOW
        await engine.all_released()


@pytest.mark.parametrize("ranges", [((0, 0),), ((60, WINDOW + 1),), ((0, 1000),)])
async def test_a_turn_that_drops_protected_tokens_fails(model, ranges):
    """The last token is fed next; other turns continue."""
    async with running_engine(model) as engine:
        request = engine.request(PROMPT, 90, window_tokens=WINDOW, truncate=lambda context: ranges)
        with pytest.raises(InvalidDiscardError):
            await engine.loop.generate(request)
        await engine.run(PROMPT, session="other")
        await engine.all_released()


async def test_others_decode_during_a_compaction(model, stock):
    """The load thread is busy; steps of others continue, and the turn waits for its rows."""
    engine_of_big_sequences = running_engine(model, answer_tokens=256)
    async with engine_of_big_sequences as engine, block_thread(engine.threads[1]) as may_resume:
        cut = engine.request(PROMPT, 60, window_tokens=WINDOW, truncate=oldest_half, session="cut")
        answer = asyncio.create_task(finish(engine, cut))
        long = engine.request(range(30, 60), 200, session="long")
        others = asyncio.create_task(finish(engine, long))
        await others
        assert cut.state is RequestState.WAITING
        assert len(cut.sink.token_ids) == WINDOW - len(PROMPT) + 1
        may_resume.set()
        await answer
        assert cut.sink.token_ids == PlainSession(stock).answer(PROMPT, 60, oldest_half)
        await engine.all_released()


async def test_a_turn_cancelled_during_compaction_leaves_nothing(model, stock):
    """Later turns do not repeat its discard; the next one has the whole context."""
    async with running_engine(model, answer_tokens=256) as engine:
        first = await engine.run(PROMPT, lineage=WHOLE)
        prompt = [*first.token_ids, 70]
        cut = engine.request(prompt, 60, window_tokens=WINDOW, truncate=oldest_half, lineage=WHOLE)
        answer = asyncio.create_task(engine.loop.generate(cut))
        await cut.sink.has_token.wait()
        async with block_thread(engine.threads[1]) as may_resume:
            await engine.store.has_discarded.wait()
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            other = await engine.run(PROMPT, session="other")
            assert engine.scheduler.residents.is_busy(cut.key)
            may_resume.set()
            await engine.loop.idle.wait()
        assert len(engine.scheduler.residents) == 1
        assert resident_ids(engine, other)
        session = PlainSession(stock)
        session.answer(PROMPT, 8)
        again = await engine.run([*prompt[:-1], 71], lineage=WHOLE)
        assert again.outcome.tokens == 0
        assert again.sink.token_ids == session.answer([71], 8)
        await engine.all_released()


async def test_a_turn_cancelled_after_its_context_was_cut_leaves_no_resident(model):
    """No later turn could use it."""
    async with running_engine(model) as engine:
        is_full_again = asyncio.Event()

        def choose(context):
            if cut.discards:
                is_full_again.set()
            return oldest_half(context)

        cut = engine.request(PROMPT, 200, window_tokens=WINDOW, truncate=choose, history_tokens=30)
        answer = asyncio.create_task(engine.loop.generate(cut))
        await is_full_again.wait()
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await engine.loop.idle.wait()
        assert cut.discards
        assert not len(engine.scheduler.residents)
        await engine.all_released()


async def test_rows_that_cannot_be_moved_are_loaded_or_recomputed(model, stock, monkeypatch):
    """A failed compaction costs time, but no token; the store has the rest."""
    for is_away in (False, True):
        async with running_engine(model) as engine:

            def fail(*_arguments):
                raise RuntimeError("out of memory")

            monkeypatch.setattr("inference_svc.runtime.transfer.compaction.Compaction.run", fail)
            engine.store.is_away = is_away
            request = engine.request(PROMPT, 60, window_tokens=WINDOW, truncate=oldest_half)
            await finish(engine, request)
            assert engine.counters.snapshot()["shifts_failed"] == request.num_overflows == 2
            if not is_away:
                assert request.sink.token_ids == PlainSession(stock).answer(PROMPT, 60, oldest_half)
            assert len(request.sink.token_ids) == 60
            await engine.all_released()


async def test_many_turns_overflow_in_memory_for_few(model, stock):
    """Each waits for room repeatedly, and answers as it would alone."""
    async with running_engine(model, kv_slots=300) as engine:
        prompts = [list(range(20 + n, 50 + n)) for n in range(6)]
        requests = [
            engine.request(prompt, 70, str(n), window_tokens=WINDOW, truncate=behind_the_first_four)
            for n, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(finish(engine, request) for request in requests))
        for request, prompt in zip(requests, prompts, strict=True):
            expected = PlainSession(stock).answer(prompt, 70, behind_the_first_four)
            assert request.sink.token_ids == expected
        await engine.all_released()


async def test_scores_are_of_the_remaining_tokens(model):
    """A policy that reads them at the end finds one for each computed token."""
    async with running_engine(model) as engine:
        request = engine.request(PROMPT, 60, window_tokens=WINDOW, truncate=every_third)
        request.scores = ScoreKeeper("accumulated", 0, len(PROMPT))
        await finish(engine, request)
        assert request.discards
        assert len(request.scores.scores()) == request.computed_tokens
        await engine.all_released()


async def test_the_lineage_follows_the_discards_of_a_turn(model):
    """Each time that of the computed tokens; without discards none is reported."""
    async with running_engine(model) as engine:
        request = engine.request(
            PROMPT, 30, window_tokens=WINDOW, truncate=oldest_half, lineage=WHOLE
        )
        await finish(engine, request)
        (discard,) = request.discards
        before = [*PROMPT, *request.sink.token_ids[: WINDOW - len(PROMPT)]]
        assert request.lineage == WHOLE.after(as_token_bytes(before), discard.ranges)
        await engine.all_released()


# ------------------------------------------------------------- turns that drop something and fail

PERIOD = [20, 21, 22, 23, 24, 25, 26]
TWO_PERIODS = ((0, 14),)


async def periodic_session(engine):
    """Make a session with a periodic context, and a turn that drops whole periods.

    The rest has the tokens of a prefix of the context, with other rows.
    """
    first = engine.request(PERIOD * 6, 1, lineage=WHOLE)
    await finish(engine, first)
    return first, ContextCut(PERIOD * 6, TWO_PERIODS, WHOLE)


def turn_after(engine, first, cut, new_ids, max_tokens=8):
    """Make a turn that drops the given cut, or nothing."""
    context, lineage = first.token_ids, WHOLE
    if cut is not None:
        context = without(context, cut.ranges)
        lineage = WHOLE.after(as_token_bytes(cut.token_ids), cut.ranges)
    history_tokens = len(context) - 1
    return engine.request(
        [*context, *new_ids], max_tokens, lineage=lineage, history_tokens=history_tokens
    )


def plain(stock, first, cut, new_ids):
    session = PlainSession(stock)
    session.answer(PERIOD * 6, 1)
    if cut is not None:
        session.discard(cut.ranges)
    return session.answer(new_ids, 8)


@pytest.mark.parametrize("keeps_residents", [True, False])
async def test_a_turn_with_a_discard_uses_the_rest(model, stock, keeps_residents):
    """Its tokens are dropped once it has its place in the queue."""
    async with running_engine(model, keeps_residents=keeps_residents) as engine:
        first, cut = await periodic_session(engine)
        turn = turn_after(engine, first, cut, [70, 71])
        await engine.loop.generate(turn, cut)
        engine.loop.keep(turn, turn.token_ids[:-1])
        assert turn.outcome.tier_tokens == {"hbm" if keeps_residents else "dram": 28}
        assert turn.sink.token_ids == plain(stock, first, cut, [70, 71])
        await engine.all_released()


@pytest.mark.parametrize("keeps_residents", [True, False])
async def test_rows_of_a_cancelled_turns_context_are_not_used_for_the_whole_one(
    model, stock, keeps_residents
):
    """The text is periodic: by tokens alone the next turn would use them."""
    async with running_engine(model, keeps_residents=keeps_residents) as engine:
        first, cut = await periodic_session(engine)
        turn = turn_after(engine, first, cut, [70, 71], 400)
        answer = asyncio.create_task(engine.loop.generate(turn, cut))
        await turn.sink.has_token.wait()
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await engine.loop.idle.wait()
        assert resident_ids(engine, turn) == (PERIOD * 4 if keeps_residents else [])
        whole = turn_after(engine, first, None, [72])
        await finish(engine, whole)
        assert whole.outcome.tokens == 0
        assert whole.sink.token_ids == plain(stock, first, None, [72])
        await engine.all_released()


@pytest.mark.parametrize("keeps_residents", [True, False])
async def test_a_turn_cancelled_while_it_waits_may_be_retried(model, stock, keeps_residents):
    """The retry drops the same tokens, which are gone already, and finds the rest."""
    async with running_engine(model, keeps_residents=keeps_residents) as engine:
        first, cut = await periodic_session(engine)
        turn = turn_after(engine, first, cut, [70, 71])
        async with block_thread(engine.threads[1]):  # its rows cannot be compacted yet
            answer = asyncio.create_task(engine.loop.generate(turn, cut))
            await asyncio.sleep(0)
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            assert turn.started_ns == 0
        await engine.loop.idle.wait()
        again = turn_after(engine, first, cut, [70, 71])
        await engine.loop.generate(again, cut)
        engine.loop.keep(again, again.token_ids[:-1])
        assert again.outcome.tier_tokens == {"hbm" if keeps_residents else "dram": 28}
        assert again.sink.token_ids == plain(stock, first, cut, [70, 71])
        assert engine.counters.snapshot().get("shifts", 0) == keeps_residents
        await engine.all_released()


async def test_a_turn_without_a_place_drops_nothing(model):
    """It is refused before its discard is reported."""
    async with running_engine(model, max_waiting=1, kv_slots=800) as engine:
        first, cut = await periodic_session(engine)
        await engine.loop.idle.wait()
        requests = [engine.request(PROMPT, 300, name) for name in "abc"]  # more than may wait
        answers = []
        for request in requests[:2]:
            answers.append(asyncio.create_task(engine.loop.generate(request)))
            await asyncio.sleep(0)
        await requests[0].sink.has_token.wait()
        while not len(engine.scheduler.queue):
            answers.append(asyncio.create_task(engine.loop.generate(requests.pop())))
            await asyncio.sleep(0)
        before, order = resident_ids(engine, first), list(engine.store.order)
        with pytest.raises(QueueFullError):
            await engine.loop.generate(turn_after(engine, first, cut, [70]), cut)
        assert resident_ids(engine, first) == before
        assert engine.store.order == order
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await engine.all_released()


async def test_a_discard_drops_a_resident_of_another_lineage(model):
    """Its tokens are those of the context, its rows are not."""
    async with running_engine(model) as engine:
        first, cut = await periodic_session(engine)
        other = Lineage(b"another", 0)
        await engine.loop.discard(first.key, ContextCut(cut.token_ids, cut.ranges, other))
        assert not len(engine.scheduler.residents)
        await engine.all_released()
