"""One replay of part `policies`, by one engine: everything is said, and what it found is noted."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from inference_svc.bench.local_engine import LocalEngine
from inference_svc.bench.options import PoliciesOptions, RunOptions
from inference_svc.bench.plan_trace import EngineConstants
from inference_svc.bench.policy_log import PolicyLog, ReplayedTurn
from inference_svc.bench.trace import Session

COUNTED = ("prefetch", "evictions", "ssd_")  # beginnings of kvd's counters that are shown


@dataclass(frozen=True, slots=True)
class Scene:
    """What every policy is given.

    Attributes:
        starts_s: when each session begins.
    """

    sessions: Sequence[Session]
    starts_s: Sequence[float]
    dram_bytes: int
    ssd_bytes: int

    @property
    def num_turns(self) -> int:
        """Of all sessions."""
        return sum(map(len, self.sessions))


class PolicyReplay:
    """See the module docstring."""

    def __init__(
        self, engine: LocalEngine, options: PoliciesOptions, run: RunOptions, scene: Scene
    ) -> None:
        assert engine.kvd is not None, "its policy is measured"  # noqa: S101
        self._engine = engine
        self._kvd = engine.kvd
        self._options = options
        self._run = run
        self._scene = scene
        self._log = PolicyLog()
        self._num_arrived = 0
        self._num_done = 0

    async def run(self) -> dict[str, float]:
        """Say everything; returns the metrics."""
        warm_up = self._engine.new_tokens(64)
        await self._engine.turn(self._engine.key("warm-up"), warm_up, 8, source="any")
        await self._engine.settle()
        await self._kvd.flush()
        before, busy_s, started_s = await self._counters(), self._engine.busy_s, perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._scene.sessions)):
                tasks.create_task(self._say(index))
        elapsed_s, busy_s = perf_counter() - started_s, self._engine.busy_s - busy_s
        await self._engine.settle()
        counters = await self._counters()
        return self._log.values(elapsed_s, busy_s) | {
            name: value - before[name] for name, value in counters.items()
        }

    def constants(self) -> EngineConstants | None:
        """What turns took, as far as steps were unlike enough to tell; for `kvd plan`."""
        steps = self._engine.parts.rates.steps.as_dict()
        if not steps:
            return None
        # A token costs so much more the longer its context is: here, the mean prompt.
        token_s = steps["step_token_s"] + steps["step_pair_s"] * self._log.mean_prompt_tokens
        return EngineConstants(
            prefill_token_s=token_s,
            decode_step_s=steps["step_constant_s"] + self._options.max_running * token_s,
            turn_s=steps["step_constant_s"],
        )

    async def _say(self, index: int) -> None:
        engine, context, num_computed = self._engine, list[int](), 0
        session = self._scene.sessions[index]
        await asyncio.sleep(self._scene.starts_s[index])
        for number, turn in enumerate(session):
            await asyncio.sleep(turn.think_s if number else 0.0)
            prompt = [*context, *engine.new_tokens(turn.new_tokens)]
            end = len(prompt) + turn.output_tokens
            counts, num_ahead = self._arrive(), len(engine.parts.engine.scheduler.queue)
            times = await engine.turn(
                engine.key(f"session-{index}"),
                prompt,
                turn.output_tokens,
                source="kvd",
                keep_tokens=end - 1,
                history_tokens=num_computed,
                is_final=self._options.end_hints and number == len(session) - 1,
            )
            if counts:
                self._log.add(ReplayedTurn(times, num_computed, len(prompt), num_ahead))
            context, num_computed = [*prompt, *times.output_ids], end - 1
        self._num_done += 1
        num_sessions = len(self._scene.sessions)
        self._run.on_progress(f"policies: {self._num_done}/{num_sessions} sessions are through")

    def _arrive(self) -> bool:
        """A turn comes; whether it counts."""
        self._num_arrived += 1
        return self._num_arrived > self._options.warmup_turns

    async def _counters(self) -> dict[str, float]:
        """What kvd has done so far."""
        (layout,) = (await self._kvd.stats()).layouts
        return {
            name: float(count)
            for name, count in sorted(layout.counters.items())
            if name.startswith(COUNTED)
        }
