"""Part `overlap`, second half: what saving costs (paper: Fig. 20).

A set of turns of new sessions is answered, more of them than run at once, under three settings,
each an engine of its own: saving off, asynchronous, synchronous. `answers_s` is from the first
submission to the last answer; `settled_s` until nothing is being saved any more.
"""

import asyncio
import time
from contextlib import AsyncExitStack

from inference_svc.bench.bench_session import in_turn, note
from inference_svc.bench.figures import Case
from inference_svc.bench.interleaved import Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import OverlapOptions, RunOptions
from inference_svc.bench.workspace import Workspace

METRIC = "answers_s"
MODES = ("off", "async", "sync")
WARM_UP = 1
WAVES = 2  # of turns: the saves of one meet the computing of the next
MOST_COST = 1.03


async def measure_saving(
    options: OverlapOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Compare the settings."""
    lengths = [*options.prompts] * WAVES
    num_tokens = sum(lengths) + len(lengths) * options.answer_tokens
    async with AsyncExitStack() as stack:
        kvd = await stack.enter_async_context(work.kvd(2 * num_tokens, ssd_tokens=2 * num_tokens))
        engines = {
            mode: await stack.enter_async_context(
                running_engine(
                    work.model,
                    kvd,
                    kv_rows=2 * num_tokens,
                    cache={"saving": mode, "residents": False},
                    scheduler={"max_running": options.batch},
                )
            )
            for mode in MODES
        }
        facts = {"batch": options.batch, "turns": len(lengths), "prompt_tokens": sum(lengths)}
        found = Interleaved(f"saving, batch {options.batch}", facts)
        for round_number in range(-WARM_UP, options.pairs):
            run.on_progress(f"saving: round {round_number + 1}/{options.pairs}")
            for mode in in_turn(list(MODES), round_number):
                await kvd.flush()
                await engines[mode].settle()
                values = await _answer_all(engines[mode], lengths, options.answer_tokens)
                note(found, mode, round_number, values)
    found.compare(METRIC, "async", "off", at_most=MOST_COST)
    found.compare(METRIC, "sync", "off")
    found.compare(METRIC, "async", "sync", at_most=1.0)
    found.compare("settled_s", "async", "sync")
    return (found.case(),)


async def _answer_all(engine: LocalEngine, lengths: list[int], num_answer: int) -> dict[str, float]:
    """One new session a length, submitted at once."""
    prompts = [engine.new_tokens(length) for length in lengths]
    started_s = time.perf_counter()
    answered = await asyncio.gather(
        *(
            engine.turn(
                engine.key(f"saved-{index}"),
                prompt,
                num_answer,
                source="any",
                keep_tokens=len(prompt) + num_answer - 1,
                history_tokens=0,
            )
            for index, prompt in enumerate(prompts)
        )
    )
    answers_s = max(times.end_s for times in answered) - started_s
    await engine.parts.engine.wait_idle()
    return {"answers_s": answers_s, "settled_s": time.perf_counter() - started_s}
