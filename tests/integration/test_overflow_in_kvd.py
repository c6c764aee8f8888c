"""An engine and a real kvd: truncated contexts are loaded as they were left.

It is the engine of the benchmarks, without residents: each turn's history comes from kvd.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_svc.assembly import Model
from inference_svc.bench.local_engine import running_engine
from inference_svc.bench.workspace import workspace
from inference_svc.core.answers import SamplingParams
from inference_svc.core.ranges import kept_runs, without
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.compute.sampling import Sampler
from inference_svc.runtime.engine.engine_request import ContextCut, EngineRequest, as_token_bytes
from inference_svc.runtime.model.model_loader import load_model
from shared.types.lineage import WHOLE
from tests.inference_svc.runtime.engine.test_discards import PlainSession
from tests.memory_engine import Sink

WINDOW = 64
PROMPT = list(range(20, 60))
EVERY_THIRD = tuple((first, first + 1) for first in range(3, 60, 3))


@pytest.fixture(scope="module")
def model(tiny_model):
    loaded = load_model(tiny_model, "float32", "cpu")
    return Model(loaded, calibrate(loaded))


@pytest.fixture(scope="module")
def stock(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model).eval()


class Session:
    """A session of a local engine, with its context and lineage as a transcript keeps them."""

    def __init__(self, local, *, names_lineage):
        self.local, self.key = local, local.key("s")
        self.context, self.computed = [], 0
        self.lineage = WHOLE if names_lineage else None
        self.numbers = iter(range(1000, 2000))

    async def turn(self, new_ids, max_tokens, choose=None):
        """Answer a turn with the history from kvd; return its request."""
        engine = self.local.parts.engine
        prompt = [*self.context, *new_ids]
        request = EngineRequest(
            *(next(self.numbers), self.key, prompt, max_tokens, 0, WINDOW),
            lineage=self.lineage,
            sampler=Sampler(SamplingParams()),
            sink=Sink(max_tokens),
            truncate=choose,
        )
        await engine.generate(request)
        engine.keep(request, request.token_ids[: request.computed_tokens])
        self.context, self.computed = request.token_ids, request.computed_tokens
        self.lineage = request.lineage
        return request

    async def discard(self, ranges):
        computed_ids = self.context[: self.computed]
        await self.local.parts.engine.discard(
            self.key, ContextCut(computed_ids, ranges, self.lineage)
        )
        if self.lineage is not None:
            self.lineage = self.lineage.after(as_token_bytes(computed_ids), ranges)
        self.context = without(self.context, ranges)
        self.computed = sum(end - start for start, end in kept_runs(ranges, self.computed))


def oldest_half(context):
    return ((0, (len(context) - 1) // 2),)


def behind_the_first_four(context):
    return ((4, 4 + len(context) // 2),)


@pytest.mark.parametrize(
    "choose", [oldest_half, pytest.param(behind_the_first_four, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("names_lineage", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "dropped",
    [
        pytest.param(((0, 20),), marks=pytest.mark.long),
        ((7, 9), (20, 28)),
        pytest.param(EVERY_THIRD, marks=pytest.mark.long),
    ],
)
async def test_every_turn_loads_the_tokens_that_discards_left(
    model, stock, tmp_path, dropped, names_lineage, choose
):
    """During turns and between them; all but the last token are loaded, and answers are right."""
    torch.set_num_threads(1)
    with workspace(tmp_path, model) as space:
        async with (
            space.kvd(2000) as kvd,
            running_engine(model, kvd, kv_tokens=2000, cache={"residents": False}) as local,
        ):
            session = Session(local, names_lineage=names_lineage)
            plain = PlainSession(stock)
            first = await session.turn(PROMPT, 60, choose)
            assert first.discards
            assert first.sink.token_ids == plain.answer(PROMPT, 60, choose)
            for new_ids in ([70, 71], [72]):
                fitting = tuple(r for r in dropped if r[1] < session.computed)
                await session.discard(fitting)
                plain.discard(fitting)
                num_stored = session.computed
                request = await session.turn(new_ids, 40, choose)
                assert request.outcome.tier_tokens == {"dram": num_stored}
                assert request.sink.token_ids == plain.answer(new_ids, 40, choose)
            await local.parts.engine.idle.wait()
            counted = local.parts.counters.snapshot()
            assert counted["store_discards_failed"] == counted["saves_refused"] == 0
            assert counted["save_errors"] == counted["load_errors"] == 0
