"""Any order of events keeps the scheduler's account true, and from any state everything ends."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inference_svc.core.attention_window import HeldRows
from inference_svc.core.scheduling.page_groups import page_groups
from inference_svc.core.scheduling.request import RequestEvent
from inference_svc.core.scheduling.step_plan import SchedulerLimits
from tests.property.scheduler_world import KEYS, MS, NUM_LAYERS, SchedulerWorld, Turn
from tests.sampled import examples

MOST_DRAFTED = 4


def whole_pages(limits: SchedulerLimits) -> SchedulerLimits:
    """Return the same limits with a whole number of pages, at least one."""
    size = limits.page_tokens
    return replace(limits, kv_slots=max(1, limits.kv_slots // size) * size) if size else limits


def with_rows(limits: SchedulerLimits, full_items: int) -> SchedulerLimits:
    """Return the same limits where layers with a window, if any, hold the last tokens only."""
    if not limits.attention_window:
        return limits
    step_tokens = max(limits.step_tokens, 1 + MOST_DRAFTED)
    rows = HeldRows(
        limits.attention_window, limits.block_tokens, step_tokens, 6, full_items=full_items
    )
    limits = replace(limits, held_rows=rows)
    return with_groups(limits, *GROUPS[full_items]) if limits.page_tokens else limits


GROUPS = {1: (1, 2), 3: (1, 1), 5: (2, 1)}  # without a window, and with one


def with_groups(limits: SchedulerLimits, num_full: int, num_windowed: int) -> SchedulerLimits:
    """Return the same limits on pages of groups of layers, at least one page of each."""
    size = limits.page_tokens
    rows = replace(limits.held_rows, step_tokens=max(limits.mixed_step_tokens, 1 + MOST_DRAFTED))
    groups = page_groups(num_full, num_windowed, rows.num_rows, size)
    kv_slots = max(limits.kv_slots, groups.num_groups * size)
    return replace(limits, kv_slots=kv_slots, held_rows=rows, page_groups=groups)


LIMITS = st.builds(
    SchedulerLimits,
    max_running=st.integers(1, 3),
    max_loading=st.integers(1, 2),
    max_waiting=st.integers(2, 6),
    kv_slots=st.sampled_from([2, 3, 20, 48, 100]),
    step_tokens=st.integers(1, 16),
    mixed_step_tokens=st.integers(1, 4),
    answer_tokens=st.integers(0, 6),
    write_slots=st.sampled_from([0, 1, 5, 100]),
    keeps_residents=st.booleans(),
    block_tokens=st.sampled_from([1, 4]),
    page_tokens=st.sampled_from([None, None, 1, 3, 4]),
    attention_window=st.sampled_from([0, 1, 6]),
).map(whole_pages)
LIMITS = st.one_of(LIMITS, st.builds(with_rows, LIMITS, st.sampled_from([1, 3, 5])))


class SchedulerMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(limits=LIMITS, window_share=st.sampled_from([1.0, 0.5, 0.1]))
    def begin(self, limits, window_share) -> None:
        self.world = SchedulerWorld(limits, window_share)

    def some(self, data, turns):
        return data.draw(st.sampled_from(turns))

    @rule(
        key=st.sampled_from(KEYS),
        new_tokens=st.integers(1, 30),
        max_tokens=st.integers(1, 20),
        priority=st.sampled_from([0, 0, 0, 1, 2]),
        expires_in=st.sampled_from([None, None, None, 0, 5 * MS, 40 * MS]),
        may_overtake=st.booleans(),
    )
    def submit(self, key, new_tokens, max_tokens, priority, expires_in, may_overtake) -> None:
        """Submit a turn; turns of a session follow each other, unless one is being cancelled."""
        if not may_overtake and any(turn.request.key == key for turn in self.world.alive()):
            return
        deadline_ns = None if expires_in is None else self.world.now_ns + expires_in
        self.world.submit(key, new_tokens, max_tokens, priority=priority, deadline_ns=deadline_ns)

    @rule(data=st.data(), times=st.integers(1, 4), ends=st.booleans(), keeps=st.booleans())
    def loop(self, data, times, ends, keeps) -> None:
        """Run the engine's loop a few times."""
        for _ in range(times):
            self._loop(data, ends, keeps)
            self.world.check()

    def _loop(self, data, ends, keeps) -> None:
        plan = self.world.schedule(data.draw(st.sampled_from([0, 1, MOST_DRAFTED])))
        numbers = [chunk.request.number for chunk in plan.chunks]
        fails = numbers and data.draw(st.integers(0, 9)) == 0
        failing = [data.draw(st.sampled_from(numbers))] if fails else []
        for turn in self.world.step(plan, failing, most_right=data.draw(st.integers(0, 4))):
            if ends or turn.is_complete:
                self.world.finish(turn, keeps=keeps)

    @precondition(lambda self: any(turn.admission for turn in self.world.turns.values()))
    @rule(
        data=st.data(),
        found=st.sampled_from([0, 3, 30]),
        layers=st.sampled_from([0, 0, 1, 3, NUM_LAYERS]),
        write_back=st.integers(0, 3),
        fails=st.booleans(),
    )
    def announce(self, data, found, layers, write_back, fails) -> None:
        turn = self.some(data, [turn for turn in self.world.turns.values() if turn.admission])
        self.world.announce(turn, found, layers, write_back, fails=fails)

    @precondition(lambda self: any(turn.admission for turn in self.world.turns.values()))
    @rule(data=st.data())
    def admit_in_vain(self, data) -> None:
        turn = self.some(data, [turn for turn in self.world.turns.values() if turn.admission])
        self.world.admit_in_vain(turn)

    @precondition(lambda self: any(turn.layers is not None for turn in self.world.turns.values()))
    @rule(data=st.data(), layers=st.integers(1, NUM_LAYERS), copies=st.booleans())
    def copy(self, data, layers, copies) -> None:
        copying = [turn for turn in self.world.turns.values() if turn.layers is not None]
        turn = self.some(data, copying)
        if turn.request.is_over:
            self.world.settle(turn, copies=copies)
        else:
            self.world.progress(turn, layers)

    @precondition(lambda self: self.world.shifts)
    @rule(data=st.data(), works=st.booleans())
    def shift(self, data, works) -> None:
        self.world.end_compaction(self.some(data, sorted(self.world.shifts)), works=works)

    @precondition(lambda self: any(turn.num_saving for turn in self.world.turns.values()))
    @rule(data=st.data())
    def save(self, data) -> None:
        saving = [turn for turn in self.world.turns.values() if turn.num_saving]
        self.world.end_save(self.some(data, saving))

    @precondition(lambda self: any(turn.is_writing for turn in self.world.turns.values()))
    @rule(data=st.data(), num_tokens=st.integers(1, 30))
    def store(self, data, num_tokens) -> None:
        writing = [turn for turn in self.world.turns.values() if turn.is_writing]
        self.world.store(self.some(data, writing), num_tokens)

    @precondition(lambda self: self.world.late)
    @rule()
    def write_late(self) -> None:
        self.world.end_late()

    @precondition(lambda self: self.world.alive())
    @rule(data=st.data())
    def cancel(self, data) -> None:
        self.world.stop(self.some(data, self.world.alive()), RequestEvent.CANCEL)

    @rule(
        key=st.sampled_from(KEYS),
        what=st.sampled_from(
            ["delete", "discard", "regenerate", "fork", "measure", "wait", "look"]
        ),
        amount=st.integers(1, 30),
    )
    def meanwhile(self, key, what, amount) -> None:
        """Take a step that concerns no request."""
        world = self.world
        if what == "delete":
            world.drop_resident(key)
            world.conversations[key].clear()
        elif what == "discard":
            world.discard(key, amount)
        elif what == "regenerate":
            del world.conversations[key][amount:]
        elif what == "fork":
            world.fork(key, KEYS[amount % len(KEYS)], amount)
        elif what == "measure":
            for num_tokens in (1, 2, 4, 8, 16):
                world.rates.steps.note(num_tokens, num_tokens**2, num_tokens * amount / 1000)
                world.rates.loads.note("dram", num_tokens, num_tokens * amount / 1000)
        elif what == "wait":
            world.tick(amount * 50 * MS)
        else:
            self._look()

    def _look(self) -> None:
        """Ask for the wait estimate: there is one."""
        assert self.world.scheduler.feed.interval_s >= 0

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(50),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestScheduler = SchedulerMachine.TestCase


@pytest.mark.long
class TestSchedulerLong(SchedulerMachine.TestCase):
    """Runs the same machine at length."""

    settings = settings(
        SchedulerMachine.TestCase.settings, max_examples=3000, stateful_step_count=120
    )


# ------------------------------------------------------------------------------- random traffic


def random_limits(random: Random) -> SchedulerLimits:
    limits = SchedulerLimits(
        max_running=random.randint(1, 4),
        max_loading=random.randint(1, 3),
        max_waiting=random.randint(2, 8),
        kv_slots=random.choice([30, 60, 120, 240, 600]),
        step_tokens=random.randint(4, 32),
        mixed_step_tokens=random.randint(1, 4),
        answer_tokens=random.randint(0, 6),
        write_slots=random.choice([0, 2, 8, 40]),
        keeps_residents=random.random() < 0.8,
        block_tokens=random.choice([1, 1, 4]),
        page_tokens=random.choice([None, None, 1, 3, 4, 4]),
        attention_window=random.choice([0, 0, 1, 5, 20]),
    )
    limits = whole_pages(limits)
    return with_rows(limits, random.choice([1, 3])) if random.random() < 0.7 else limits


def disturb(world: SchedulerWorld, turn: Turn, random: Random) -> None:
    """Let an event happen to a turn, or let the turn wait on."""
    if turn.num_saving and random.random() < 0.3:
        world.end_save(turn)
    if turn.is_writing and random.random() < 0.3:
        world.store(turn, random.randint(0, 8))
    if turn.admission is not None and random.random() < 0.5:
        if random.random() < 0.1:
            world.admit_in_vain(turn)
            return
        fails = random.random() < 0.2
        found, layers = random.randint(0, 30), random.choice([0, 2, NUM_LAYERS])
        world.announce(turn, found, layers, random.randint(0, 3), fails=fails)
    elif turn.layers is not None and random.random() < 0.5:
        if turn.request.is_over:
            world.settle(turn, copies=random.random() < 0.5)
        else:
            world.progress(turn, random.randint(1, 3))
    if not turn.request.is_over and random.random() < 0.01:
        world.stop(turn, RequestEvent.CANCEL)


def go_round(world: SchedulerWorld, random: Random, seen: Counter[str]) -> None:
    """Run the engine's loop once."""
    for turn in list(world.turns.values()):
        disturb(world, turn, random)
    for key in list(world.shifts):
        if random.random() < 0.5:
            seen["shifted"] += 1
            world.end_compaction(key, works=random.random() < 0.8)
    if random.random() < 0.1:
        key = random.choice(KEYS)
        world.discard(key, random.randint(0, 3))
        seen["discarded"] += key in world.shifts
    if world.late and random.random() < 0.2:
        seen["late"] += 1
        world.end_late()
    if random.random() < 0.2:  # a retry asks for another answer
        del world.conversations[random.choice(KEYS)][random.randint(5, 60) :]
    plan = world.schedule()
    seen["stalled"] += len(plan.stalled)
    seen["preempted"] += len(plan.preempted)
    seen["overflowed"] += len(plan.overflowed)
    seen["evicted"] += len(plan.evicted)
    seen["expired"] += len(plan.expired)
    seen["in place"] += sum(admission.in_place for admission in plan.admitted)
    copied = [admission for admission in plan.admitted if admission.is_copy]
    seen["moved"] += sum(admission.source == admission.request.key for admission in copied)
    seen["shared"] += sum(admission.source != admission.request.key for admission in copied)
    seen["grown"] += len(plan.grown)
    on_pages = [a for a in plan.admitted if a.pages and a.source not in (None, a.request.key)]
    seen["on shared pages"] += len(on_pages)
    seen["mixed"] += len(plan.chunks) > 1
    for turn in world.step(plan):
        if turn.is_complete or random.random() < 0.05:
            seen["finished"] += 1
            world.finish(turn, keeps=random.random() < 0.9)
    world.check()


def random_traffic(seed: int, num_rounds: int) -> Counter[str]:
    """Let turns come and go, then stop new ones until all end; return counts of the events."""
    random, seen = Random(seed), Counter[str]()  # noqa: S311  # test data
    world = SchedulerWorld(random_limits(random), random.choice([1.0, 1.0, 0.5, 0.2]))
    for _ in range(num_rounds):
        if random.random() < 0.4:
            key = random.choice(KEYS)
            if all(turn.request.key != key for turn in world.alive()):
                priority = random.choice([0, 0, 0, 1, 2])
                in_ns = random.choice([None, None, None, 100 * MS])
                deadline_ns = in_ns and world.now_ns + in_ns
                if (
                    random.random() < 0.3
                ):  # a session that ends, and another that begins as one does
                    world.drop_resident(key)
                    world.conversations[key].clear()
                world.fork(key, random.choice(KEYS), random.randint(10, 100))
                world.submit(
                    key,
                    random.randint(1, 12),
                    random.randint(1, 12),
                    priority=priority,
                    deadline_ns=deadline_ns,
                )
        go_round(world, random, seen)
    world.drain()
    seen["pages copied"] += world.num_copied_pages
    seen["pages replaced"] += world.num_replaced_pages
    seen["prefixes of running turns"] += world.num_shared_running
    seen["windows moved"] += world.num_moved_windows
    seen["held up"] += world.num_held_up
    seen["window pages replaced"] += world.num_moved_pages
    return seen


def check_traffic(seeds: range, num_rounds: int) -> None:
    seen = sum((random_traffic(seed, num_rounds) for seed in seeds), Counter[str]())
    wanted = ("preempted", "overflowed", "shifted", "discarded", "evicted", "expired", "in place")
    wanted += ("moved", "shared", "mixed", "finished", "stalled", "grown", "on shared pages")
    wanted += ("pages copied", "pages replaced", "prefixes of running turns", "late")
    wanted += ("windows moved", "held up", "window pages replaced")
    assert min(seen[what] for what in wanted) > 0, f"the traffic is too tame: {seen}"


def test_nothing_starves_and_no_row_is_lost_under_random_traffic() -> None:
    """With tiny budgets, failing loads, priorities and cancellations, every request ends."""
    check_traffic(range(30), 150)


@pytest.mark.long
def test_nothing_starves_under_long_random_traffic() -> None:
    """The same, at length."""
    check_traffic(range(1000, 1400), 600)
