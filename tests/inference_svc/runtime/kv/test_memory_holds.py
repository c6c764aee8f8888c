"""Rows that are being read or written are not lent again, though their owner has freed them.

A cancelled turn frees its rows at once, while another thread may still use them. (Copies from and
to kvd: store/test_session_store.py.)
"""

from types import SimpleNamespace

import pytest

from inference_svc.core.counters import Counters
from inference_svc.core.rates.rates import Rates
from inference_svc.core.turn_histograms import TurnHistograms
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.engine.loads import _copy_prefix
from inference_svc.runtime.engine.stepping import StepInput, Stepper
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.transfer.compaction import compact_in_place
from inference_svc.runtime.worker_thread import WorkerThread

TOKENS = list(range(3, 43))
NUM_ROWS = 512


class LetGo:
    """Frees rows when it is first called, as their owner would, and notes the free rows.

    Attributes:
        num_free: rows of the pool before and right after.
    """

    def __init__(self, pool, *lent):
        self._pool = pool
        self._lent = lent
        self.num_free = []

    def __call__(self):
        if self._lent:
            self.num_free.append(self._pool.num_free)
            for rows in self._lent:
                self._pool.release(rows)
            self._lent = ()
            self.num_free.append(self._pool.num_free)


@pytest.fixture
def model(tiny):
    return tiny("llama")


@pytest.fixture
def pool(model):
    """Make a separate pool."""
    shapes = [layer.shape for layer in model.calibration.layers]
    return KVPool(shapes, NUM_ROWS, device=model.loaded.device, dtype=model.loaded.dtype)


def _compute(model, pool):
    kv = pool.new_kv(64)
    model.runner.step([Chunk(kv, TOKENS, want_logits=False)])
    return kv


def test_a_copy_holds_the_sequence_kv_that_it_fills(model, pool):
    """Its turn is cancelled meanwhile; the load also holds the source."""
    source, target = _compute(model, pool), pool.new_kv(128)
    target.num_tokens = len(TOKENS)
    target.gate = LayerGate(len(model.calibration.layers))
    target.gate.on_change = let_go = LetGo(pool, target)
    _copy_prefix(source, target)
    assert let_go.num_free == [NUM_ROWS - 192, NUM_ROWS - 192]
    assert pool.num_free == NUM_ROWS - 64


def test_compaction_holds_its_sequence_kv(model, pool):
    """Its tokens are compacted after an overflow, layer by layer."""
    kv = _compute(model, pool)
    let_go = LetGo(pool, kv)

    class Watched(type(kv.keys)):
        """Rows that are freed when one of their layers is read."""

        def __init__(self, rows):
            self.__dict__ = rows.__dict__

        def read(self, layer_index, first, num_tokens):
            if layer_index == 1 and not let_go.num_free:
                let_go()
            return super().read(layer_index, first, num_tokens)

    kv.keys = Watched(kv.keys)
    compact_in_place(kv, ((10, 40),), model.calibration)
    assert let_go.num_free == [NUM_ROWS - 64, NUM_ROWS - 64]
    assert pool.num_free == NUM_ROWS


@pytest.mark.parametrize("part", ["kv", "write_buffer"])
async def test_a_step_holds_the_memory_of_its_results(model, pool, part):
    """The turn is cancelled in the middle of a forward."""
    lent = {"kv": pool.new_kv(64), "write_buffer": pool.new_write_buffer(0, 64)}
    let_go = LetGo(pool, lent[part])

    class Runner(ModelRunner):
        def step(self, chunks, clock=None):
            let_go()
            return super().step(chunks, clock)

    thread = WorkerThread("compute")
    stepper = Stepper(
        Runner(model.loaded, model.calibration), thread, Counters(), Rates(), TurnHistograms()
    )
    chunk = Chunk(lent["kv"], TOKENS, want_logits=False, write_buffer=lent["write_buffer"])
    request = SimpleNamespace(computed_tokens=0)
    try:
        (output,) = await stepper.step([StepInput(request, chunk)])
    finally:
        thread.close()
    assert output.error is None
    assert let_go.num_free == [NUM_ROWS - 128, NUM_ROWS - 128]
    assert pool.num_free == NUM_ROWS - 64


def test_a_failed_move_is_reported_to_both_sides(model, pool):
    """The gate has the error, and no row of the target is kept."""
    source, target = _compute(model, pool), pool.new_kv(128)
    target.num_tokens = len(TOKENS) + 64  # more rows than there are
    target.gate = LayerGate(len(model.calibration.layers))
    with pytest.raises(RuntimeError) as failed:
        _copy_prefix(source, target)
    assert target.gate.error is failed.value
    pool.release(source)
    pool.release(target)
    assert pool.num_free == NUM_ROWS
