"""Times the kernels by themselves, in seconds: `python -m tests.gpu.kernels`.

attention   of Mistral-7B's shape, beside torch's own over tensors side by side, and the rate of a
            product of large matrices
copies      of pieces of 32 KiB, as a layer of a block has them: each way and both at once, beside
            the copy engine; and what a product of a vector, which reads weights, loses beside them

Medians on the device's clock, or of wall time where there are two streams.
"""

import mmap
import statistics
import sys
import time
from functools import partial
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from inference_svc.runtime.attention.paged_attention import PageCall
from inference_svc.runtime.cuda.page_attention import attend_pages
from inference_svc.runtime.cuda.slot_copies import TokensInSlots, TokensOnDevice, copy_slots
from shared.cuda.driver_calls import DriverCalls
from shared.cuda.registered_memory import address_of
from tests.pages import placed_step

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, DIM, PAGE_TOKENS = 32, 8, 128, 16
# New tokens and length of each part.
ATTENDED = {
    "prompt of 4096": [(4096, 4096)],
    "256 over 16384": [(256, 16640)],
    "256 over 28672": [(256, 28928)],
    "one over 1024": [(1, 1024)],
    "8 x one over 1024": [(1, 1024)] * 8,
    "32 x one over 1024": [(1, 1024)] * 32,
    "one over 16384": [(1, 16384)],
}
TOKEN_BYTES = KV_HEADS * DIM * 2
SLOT_BYTES, NUM_SLOTS = 2 << 20, 512
BLOCK_TOKENS, NUM_TOKENS = 16, 65536
REPEATS = 10
QUEUED_CYCLES = 8_000_000  # takes some milliseconds, in which all timed work is enqueued


def say(what, *figures):
    sys.stdout.write(f"{what:32}{'  '.join(figures)}\n")


def device_s(work):
    """Return the median time of some runs, none of which waits for Python."""
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    torch.cuda._sleep(QUEUED_CYCLES)
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    times = [one.elapsed_time(other) for one, other in pairwise(marks)]
    return statistics.median(times) / 1e3


def wall_s(work):
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def attention():
    """Time all shapes."""
    matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    rate = 2 * 8192**3 / device_s(lambda: matrix @ matrix)
    say("matrix product", f"{rate / 1e12:.0f} TFLOP/s")
    for name, parts in ATTENDED.items():
        say(name, *measure_attention(parts))


def measure_attention(parts):
    """Return the figures of one shape."""
    counts = [-(-length // PAGE_TOKENS) for _, length in parts]
    pages = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
    made = {"device": DEVICE, "dtype": torch.bfloat16}
    keys, values = torch.randn(2, sum(counts) * PAGE_TOKENS, KV_HEADS, DIM, **made).unbind(0)
    query = torch.randn(sum(new for new, _ in parts), HEADS, DIM, **made)
    of_parts = [(table, *sizes) for table, sizes in zip(pages, parts, strict=True)]
    step, call = placed_step(of_parts, PAGE_TOKENS, DEVICE), PageCall(DIM**-0.5)
    seconds = device_s(lambda: attend_pages(query, keys, values, step, call))
    num_pairs = sum(new * length - new * (new - 1) // 2 for new, length in parts)
    operations = 4 * num_pairs * HEADS * DIM
    read = 2 * sum(length for _, length in parts) * TOKEN_BYTES
    yield f"{seconds * 1e6:8.1f} us"
    yield f"{operations / seconds / 1e12:6.1f} TFLOP/s"
    yield f"{read / seconds / 1e9:7.0f} GB/s"
    if parts[0][0] == parts[0][1]:
        ours, *theirs = (kept.transpose(0, 1)[None].contiguous() for kept in (query, keys, values))
        of_torch = partial(
            scaled_dot_product_attention, ours, *theirs, is_causal=True, enable_gqa=True
        )
        yield f"torch, side by side: {device_s(of_torch) * 1e6:.1f} us"


def copies():
    """Time copies each way, both at once, and beside work that reads weights."""
    memory = memoryview(mmap.mmap(-1, SLOT_BYTES * NUM_SLOTS))
    torch.frombuffer(memory, dtype=torch.int64).random_()
    calls = DriverCalls()
    calls.enter(calls.context(0))
    calls.register(address_of(memory), len(memory))
    slots = torch.randint(0, NUM_SLOTS, (NUM_TOKENS // BLOCK_TOKENS,))
    offsets = slots[:, None] * SLOT_BYTES + torch.arange(BLOCK_TOKENS) * TOKEN_BYTES
    there = TokensInSlots(address_of(memory), offsets.flatten().to(DEVICE), TOKEN_BYTES)
    made = {"device": DEVICE, "dtype": torch.bfloat16}
    here, other = (
        TokensOnDevice(
            torch.empty(NUM_TOKENS, KV_HEADS, DIM, **made),
            torch.randperm(NUM_TOKENS, device=DEVICE),
        )
        for _ in range(2)
    )
    plain = torch.empty(NUM_TOKENS * TOKEN_BYTES, dtype=torch.uint8, pin_memory=True)
    flat = here.memory.view(-1).view(torch.uint8)
    size, streams = len(plain), [torch.cuda.Stream() for _ in range(2)]

    def engine():
        flat.copy_(plain, non_blocking=True)

    def load():
        copy_slots(there, here, to_slots=False)

    def save(source=here):
        copy_slots(there, source, to_slots=True)

    def both():
        with torch.cuda.stream(streams[0]):
            load()
        with torch.cuda.stream(streams[1]):
            save(other)

    for name, work, num in (
        ("copy engine, in one piece", engine, 1),
        ("load", load, 1),
        ("save", save, 1),
        ("load and save", both, 2),
    ):
        say(name, f"{num * size / wall_s(work) / 1e9:.1f} GB/s")
    load()
    expected = torch.frombuffer(memory, dtype=torch.uint8).view(NUM_SLOTS, SLOT_BYTES)
    expected = expected[slots, : BLOCK_TOKENS * TOKEN_BYTES].flatten()
    assert torch.equal(here.memory[here.places].view(-1).view(torch.uint8).cpu(), expected)
    for name, work in (("copy engine", engine), ("load", load), ("save", save)):
        say(f"weights read beside {name}", f"{slowdown(work, streams[0]):.2f} x as long")
    calls.unregister(address_of(memory))


def slowdown(work, stream):
    """Return how much longer a product of a vector takes while a copy runs."""
    made = {"device": DEVICE, "dtype": torch.bfloat16}
    weights, vector = torch.randn(4096, 14336, **made), torch.randn(1, 4096, **made)

    def products():
        for _ in range(100):
            vector @ weights

    def beside():
        with torch.cuda.stream(stream):
            for _ in range(10):
                work()
        products()

    alone = device_s(products)
    found = device_s(beside) / alone
    torch.cuda.synchronize()
    return found


if __name__ == "__main__":
    attention()
    copies()
