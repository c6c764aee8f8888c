"""Part `decode`: how fast answers are generated, by batch.

    ours        the engine, with all its other work (saving included)
    computed    (if it replays steps from graphs) the same, without replaying
    generate    plain `model.generate` with the same batch: sdpa attention, its own cache
    grammar     (a model with a tokenizer) ours, each answer bound to a JSON schema
    tools       (likewise) ours, each answer free to call tools; calls would be bound
    sequential  (batch 8) eight sequences, one after another, with batch 1
    floor       the bytes of all weights and of the batch's KV, at the speed at which this machine
                reads memory, measured in the same round

Only decoding is measured: from when every sequence has its first token until the first of them is
complete; for `generate`, from its first token to its last.
"""

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from inference_svc.bench.bench_session import take_rounds
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, TurnTimes, running_engine
from inference_svc.bench.options import DecodeOptions, RunOptions
from inference_svc.bench.stock_model import StockModel
from inference_svc.bench.workspace import Workspace
from inference_svc.core.chat import Tool
from inference_svc.core.grammar import schema_grammar
from inference_svc.core.tools.bound_calls import BoundCalls
from inference_svc.core.tools.formats import FORMATS
from inference_svc.runtime.compute.answer_grammar import AnswerGrammar, CallGrammar
from inference_svc.runtime.compute.grammars import Grammars
from inference_svc.runtime.memory import allocate_region
from inference_svc.runtime.model.packed_linear import packed_bytes

ROW_ITEMS = 4096
BUFFER_BYTES = 512 << 20  # far more than any cache
CUDA_BUFFER_BYTES = 4 << 30
TRIES = 3


class MemoryReader:
    """Measures how fast a device reads memory, in the faster of two ways; float32, huge pages.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        num_bytes = CUDA_BUFFER_BYTES if device.type == "cuda" else BUFFER_BYTES
        num_rows = num_bytes // 4 // ROW_ITEMS
        region = allocate_region(num_rows * ROW_ITEMS, device, torch.float32)
        self._buffer = region.fill_(1).view(num_rows, ROW_ITEMS)
        self._vector = torch.ones(ROW_ITEMS, device=device)
        ways: list[Callable[[], torch.Tensor]] = [
            self._buffer.sum,
            lambda: torch.mv(self._buffer, self._vector),
        ]
        self._read = max(ways, key=lambda way: max(self._speed(way) for _ in range(TRIES)))

    def bytes_per_s(self) -> float:
        """Measure the bytes read per second: the best of some tries."""
        return max(self._speed(self._read) for _ in range(TRIES))

    def _speed(self, read: Callable[[], torch.Tensor]) -> float:
        self._wait()
        started_s = time.perf_counter()
        read()
        self._wait()
        return self._buffer.nbytes / (time.perf_counter() - started_s)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


METRIC = "tokens_per_s"
WARM_UP = 1
SEQUENTIAL_BATCH = 8
LONG_DOCUMENT = schema_grammar(  # longer than any answer, which therefore ends at its length
    {
        "type": "array",
        "minItems": 4000,
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["name", "count"],
        },
    }
)
TOOLS = tuple(Tool(f"tool_{number}") for number in range(40))  # as many as agents have
HERMES = FORMATS["hermes"]
CALLS = BoundCalls(
    TOOLS, HERMES.closings, lambda: HERMES.reader([tool.name for tool in TOOLS], is_bound=True)
)
LEAST_OF_GRAMMAR = 0.95  # of the speed without a grammar
LEAST_OF_TOOLS = 0.95
LEAST_OF_GENERATE, LEAST_ALONE, LEAST_OF_SEQUENTIAL = 1.0, 0.95, 3.0


def window_tokens(options: DecodeOptions) -> int:
    """Return the length of the longest sequence, in tokens."""
    return options.history_tokens + options.steps + 1


async def measure_decode(
    options: DecodeOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Measure every batch size."""
    num_slots = max(options.batches) * window_tokens(options)
    prompt_tokens = max(16, max(options.batches) * options.history_tokens)
    stock = StockModel(work.model.loaded)
    loaded = work.model.loaded
    reader = MemoryReader(loaded.device)
    has_grammars = loaded.tokenizer is not None and bool(loaded.eos_ids)
    grammars = (
        Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids) if has_grammars else None
    )
    async with (
        work.kvd(2 * num_slots) as kvd,
        running_engine(
            work.model,
            kvd,
            kv_tokens=3 * num_slots,
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
            await _Batch(
                options, engine, stock, reader, grammars, batch, _step_bytes(work, options, batch)
            ).measure(run)
            for batch in options.batches
        ]
    return tuple(cases)


@dataclass(frozen=True, slots=True)
class _Batch:
    """One batch size.

    Attributes:
        options: the part's options.
        engine: the engine.
        stock: the stock model.
        reader: measures the speed of memory.
        grammars: compiles grammars; None: the model has no tokenizer for them.
        batch: number of sequences.
        step_bytes: bytes that a step has to read.
    """

    options: DecodeOptions
    engine: LocalEngine
    stock: StockModel
    reader: MemoryReader
    grammars: Grammars | None
    batch: int
    step_bytes: int

    async def measure(self, run: RunOptions) -> Case:
        """Measure all rounds, and compare the variants."""
        options, batch = self.options, self.batch
        facts = {
            "batch": batch,
            "history_tokens": options.history_tokens,
            "steps": options.steps,
            "bytes_per_step": self.step_bytes,
        }
        found = Interleaved(f"batch {batch}", facts)
        ways = {"ours": self._ours, "generate": self._generate, "floor": self._floor}
        if self.engine.parts.runner.graphs is not None:
            ways["computed"] = self._computed
        if self.grammars is not None:
            ways["grammar"] = self._with_grammar
            ways["tools"] = self._with_tools
        if batch == SEQUENTIAL_BATCH:
            ways["sequential"] = self._sequential

        async def take(name: str) -> dict[str, float]:
            await self.engine.settle()
            tokens_per_s = await ways[name]()
            return {METRIC: tokens_per_s, "steps_per_s": tokens_per_s / batch}

        await take_rounds(
            found,
            lambda _: list(ways),
            range(-WARM_UP, options.pairs),
            take,
            lambda what: run.on_progress(f"decode batch {batch}: {what}"),
        )
        least = LEAST_ALONE if batch == 1 else LEAST_OF_GENERATE
        is_goal = batch in {1, SEQUENTIAL_BATCH}
        found.compare(METRIC, "ours", "generate", at_least=least if is_goal else 0.0)
        found.compare(METRIC, "ours", "sequential", at_least=LEAST_OF_SEQUENTIAL)
        found.compare(METRIC, "ours", "computed")
        found.compare(METRIC, "grammar", "ours", at_least=LEAST_OF_GRAMMAR)
        found.compare(METRIC, "tools", "ours", at_least=LEAST_OF_TOOLS)
        found.compare(METRIC, "ours", "floor")
        return found.case()

    def _prompts(self, number: int) -> list[list[int]]:
        return [self.engine.new_tokens(self.options.history_tokens) for _ in range(number)]

    async def _ours(
        self, grammar: Callable[[], AnswerGrammar | CallGrammar | None] = lambda: None
    ) -> float:
        engine, num_tokens = self.engine, self.options.steps + 1
        answers = await asyncio.gather(
            *(
                engine.turn(
                    engine.key(f"decode-{index}"),
                    prompt,
                    num_tokens,
                    source="none",
                    grammar=grammar(),
                )
                for index, prompt in enumerate(self._prompts(self.batch))
            )
        )
        return decode_tokens_per_s(answers)

    async def _with_grammar(self) -> float:
        assert self.grammars is not None, "asked for where there are any"  # noqa: S101
        return await self._ours(partial(self.grammars.compile, LONG_DOCUMENT))

    async def _with_tools(self) -> float:
        assert self.grammars is not None, "asked for where there are any"  # noqa: S101
        return await self._ours(partial(self.grammars.compile_calls, CALLS, {}))

    async def _computed(self) -> float:
        runner = self.engine.parts.runner
        graphs, runner.graphs = runner.graphs, None
        try:
            return await self._ours()
        finally:
            runner.graphs = graphs

    async def _generate(self) -> float:
        num_tokens, prompts = self.options.steps + 1, self._prompts(self.batch)
        seconds = await asyncio.to_thread(self.stock.decode_s, prompts, num_tokens)
        return self.batch * self.options.steps / seconds

    async def _sequential(self) -> float:
        num_tokens, seconds = self.options.steps + 1, 0.0
        for prompt in self._prompts(self.batch):
            seconds += await asyncio.to_thread(self.stock.decode_s, [prompt], num_tokens)
        return self.batch * self.options.steps / seconds

    async def _floor(self) -> float:
        bytes_per_s = await asyncio.to_thread(self.reader.bytes_per_s)
        return self.batch * bytes_per_s / self.step_bytes


def decode_tokens_per_s(answers: list[TurnTimes]) -> float:
    """Return the tokens per second of the whole batch, while all of it decodes.

    The tokens of a step come one after the other. So an answer's time is that between two tokens
    of its own.
    """
    begin_s = max(times.token_s[0] for times in answers)
    end_s = min(times.token_s[-1] for times in answers)
    if begin_s >= end_s:
        return 0.0
    return sum(_tokens_per_s(times.token_s, begin_s, end_s) for times in answers)


def _tokens_per_s(token_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Return the speed of one answer between its tokens of the steps with these times.

    The first step of all ends with `begin_s`, the last one begins with `end_s`.
    """
    first, last = bisect_right(token_s, begin_s) - 1, bisect_left(token_s, end_s)
    return (last - first) / (token_s[last] - token_s[first])


def _step_bytes(work: Workspace, options: DecodeOptions, batch: int) -> int:
    """Return the bytes of weights (only the batch's embedding rows) and of KV in mid-run."""
    model = work.model.loaded.model
    weights = packed_bytes(model) + sum(part.nbytes for part in model.parameters())
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and (head is None or embedding.weight is not head.weight):
        weights -= embedding.weight.nbytes
    context = options.history_tokens + options.steps // 2
    return int(weights) + batch * context * work.layout.token_bytes
