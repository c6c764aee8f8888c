"""Part `prefill`: how fast prompts are computed, by length.

ours     the engine, with all its other work (saving included), to the first token
stock    the model as Transformers runs it: sdpa attention, its own cache
floor    the multiplications of all linear layers and of attention, at the rate of this device
         for the product of two large matrices in the model's dtype, measured in the same round
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import torch

from inference_svc.bench.bench_session import take_rounds
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import PrefillOptions, RunOptions
from inference_svc.bench.stock_model import StockModel
from inference_svc.bench.workspace import Workspace

METRIC = "tokens_per_s"
WARM_UP = 1
TRIES = 3
MATRIX_SIDE = 2048
CUDA_MATRIX_SIDE = 8192
LEAST_OF_STOCK = 1.0
LEAST_OF_FLOOR = 0.6  # on a GPU


def window_tokens(options: PrefillOptions) -> int:
    """Return the length of the longest sequence, in tokens."""
    return max(options.prompts) + 1


async def measure_prefill(
    options: PrefillOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure every length."""
    longest = window_tokens(options)
    stock, rate = StockModel(work.model.loaded), MatrixRate(work.model.loaded)
    async with (
        work.kvd(2 * longest) as kvd,
        running_engine(
            work.model,
            kvd,
            kv_tokens=4 * longest,
            cache={"residents": False},
            scheduler={"max_running": 1},
        ) as engine,
    ):
        lengths = [
            _Length(options, engine, stock, rate, num_tokens, _operations(work, num_tokens))
            for num_tokens in options.prompts
        ]
        return tuple([await length.measure(run) for length in lengths])


class MatrixRate:
    """Measures the rate of multiplying two large matrices in the model's dtype, on its device."""

    def __init__(self, loaded: Any) -> None:
        self._device = loaded.device
        side = CUDA_MATRIX_SIDE if self._device.type == "cuda" else MATRIX_SIDE
        made = torch.randn(2, side, side, device=self._device, dtype=loaded.dtype)
        self._left, self._right = made.unbind(0)
        self._operations = 2 * side**3

    def per_s(self) -> float:
        """Measure multiplications and additions per second: the best of some tries."""
        return max(self._try() for _ in range(TRIES))

    def _try(self) -> float:
        self._wait()
        began_s = time.perf_counter()
        torch.mm(self._left, self._right)
        self._wait()
        return self._operations / (time.perf_counter() - began_s)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@dataclass(frozen=True, slots=True)
class _Length:
    """One length of prompts.

    Attributes:
        options: the part's options.
        engine: the engine.
        stock: the stock model.
        rate: the device's matrix rate.
        num_tokens: length of the prompts.
        operations: number of multiplications and additions of a prefill.
    """

    options: PrefillOptions
    engine: LocalEngine
    stock: StockModel
    rate: MatrixRate
    num_tokens: int
    operations: float

    async def measure(self, run: RunOptions) -> Case:
        """Measure all rounds, and compare the variants."""
        facts = {"prompt_tokens": self.num_tokens, "operations": self.operations}
        found = Interleaved(f"{self.num_tokens} tokens", facts)
        ways = {"ours": self._ours, "stock": self._stock, "floor": self._floor}

        async def take(name: str) -> dict[str, float]:
            await self.engine.settle()
            return {METRIC: self.num_tokens / await ways[name]()}

        await take_rounds(
            found,
            lambda _: list(ways),
            range(-WARM_UP, self.options.pairs),
            take,
            lambda what: run.on_progress(f"prefill of {self.num_tokens} tokens: {what}"),
        )
        is_gpu = self.engine.device.type == "cuda"
        found.compare(METRIC, "ours", "stock", at_least=LEAST_OF_STOCK)
        found.compare(METRIC, "ours", "floor", at_least=LEAST_OF_FLOOR if is_gpu else 0.0)
        return found.case()

    async def _ours(self) -> float:
        prompt, key = self.engine.new_tokens(self.num_tokens), self.engine.key("prefill")
        return (await self.engine.turn(key, prompt, 1, source="none")).ttft_s

    async def _stock(self) -> float:
        prompt = self.engine.new_tokens(self.num_tokens)
        return await asyncio.to_thread(self.stock.prefill_s, prompt)

    async def _floor(self) -> float:
        return self.operations / await asyncio.to_thread(self.rate.per_s)


def _operations(work: Workspace, num_tokens: int) -> float:
    """Count multiplications and additions of a prefill: of linear layers and of attention.

    The embedding is looked up; the head computes one token.
    """
    loaded, calibration = work.model.loaded, work.model.calibration
    config = loaded.model.config.get_text_config()
    tables = {id(part.weight): part.weight for part in _tables(loaded.model)}
    linear = loaded.num_weights - sum(weight.numel() for weight in tables.values())
    seen = num_tokens * (num_tokens + 1) / 2
    heads = config.num_attention_heads
    widths = sum(layer.shape.key[1] + layer.shape.value[1] for layer in calibration.layers)
    return float(2 * linear * num_tokens + 2 * heads * widths * seen)


def _tables(model: Any) -> list[Any]:
    """Return the embedding and the head, if a model has them."""
    found = (model.get_input_embeddings(), model.get_output_embeddings())
    return [part for part in found if isinstance(getattr(part, "weight", None), torch.Tensor)]
