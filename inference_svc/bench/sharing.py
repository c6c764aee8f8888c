"""Part `sharing`: many sessions that begin with the same prompt, and the cost of the last of them.

pages        the prompt's KV is on pages that all of them hold
copied       each session has KV of its own, and the prompt's is copied
... floor    the same turn in a session whose own history is that prompt

Both engines have a session that has computed the prompt, and the other sessions, each with tokens
of its own. The facts have the memory that all of them take. The measured session is a new one in
each round.

Then several sessions come at the same time, in each round with a prompt that is new. Measured is
the time until the last of them has its first token. The first session computes the prompt for all.
The floor is one turn with all their tokens, in which the prompt counts once.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from inference_svc.bench.bench_session import BenchSession, in_turn, take_rounds, ttft_values
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, is_from, running_engine, whole_blocks
from inference_svc.bench.options import RunOptions, SharingOptions
from inference_svc.bench.workspace import Workspace

METRIC = "ttft_s"
WARM_UP = 2
MOST_OVER_FLOOR = 1.10  # the prompt's length should not matter
WORKING_KV = {"pages": "pages", "copied": "contiguous"}


def window_tokens(options: SharingOptions) -> int:
    """Return the length of the longest turn, in tokens."""
    num_new = max(1, options.num_at_once) * options.new_tokens
    return options.prompt_tokens + num_new + options.answer_tokens


async def measure_sharing(
    options: SharingOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure the last of many sessions, and sessions that come at the same time."""
    kv_tokens = (options.num_sessions + options.num_at_once + 4) * (window_tokens(options) + 64)
    async with AsyncExitStack() as stack:
        kvd = await stack.enter_async_context(work.kvd(2 * kv_tokens))
        engines = {}
        for name, working_kv in WORKING_KV.items():
            engine = await stack.enter_async_context(
                running_engine(
                    work.model,
                    kvd,
                    kv_tokens=2 * kv_tokens,
                    scheduler={"working_kv": working_kv},
                )
            )
            run.on_progress(f"sharing: {name}: computing {options.num_sessions} sessions")
            engines[name] = await _start_sessions(engine, options, name)
        return await _measure_last(engines, options, run), await _measure_at_once(
            engines, options, run
        )


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine with its sessions.

    Attributes:
        local: the engine.
        options: the part's options.
        owner: the session whose history is exactly the prompt.
        num_new: number of tokens that each session adds.
        held_bytes: bytes of all sessions' KV in memory.
    """

    local: LocalEngine
    options: SharingOptions
    owner: BenchSession
    num_new: int
    held_bytes: int

    async def turn(self, *, is_floor: bool) -> dict[str, float] | None:
        """Measure a turn behind the prompt, of its owner (floor) or of a new session."""
        local, options = self.local, self.options
        await local.settle()
        if is_floor:
            times = await self.owner.turn("resident", self.num_new, options.answer_tokens)
        else:
            prompt = [*self.owner.ids, *local.new_tokens(self.num_new)]
            key = local.key("the-last-one")
            times = await local.turn(key, prompt, options.answer_tokens, source="any")
            local.parts.engine.memory.release_resident(key)
        if not is_from(times, "hbm", len(self.owner.ids)):
            return None
        return ttft_values(times, len(self.owner.ids) + self.num_new)

    async def last_of_all(self, *, is_floor: bool) -> dict[str, float]:
        """Measure sessions that come at the same time, or (floor) one turn of all tokens."""
        local, num_sessions = self.local, self.options.num_at_once
        await local.settle()
        prompt = local.new_tokens(len(self.owner.ids))
        if is_floor:
            prompts = [[*prompt, *local.new_tokens(num_sessions * self.num_new)]]
        else:
            prompts = [[*prompt, *local.new_tokens(self.num_new)] for _ in range(num_sessions)]
        keys = [local.key(f"at-once-{number}") for number in range(len(prompts))]
        turns = zip(keys, prompts, strict=True)
        times = await asyncio.gather(*(local.turn(*turn, 1, source="any") for turn in turns))
        for key in keys:
            local.parts.engine.memory.release_resident(key)
        last_s = max(each.ttft_s for each in times)
        return {METRIC: last_s, "prefill_tokens_per_s": sum(map(len, prompts)) / last_s}


async def _start_sessions(local: LocalEngine, options: SharingOptions, name: str) -> _Engine:
    """Compute the prompt, and all sessions that begin with it except the last one."""
    whole, num_new = whole_blocks(options.prompt_tokens, options.new_tokens, local.block_tokens)
    owner = BenchSession(local, f"{name}-owner")
    await owner.grow(whole)
    for number in range(options.num_sessions - 1):
        prompt = [*owner.ids, *local.new_tokens(num_new)]
        key, num_kept = local.key(f"{name}-{number}"), len(prompt)
        await local.turn(key, prompt, 1, source="any", keep_tokens=num_kept, history_tokens=0)
    await local.settle()
    gauges = local.parts.engine.gauges()
    slots = gauges["resident_token_slots"] - gauges["shared_token_slots"]
    held_bytes = int(slots) * local.parts.pool.token_slot_bytes
    return _Engine(local, options, owner, num_new, held_bytes)


async def _measure_last(
    engines: dict[str, _Engine], options: SharingOptions, run: RunOptions
) -> Case:
    """Measure all rounds, and compare each way with its floor."""
    any_engine = next(iter(engines.values()))
    facts = {
        "sessions": options.num_sessions,
        "prompt_tokens": len(any_engine.owner.ids),
        "new_tokens": any_engine.num_new,
        **{f"{name}_bytes": engine.held_bytes for name, engine in engines.items()},
    }
    found = Interleaved(f"{options.num_sessions} sessions", facts)
    variants = [variant for name in engines for variant in (name, f"{name} floor")]

    async def take(variant: str) -> dict[str, float] | None:
        name, _, floor = variant.partition(" ")
        return await engines[name].turn(is_floor=bool(floor))

    rounds = range(-WARM_UP, options.pairs)
    await take_rounds(
        found, lambda _: variants, rounds, take, lambda what: run.on_progress(f"sharing: {what}")
    )
    found.compare(METRIC, "pages", "pages floor", at_most=MOST_OVER_FLOOR)
    found.compare(METRIC, "copied", "copied floor")
    found.compare(METRIC, "pages", "copied")
    return found.case()


async def _measure_at_once(
    engines: dict[str, _Engine], options: SharingOptions, run: RunOptions
) -> Case:
    """Measure all rounds of sessions that come at the same time."""
    found = Interleaved(f"{options.num_at_once} at once", {"sessions": options.num_at_once})
    variants = [variant for name in engines for variant in (name, f"{name} floor")]

    async def take(variant: str) -> dict[str, float]:
        name, _, floor = variant.partition(" ")
        return await engines[name].last_of_all(is_floor=bool(floor))

    await take_rounds(
        found,
        lambda number: in_turn(variants, number),
        range(-1, options.pairs),
        take,
        lambda what: run.on_progress(f"sharing at once: {what}"),
    )
    for name in engines:
        found.compare(METRIC, name, f"{name} floor", at_most=MOST_OVER_FLOOR)
    return found.case()
