"""Part `decode`: how fast answers grow, by batch.

    ours        the engine, with everything it does beside (saving included)
    generate    plain `model.generate` with the same batch: sdpa attention, its own cache
    sequential  (batch 8) eight of these, one after another, with batch 1
    floor       the bytes of all weights and of the batch's KV, at the speed at which this machine
                reads memory, measured in the same round

Only decoding is measured: from when every sequence has its first token until the first of them is
complete; of `generate`, from its first token to its last.
"""

import asyncio

from inference_svc.bench.bandwidth import MemoryReader
from inference_svc.bench.bench_session import in_turn, note
from inference_svc.bench.figures import Case
from inference_svc.bench.interleaved import Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import DecodeOptions, RunOptions
from inference_svc.bench.stock_generate import StockModel
from inference_svc.bench.turn_times import TurnTimes
from inference_svc.bench.workspace import Workspace

METRIC = "tokens_per_s"
WARM_UP = 1
SEQUENTIAL_BATCH = 8
LEAST_OF_GENERATE, LEAST_ALONE, LEAST_OF_SEQUENTIAL = 1.0, 0.95, 3.0


def window_tokens(options: DecodeOptions) -> int:
    """The longest sequence."""
    return options.history_tokens + options.steps + 1


async def measure_decode(
    options: DecodeOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure every batch."""
    num_rows = max(options.batches) * window_tokens(options)
    prompt_tokens = max(16, max(options.batches) * options.history_tokens)
    stock = StockModel(work.model.loaded)
    reader = MemoryReader(work.model.loaded.device)
    async with (
        work.kvd(2 * num_rows) as kvd,
        running_engine(
            work.model,
            kvd,
            kv_rows=3 * num_rows,
            cache={"residents": False},
            scheduler={
                "max_running": max(options.batches),
                "max_loading": max(options.batches),
                "step_tokens": prompt_tokens,
                "mixed_step_tokens": prompt_tokens,
                "answer_tokens": options.steps + 1,
            },
        ) as engine,
    ):
        cases = [
            await _Batch(options, run, work, engine, stock, reader, batch).measure()
            for batch in options.batches
        ]
    return tuple(cases)


class _Batch:
    """One batch size."""

    def __init__(
        self,
        options: DecodeOptions,
        run: RunOptions,
        work: Workspace,
        engine: LocalEngine,
        stock: StockModel,
        reader: MemoryReader,
        batch: int,
    ) -> None:
        self._options = options
        self._run = run
        self._engine = engine
        self._stock = stock
        self._reader = reader
        self._batch = batch
        self._step_bytes = _step_bytes(work, options, batch)
        facts = {
            "batch": batch,
            "history_tokens": options.history_tokens,
            "steps": options.steps,
            "bytes_per_step": self._step_bytes,
        }
        self._found = Interleaved(f"batch {batch}", facts)

    async def measure(self) -> Case:
        ways = {"ours": self._ours, "generate": self._generate, "floor": self._floor}
        if self._batch == SEQUENTIAL_BATCH:
            ways["sequential"] = self._sequential
        for round_number in range(-WARM_UP, self._options.pairs):
            pairs = self._options.pairs
            self._run.on_progress(f"decode batch {self._batch}: round {round_number + 1}/{pairs}")
            for name in in_turn(list(ways), round_number):
                await self._engine.settle()
                tokens_per_s = await ways[name]()
                values = {METRIC: tokens_per_s, "steps_per_s": tokens_per_s / self._batch}
                note(self._found, name, round_number, values)
        least = LEAST_ALONE if self._batch == 1 else LEAST_OF_GENERATE
        is_goal = self._batch in {1, SEQUENTIAL_BATCH}
        compare = self._found.compare_gain
        compare(METRIC, "ours", "generate", at_least=least if is_goal else 0.0)
        compare(METRIC, "ours", "sequential", at_least=LEAST_OF_SEQUENTIAL)
        compare(METRIC, "ours", "floor")
        return self._found.case()

    def _prompts(self, number: int) -> list[list[int]]:
        return [self._engine.new_tokens(self._options.history_tokens) for _ in range(number)]

    async def _ours(self) -> float:
        engine, num_tokens = self._engine, self._options.steps + 1
        answers = await asyncio.gather(
            *(
                engine.turn(engine.key(f"decode-{index}"), prompt, num_tokens, source="none")
                for index, prompt in enumerate(self._prompts(self._batch))
            )
        )
        return decode_tokens_per_s(answers)

    async def _generate(self) -> float:
        num_tokens, prompts = self._options.steps + 1, self._prompts(self._batch)
        seconds = await asyncio.to_thread(self._stock.decode_s, prompts, num_tokens)
        return self._batch * self._options.steps / seconds

    async def _sequential(self) -> float:
        num_tokens, seconds = self._options.steps + 1, 0.0
        for prompt in self._prompts(self._batch):
            seconds += await asyncio.to_thread(self._stock.decode_s, [prompt], num_tokens)
        return self._batch * self._options.steps / seconds

    async def _floor(self) -> float:
        bytes_per_s = await asyncio.to_thread(self._reader.bytes_per_s)
        return self._batch * bytes_per_s / self._step_bytes


def decode_tokens_per_s(answers: list[TurnTimes]) -> float:
    """Of the whole batch, while all of it decodes."""
    begin_s = max(times.token_s[0] for times in answers)
    end_s = min(times.token_s[-1] for times in answers)
    num_tokens = sum(begin_s < at_s <= end_s for times in answers for at_s in times.token_s)
    return num_tokens / (end_s - begin_s) if end_s > begin_s else 0.0


def _step_bytes(work: Workspace, options: DecodeOptions, batch: int) -> int:
    """Weights (of the embedding only the rows of the batch) and the KV in the middle of the run."""
    model = work.model.loaded.model
    weights = sum(part.nbytes for part in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and (head is None or embedding.weight is not head.weight):
        weights -= embedding.weight.nbytes
    context = options.history_tokens + options.steps // 2
    return int(weights) + batch * context * work.layout.token_bytes
