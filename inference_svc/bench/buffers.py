"""Part `buffers`: read buffers of every size, and the start gate's choice (paper: §3.2.1, Fig. 19).

A turn's history is in kvd's DRAM. Loading it is slowed down to given ratios of the time that
computing a layer takes (`PacedLoads`); each ratio is a case. The variants:

    B0, B1, …  so many layers are loaded before the turn joins the batch, the others behind that
    auto       the engine's default: the start gate requires S_buf, by measured rates

Each is measured twice. First the batch is free when the turn arrives: `ttft_s`, and `stall_s`, the
time that computing waited for layers, as would every other request in the batch. Then the batch is
busy until long after: `queued_s`, from when it is free to the first token. Too small a buffer costs
stalls and queued turns, too large a one costs TTFT.

On a machine that others use, too, a percent is lost in noise. `layer_ms` adds a pause to each
layer's computing. Then mostly pauses are measured, as with a larger model on a device of its own.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import ceil

from torch.nn import ModuleList

from inference_svc.assembly import Model
from inference_svc.bench.bench_session import (
    BLOCKER_KV_TOKENS,
    BLOCKER_TOKENS,
    ONE_AT_A_TIME,
    BenchSession,
    run_queued,
    take_rounds,
)
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, TurnTimes, running_engine, whole_blocks
from inference_svc.bench.options import BuffersOptions, RunOptions
from inference_svc.bench.workspace import Workspace
from inference_svc.core.rates.rates import pairs
from inference_svc.runtime.engine.loads import PreloadPolicy
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.sequence_kv import SequenceKv, WriteBuffer
from inference_svc.runtime.store.kvd_session_store import KvdSessionStore
from inference_svc.runtime.store.session_store import BegunLoad, LoadRequest, SessionLoads
from shared.children.child_kvd import ChildKvd
from shared.types.errors import InvalidInputError

METRIC = "ttft_s"
QUEUED = "queued_s"
BUFFER = "buffer_layers"
AUTO = "auto"
WARM_UP = 2
LEARN = 5  # turns from which the engine learns what computing takes
MOST_OVER_BEST = 1.02
MIN_HOLD_S = 0.25
HOLD_FACTOR = 1.5  # the batch is busy for this times a step and a whole load


class PacedLoads:
    """Loads in which each layer takes a least time, as from kvd's DRAM over a slower link.

    The copying thread waits, so that the engine measures the slower link's rates.
    """

    def __init__(self, loads: SessionLoads, layer_s: float) -> None:
        self._loads = loads
        self._layer_s = layer_s

    async def begin(self, request: LoadRequest) -> BegunLoad:
        """See SessionLoads."""
        return await self._loads.begin(request)

    async def finish(
        self,
        begun: BegunLoad,
        kv: SequenceKv,
        tail: WriteBuffer | None,
        gate: LayerGate,
        layers: range,
    ) -> None:
        """See SessionLoads."""
        await self._loads.finish(begun, kv, tail, _PacedGate(gate, self._layer_s), layers)

    async def cancel(self, begun: BegunLoad) -> None:
        """See SessionLoads."""
        await self._loads.cancel(begun)


class _PacedGate(LayerGate):
    """Opens the layers of another gate, each a least time after the one before it."""

    def __init__(self, gate: LayerGate, layer_s: float) -> None:
        super().__init__(gate.num_layers)
        self._gate = gate
        self._layer_s = layer_s
        self._opened_s = time.perf_counter()

    def open(self, num_layers: int) -> None:
        time.sleep(max(0.0, self._opened_s + self._layer_s - time.perf_counter()))
        self._opened_s = time.perf_counter()
        self._gate.open(num_layers)

    def fail(self, error: BaseException) -> None:
        self._gate.fail(error)

    def confirm(self) -> None:
        self._gate.confirm()


@contextmanager
def _slowed(model: Model, layer_s: float) -> Iterator[None]:
    """Have each layer of a model take so much longer, with the processor idle."""
    num_layers = len(model.calibration.layers)
    lists = (part for part in model.loaded.model.modules() if isinstance(part, ModuleList))
    layers = next((found for found in lists if len(found) == num_layers), None)
    if layers is None:
        raise InvalidInputError("the layers of this model cannot be found", "leave --layer-ms out")

    def pause(*_: object) -> None:
        time.sleep(layer_s)

    hooks = [layer.register_forward_hook(pause) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def window_tokens(options: BuffersOptions) -> int:
    """The longest turn."""
    return max(options.history_tokens + options.new_tokens + 1, BLOCKER_TOKENS)


async def measure_buffers(
    options: BuffersOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure each ratio, on an engine of its own: what that learns of loads is of the ratio."""
    with _slowed(work.model, options.layer_ms / 1e3) if options.layer_ms else nullcontext():
        return await _measure_ratios(options, run, work)


async def _measure_ratios(
    options: BuffersOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    num_tokens = options.history_tokens + options.new_tokens
    found = []
    async with work.kvd(4 * num_tokens) as kvd:
        async with _engine(work, kvd, num_tokens) as engine:
            session = BenchSession(engine, "history")
            run.on_progress("buffers: computing the history")
            whole, num_new = whole_blocks(
                options.history_tokens, options.new_tokens, engine.block_tokens
            )
            await session.grow(whole)
            for _ in range(LEARN):
                await session.turn("kvd", num_new, 1)
                await engine.settle()
            compute_layer_s = _compute_layer_s(engine, whole, num_new)
        for ratio in options.ratios:
            async with _engine(work, kvd, num_tokens) as engine:
                case = _Case(ratio, engine, session.on(engine), num_new, compute_layer_s)
                found.append(await case.measure(options.pairs, run))
    return tuple(found)


def _engine(
    work: Workspace, kvd: ChildKvd, num_tokens: int
) -> AbstractAsyncContextManager[LocalEngine]:
    return running_engine(
        work.model,
        kvd,
        kv_tokens=6 * num_tokens + BLOCKER_KV_TOKENS,
        cache={"residents": False},
        scheduler=ONE_AT_A_TIME,
    )


def _compute_layer_s(engine: LocalEngine, history: int, num_new: int) -> float:
    """Return the time that a layer of the measured turn takes, as estimated by the engine."""
    num_pairs = pairs(history, history + num_new)
    step_s = engine.parts.rates.steps.seconds(num_new, num_pairs)
    assert step_s is not None, "a few turns were computed"  # noqa: S101
    return step_s / engine.num_layers


@dataclass(slots=True)
class _Case:
    """One ratio of loading to computing.

    Attributes:
        ratio: the ratio.
        engine: the engine.
        session: the session with the history.
        num_new: number of new tokens in each turn.
        compute_layer_s: seconds to compute a layer, to which the ratio refers.
    """

    ratio: float
    engine: LocalEngine
    session: BenchSession
    num_new: int
    compute_layer_s: float

    @property
    def name(self) -> str:
        """The case's name."""
        return f"load/compute {self.ratio:g}"

    @property
    def buffers(self) -> list[str]:
        """The variants with a fixed buffer."""
        return [f"B{size}" for size in range(self.engine.num_layers + 1)]

    async def measure(self, num_pairs: int, run: RunOptions) -> Case:
        """Measure all rounds, and compare the variants."""
        store = self.engine.parts.store
        assert isinstance(store, KvdSessionStore), "an engine with a kvd"  # noqa: S101
        store.loads = PacedLoads(store.loads, self.ratio * self.compute_layer_s)
        facts = {"history_tokens": len(self.session.ids), "new_tokens": self.num_new}
        found = Interleaved(self.name, facts)
        await take_rounds(
            found,
            lambda _: [AUTO, *self.buffers],
            range(-WARM_UP, num_pairs),
            self._take,
            lambda what: run.on_progress(f"buffers, {self.name}: {what}"),
        )
        most = self.engine.num_layers
        chosen = min(found.median(BUFFER, AUTO), most)
        for metric, choices, wrong in (
            (METRIC, [AUTO], f"B{most}"),
            (QUEUED, [f"B{ceil(chosen)}", AUTO], "B0"),
        ):
            best = min(self.buffers, key=lambda name: found.median(metric, name))
            for choice in choices:
                found.compare(metric, choice, best, at_most=MOST_OVER_BEST)
            found.compare(metric, wrong, best)
        return replace(found.case(), notes=(self._note(chosen),))

    def _note(self, chosen: float) -> str:
        """Describe the engine's rates, and its choice."""
        history, num_layers = len(self.session.ids), self.engine.num_layers
        load_s = self.engine.parts.rates.loads.seconds("dram", history) or 0.0
        compute_ms = 1e3 * _compute_layer_s(self.engine, history, self.num_new)
        return (
            f"{self.name}: a layer loads in {1e3 * load_s / num_layers:.2f} ms and is computed in"
            f" {compute_ms:.2f} ms; S_buf is {chosen:.2f} of {num_layers} layers"
        )

    async def _take(self, name: str) -> dict[str, float] | None:
        """Measure a turn that arrives when the batch is free, and one that waits for that."""
        size = None if name == AUTO else int(name.removeprefix("B"))
        self.engine.parts.loads.preload = PreloadPolicy(buffer_layers=size)
        await self.engine.settle()
        free = await self._turn()
        await self.engine.settle()
        queued, queued_s = await run_queued(self.engine, self._hold_s, self._turn)
        if not all(self.session.is_from(times, "dram") for times in (free, queued)):
            return None
        values = {METRIC: free.ttft_s, "stall_s": free.stall_s, QUEUED: queued_s}
        if free.buffer_layers is not None:  # else all layers were there before it could start
            values[BUFFER] = round(free.buffer_layers, 2)
        return values

    @property
    def _hold_s(self) -> float:
        """Seconds long enough to load all layers ahead, which begins behind the current step."""
        step_s = self.engine.num_layers * self.compute_layer_s
        return max(MIN_HOLD_S, HOLD_FACTOR * (1 + self.ratio) * step_s)

    async def _turn(self) -> TurnTimes:
        return await self.session.turn("kvd", self.num_new, 1)
