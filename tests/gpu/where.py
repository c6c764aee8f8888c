"""Profiles decode steps, a prompt and turns: `python -m tests.gpu.where`, in Mistral-7B's shape.

For decode steps, a prompt, and turns whose history is resident or in kvd: the time, how much of it
the device was busy, with its kernels, and what Python's threads were at, from samples of their
stacks. Samples take the interpreter's lock: times are measured without them.
"""

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from inference_svc.assembly import Model
from inference_svc.bench.bench_session import BenchSession
from inference_svc.bench.local_engine import running_engine
from inference_svc.bench.options import ModelChoice
from inference_svc.bench.random_model import chosen_model
from inference_svc.bench.workspace import workspace
from inference_svc.runtime.calibration.calibration import calibrate

SAMPLE_S = 0.0005
MOST_LINES = 12
STEPS, PROMPT_TOKENS, NEW_TOKENS = 40, 512, 256
IDLE = ("threading.py", "selectors.py", "thread.py")


class Samples:
    """Samples of the other threads' stacks, inside the block."""

    def __enter__(self):
        self._found = defaultdict(Counter)
        self._number = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _run(self):
        own = threading.get_ident()
        while not self._is_over.wait(SAMPLE_S):
            self._number += 1
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for thread, frame in sys._current_frames().items():
                if thread != own:
                    code = frame.f_code
                    place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
                    self._found[names.get(thread, "?")][place] += 1

    def lines(self):
        """Return what each busy thread was doing, the most frequent first."""
        for name, places in self._found.items():
            busy = {at: n for at, n in places.items() if not at.startswith(IDLE)}
            if sum(busy.values()) > self._number // 20:
                shares = [f"{at} {n}" for at, n in Counter(busy).most_common(MOST_LINES)]
                yield f"  {name}, of {self._number} samples: {', '.join(shares)}"


async def show(name, measured, engine):
    """Run a case twice to warm up and to time it, once under samples, once under the profiler."""
    for _ in range(2):
        await engine.settle()
        seconds = await measured()
    await engine.settle()
    lines = [f"{name}: {seconds * 1e3:.2f} ms"]
    with Samples() as samples:
        await measured()
    lines += samples.lines()
    await engine.settle()
    if engine.device.type == "cuda":
        began_s = time.perf_counter()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            await measured()
            torch.cuda.synchronize()
            all_s = time.perf_counter() - began_s
        kernels = sorted(
            seen.key_averages(), key=lambda one: one.self_device_time_total, reverse=True
        )
        busy_s = sum(kernel.self_device_time_total for kernel in kernels) / 1e6
        lines.append(f"  the device was busy {busy_s * 1e3:.1f} of {all_s * 1e3:.1f} ms:")
        lines += [
            f"    {kernel.self_device_time_total / 1e3:9.2f} ms {kernel.count:6d} x "
            f"{kernel.key[:90]}"
            for kernel in kernels[:MOST_LINES]
        ]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


async def measure(work, history):
    """Measure all cases; `history` is the largest number of tokens."""
    scheduler = {"max_running": 16, "step_tokens": 4096, "mixed_step_tokens": 8192}
    async with (
        work.kvd(2 * history + 4096) as kvd,
        running_engine(
            work.model, kvd, kv_tokens=3 * history + 16384, scheduler=scheduler
        ) as engine,
    ):

        async def step_s(batch):
            prompts = [engine.new_tokens(PROMPT_TOKENS) for _ in range(batch)]
            turns = [
                engine.turn(engine.key(f"step-{index}"), prompt, STEPS, source="none")
                for index, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*turns)
            all_s = max(times.token_s[0] for times in answers)
            return statistics.median(b - a for a, b in pairwise(answers[0].token_s) if a >= all_s)

        async def prompt_s():
            prompt = engine.new_tokens(4096)
            return (await engine.turn(engine.key("prompt"), prompt, 1, source="none")).ttft_s

        session = BenchSession(engine, "history")

        async def ttft_s(source):
            return (await session.turn(source, NEW_TOKENS, 1)).ttft_s

        for batch in (1, 16):
            await show(f"a step of {batch}", partial(step_s, batch), engine)
        await show("a prompt of 4096", prompt_s, engine)
        await session.grow(history)
        for source in ("resident", "kvd"):
            what = f"{NEW_TOKENS} new over {history}, {source}"
            await show(what, partial(ttft_s, source), engine)


def main():
    """Make the model, and measure."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--random", default="mistral-7b", help="a preset")
    asked.add_argument("--device", default="cuda")
    asked.add_argument("--dtype", default="bfloat16")
    asked.add_argument("--history", type=int, default=16384)
    asked.add_argument("--directory", type=Path, default=Path())
    options = asked.parse_args()
    choice = ModelChoice(random=options.random, device=options.device, dtype=options.dtype)
    loaded = chosen_model(choice, options.history + 2 * NEW_TOKENS)
    model = Model(loaded, calibrate(loaded, packing="auto"))
    with workspace(options.directory, model) as work:
        asyncio.run(measure(work, options.history))


if __name__ == "__main__":
    main()
